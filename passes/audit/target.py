"""What an audit tries, a single pass or a library's own set of passes; and the calls that a worker makes for it.

Each pass gets its own copy of the model. Error messages are normalized, so that they are equal on every machine and for
every model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import onnx

from passes.advisories import ROUND_TRIP
from passes.catalog import catalog
from passes.catalog.listing import CatalogEntry, isolate_pass
from passes.context import PassContext
from passes.errors import PolicyError
from passes.external.onnxruntime_graph import NOTHING
from passes.graph.index import copy_of
from passes.model.canonical import canonical_digest
from passes.recipe.own_steps import OWN_STEPS
from passes.recipe.recipe import default_passes, single_passes, steps_of
from passes.step import Step, flatten
from passes.weights.detached import DetachedModel

DEFAULT: Final = "default"
"""The passes that a recipe calls by this name, in the order of their library."""


@dataclass(frozen=True, slots=True)
class AuditTarget:
    """A call to try. `distribution` is the library's name in pip, `step` its name in a recipe.

    `passes` are what one call runs of those that a recipe names one by one; `left_out` are the passes that a composite
    step leaves out, and `options` its other options. `inner` are the passes of a step that are searched for the pass at
    fault. `data` and `AuditTarget(**data)` convert to JSON and back.
    """

    name: str
    distribution: str
    step: str
    passes: Sequence[str] = ()
    left_out: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    inner: Sequence[str] = ()

    def data(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def make_step(self) -> Step:
        """The step whose library is called."""
        if not self.passes:
            return OWN_STEPS[self.step].from_options(self.options).without(self.left_out)
        first, *following = flatten(steps_of(self.passes))
        return first.join(following)


def targets_of(context: PassContext, *, every: bool = False) -> tuple[AuditTarget, ...]:
    """Each pass that a recipe names alone, the default set, and each step of a recipe that is installed.

    onnxruntime loads a model before it optimizes it, and may refuse it then: that is `onnxruntime/nop`.

    Args:
        context: where libraries are asked for their passes.
        every: the passes inside of the steps too, each alone. There are hundreds.
    """
    rows = catalog(context, steps=None if every else ())
    passes = default_passes()
    default = AuditTarget(DEFAULT, passes[0].source, passes[0].source, [step.name for step in passes])
    idle = AuditTarget(f"onnxruntime/{ROUND_TRIP}", "onnxruntime", "onnxruntime", options={"level": NOTHING})
    singles = {step.name for step in single_passes()}
    steps = OWN_STEPS.keys() - missing_steps(context).keys()
    known = [row for row in rows if row.name in singles or row.name.partition("/")[0] in steps]
    others = [_target(row, rows, singles) for row in known if row.runs not in ("missing", "never")]
    return (default, idle, *others)


def missing_steps(context: PassContext) -> Mapping[str, str]:
    """Name → why, for each step of a recipe whose library is not installed, or that asks for a file."""
    missing = {}
    for name, make in OWN_STEPS.items():
        try:
            make().check(context)
        except PolicyError as error:
            missing[name] = f"{name} is not tried: {error}"
    return missing


def with_inner(targets: Sequence[AuditTarget], context: PassContext) -> tuple[AuditTarget, ...]:
    """Fill in the inner passes of whole steps. Asking a library takes seconds, so choose `targets` before."""
    return tuple(
        replace(target, inner=_inner(target, context)) if target.name in OWN_STEPS else target for target in targets
    )


def _inner(target: AuditTarget, context: PassContext) -> tuple[str, ...]:
    step = OWN_STEPS[target.name]()
    return step.inner(context)


def _target(row: CatalogEntry, rows: Sequence[CatalogEntry], singles: Collection[str]) -> AuditTarget:
    if row.name in singles:
        return AuditTarget(row.name, row.source, row.source, (row.bare,))
    if "/" not in row.name:
        return AuditTarget(row.name, row.source, row.name)
    step = isolate_pass(row, rows)
    return AuditTarget(row.name, row.source, step.name, left_out=tuple(step.left_out), options=dict(step.options))


LARGEST: Final = 128 * 2**20
"""Bytes of a result above which only its size is judged: constant folding can turn a kilobyte into a gigabyte."""


@dataclass(frozen=True, slots=True)
class PassAttempt:
    """The result of one call of a pass. `index` counts the passes in `targets`, from 0.

    `again` marks the second call, on the result of the first. Each call is reported by itself, since either may crash
    the process. The second call is made only if the first changed something; `followed` announces it.
    """

    index: int
    raised: str = ""
    model: bytes = b""
    changed: bool = False
    nbytes: int = 0
    again: bool = False
    followed: bool = False


def attempts(model: bytes, targets: Sequence[Mapping[str, Any]], start: int) -> Generator[PassAttempt]:
    """Try `targets`, beginning with number `start`. A pass that leaves what the model computes is not called again."""
    source = onnx.load_from_string(model)
    digests = _Digests()
    digest = digests.of(model)
    for index, data in enumerate(targets):
        if index < start:
            continue
        step = AuditTarget(**data).make_step()
        first = _attempt(step, source, index)
        changed = not first.raised and digests.of(first.model) != digest
        small = len(first.model) <= LARGEST
        shipped = first.model if small else b""
        yield PassAttempt(index, first.raised, shipped, changed, len(first.model), followed=changed and small)
        if changed and small:
            second = _attempt(step, onnx.load_from_string(first.model), index)
            same = not second.raised and digests.of(second.model) == digests.of(first.model)
            yield PassAttempt(index, second.raised, changed=not same, again=True)


def _attempt(step: Step, source: onnx.ModelProto, index: int) -> PassAttempt:
    """Call a library on a copy of `source` as its users do: the repairs of its step would hide findings."""
    copy = copy_of(source)
    try:
        result = step.call_library(copy)
        return PassAttempt(index, model=result.SerializeToString(deterministic=True))
    except MemoryError:
        raise
    except Exception as error:
        return PassAttempt(index, raised=message_of(error))


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
    """Reduce a message to one line of at most 110 characters, without names, paths, counts and addresses."""
    line = next((part.strip() for part in text.splitlines() if part.strip(" :")), "")
    for pattern, instead in CHANGING:
        line = re.sub(pattern, instead, line)
    line = " ".join(line.split())
    return line if len(line) <= LENGTH else line[: LENGTH - 1].rstrip() + "…"


def signal_in(message: str) -> str:
    """The signal named in the message of a crash, such as `SIGSEGV`; else its exit code or its words on memory."""
    match = re.search(r"signal (SIG\w+)|exit code -?\d+|out of memory|more memory", message)
    return match[1] or match[0] if match else "died"
