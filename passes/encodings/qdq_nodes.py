"""The names and the nodes of quantization in ONNX's own operators: DequantizeLinear of a stored tensor, what the names
of new values begin with, and reads that go to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import onnx
from onnx import NodeProto, helper

from passes.encodings.encoding import Precision
from passes.graph.traversal import bodies_in, own_names

DEQUANTIZED: Final = "_dequantized"
"""What follows the name of a tensor in the name of its value after both operators."""

FLOAT_ENDING: Final = "_float"
"""What follows the name of an output in the name of its value before both operators; the output keeps its own."""

BLOCK_SCALE: Final = "_block_scale"
GLOBAL_SCALE: Final = "_global_scale"


def choose_stems(graph: onnx.GraphProto, names: Iterable[str]) -> dict[str, str]:
    """How the names of the new values begin, for each tensor: with its own name, or, where the model has a value of
    such a name already, as the weight `bn_scale` next to a value `bn`, with `bn_2`."""
    taken = own_names(graph)
    stems: dict[str, str] = {}
    for name in names:
        stem, number = name, 1
        while any(f"{stem}{ending}" in taken for ending in ENDINGS):
            number += 1
            stem = f"{name}_{number}"
        taken.update(f"{stem}{ending}" for ending in ENDINGS)
        stems[name] = stem
    return stems


ENDINGS: Final = (
    "_quantized", DEQUANTIZED, "_scale", "_zero_point", "_clipped", "_lowest", "_highest", FLOAT_ENDING, BLOCK_SCALE,
    GLOBAL_SCALE,
)  # fmt: skip
"""What follows the name of a tensor in the names of new values."""


def dequantize_node(name: str, precision: Precision, axis: int | None) -> NodeProto:
    """The DequantizeLinear of a stored tensor; `name` is what the names of its tensors begin with."""
    reads, title = [f"{name}_quantized", f"{name}_scale", f"{name}_zero_point"], f"{name}_DequantizeLinear"
    return helper.make_node(
        "DequantizeLinear", reads, [f"{name}{DEQUANTIZED}"], name=title, **block_axes(precision, axis)
    )


def block_axes(precision: Precision, axis: int | None) -> dict[str, Any]:
    """The attributes that say along which axis the scales lie, and how large a block is."""
    if axis is None:
        return {}
    return {"axis": axis} | ({"block_size": precision.block} if precision.granularity == "block" else {})


def rename_values(node: NodeProto, new_name: Callable[[str], str], *, reads_only: bool = False) -> None:
    """Rename the values that `node` reads and makes, and those that its bodies take from outside."""
    _rename(node.input, new_name)
    if not reads_only:
        _rename(node.output, new_name)
    for body in bodies_in(node):

        def outer_name(name: str, own: Collection[str] = own_names(body)) -> str:
            return name if name in own else new_name(name)

        for inner in body.node:
            rename_values(inner, outer_name, reads_only=True)
        for info in body.output:
            info.name = outer_name(info.name)


def _rename(names: Any, new_name: Callable[[str], str]) -> None:
    for index, name in enumerate(names):
        if name:
            names[index] = new_name(name)
