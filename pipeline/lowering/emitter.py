"""What every emitter does: refuse a call that its kernel could not run, then pack the attributes.

`emitter(...)` makes one from a row of facts. The refusals are ours to fix (an importer normalises what ONNX and torch
leave open), so all of them are InternalErrors that name the kind and the attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipeline.errors import InternalError
from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Attr, KernelSpec
from pipeline.ir.spec import TensorSpec
from pipeline.lowering.attrs import pack
from pipeline.lowering.kinds import Kind

__all__ = ["Check", "axis_in_range", "emitter", "floating", "one_of", "per_spatial_dim", "same_dtype", "sizes_of"]

Attrs = Mapping[str, Attr]
Specs = Sequence[TensorSpec]

Check = Callable[[Attrs, Specs, Specs], str | None]
"""(attrs, input specs, output specs) -> what is wrong, or None."""


def emitter(
    kind: Kind,
    layout: str = "",
    *checks: Check,
    inputs: int | tuple[int, int | None] = 1,
    outputs: int | tuple[int, int | None] = 1,
) -> Emitter:
    """The emitter of `kind`: `layout` is the field part of its schema, a count is exact or (least, most).

    The emitter that comes back raises InternalError: a wrong number of values, an attribute that is missing, unknown
    or of the wrong type, or what a check objects to.
    """
    schema = f"{kind.name.lower()}/1:{layout}"

    def emit(attrs: Attrs, ins: Specs, outs: Specs) -> KernelSpec:
        blob = pack(schema, attrs)
        objections = [_wrong_count("inputs", len(ins), inputs), _wrong_count("outputs", len(outs), outputs)]
        # A check may rely on the counts, and on the types that pack has seen to.
        for objection in objections if any(objections) else (check(attrs, ins, outs) for check in checks):
            if objection:
                shown = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in ins)
                raise InternalError(f"{kind.name}({shown}) {dict(attrs)}: {objection}")
        return KernelSpec(int(kind), schema, blob)

    return emit


def _wrong_count(what: str, found: int, wanted: int | tuple[int, int | None]) -> str | None:
    least, most = wanted if isinstance(wanted, tuple) else (wanted, wanted)
    if found >= least and (most is None or found <= most):
        return None
    expected = f"at least {least}" if most is None else " or ".join(map(str, range(least, most + 1)))
    return f"{found} {what}; expected {expected}"


def axis_in_range(name: str = "axis") -> Check:
    """Attribute `name` (an int, or a tuple without repeats) names axes of input 0; negative counts from the end."""

    def check(attrs: Attrs, ins: Specs, outs: Specs) -> str | None:
        del outs
        found, rank = attrs[name], ins[0].rank
        axes = found if isinstance(found, tuple) else (found,)
        wrong = [axis for axis in axes if not (isinstance(axis, int) and -rank <= axis < rank)]
        if wrong:
            return f"attr {name}={found} has {wrong[0]}, out of range for rank {rank}"
        if len({axis % rank for axis in axes if isinstance(axis, int)}) != len(axes):
            return f"attr {name}={found} names an axis twice"
        return None

    return check


def one_of(name: str, *allowed: str) -> Check:
    """Attribute `name` is one of the words `allowed`."""

    def check(attrs: Attrs, ins: Specs, outs: Specs) -> str | None:
        del ins, outs
        return None if attrs[name] in allowed else f"attr {name}={attrs[name]!r}; expected one of {list(allowed)}"

    return check


def sizes_of(name: str, length: Callable[[Specs, Specs], int], meaning: str) -> Check:
    """Attribute `name` is a tuple of `length(ins, outs)` items, one per `meaning`."""

    def check(attrs: Attrs, ins: Specs, outs: Specs) -> str | None:
        found, wanted = attrs[name], length(ins, outs)
        right = isinstance(found, tuple) and len(found) == wanted
        return None if right else f"attr {name}={found}; expected {wanted} items, one per {meaning}"

    return check


def per_spatial_dim(*names: str) -> tuple[Check, ...]:
    """Each of `names` has one item per spatial dimension of input 0 (`pads` two), of which there are 1 to 3."""

    def spatial(attrs: Attrs, ins: Specs, outs: Specs) -> str | None:
        del attrs, outs
        return None if 3 <= ins[0].rank <= 5 else f"rank {ins[0].rank}; expected batch, channels and 1 to 3 more"

    def sides(ins: Specs, outs: Specs) -> int:
        del outs
        return 2 * (ins[0].rank - 2)

    def dims(ins: Specs, outs: Specs) -> int:
        del outs
        return ins[0].rank - 2

    lengths = [
        sizes_of(name, sides, "side of a spatial dim") if name == "pads" else sizes_of(name, dims, "spatial dim")
        for name in names
    ]
    return (spatial, *lengths)


def same_dtype(attrs: Attrs, ins: Specs, outs: Specs) -> str | None:
    """All inputs and outputs share one dtype: there is no promotion in the IR, only Cast."""
    del attrs
    found = list(dict.fromkeys(spec.dtype for spec in (*ins, *outs)))
    return None if len(found) == 1 else f"dtypes {found} in one call; expected one, and Cast where they differ"


def floating(attrs: Attrs, ins: Specs, outs: Specs) -> str | None:
    """Input 0 is floating point."""
    del attrs, outs
    return None if "float" in ins[0].dtype else f"dtype {ins[0].dtype}; expected floating point"
