"""Operators of torch that only move elements, as our own view kinds with concrete attributes.

Sizes are taken from the results of the trace. Where torch copies for a reason (`contiguous` of a
transposed tensor) the view rule of the kind copies too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.ir.graph import Attr, KernelSpec, TensorSpec, TorchConst
from pipeline.ops import shape

Attrs = Mapping[str, Any]
Outs = Sequence[TensorSpec]
Row = tuple[str, dict[str, Attr]]

Rule = Callable[[Attrs, TensorSpec, Outs], Row | None]
"""(arguments, input 0, results) -> kind and attributes of the view, or None where this call is none."""


def as_view(kind: str, attrs: Attrs, ins: Sequence[TensorSpec], outs: Outs) -> KernelSpec | None:
    """The kernel of a call that only moves elements of its first input; None for every other call."""
    rule = RULES.get(kind)
    if rule is None or not ins or not outs or any(out.dtype != ins[0].dtype for out in outs):
        return None
    row = rule(attrs, ins[0], outs)
    if row is None:
        return None
    name, view_attrs = row
    return VIEW_KINDS[name].emit(view_attrs, ins[:1], outs)


def as_identity(attrs: Attrs, source: TensorSpec, outs: Outs) -> Row | None:
    """A copy that keeps the elements: Contiguous where the call asks for contiguous_format, else Identity.

    A copy to channels_last stays a call and keeps its traced strides, since convolutions depend on them.
    """
    if outs[0].shape != source.shape or attrs.get("memory_format") in CHANNELS_LAST:
        return None
    rows = attrs.get("memory_format") == TorchConst("memory_format", "contiguous_format")
    return ("Contiguous" if rows else "Identity"), {}


def as_contiguous(attrs: Attrs, source: TensorSpec, outs: Outs) -> Row | None:
    return as_identity({"memory_format": TorchConst("memory_format", "contiguous_format"), **attrs}, source, outs)


def as_real(attrs: Attrs, source: TensorSpec, outs: Outs) -> Row | None:
    """Conjugation and the like, which change complex numbers only."""
    return None if source.dtype.startswith("complex") else as_identity(attrs, source, outs)


def as_dropout(attrs: Attrs, source: TensorSpec, outs: Outs) -> Row | None:
    """Dropout that drops nothing."""
    return None if attrs.get("train", True) and attrs.get("p", 0.5) != 0 else as_identity({}, source, outs)


def as_reshape(_attrs: Attrs, _source: TensorSpec, outs: Outs) -> Row:
    return "Reshape", {"shape": outs[0].sizes}


def as_expand(_attrs: Attrs, _source: TensorSpec, outs: Outs) -> Row:
    return "Expand", {"shape": outs[0].sizes}


def transpose_row(perm: Sequence[int], rank: int) -> Row:
    return "Transpose", {"perm": tuple(axis % rank for axis in perm)}


def as_permute(attrs: Attrs, source: TensorSpec, _: Outs) -> Row:
    return transpose_row(attrs["dims"], source.rank)


def as_swap(first: str, second: str) -> Rule:
    """A rule that swaps two axes; their numbers are the arguments of these names."""

    def rule(attrs: Attrs, source: TensorSpec, outs: Outs) -> Row | None:
        return exchange_axes(attrs[first], attrs[second], source, outs)

    return rule


def as_matrix_transpose(attrs: Attrs, source: TensorSpec, outs: Outs) -> Row | None:
    return exchange_axes(-2, -1, source, outs) if source.rank >= 2 else as_identity(attrs, source, outs)


def exchange_axes(first: int, second: int, source: TensorSpec, outs: Outs) -> Row | None:
    if not source.rank:
        return as_identity({}, source, outs)
    perm = list(range(source.rank))
    perm[first], perm[second] = perm[second], perm[first]
    return transpose_row(perm, source.rank)


def as_reversal(_attrs: Attrs, source: TensorSpec, _outs: Outs) -> Row:
    return transpose_row(range(source.rank)[::-1], source.rank)


def as_move(attrs: Attrs, source: TensorSpec, outs: Outs) -> Row | None:
    if not source.rank:
        return as_identity({}, source, outs)
    places = [[axis % source.rank for axis in to_tuple(attrs[name])] for name in ("source", "destination")]
    perm = [axis for axis in range(source.rank) if axis not in places[0]]
    for destination, axis in sorted(zip(places[1], places[0], strict=True)):
        perm.insert(destination, axis)
    return transpose_row(perm, source.rank)


def to_tuple(item: int | tuple[int, ...]) -> tuple[int, ...]:
    return item if isinstance(item, tuple) else (item,)


def as_slice(attrs: Attrs, _source: TensorSpec, _outs: Outs) -> Row:
    start, end = attrs.get("start") or 0, attrs.get("end")
    return slice_row(attrs.get("dim", 0), start, FAR if end is None else end, attrs.get("step", 1))


def as_narrow(attrs: Attrs, source: TensorSpec, outs: Outs) -> Row:
    size = source.sizes[attrs["dim"]]
    start = attrs["start"] + (size if attrs["start"] < 0 else 0)
    return slice_row(attrs["dim"], start, start + outs[0].sizes[attrs["dim"]], 1)


def slice_row(axis: int, start: int, end: int, step: int) -> Row:
    return "Slice", {"starts": (start,), "ends": (end,), "axes": (axis,), "steps": (step,)}


def as_select(attrs: Attrs, source: TensorSpec, _: Outs) -> Row:
    axis = attrs["dim"] % source.rank
    return "Select", {"axis": axis, "index": attrs["index"] % source.sizes[axis]}


def as_split(attrs: Attrs, source: TensorSpec, outs: Outs) -> Row | None:
    """`tensor_split` at arbitrary places may omit or repeat elements; it stays a call then."""
    axis = attrs.get("dim", 0) % source.rank
    sizes = tuple(out.sizes[axis] for out in outs)
    return ("Split", {"axis": axis, "sizes": sizes}) if sum(sizes) == source.sizes[axis] else None


def as_unbind(attrs: Attrs, source: TensorSpec, _: Outs) -> Row:
    return "Unbind", {"axis": attrs.get("dim", 0) % source.rank}


def as_diagonal(attrs: Attrs, source: TensorSpec, _: Outs) -> Row:
    first, second = attrs.get("dim1", 0) % source.rank, attrs.get("dim2", 1) % source.rank
    return "Diagonal", {"distance": attrs.get("offset", 0), "first": first, "second": second}


def as_unfold(attrs: Attrs, source: TensorSpec, _: Outs) -> Row | None:
    if not source.rank:
        return None
    return "Unfold", {"axis": attrs["dimension"] % source.rank, "size": attrs["size"], "step": attrs["step"]}


VIEW_KINDS = {row.kind.name: row for row in shape.KINDS if row.view is not None}

CHANNELS_LAST = (TorchConst("memory_format", "channels_last"), TorchConst("memory_format", "channels_last_3d"))

FAR = 2**63 - 1
"""How torch, and ONNX's Slice, write "to the end"."""

