"""In the worker: run passes on one case, one after the other, each on its own copy of the model.

Error messages are normalized, so that they are equal on every machine and for every model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import onnx

from passes.audit.target import AuditTarget
from passes.graph.index import copy_of
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
    copy = copy_of(source)
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


LENGTH: Final = 110

CHANGING: Final = (
    (r"'[^']*'|\"[^\"]*\"|\u2018[^\u2019]*\u2019", "'…'"),  # names of values and nodes
    (r"(?:/[\w.+-]+)+/([\w.+-]+)", r"\1"),  # folders
    (r"0x[0-9a-fA-F]+", "0x…"),
    (r"(?<=references: ).*", "…"),
    (r"\[ONNXRuntimeError\] : \d+ : \w+ : ", ""),
    (r"\S+\.(?:cc|h):\d+ \S.*[)>] (?=[A-Z])", ""),  # the place in C++, with its signature
    (r"(?<=implementation for )\w+", "…"),
    (r"\d+", "#"),
    (r"\(?node name: [^)]*\)?|node:? ?\S* ?name:? ?\S*|Name:\S*", "node"),
)
"""Pattern → replacement."""


def message_of(error: BaseException) -> str:
    """The type of an error and the first non-empty line of its message, normalized."""
    return normalize(f"{type(error).__name__}: {error}")


def normalize(text: str) -> str:
    """Reduce a message to one line of at most 110 characters, without names, paths, numbers and addresses."""
    line = next((part.strip() for part in text.splitlines() if part.strip(" :")), "")
    for pattern, instead in CHANGING:
        line = re.sub(pattern, instead, line)
    line = " ".join(line.split())
    return line if len(line) <= LENGTH else line[: LENGTH - 1].rstrip() + "…"


def signal_in(message: str) -> str:
    """The signal named in the message of a crash, such as `SIGSEGV`; else its exit code or its words on memory."""
    match = re.search(r"signal (SIG\w+)|exit code -?\d+|out of memory|more memory", message)
    return match[1] or match[0] if match else "died"
