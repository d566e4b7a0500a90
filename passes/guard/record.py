"""What a guard writes down of each call that it intercepted: data, its JSON, and the lines that people read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = ["GuardedCall", "Returned", "call_from_json", "call_to_json"]


class Returned(StrEnum):
    """What the caller was given."""

    GUARDED = "guarded"
    """The optimizer's result under the policy, proven."""
    UNGUARDED = "unguarded"
    """The optimizer's own result, in which nothing was found lost; the guarded run did not work."""
    AS_GIVEN = "as given"
    """The model that came in: nothing else could be shown to be sound."""
    NOT_JUDGED = "not judged"
    """The optimizer's own result, unseen: the call has no model that a policy could speak of."""
    RAISED = "raised"
    """The optimizer's own exception, as it comes without a guard."""


@dataclass(frozen=True, slots=True)
class GuardedCall:
    """One call of an optimizer.

    `file`, `line` and `caller` (the function's name) are the nearest place outside of the libraries. `kept` counts what
    the policy holds, by kind, in the model that was returned; `missing` are the entries of `keep` that match nothing in
    this model. `would_have_lost` and `unguarded_fault` say what the same call does without a guard, and
    `unguarded_nodes` what it leaves; None if it was not compared or left nothing.
    """

    function: str
    file: str
    line: int
    caller: str
    process: int
    thread: str
    model: str
    returned: Returned
    nodes_before: int = 0
    nodes_after: int = 0
    proof: str = ""
    """`numbers`, or `structure` where onnxruntime cannot compare what the model computes."""
    kept: Mapping[str, int] | None = None
    missing: tuple[str, ...] = ()
    reverted: Mapping[str, str] | None = None
    """Pass → why it was taken back, or did not end well."""
    skipped: Mapping[str, str] | None = None
    compared: bool = False
    unguarded_nodes: int | None = None
    unguarded_fault: str = ""
    """`differs: …` or `crashed: …`: what else is wrong with the unguarded result."""
    would_have_lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def lines(self) -> Iterator[str]:
        """For people: one line of what happened, then one for each thing worth knowing."""
        where = f"{_near(self.file)}:{self.line} in {self.caller}"
        yield f"{where}: {self.function}{self._outcome()} ({self.seconds:.1f} s)"
        for what in self.would_have_lost:
            yield f"  without the guard lost: {what}"
        if self.unguarded_fault:
            yield f"  without the guard: {self.unguarded_fault}"
        for name, why in (self.reverted or {}).items():
            yield f"  reverted {name}: {why}"
        if self.skipped:
            yield f"  skipped {', '.join(self.skipped)}"
        for note in self.notes:
            yield f"  note: {note}"

    def _outcome(self) -> str:
        if self.returned in (Returned.RAISED, Returned.NOT_JUDGED):
            return f" {self.returned}"
        kept = ", ".join(f"{kind} ×{count}" for kind, count in (self.kept or {}).items() if count)
        nodes = f", {self.nodes_before} → {self.nodes_after} nodes"
        if self.unguarded_nodes is not None:
            nodes += f" ({self.unguarded_nodes} without the guard)"
        return nodes + (f", kept {kept}" if kept else "") + self._caution()

    def _caution(self) -> str:
        words = {Returned.UNGUARDED: ", the optimizer's own result", Returned.AS_GIVEN: ", the model as it was given"}
        return words.get(self.returned, "")


def call_to_json(call: GuardedCall) -> dict[str, Any]:
    return {"event": "call", **asdict(call)}


def call_from_json(data: Mapping[str, Any]) -> GuardedCall:
    lists = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
    values = {key: value for key, value in data.items() if key != "event"}
    return GuardedCall(**{**values, **lists, "returned": Returned(data["returned"])})


def _near(file: str) -> str:
    """A path below the working directory is shown from there."""
    try:
        near = os.path.relpath(file)
    except ValueError:
        return file
    return file if near.startswith("..") else near