OPERATORS: tuple[tuple[Rule, str], ...] = (
    (
        as_reshape,
        """
        view.default _unsafe_view.default reshape.default view_as.default reshape_as.default flatten.using_ints
        unflatten.int ravel.default unsqueeze.default squeeze.default squeeze.dim squeeze.dims atleast_1d.default
        atleast_2d.default atleast_3d.default
        """,
    ),
    (
        as_identity,
        """
        clone.default detach.default alias.default positive.default lift.default lift_fresh_copy.default
        _to_copy.default to.dtype to.device to.dtype_layout to.other type_as.default
        """,
    ),
    (as_contiguous, "contiguous.default"),
    (as_real, "conj.default resolve_conj.default resolve_neg.default real.default"),
    (as_dropout, "dropout.default feature_dropout.default alpha_dropout.default feature_alpha_dropout.default"),
    (as_expand, "expand.default expand_as.default broadcast_to.default"),
    (as_permute, "permute.default"),
    (as_swap("dim0", "dim1"), "transpose.int swapdims.default"),
    (as_swap("axis0", "axis1"), "swapaxes.default"),
    (as_matrix_transpose, "t.default mT.default"),
    (as_reversal, "numpy_T.default"),
    (as_move, "movedim.int movedim.intlist moveaxis.int moveaxis.intlist"),
    (as_slice, "slice.Tensor"),
    (as_narrow, "narrow.default"),
    (as_select, "select.int"),
    (
        as_split,
        """
        split.Tensor split.sizes split_with_sizes.default chunk.default unsafe_split.Tensor
        unsafe_split_with_sizes.default unsafe_chunk.default tensor_split.sections tensor_split.indices
        """,
    ),
    (as_unbind, "unbind.int"),
    (as_diagonal, "diagonal.default"),
    (as_unfold, "unfold.default"),
)

RULES: dict[str, Rule] = {f"aten.{name}": rule for rule, names in OPERATORS for name in names.split()}

MOVES = frozenset(RULES)
"""Operators that move elements only, in some of their calls or in all."""
