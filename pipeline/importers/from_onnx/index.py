"""Ops that read or write at computed places, as calls of torch. Axes count from the front."""

from __future__ import annotations

import math

import numpy as np

from pipeline.importers.from_onnx.definitions import aten, compute, constant, give, term, where
from pipeline.importers.from_onnx.node import Importer, Node
from pipeline.importers.from_onnx.shape import (
    INDEX,
    PERMUTE,
    Move,
    emit_moves,
    emit_reshape,
    expand,
    index_attrs,
    permute,
    reshape,
    split,
)
from pipeline.ir.graph import Attr, InputRef, TensorSpec


def one_hot(node: Node, *, axis: int = -1) -> None:
    """The off value everywhere except where the position is the index; an index out of range gives no on value."""
    out = node.output()
    axis %= out.rank
    node.settle_inputs(1)  # the depth is a size of the output
    depth, indices = out.sizes[axis], node.spec(0)
    dtype = "float64" if "float" in indices.dtype else "int64"  # a fractional index is the index of no place
    vid = node.convert(node.operand(0), dtype)
    vid = reshape(node, vid, (*indices.sizes[:axis], 1, *indices.sizes[axis:]))
    places = np.arange(depth, dtype=dtype).reshape([-1 if at == axis else 1 for at in range(out.rank)])
    on = aten("eq.Tensor", term(node, vid), constant(node, places))
    if depth:
        on = aten("logical_or", on, aten("eq.Tensor", term(node, vid), constant(node, places - depth)))
    names = [node.fresh(f"{node.output_names[0]}.{word}") for word in ("off", "on")]
    off, high = (term(node, reshape(node, half, ())) for half in split(node, node.operand(2), 0, (1, 1), names))
    give(node, where(on, high, off))


def reverse_sequence(node: Node, *, batch_axis: int = 1, time_axis: int = 0) -> None:
    """The first `length` steps of each row of the batch in reverse order, the others as they are."""
    spec = node.spec(0)
    if {batch_axis, time_axis} != {0, 1}:
        raise node.refusal(f"found batch_axis {batch_axis} and time_axis {time_axis}, expected 0 and 1 in some order")
    steps, rows = spec.sizes[time_axis], spec.sizes[batch_axis]
    swap = (1, 0, *range(2, spec.rank))
    x = permute(node, node.operand(0), swap) if time_axis == 0 else node.operand(0)
    lengths = term(node, reshape(node, node.operand(1), (rows, 1)))
    row = node.constant_operand(np.arange(rows).reshape(-1, 1))
    place = constant(node, np.arange(steps).reshape(1, -1))
    chosen = where(place < lengths, lengths - 1 - place, place)
    picked: Move = (INDEX, (row, compute(node, chosen)), node.vid_spec(x).sizes, by_several(2))
    emit_moves(node, x, [picked] if time_axis == 1 else [picked, (PERMUTE, (), spec.sizes, {"dims": swap})])


def tensor_scatter(node: Node, *, axis: int = -2, mode: str = "linear") -> None:
    """Writes each row of a batch into its cache, beginning at a place, around the end if it is circular."""
    cache, update = node.spec(0), node.spec(1)
    axis %= cache.rank
    if mode not in ("linear", "circular"):
        raise node.refusal(f"found mode {mode!r}, expected linear or circular")
    batch, count, size = cache.sizes[0], update.sizes[axis], cache.sizes[axis]
    places = constant(node, np.arange(count).reshape([-1 if at == axis else 1 for at in range(cache.rank)]))
    if node.has(2):
        places = term(node, reshape(node, node.operand(2), (batch, *(1,) * (cache.rank - 1)))) + places
        if mode == "circular":
            places = aten("remainder.Tensor", places, constant(node, size))
    indices = expand(node, compute(node, places), update.sizes)
    node.emit("aten.scatter.src", [node.operand(0), indices, node.operand(1)], {"dim": axis})


def gather(node: Node) -> None:
    node.emit(INDEX, node.operands(), index_attrs(node.axis(0)))


def gather_elements(node: Node) -> None:
    axis = node.axis(0)
    node.emit("aten.gather.default", [node.operand(0), from_front(node, 1, node.spec(0).sizes[axis])], {"dim": axis})


def gather_nd(node: Node, *, batch_dims: int = 0) -> None:
    """Torch's own indexing by several tensors; the leading axes of a batch index themselves."""
    rank = node.spec(1).rank
    own = [
        node.constant_operand(np.arange(size).reshape([-1 if at == axis else 1 for at in range(rank - 1)]))
        for axis, size in enumerate(node.spec(0).sizes[:batch_dims])
    ]
    places = [*own, *coordinates(node)]
    node.emit(INDEX, [node.operand(0), *places], by_several(len(places)))


def coordinates(node: Node) -> tuple[int, ...]:
    """The elements along the last axis of input 1, each as a tensor of its own."""
    spec = node.spec(1)
    names = [node.fresh(f"{node.input_names[1]}.{axis}") for axis in range(spec.sizes[-1])]
    outputs = [(name, TensorSpec(spec.shape[:-1], spec.dtype)) for name in names]
    return node.make("aten.unbind.int", [node.operand(1)], outputs, {"dim": spec.rank - 1})


def by_several(count: int) -> dict[str, Attr]:
    """Arguments of indexing where the operands after the first one hold the places of as many axes."""
    return {"self": InputRef(0), "indices": tuple(map(InputRef, range(1, count + 1)))}


