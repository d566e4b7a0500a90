"""In the worker: run passes on one case, one after the other, each on its own copy of the model."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import onnx

from passes.audit.error_text import message_of
from passes.audit.target import AuditTarget
from passes.model.canonical import canonical_digest
from passes.step import Step
from passes.weights.detached import DetachedModel

LARGEST: Final = 128 * 2**20
"""Bytes of a result above which only its size is judged: constant folding can turn a kilobyte into a gigabyte."""


@dataclass(frozen=True, slots=True)
class PassAttempt:
    """The result of one call of a pass. `place` is the index of the pass in `subjects`.

    `again` marks the second call, on the result of the first. Each call is reported by itself, since either may crash
    the process. The second call is made only if the first changed something; `followed` announces it.
    """

    place: int
    raised: str = ""
    model: bytes = b""
    changed: bool = False
    nbytes: int = 0
    again: bool = False
    followed: bool = False


def attempts(model: bytes, subjects: Sequence[Mapping[str, Any]], start: int) -> Generator[PassAttempt]:
    """Try `subjects` from `start` on. A pass that does not change the model's meaning is not called again."""
    source = onnx.load_from_string(model)
    digests = _Digests()
    meaning = digests.of(model)
    for place, data in enumerate(subjects):
        if place < start:
            continue
        step = AuditTarget(**data).make_step()
        first = _attempt(step, source, place)
        changed = not first.raised and digests.of(first.model) != meaning
        small = len(first.model) <= LARGEST
        shipped = first.model if small else b""
        yield PassAttempt(place, first.raised, shipped, changed, len(first.model), followed=changed and small)
        if changed and small:
            second = _attempt(step, onnx.load_from_string(first.model), place)
            same = not second.raised and digests.of(second.model) == digests.of(first.model)
            yield PassAttempt(place, second.raised, changed=not same, again=True)


def _attempt(step: Step, source: onnx.ModelProto, place: int) -> PassAttempt:
    """Call a library on a copy of `source` as its users do: the repairs of its step would hide findings."""
    copy = onnx.ModelProto()
    copy.CopyFrom(source)
    try:
        result = step.call_library(copy)
        return PassAttempt(place, model=result.SerializeToString(deterministic=True))
    except MemoryError:
        raise
    except Exception as error:
        return PassAttempt(place, raised=message_of(error))


@dataclass(frozen=True, slots=True)
class _Digests:
    """Canonical digests, cached by the bytes of a model: most passes produce the same result."""

    known: dict[bytes, str] = field(default_factory=dict)

    def of(self, model: bytes) -> str:
        key = hashlib.blake2b(model).digest()
        if key not in self.known:
            self.known[key] = _digest(onnx.load_from_string(model))
        return self.known[key]


def _digest(model: onnx.ModelProto) -> str:
    try:
        return canonical_digest(DetachedModel(model, {}))
    except Exception as error:  # a result that cannot be read counts as changed
        return f"unreadable: {type(error).__name__}"
