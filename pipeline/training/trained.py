"""Choose the weights of a graph that are trained.

In ONNX every constant is an initializer, so a model does not say which constants are parameters. By default these are:

- in a graph with values of role param (torch's graphs, and `from_onnx(trainable=…)`): its float params;
- in another graph: float constants with more than one element that an operator reads as a weight, directly or through
  operators that move elements or quantize. Weights are operands of a product, a convolution or a recurrent operator,
  scale and bias of a normalisation, the table of an embedding, and operands of an addition or a multiplication with
  more than one element along exactly one axis (a bias, the scale of a layer). A constant that is added along several
  axes may be a mask, and is not trained;
- in every graph: the scales of quantizers, also those with one element.

Statistics of a BatchNormalization and values that decide shapes are not trained. Globs of names choose otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import onnx

from passes.graph.index import producers_of
from passes.graph.op_facts import SIZES
from passes.graph.traversal import walk
from passes.suggest import is_named, nearest
from pipeline.errors import UsageError
from pipeline.ir import Graph, Op, Role, Value
from pipeline.ops.aten import views


def find_trained(graph: Graph, chosen: Sequence[str] | None, *, by_readers: bool = False) -> frozenset[int]:
    """The vids of the weights to train: those that a glob of `chosen` matches, or those of the rule above.

    Args:
        by_readers: the params are what may be trained, and say nothing about what is.

    Raises:
        UsageError: a glob matches no float weight, or there is nothing to train.
    """
    names = {vid: found for vid, found in graph.weight_names().items() if _is_float(graph.values[vid])}
    if chosen is not None:
        matched = {
            glob: {vid for vid, own in names.items() if any(is_named(name, glob) for name in own)} for glob in chosen
        }
        for glob in chosen:
            if not matched[glob]:
                hint = nearest(glob, [name for own in names.values() for name in own])
                raise UsageError(f"train: found no float weight that {glob!r} names or matches{hint}")
        return frozenset().union(*matched.values())
    params = frozenset() if by_readers else {value.vid for value in graph.with_role(Role.PARAM) if value.vid in names}
    found = frozenset((params or _find_weights(graph, filled_in=by_readers)) | scales_of(graph).keys())
    if not found:
        raise UsageError(f"graph {graph.name!r} has no float weight that is trained by default; name some by train=")
    return found


def _find_weights(graph: Graph, *, filled_in: bool) -> frozenset[int]:
    """The stored floats that an operator reads as a weight.

    filled_in: a const at an optional operand was put there by the importer, and the model has nothing to train at it.
    """
    stored = graph.with_role(Role.PARAM, Role.CONST)
    return frozenset(
        value.vid
        for value in stored
        if _is_float(value)
        and value.spec.numel > 1
        and any(
            _is_weight(graph, op, position, value)
            and not (filled_in and value.role is Role.CONST and position in OPTIONAL.get(op.kind, ()))
            for op, position in _uses(graph, value)
        )
    )


def scales_of(graph: Graph) -> Mapping[int, Op]:
    """{vid of a stored scale: the first QuantizeLinear that divides by it}."""
    found: dict[int, Op] = {}
    for op in graph.ops:
        if op.kind == QUANTIZER and graph.values[op.inputs[1]].producer is None:
            found.setdefault(op.inputs[1], op)
    return found


def find_candidates(graph: onnx.GraphProto) -> list[str]:
    """Float initializers that may become params: no shape, and nothing else that has to be known, follows from them."""
    producers = producers_of(graph.node)

    def before(name: str) -> list[str]:
        producer = producers.get(name)
        return [] if producer is None or producer.op_type in SIZES else [source for source in producer.input if source]

    ends = [name for node in graph.node for at, name in enumerate(node.input) if at in FIXED.get(node.op_type, ())]
    fixed = set(walk(ends, before))
    scales = {node.input[1] for node in graph.node if node.op_type == "QuantizeLinear"}
    listed = {info.name for info in graph.input}
    return [
        tensor.name
        for tensor in graph.initializer
        if tensor.data_type in FLOATS
        and tensor.name not in fixed | listed
        and (tensor.name in scales or any(size > 1 for size in tensor.dims))
    ]


def _uses(graph: Graph, value: Value) -> Iterator[tuple[Op, int]]:
    """The ops that read `value` or what only moves or quantizes it, each with the position of the operand."""
    todo = [value]
    while todo:
        current = todo.pop()
        for oid in current.users:
            op = graph.ops[oid]
            for position, vid in enumerate(op.inputs):
                if vid != current.vid:
                    continue
                yield op, position
                if position == 0 and (op.kind in MOVES or op.kind in (QUANTIZER, DEQUANTIZER)):
                    todo += [graph.values[out] for out in op.outputs]


def _is_weight(graph: Graph, op: Op, position: int, value: Value) -> bool:
    if op.kind in VECTORS:
        return sum(size != 1 for size in value.spec.sizes) == 1
    return position in WEIGHTS.get(op.kind, ())


def _is_float(value: Value) -> bool:
    return value.spec.dtype in ("float16", "bfloat16", "float32", "float64")


QUANTIZER, DEQUANTIZER = "onnxline.quantize.default", "onnxline.dequantize.default"

CONVOLUTIONS: Final = (
    *(f"aten.conv{axes}d.default" for axes in (1, 2, 3)),
    *("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"),
)

WEIGHTS: Final[Mapping[str, Sequence[int]]] = {
    "aten.matmul.default": (0, 1), "aten.mm.default": (0, 1), "aten.linear.default": (0, 1, 2),
    "aten.addmm.default": (0, 1, 2), "aten.einsum.default": range(9),
    **dict.fromkeys(CONVOLUTIONS, (1, 2)), "onnxline.recurrent.default": (1, 2, 3, 6, 7),
    "aten.layer_norm.default": (1, 2), "aten.rms_norm.default": (1,), "aten.batch_norm.default": (1, 2),
    "aten.group_norm.default": (1, 2), "aten.index.Tensor": (0,),
}  # fmt: skip
"""kind → the operands that are weights where they are stored."""

VECTORS: Final = frozenset(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div"))

OPTIONAL: Final[Mapping[str, Sequence[int]]] = {"onnxline.recurrent.default": (3,)}
"""kind → the weights that the importer fills in with zeros where a model has none."""

MOVES: Final = views.MOVES | {"aten.clamp.default"}

FIXED: Final[Mapping[str, Sequence[int]]] = {
    "Reshape": (1,), "Expand": (1,), "Tile": (1,), "Resize": (1, 2, 3), "Upsample": (1,), "Pad": (1, 2, 3),
    "Slice": (1, 2, 3, 4), "Split": (1,), "Squeeze": (1,), "Unsqueeze": (1,), "TopK": (1,), "Clip": (1, 2),
    "ConstantOfShape": (0,), "Range": (0, 1, 2), "CumSum": (1,), "OneHot": (1,), "If": (0,), "Loop": (0, 1),
    "Dropout": (1, 2), "Trilu": (1,),
}  # fmt: skip
"""op type → the inputs whose values an importer has to know."""

FLOATS: Final = frozenset(
    {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE}
)