def from_front(node: Node, index: int, size: int) -> int:
    """The places that an input holds, as int64, where a negative one counts from the end of an axis of this size."""
    known = node.constant(index)
    if known is not None:
        return node.constant_operand(np.where(known < 0, known + size, known).astype(np.int64))
    key = node.operand(index), size
    if key in node.scope.counted:
        return node.scope.counted[key]
    places = node.convert(key[0], "int64")
    spec = node.vid_spec(places)
    is_negative = node.step("aten.lt.Scalar", [places], TensorSpec(spec.shape, "bool"), {"other": 0})
    moved = node.step("aten.add.Tensor", [places], spec, {"other": size})
    name = node.fresh(f"{node.input_names[index]}.from_front")
    result = node.scope.counted[key] = node.make("aten.where.self", [is_negative, moved, places], [(name, spec)])[0]
    return result


def scatter_elements(node: Node) -> None:
    """A copy of the data with single elements replaced, or added, multiplied and so on."""
    axis = node.axis(0)
    operands = [node.operand(0), from_front(node, 1, node.spec(0).sizes[axis]), node.operand(2)]
    reduction = read_reduction(node)
    if reduction:
        node.emit("aten.scatter_reduce.two", operands, {"dim": axis, "reduce": reduction})
    else:
        node.emit("aten.scatter.src", operands, {"dim": axis})


def read_reduction(node: Node) -> str:
    """Torch's name for what happens to an element that is written to; empty where it is replaced."""
    name = node.attributes.text("reduction", "none")
    if name not in REDUCTIONS:
        raise node.refusal(f"found reduction {name!r}, expected one of {', '.join(REDUCTIONS)}")
    return REDUCTIONS[name]


def scatter_nd(node: Node) -> None:
    """A copy of the data with rows replaced, or added, multiplied and so on."""
    reduction, places = read_reduction(node), coordinates(node)
    if reduction in ("", "sum"):
        call = {**by_several(len(places)), "values": InputRef(len(places) + 1), "accumulate": bool(reduction)}
        node.emit("aten.index_put.default", [node.operand(0), *places, node.operand(2)], call)
        return
    data, indices = node.spec(0), node.spec(1)
    indexed, rest = data.sizes[: len(places)], data.sizes[len(places) :]
    # A table of places in the indexed axes as one, so that torch checks each index.
    table = node.constant_operand(np.arange(math.prod(indexed)).reshape(indexed))
    flat = node.step(INDEX, [table, *places], TensorSpec(indices.shape[:-1], "int64"), by_several(len(places)))
    rows, written = (math.prod(indexed), math.prod(rest)), (math.prod(indices.sizes[:-1]), math.prod(rest))
    at = expand(node, reshape(node, flat, (written[0], 1)), written)
    operands = [reshape(node, node.operand(0), rows), at, reshape(node, node.operand(2), written)]
    call = {"dim": 0, "reduce": reduction}
    emit_reshape(node, node.step("aten.scatter_reduce.two", operands, TensorSpec(rows, data.dtype), call))


def eye_like(node: Node, *, k: int = 0) -> None:
    node.settle_inputs(0)
    node.attributes.settle("dtype")
    out = node.output()
    rows, columns = out.sizes
    node.emit_conversion(node.constant_operand(np.eye(rows, columns, k).astype(bool)))


def optional_element(node: Node) -> None:
    """A tensor stands for an optional that has it."""
    node.alias(node.operand(0))


def has_element(node: Node) -> None:
    node.settle_inputs(0)
    node.alias(node.constant_operand(np.array(node.has(0))))


def grid_sample(node: Node, *, mode: str = "linear", padding_mode: str = "zeros", align_corners: bool = False) -> None:
    """Since opset 20 modes have other names."""
    mode, dims = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode), node.spec(0).rank - 2
    if dims not in (2, 3) or mode not in SAMPLINGS or (mode == "bicubic" and dims == 3) or padding_mode not in BORDERS:
        raise node.refusal(
            f"found mode {mode!r} over {dims} dims, and padding_mode {padding_mode!r}; expected bilinear or nearest "
            f"over 2 or 3, bicubic over 2, and padding by {', '.join(BORDERS)}"
        )
    call: dict[str, Attr] = {
        "interpolation_mode": SAMPLINGS.index(mode),
        "padding_mode": BORDERS.index(padding_mode),
        "align_corners": align_corners,
    }
    node.emit("aten.grid_sampler.default", node.operands(), call)


def top_k(node: Node, *, largest: bool = True) -> None:
    """ONNX allows any order of an unsorted result."""
    node.attributes.settle("sorted")
    count = int(node.need_constant(1, "k").item()) if node.has(1) else node.attributes.integer("k")
    axis, spec = node.axis(-1), node.spec(0)
    sizes = (*spec.sizes[:axis], count, *spec.sizes[axis + 1 :])
    names = [name or node.fresh(f"topk.{place}") for place, name in enumerate((*node.output_names, "")[:2])]
    outputs = [(name, TensorSpec(sizes, dtype)) for name, dtype in zip(names, (spec.dtype, "int64"), strict=True)]
    call: dict[str, Attr] = {"k": count, "dim": axis, "largest": largest}
    node.make("onnxline.top_k.default", [node.operand(0)], outputs, call)


REDUCTIONS = {"none": "", "add": "sum", "mul": "prod", "min": "amin", "max": "amax"}

SAMPLINGS, BORDERS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
"""Torch's names in the order of its numbers."""

IMPORTERS: dict[str, Importer] = {
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "GridSample": grid_sample,
    "OneHot": one_hot,
    "EyeLike": eye_like,
    "OptionalGetElement": optional_element,
    "OptionalHasElement": has_element,
    "ReverseSequence": reverse_sequence,
    "Scatter": scatter_elements,
    "TensorScatter": tensor_scatter,
    "ScatterElements": scatter_elements,
    "ScatterND": scatter_nd,
    "TopK": top_k,
}
