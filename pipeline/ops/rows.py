"""`kind(…)` makes one row of a family's table: all that lowering and planning know about a kind of kernel.

    kind(Kind.Tile, signature(same_dtype, sizes_of("repeats", rank, "dimension")), "repeats=i[]")

The emitter of a row refuses a call that its kernel could not run, then packs the attributes. A refusal is a bug of an
importer, which normalises what ONNX and torch leave open, so it is an InternalError that names kind and attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import InternalError
from pipeline.ir.graph import KernelSpec, TensorSpec
from pipeline.ops.attrs import pack
from pipeline.ops.kinds import Kind
from pipeline.ops.layout import ViewRule

Attrs = Mapping[str, Any]
Specs = Sequence[TensorSpec]


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op as its emitter sees it: attributes, and the specs of inputs and outputs."""

    attrs: Attrs
    ins: Specs
    outs: Specs


Check = Callable[[OpCall], str | None]
"""What is wrong with a call, or None. Counts of values and types of attributes are checked before it runs."""

OverwriteRule = Callable[[OpCall], tuple[int, ...]]
"""For each output of a call the input whose storage it may take when that dies."""

Count = int | tuple[int, int | None]
"""How many values: an exact number, or (least, most)."""


@dataclass(frozen=True, slots=True)
class EmitterSignature:
    """How many inputs and outputs a call has, and its checks."""

    checks: tuple[Check, ...]
    inputs: Count
    outputs: Count


def signature(*checks: Check, inputs: Count = 1, outputs: Count = 1) -> EmitterSignature:
    return EmitterSignature(checks, inputs, outputs)


CAPTURING_DEVICES = ("cpu", "cuda")
"""Kinds of devices that a capture can be made on."""

HOST_SYNC = "it waits for the host: a value that a kernel computed decides what is launched next"
RUNS_BODIES = "it is a higher-order operator, whose bodies run as often as the data says"


def everywhere(reason: str) -> Mapping[str, str]:
    """An obstacle on every device: a loop on the CPU could call it, and its report says what a CUDA graph would do."""
    return dict.fromkeys(CAPTURING_DEVICES, reason)


@dataclass(frozen=True, slots=True)
class KernelKind:
    """A kind of kernel: its number and attribute schema, which are the ABI, and what the planner may do with it."""

    kind: Kind
    schema: str
    signature: EmitterSignature
    inplace: tuple[int, ...]
    """Inputs whose storage output 0 may take when they die. The planner asks for the same shape and dtype, so a
    broadcast input and a comparison's operands drop out by themselves."""
    view: ViewRule | None
    """The layouts of the outputs as views of input 0; None for a kind that always computes."""
    obstacles: Mapping[str, str] = field(default_factory=dict)
    """Device → why a capture there cannot hold a launch of this kind; a device without an entry can."""
    overwrites: OverwriteRule | None = None
    """For a kind with several outputs, each of which may take the storage of an input of its own."""

    def emit(self, attrs: Attrs, ins: Specs, outs: Specs) -> KernelSpec:
        """The emitter of this kind.

        Raises:
            InternalError: a wrong number of values, an attribute that is missing, unknown or of the wrong type, or
                what a check objects to.
        """
        blob = pack(self.schema, attrs)
        objection = self._find_objection(OpCall(attrs, ins, outs))
        if objection:
            shown = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in ins)
            raise InternalError(f"{self.kind.name}({shown}) {dict(attrs)}: {objection}")
        return KernelSpec(int(self.kind), self.schema, blob)

    def _find_objection(self, call: OpCall) -> str | None:
        wanted = self.signature
        miscount = _miscount("inputs", len(call.ins), wanted.inputs) or _miscount(
            "outputs", len(call.outs), wanted.outputs
        )
        return miscount or next(filter(None, (check(call) for check in wanted.checks)), None)


def kind(
    number: Kind,
    values: EmitterSignature,
    layout: str = "",
    *,
    inplace: tuple[int, ...] = (),
    view: ViewRule | None = None,
    obstacles: Mapping[str, str] | None = None,
    overwrites: OverwriteRule | None = None,
    version: int = 1,
) -> KernelKind:
    """A row; `layout` is the field part of the attribute schema (`pipeline.ops.attrs`)."""
    schema = f"{number.name.lower()}/{version}:{layout}"
    return KernelKind(number, schema, values, inplace, view, obstacles or {}, overwrites)


def rows(numbers: Iterable[Kind], values: EmitterSignature, layout: str = "", **facts: Any) -> tuple[KernelKind, ...]:
    """Rows of kinds that differ in their number alone; `facts` as in `kind`."""
    return tuple(kind(number, values, layout, **facts) for number in numbers)


def _miscount(what: str, found: int, wanted: Count) -> str | None:
    least, most = wanted if isinstance(wanted, tuple) else (wanted, wanted)
    if found >= least and (most is None or found <= most):
        return None
    expected = f"at least {least}" if most is None else " or ".join(map(str, range(least, most + 1)))
    return f"{found} {what}; expected {expected}"


def axis_in_range(name: str = "axis") -> Check:
    """Attribute `name` (an int, or a tuple without repeats) names axes of input 0; negative counts from the end."""

    def check(call: OpCall) -> str | None:
        value, rank = call.attrs[name], call.ins[0].rank
        axes = value if isinstance(value, tuple) else (value,)
        wrong = [axis for axis in axes if not (isinstance(axis, int) and -rank <= axis < rank)]
        if wrong:
            return f"attr {name}={value} has {wrong[0]}, out of range for rank {rank}"
        if len({axis % rank for axis in axes if isinstance(axis, int)}) != len(axes):
            return f"attr {name}={value} names an axis twice"
        return None

    return check


def one_of(name: str, *allowed: str) -> Check:
    """Attribute `name` is one of the words `allowed`."""

    def check(call: OpCall) -> str | None:
        value = call.attrs[name]
        return None if value in allowed else f"attr {name}={value!r}; expected one of {list(allowed)}"

    return check


def sizes_of(name: str, length: Callable[[OpCall], int], meaning: str) -> Check:
    """Attribute `name` is a tuple of `length(call)` items, one per `meaning`."""

    def check(call: OpCall) -> str | None:
        value, wanted = call.attrs[name], length(call)
        right = isinstance(value, tuple) and len(value) == wanted
        return None if right else f"attr {name}={value}; expected {wanted} items, one per {meaning}"

    return check


def per_spatial_dim(*names: str) -> tuple[Check, ...]:
    """Each of `names` has one item per spatial dimension of input 0, of which there are 1 to 3."""

    def spatial(call: OpCall) -> str | None:
        rank = call.ins[0].rank
        return None if 3 <= rank <= 5 else f"rank {rank}; expected batch, channels and 1 to 3 more"

    return (spatial, *(sizes_of(name, lambda call: call.ins[0].rank - 2, "spatial dim") for name in names))


def same_dtype(call: OpCall) -> str | None:
    """All inputs and outputs share one dtype: there is no promotion in the IR, only Cast."""
    dtypes = list(dict.fromkeys(spec.dtype for spec in (*call.ins, *call.outs)))
    return None if len(dtypes) == 1 else f"dtypes {dtypes} in one call; expected one, and Cast where they differ"


def floating(call: OpCall) -> str | None:
    """Input 0 is floating point."""
    dtype = call.ins[0].dtype
    return None if "float" in dtype else f"dtype {dtype}; expected floating point"
