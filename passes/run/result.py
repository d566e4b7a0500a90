"""The result of a pass run: the final model, a row for each step, a verdict for each structure, and the model's latency
in onnxruntime with its default optimization.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import onnx

from passes.context import PassContext
from passes.custom_ops.declarations import add_libraries
from passes.errors import StepFailed
from passes.graph.op_facts import op_name
from passes.proof.coverage import Coverage
from passes.proof.numbers import Errors, only_compared
from passes.proof.prover import Sensitivity
from passes.run.tracked import TrackedStructures
from passes.suggest import ELLIPSIS, join_first, plural, shorten_lines
from passes.visible import html_table
from passes.weights.detached import DetachedModel, attach
from passes.weights.files import write_model

if TYPE_CHECKING:
    from passes.encodings.carry import CarriedEncodings


class Status(StrEnum):
    """What became of a step."""

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
    """The step as the recipe names it; `step/inner` for an inner pass."""
    source: str
    """The library that the step comes from, such as `onnxsim`."""
    status: Status
    """What became of the step."""
    reason: str
    """Why the step has this status, or what it left; empty for nothing to say."""
    nodes_before: int
    """Nodes of the model before the step, without the nodes of bodies."""
    nodes_after: int
    """The nodes after the step, counted in the same way."""
    seconds: float
    """Wall time of the step with its proof; of an inner pass 0."""
    changed: bool
    """Whether the step changed the model; names and the order of nodes do not count."""
    errors: Mapping[str, Errors]
    diff: Mapping[str, int] = field(default_factory=dict)
    """Op type → how many nodes more, or fewer, the step left; empty when it changed nothing."""
    lost: tuple[str, ...] = ()
    """The structures that it broke, such as `qkv encoder.layer.0`."""
    remarks: tuple[str, ...] = ()
    """What else a user should know: growth, nodes that it removed since their stored values are zero or one, and a kept
    structure that it would have lost."""
    turn: int = 1
    """Which turn of a `repeat` this is."""
    reproducer: str = ""
    """The file with the smallest model on which the step still crashes or times out."""
    merges: tuple[str, ...] = ()
    """A sentence for each group of merged products of one input that no tracked structure holds."""

    @property
    def words(self) -> str:
        """The reason and the remarks, as they stand next to the row."""
        return "; ".join(filter(None, (self.reason, *self.remarks)))


@dataclass(frozen=True, slots=True)
class StructureVerdict:
    """Whether the final model has a structure, in `kept`; `broken_by` names the first step that broke it, even if that
    step was reverted; `author_of_loss` names the step that is left in place. `kind` and `name` identify the structure,
    such as `qkv` and `encoder.layer.0`; `module` is the path of its torch module."""

    kind: str
    name: str
    module: str
    kept: bool
    broken_by: str | None


class OptimizeResult(ABC):
    """What `optimize` gives for a torch module and for an ONNX model: the final model, and how it came about.

    `repr` is a summary of ten lines at most.
    """

    __slots__ = ()

    structures: tuple[StructureVerdict, ...]
    """The verdict on each structure that the run kept or watched."""

    @property
    @abstractmethod
    def passes(self) -> tuple[PassRow, ...]:
        """A row for each step of the recipe, and one for each inner pass that was taken out of a composite step."""

    @property
    def reverted(self) -> tuple[PassRow, ...]:
        """The rows that make a `strict` run fail."""
        return tuple(row for row in self.passes if row.status.counts_as_reverted)

    @abstractmethod
    def save(self, path: str | PathLike[str]) -> None:
        """Write the final model; above 100 MB its weights go to a file next to it.

        Args:
            path: the file to write.

        Raises:
            UsageError: the file cannot be written; an existing file is unchanged.
        """

    @abstractmethod
    def to_proto(self) -> onnx.ModelProto:
        """The final model as one message, with its weights.

        Raises:
            ModelError: it has more than 2 GiB; `save` it.
        """

    def _repr_html_(self) -> str:
        rows = [
            (row.name, str(row.status), f"{row.nodes_before} → {row.nodes_after}", _worst(row), row.words)
            for row in self.passes
            if row.changed or row.words or row.status.counts_as_reverted
        ]
        title = next(summary_lines(self.passes, self.structures))
        kept = [("kept" if verdict.kept else "lost", verdict.kind, verdict.name) for verdict in self.structures]
        structures = html_table("structures", (), kept) if kept else ""
        return html_table(title, ("pass", "status", "nodes", "max error", "why"), rows) + structures

    def __repr__(self) -> str:
        return shorten_lines((type(self).__name__, *summary_lines(self.passes, self.structures)))


@dataclass(frozen=True, slots=True, repr=False)
class PassRun(OptimizeResult):
    """The result of a pass run on an ONNX model."""

    model: DetachedModel
    """The final model."""
    rows: tuple[PassRow, ...]
    """One for each step of the recipe, and for each inner pass that was taken out of a step."""
    structures: tuple[StructureVerdict, ...]
    """The verdict on each structure that the run kept or watched."""
    power: Sensitivity
    """Whether the draws would detect a fault in the kept weights."""
    versions: Mapping[str, str]
    """Name → version of the libraries whose release can change the result."""
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
    def passes(self) -> tuple[PassRow, ...]:
        return self.rows

    def describe_merges(self, keep: Collection[str], recipe: Iterable[object]) -> tuple[str, ...]:
        """A sentence on each step that merged products which no structure holds.

        Args:
            keep: the structures that the run keeps. Without any, a pass that the recipe names by itself is left out:
                its user asked for that.
            recipe: the items of the recipe.

        Returns:
            The sentences, in the order of the steps.
        """
        named = {str(item) for entry in recipe for item in (entry if isinstance(entry, Mapping) else [entry])}
        sentences = []
        for row in self.rows:
            first, count = next(iter(row.merges), ""), len(row.merges)
            if first and row.status is Status.RAN and (keep or first.partition(" ")[0] not in named):
                more = f" (and {plural(count - 1, 'more place')})" if count > 1 else ""
                sentences.append(f"{first}{more}; no structure in the report holds them, but skip leaves a pass out")
        return tuple(sentences)

    def save(self, path: str | PathLike[str]) -> None:
        write_model(self.model, path)

    def to_proto(self) -> onnx.ModelProto:
        return attach(self.model)


def _worst(row: PassRow) -> str:
    error = max((errors.max_abs for errors in only_compared(row.errors).values()), default=None)
    return "" if error is None else f"{error:.1e}"


def author_of_loss(verdict: StructureVerdict, rows: Sequence[PassRow]) -> str:
    """The step, or its inner pass, that broke a lost structure and is left in place; empty where no row shows it."""
    steps = [row.name for row in rows if not row.status.counts_as_reverted]
    breakers = [
        row.name for row in rows if f"{verdict.kind} {verdict.name}" in row.lost and not row.status.counts_as_reverted
    ]
    first = verdict.broken_by or ""
    was_reverted = any(row.name == first for row in rows if row.status.counts_as_reverted) and first not in steps
    if breakers and (was_reverted or first.partition("/")[0] not in breakers):
        return breakers[0]
    return "" if was_reverted else first


SUMMARIZED: Final = 3
"""Changed steps, reverted steps, and kinds of structures that a summary lists at most."""


def summary_lines(passes: Sequence[PassRow], structures: Sequence[StructureVerdict]) -> Iterator[str]:
    """At most seven lines: steps that changed the model, a remark, steps that were reverted, and what is kept."""
    changed = [row for row in passes if row.changed and not row.status.counts_as_reverted]
    reverted = [row for row in passes if row.status.counts_as_reverted]
    ends = (passes[0].nodes_before, passes[-1].nodes_after) if passes else (0, 0)
    yield f"{ends[0]} → {plural(ends[1], 'node')}, {plural(len(passes), 'step')}, {len(changed)} changed the model"
    for row in changed[: SUMMARIZED - 1]:
        error = max((errors.max_abs for errors in only_compared(row.errors).values()), default=None)
        figures = "" if error is None else f", max error {error:.1e}"
        yield f"{row.name}: {row.nodes_before} → {plural(row.nodes_after, 'node')}{figures}"
    if len(changed) >= SUMMARIZED:
        yield f"and {len(changed) - SUMMARIZED + 1} more that changed the model"
    remarks = [f"{row.name}: {remark}" for row in passes for remark in row.remarks]
    if remarks:
        yield remarks[0] + (f" (and {plural(len(remarks) - 1, 'more remark')})" if remarks[1:] else "")
    if reverted:
        yield f"reverted or failed: {join_first([row.name for row in reverted], SUMMARIZED, ELLIPSIS)}"
    found = Counter(verdict.kind for verdict in structures)
    kept = Counter(verdict.kind for verdict in structures if verdict.kept)
    authors = (author_of_loss(verdict, passes) for verdict in structures if not verdict.kept)
    culprits = dict.fromkeys(filter(None, authors))
    lost = f" (lost to {', '.join(culprits)})" if culprits else ""
    if found:
        yield ", ".join(f"{kind}: {kept[kind]} of {count} kept" for kind, count in found.items()) + lost


def op_counts(model: DetachedModel) -> Counter[str]:
    """Op type → number of nodes; other domains than ONNX's own as `domain::Op`."""
    return Counter(map(op_name, model.proto.graph.node))


