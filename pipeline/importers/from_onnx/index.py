"""Ops that read or write at computed places. Axes count from the front."""

from __future__ import annotations

import numpy as np

from pipeline.importers.from_onnx.node import Importer, Node, direct, read_axis, read_integer, read_text
from pipeline.ir.graph import Attr, TensorSpec


def one_hot(node: Node) -> None:
    """Off everywhere but where the place is the index; an index that is out of range is on nowhere."""
    axis, out = node.attributes.integer("axis", -1) % node.output().rank, node.output()
    node.settle_inputs(1)  # the depth is a size of the output
    depth, indices = out.sizes[axis], node.spec(0)
    column = TensorSpec((*indices.sizes[:axis], 1, *indices.sizes[axis:]), "int64")
    vid = node.operand(0)
    if indices.dtype != "int64":
        vid = node.convert(vid, "int64")
    vid = node.step("Reshape", [vid], column, {"shape": column.sizes})
    places = np.arange(depth).reshape([-1 if at == axis else 1 for at in range(out.rank)])
    on = node.step("aten.eq.Tensor", [vid, node.constant_operand(places)], TensorSpec(out.shape, "bool"))
    if depth:
        behind = node.step(
            "aten.eq.Tensor", [vid, node.constant_operand(places - depth)], TensorSpec(out.shape, "bool")
        )
        on = node.step("aten.logical_or.default", [on, behind], TensorSpec(out.shape, "bool"))
    pair = node.operand(2)
    values = [
        node.step("Reshape", [half], TensorSpec((), out.dtype), {"shape": ()})
        for half in node.make(
            "Split",
            [pair],
            [(node.fresh(f"{node.output_names[0]}.{word}"), TensorSpec((1,), out.dtype)) for word in ("off", "on")],
            {"axis": 0, "sizes": (1, 1)},
        )
    ]
    node.emit("aten.where.self", [on, values[1], values[0]])


def reverse_sequence(node: Node) -> None:
    """The first `length` steps of each row of the batch from behind, the others as they are."""
    read, spec = node.attributes, node.spec(0)
    batch, time = read.integer("batch_axis", 1), read.integer("time_axis", 0)
    if {batch, time} != {0, 1}:
        raise node.refusal(f"found batch_axis {batch} and time_axis {time}, expected 0 and 1 in some order")
    steps, rows = spec.sizes[time], spec.sizes[batch]
    swap = (1, 0, *range(2, spec.rank))
    x = node.operand(0)
    by_row = TensorSpec((rows, steps, *spec.sizes[2:]), spec.dtype)
    if time == 0:
        x = node.step("Transpose", [x], by_row, {"perm": swap})
    table = TensorSpec((rows, steps), "int64")
    lengths = node.step("Reshape", [node.operand(1)], TensorSpec((rows, 1), "int64"), {"shape": (rows, 1)})
    place = node.constant_operand(np.arange(steps).reshape(1, -1))
    last = node.step("aten.sub.Tensor", [lengths, node.constant_operand(np.array(1))], TensorSpec((rows, 1), "int64"))
    turned = node.step("aten.sub.Tensor", [last, place], table)
    inside = node.step("aten.lt.Tensor", [place, lengths], TensorSpec(table.shape, "bool"))
    chosen = node.step("aten.where.self", [inside, turned, place], table)
    indices = node.step("Reshape", [chosen], TensorSpec((rows, steps, 1), "int64"), {"shape": (rows, steps, 1)})
    if time == 1:
        node.emit("GatherND", [x, indices], {"batch_dims": 1})
        return
    picked = node.step("GatherND", [x, indices], by_row, {"batch_dims": 1})
    node.emit("Transpose", [picked], {"perm": swap})


