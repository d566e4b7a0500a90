"""In a worker of its own: what is wrong with what a pass made of a case. It shares no code with any pass."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import onnx

from passes.audit.case import Case
from passes.audit.marks import unmarked, what_is_lost
from passes.audit.runtimes import RUNTIMES, differs
from passes.audit.words import steady, words_of
from passes.graph.op_facts import RANDOM_OPS
from passes.graph.traversal import every_node

__all__ = ["Result", "judge", "larger"]

SHARE: Final = 1.1
BYTES: Final = 1024
"""A result has grown in bytes when it is larger by a tenth and by a KiB: a few types written down are not meant."""


@dataclass(frozen=True, slots=True)
class Result:
    """What some pass made. `changed` when it means something else, and its numbers have to be looked at."""

    model: bytes
    changed: bool


Verdict = dict[str, str]
"""Kind of finding → in words, why."""

DRAWING: Final = RANDOM_OPS - {"Dropout"}
"""Operators that draw other numbers each time, or others in another place of the graph."""

APART: Final = frozenset({"invalid", "signature"})
"""Kinds after which numbers say nothing: the result does not run, or takes other inputs."""

READY: Final = "ready"
"""What is sent when the case itself has run: after that, a crash is the result's fault."""


def judge(case: Case, results: Sequence[Result], start: int, numbers: bool) -> Generator[str | tuple[int, Verdict]]:
    """Judge `results` from `start` on; with `numbers`, those that have changed are run.

    First comes "ready", or why the numbers cannot be judged; then the place of each result, with its verdict.
    """
    valid = not _invalid(case.model)
    standard = _standard(case) if numbers else ""
    yield standard if isinstance(standard, str) and standard else READY
    for place, result in enumerate(results):
        if place >= start:
            after = onnx.load_from_string(result.model)
            said = dict(_said(case, after, valid))
            if result.changed and said.keys().isdisjoint(APART) and not isinstance(standard, str):
                said |= standard.judged(case, after)
            yield place, said


def _said(case: Case, after: onnx.ModelProto, valid: bool) -> Iterator[tuple[str, str]]:
    """Everything that is known without running it."""
    if valid and (why := _invalid(after)):
        yield "invalid", why
    elif why := _other_signature(case.model, after):
        yield "signature", why
    if lost := what_is_lost(case.model, after):
        yield "lost-metadata", lost
    if len(list(every_node(after.graph))) > len(list(every_node(case.model.graph))):
        yield "grew-nodes", ""
    if larger(unmarked(case.model).ByteSize(), unmarked(after).ByteSize()):
        yield "grew-bytes", ""


def larger(before: int, after: int) -> bool:
    """Whether a model of so many bytes has grown."""
    return after > before * SHARE and after > before + BYTES


def _invalid(model: onnx.ModelProto) -> str:
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:
        return steady(str(error)) or type(error).__name__
    return ""


@dataclass(frozen=True, slots=True)
class _Standard:
    """The outputs to come up to, and the runtime that computes them from the case itself."""

    expected: Sequence[Any]
    runtime: str

    def judged(self, case: Case, after: onnx.ModelProto) -> Verdict:
        """Another runtime is asked where this one does not run the result: it may lack an operator."""
        said = ""
        for name in (self.runtime, *(name for name in RUNTIMES if name != self.runtime)):
            try:
                got = RUNTIMES[name](after, case.feeds)
            except Exception as error:
                said = said or f"does not run: {words_of(error)}"
                continue
            why = differs(self.expected, got, case.rtol, case.atol)
            return {"wrong": why} if why else {}
        return {"wrong": said}


def _standard(case: Case) -> _Standard | str:
    """Why there is none, where no runtime computes what the case expects."""
    if case.expected is None and any(node.op_type in DRAWING for node in every_node(case.model.graph)):
        return "it draws random numbers"
    why = "it does not run"
    for name, run in RUNTIMES.items():
        try:
            got = run(case.model, case.feeds)
        except Exception:
            continue
        if case.expected is not None and (why := differs(case.expected, got, case.rtol, case.atol)):
            continue
        return _Standard(got if case.expected is None else case.expected, name)
    return why


def _other_signature(before: onnx.ModelProto, after: onnx.ModelProto) -> str:
    """What a caller of the model would notice."""
    for what, ours, theirs in (("inputs", _given(before), _given(after)), ("outputs", _made(before), _made(after))):
        if list(ours) != list(theirs):
            return f"other {what}" if len(ours) == len(theirs) else f"{len(theirs) - len(ours):+} {what}"
        for name in ours:
            if _contradicts(ours[name], theirs[name], open_is_other=what == "inputs"):
                return f"{what} of another type or size"
    return ""


def _given(model: onnx.ModelProto) -> Mapping[str, onnx.TypeProto]:
    stored = {tensor.name for tensor in model.graph.initializer}
    return {info.name: info.type for info in model.graph.input if info.name not in stored}


def _made(model: onnx.ModelProto) -> Mapping[str, onnx.TypeProto]:
    return {info.name: info.type for info in model.graph.output}


def _contradicts(one: onnx.TypeProto, other: onnx.TypeProto, *, open_is_other: bool) -> bool:
    """A size of an output that was open may be known afterwards; one of an input may not."""
    kind = one.WhichOneof("value")
    if kind != other.WhichOneof("value"):
        return True
    if kind != "tensor_type":
        return False
    left, right = one.tensor_type, other.tensor_type
    if left.elem_type != right.elem_type:
        return True
    if not (left.HasField("shape") and right.HasField("shape")):
        return False
    if len(left.shape.dim) != len(right.shape.dim):
        return True
    pairs = zip(left.shape.dim, right.shape.dim, strict=True)
    known = [(a.HasField("dim_value"), b.HasField("dim_value"), a.dim_value != b.dim_value) for a, b in pairs]
    return any((a and b and apart) or (open_is_other and b and not a) for a, b, apart in known)