def op_changes(before: DetachedModel, after: DetachedModel) -> dict[str, int]:
    """Op type → number of nodes in `after` minus the number in `before`, where these differ."""
    had, has = op_counts(before), op_counts(after)
    return {kind: has[kind] - had[kind] for kind in sorted(had | has) if has[kind] != had[kind]}


RUNS: Final = 10

LONGEST_S: Final = 2.0
"""Seconds after which no further run begins."""

HOW_MEASURED: Final = f"onnxruntime's CPU provider, its default optimization, 1 thread, median of up to {RUNS} runs"


def measure_latency(path: str, feeds: Mapping[str, np.ndarray], context: PassContext) -> float:
    """Median seconds of a run of the ONNX file `path` on `feeds`, after one run that does not count.

    Raises:
        StepFailed: onnxruntime refuses the model, stops, or takes too long.
    """
    return context.worker.call(time_runs, path=str(Path(path).absolute()), feeds=dict(feeds))


def time_runs(path: str, feeds: dict[str, np.ndarray]) -> float:
    """In the worker."""
    import onnxruntime  # the worker alone needs it

    from passes.weights.sessions import describe_refusal

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    add_libraries(options)
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # native code, with classes of its own
        raise StepFailed(describe_refusal(error)) from error
    known = {entry.name for entry in session.get_inputs()}
    given = {name: array for name, array in feeds.items() if name in known}
    session.run(None, given)
    seconds: list[float] = []
    while not seconds or (len(seconds) < RUNS and sum(seconds) < LONGEST_S):
        begun = time.perf_counter()
        session.run(None, given)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)
