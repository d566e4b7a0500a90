"""The result of a pass run: the final model, a row for each step, and a verdict for each structure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from os import PathLike

import numpy as np
import onnx

from passes.encodings.carry import CarriedEncodings
from passes.graph.op_facts import op_name
from passes.proof.coverage import Coverage
from passes.proof.numbers import Errors
from passes.proof.types import Sensitivity
from passes.run.tracked import TrackedStructures
from passes.weights.detached import DetachedModel, attach
from passes.weights.files import write_model

__all__ = ["PassRow", "PassRun", "Status", "StructureVerdict", "op_changes", "op_counts"]


class Status(StrEnum):
    RAN = "ran"
    SKIPPED = "skipped"
    REVERTED = "reverted"
    FAILED = "failed"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"

    @property
    def counts_as_reverted(self) -> bool:
        return self not in (Status.RAN, Status.SKIPPED)


@dataclass(frozen=True, slots=True)
class PassRow:
    """One step of the run, or one inner pass that was taken out of a composite step.

    `errors` are against the reference, for each output; empty when the step changed nothing or did not run.
    """

    name: str
    source: str
    status: Status
    reason: str
    nodes_before: int
    nodes_after: int
    seconds: float
    changed: bool
    errors: Mapping[str, Errors]
    diff: Mapping[str, int] = field(default_factory=dict)
    """Op type → how many nodes more, or fewer, the step left; empty when it changed nothing."""
    lost: tuple[str, ...] = ()
    """The structures that it broke, such as `qkv encoder.layer.0`."""
    remarks: tuple[str, ...] = ()
    """What else it did that a user should know: growth, and nodes that it removed since their stored values are zero or
    one."""
    turn: int = 1
    """Which turn of a `repeat` this is."""
    reproducer: str = ""
    """The file with the smallest model on which the step still crashes or times out."""

    @property
    def words(self) -> str:
        """The reason and the remarks, as they stand beside the row."""
        return "; ".join(filter(None, (self.reason, *self.remarks)))


@dataclass(frozen=True, slots=True)
class StructureVerdict:
    """Whether the final model has a structure, in `kept`; `broken_by` names the first step that broke it, even if that
    step was reverted."""

    kind: str
    name: str
    module: str
    kept: bool
    broken_by: str | None


@dataclass(frozen=True, slots=True)
class PassRun:
    model: DetachedModel
    rows: tuple[PassRow, ...]
    structures: tuple[StructureVerdict, ...]
    power: Sensitivity
    versions: Mapping[str, str]
    watched: TrackedStructures
    """The structures that were looked at, as they are in the source."""
    coverage: Coverage = field(default_factory=Coverage)
    """What the draws have shown, and what a wrong pass could have changed unseen."""
    encodings: CarriedEncodings | None = None
    """The encodings of the final model, where those of the source were given."""
    example: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The inputs of the first draw, by name; none where nothing was run."""
    nodes_before: int = 0
    """The nodes of the source."""
    remarks: tuple[str, ...] = ()
    """What a user should know of the final model, one sentence each."""
    invalid: str = ""
    """What ONNX's checker finds wrong in the final model, where it took the source; empty for nothing."""

    @property
    def reverted(self) -> tuple[PassRow, ...]:
        """The rows that make a `strict` run fail."""
        return tuple(row for row in self.rows if row.status.counts_as_reverted)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the final model; above 100 MB its weights go to a file beside it.

        Raises:
            UsageError: the file cannot be written; what was there before is as it was.
        """
        write_model(self.model, path)

    def to_proto(self) -> onnx.ModelProto:
        """The final model as one message, with its weights.

        Raises:
            ModelError: it has more than 2 GiB; `save` it.
        """
        return attach(self.model)


def op_counts(model: DetachedModel) -> Counter[str]:
    """Op type → number of nodes; other domains than ONNX's own as `domain::Op`."""
    return Counter(map(op_name, model.proto.graph.node))


def op_changes(before: DetachedModel, after: DetachedModel) -> dict[str, int]:
    """Op type → number of nodes in `after` less that in `before`, where they differ."""
    had, has = op_counts(before), op_counts(after)
    return {kind: has[kind] - had[kind] for kind in sorted(had | has) if has[kind] != had[kind]}