def tensor_scatter(node: Node) -> None:
    """Writes each row of a batch into its cache from a place on, around the end if it is circular."""
    read, cache, update = node.attributes, node.spec(0), node.spec(1)
    axis, mode = read.integer("axis", -2) % cache.rank, read.text("mode", "linear")
    if mode not in ("linear", "circular"):
        raise node.refusal(f"found mode {mode!r}, expected linear or circular")
    batch, count, size = cache.sizes[0], update.sizes[axis], cache.sizes[axis]
    shape = tuple(batch if at == 0 else count if at == axis else 1 for at in range(cache.rank))
    steps = node.constant_operand(np.arange(count).reshape([-1 if at == axis else 1 for at in range(cache.rank)]))
    places = steps
    if node.has(2):
        column = (batch, *(1,) * (cache.rank - 1))
        begin = node.step("Reshape", [node.operand(2)], TensorSpec(column, "int64"), {"shape": column})
        places = node.step("aten.add.Tensor", [begin, steps], TensorSpec(shape, "int64"))
        if mode == "circular":
            length = node.constant_operand(np.array(size))
            places = node.step("aten.remainder.Tensor", [places, length], TensorSpec(shape, "int64"))
    indices = node.step("Expand", [places], TensorSpec(update.shape, "int64"), {"shape": update.sizes})
    node.emit("ScatterElements", [node.operand(0), indices, node.operand(1)], {"axis": axis, "reduction": "none"})


def scatter(node: Node) -> None:
    """The name of ScatterElements up to opset 10."""
    node.emit("ScatterElements", node.operands(), {"axis": node.axis(0), "reduction": "none"})


def eye_like(node: Node) -> None:
    node.settle_inputs(0)
    node.attributes.settle("dtype")
    out = node.output()
    rows, columns = out.sizes
    eye = np.eye(rows, columns, node.attributes.integer("k"))
    vid = node.constant_operand(eye.astype(bool))
    node.emit_conversion(vid)


def optional_element(node: Node) -> None:
    """A tensor stands for an optional that has it."""
    node.alias(node.operand(0))


def has_element(node: Node) -> None:
    node.settle_inputs(0)
    node.alias(node.constant_operand(np.array(node.has(0))))


def grid_sample(node: Node) -> None:
    """Since opset 20 modes have other names."""
    read = node.attributes
    mode = read.text("mode", "linear" if node.opset >= 20 else "bilinear")
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    dims = node.spec(0).rank - 2
    if dims not in (2, 3) or mode not in ("linear", "nearest", "cubic") or (mode == "cubic" and dims == 3):
        raise node.refusal(
            f"found mode {mode!r} over {dims} dims; expected linear or nearest over 2 or 3, cubic over 2"
        )
    attrs: dict[str, Attr] = {
        "mode": mode,
        "padding": read.text("padding_mode", "zeros"),
        "align_corners": read.flag("align_corners"),
    }
    node.emit("GridSample", node.operands(), attrs)


def top_k(node: Node) -> None:
    """Values and indices are both outputs, whichever is read. ONNX allows any order if unsorted, so it is sorted."""
    node.attributes.settle("sorted")
    count = int(node.need_constant(1, "k").item()) if node.has(1) else node.attributes.integer("k")
    axis = node.axis(-1)
    shape = tuple(count if place == axis else size for place, size in enumerate(node.spec(0).sizes))
    specs = (TensorSpec(shape, node.spec(0).dtype), TensorSpec(shape, "int64"))
    names = [name or node.fresh(f"topk.{place}") for place, name in enumerate((*node.output_names, "")[:2])]
    attrs: dict[str, Attr] = {"axis": axis, "largest": node.attributes.flag("largest", True), "k": count}
    node.make("TopK", node.operands(0), list(zip(names, specs, strict=True)), attrs)


IMPORTERS: dict[str, Importer] = {
    "Gather": direct(axis=read_axis(0)),
    "GatherElements": direct(axis=read_axis(0)),
    "GatherND": direct(batch_dims=read_integer("batch_dims")),
    "GridSample": grid_sample,
    "OneHot": one_hot,
    "EyeLike": eye_like,
    "OptionalGetElement": optional_element,
    "OptionalHasElement": has_element,
    "ReverseSequence": reverse_sequence,
    "Scatter": scatter,
    "TensorScatter": tensor_scatter,
    "ScatterElements": direct(axis=read_axis(0), reduction=read_text("reduction", "none")),
    "ScatterND": direct(reduction=read_text("reduction", "none")),
    "TopK": top_k,
}
