"""Facts about operators: what they do with elements, at which positions their operands are, and their names.

Rooms share these facts, checkers too. A rule, such as which operators may stand between two nodes of a structure, is in
the module that applies it: a checker has rules of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from onnx import GraphProto, ModelProto, NodeProto, helper

ONNX_DOMAINS: Final = ("", "ai.onnx")
"""Two names of ONNX's own domain."""

CONTRIB: Final = "com.microsoft"
"""The domain of the operators that onnxruntime adds."""

RANDOM_OPS: Final = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"}
)
"""Ops whose value differs from run to run."""

SIZES: Final = frozenset({"Shape", "Size"})
"""Ops that depend only on the shape of their input."""

COMMUTATIVE: Final = frozenset({"Add", "Mul", "And", "Or", "Xor", "Max", "Min", "Sum", "Mean", "Equal"})

RESHAPES: Final = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
"""Ops that leave the elements in their order."""

LAYOUT_OPS: Final = RESHAPES | {"Transpose", "Identity"}
"""Ops whose result has all elements of their first input, each once."""

ARRANGING: Final = LAYOUT_OPS | {"Cast"}
"""Ops whose result has all elements of their first input, each once, perhaps in another type."""

SAME_OPS: Final = frozenset({"Identity", "Cast", "CastLike", "Dropout"})
"""Ops whose first output equals their first input at inference, perhaps in another type."""

PASSING_OPS: Final = ARRANGING | SAME_OPS

MOVES: Final = LAYOUT_OPS | {"Slice", "Expand", "Tile", "Split", "Gather", "DepthToSpace", "SpaceToDepth"}
"""Ops that move the elements of their first input; the other inputs are positions or sizes."""

CORRECTLY_ROUNDED: Final = (
    MOVES
    | SAME_OPS
    | SIZES
    | {"Abs", "Add", "Ceil", "Clip", "Div", "Floor", "Max", "Min", "Mod", "Mul", "Neg", "Reciprocal", "Relu", "Round"}
    | {"Sign", "Sqrt", "Sub", "And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or", "Where"}
    | {"Concat", "Constant", "ConstantOfShape", "EyeLike", "GatherElements", "GatherND", "OneHot", "Pad", "Range"}
    | {"ScatterElements", "ScatterND", "Trilu", "DequantizeLinear"}
)
"""Ops whose floats have the same bits in each library and on each machine (IEEE 754). A Cos, an Exp or a sum of many
elements may differ in the last bit."""

CURVES: Final = frozenset(
    {
        *("Abs", "Cast", "Ceil", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu"),
        *("Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Softplus"),
        *("Softsign", "Sqrt", "Swish", "Tanh", "ThresholdedRelu"),
    }
)
"""Operators of one input that compute element by element."""

OF_TWO: Final = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Min", "Max"})
"""Operators of two inputs that compute element by element, and broadcast."""

BROADCASTING: Final = OF_TWO | {
    *("Where", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor")
}
"""Operators that compute element by element, and broadcast."""

MATRIX_PRODUCTS: Final = frozenset({"MatMul", "Gemm"})

CONTRACTIONS: Final = MATRIX_PRODUCTS | {"Einsum"}
"""Ops that sum the products of two operands along an axis; their weights are matrices."""

PRODUCTS: Final = MATRIX_PRODUCTS | {"Conv", "ConvTranspose"}
"""Ops that multiply their first input with a weight, the second one."""

CONVOLUTIONS: Final = frozenset({"Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "DeformConv"})

RECURRENT: Final = frozenset({"LSTM", "GRU", "RNN"})

BIASED: Final = PRODUCTS - {"MatMul"}
"""Products that add a bias."""

BIAS: Final = 2
"""The position of the bias among the inputs of a product."""

FACTORS: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(("MatMul", "Gemm", "Einsum", "Conv", "MatMulInteger", "ConvInteger"), (0, 1)),
    **dict.fromkeys(("QLinearMatMul", "QLinearConv"), (0, 3)),
}
"""Product of ONNX → the positions of its two factors among its inputs."""

CONTRIB_FACTORS: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(("FusedMatMul", "FusedGemm", "FusedConv", "TransposeMatMul", "MatMulNBits"), (0, 1)),
    **dict.fromkeys(("MatMulIntegerToFloat", "DynamicQuantizeMatMul"), (0, 1)),
    "QGemm": (0, 3),
}
"""The same for the products that onnxruntime adds."""

MULTIPLIED: Final[Mapping[str, tuple[int, ...]]] = {
    "Attention": (0, 1, 2),
    "com.microsoft.Attention": (0, 1),
    "com.microsoft.DecoderAttention": (0, 1, 2, 3),
    "com.microsoft.DecoderMaskedMultiHeadAttention": (0, 1, 2),
    "com.microsoft.DecoderMaskedSelfAttention": (0, 1),
    "com.microsoft.GroupQueryAttention": (0, 1, 2),
    "com.microsoft.LongformerAttention": (0, 1, 4),
    "com.microsoft.MultiHeadAttention": (0, 1, 2),
    "com.microsoft.PackedAttention": (0, 1),
    "com.microsoft.PackedMultiHeadAttention": (0, 1, 2),
    "com.microsoft.PagedAttention": (0, 1, 2),
    "com.microsoft.QAttention": (0, 1),
    "com.microsoft.RotaryEmbedding": (0,),
    "com.microsoft.SparseAttention": (0, 1, 2),
}
"""Operator → the positions of its data and weights; its other inputs are masks, biases, pasts or tables of angles."""


def moved_inputs(node: NodeProto) -> list[str]:
    """The inputs whose elements `node` moves; empty when it does something else with them."""
    if node.domain not in ONNX_DOMAINS:
        return []
    return list(node.input) if node.op_type == "Concat" else list(node.input[: node.op_type in MOVES])


WITH_BODIES: Final = frozenset({"If", "Loop", "Scan", "SequenceMap"})
"""The operators of ONNX's own domain that have graphs as attributes."""


def has_body(node: NodeProto) -> bool:
    """Whether `node` has a graph as an attribute."""
    return any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)


def is_opaque(node: NodeProto) -> bool:
    """Whether `node` cannot be run without its model: it is random, or it has a body."""
    return node.op_type in RANDOM_OPS or has_body(node)


def input_of(node: NodeProto, index: int) -> str:
    """The name of an input, empty where it is left out."""
    return node.input[index] if index < len(node.input) else ""


def output_of(node: NodeProto, index: int) -> str:
    """The name of an output, empty where it is left out."""
    return node.output[index] if index < len(node.output) else ""


def first_output(node: NodeProto) -> str:
    """The first named output, which identifies the node, since a value has one producer; empty if none has."""
    return next((name for name in node.output if name), "")


def domain_of(node: NodeProto) -> str:
    """The domain of a node's operator; empty for ONNX's own, whichever of its names the node has."""
    return "" if node.domain in ONNX_DOMAINS else node.domain


def op_name(node: NodeProto) -> str:
    """The operator's name for messages: `Softmax`, or with another domain than ONNX's `com.microsoft::Attention`."""
    return node.op_type if node.domain in ONNX_DOMAINS else f"{node.domain}::{node.op_type}"


def op_of(node: NodeProto) -> str:
    """The operator's name as a key of tables: `Softmax`, or with another domain than ONNX's `com.microsoft.Gelu`."""
    return node.op_type if node.domain in ONNX_DOMAINS else f"{node.domain}.{node.op_type}"


def attribute_of(node: NodeProto, name: str, default: Any = None) -> Any:
    """The value of an attribute; `default` if the node does not have it."""
    return next(
        (helper.get_attribute_value(attribute) for attribute in node.attribute if attribute.name == name), default
    )


def broadcasts(node: NodeProto) -> bool:
    """Whether an operator of `BROADCASTING` aligns the last axes of its operands; before opset 7 its `axis` may name
    others."""
    return node.op_type in BROADCASTING and attribute_of(node, "axis") is None


def is_scaled(node: NodeProto) -> bool:
    """Whether a product of matrices transposes its data or multiplies by a number, as a Gemm may."""
    factors = attribute_of(node, "alpha", 1.0), attribute_of(node, "beta", 1.0)
    return bool(attribute_of(node, "transA", 0)) or factors != (1.0, 1.0)


def addend_of(node: NodeProto) -> str:
    """What a product of matrices adds to its result: the third input; empty where there is none."""
    return input_of(node, BIAS) if node.op_type in MATRIX_PRODUCTS else ""


def opset_of(model: ModelProto) -> int:
    """The opset of ONNX's own operators; 0 where the model names none."""
    return max((entry.version for entry in model.opset_import if entry.domain in ONNX_DOMAINS), default=0)


def weight_axes(node: NodeProto, index: int, rank: int) -> tuple[int | None, int | None] | None:
    """(channel axis, summed axis) of the weight at input `index`, counted from 0; None if that input is no weight.

    `rank` is the rank of the weight. Both axes are None where a weight has several, as a recurrent weight has.
    """
    match node.op_type, index:
        case "MatMul", (0 | 1) if rank >= 2:
            return (rank - 1, rank - 2) if index == 1 else (rank - 2, rank - 1)
        case "Gemm", 1:
            return (0, 1) if attribute_of(node, "transB") else (1, 0)
        case "Gemm", 0:
            return (1, 0) if attribute_of(node, "transA") else (0, 1)
        case "Conv", 1:
            return 0, 1
        case "ConvTranspose", 1:
            return (1, 0) if attribute_of(node, "group", 1) == 1 else (None, None)
        case (("LSTM" | "GRU" | "RNN"), (1 | 2)):
            return None, None
    return None


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MovedConstant:
    """A value that holds the elements of the stored tensor `source`, each once; `source` itself is such a value too.

    `axes`: for each axis of the value, the source axis with the same elements; None for a merged, split or new axis.
    """

    source: str
    axes: tuple[int | None, ...]

    def axis_of_source(self, axis: int | None) -> int | None:
        return None if axis is None else self.axes[axis]


def find_moved_constants(
    graph: GraphProto, sources: Mapping[str, Shape], shapes: Mapping[str, Shape | None]
) -> dict[str, MovedConstant]:
    """Values of `graph` that are a source tensor, or a source tensor followed only by layout operators.

    Args:
        graph: the graph with the layout operators.
        sources: stored tensors with their shapes.
        shapes: of computed values, where they are known; a dim that is open is negative.
    """
    found = {name: MovedConstant(name, tuple(range(len(shape)))) for name, shape in sources.items()}
    known: dict[str, Shape] = dict(sources)
    for node in graph.node:
        if node.op_type not in LAYOUT_OPS or node.domain not in ONNX_DOMAINS or node.input[0] not in found:
            continue
        source, name = node.input[0], node.output[0]
        shape = shapes.get(name)
        if shape is None or any(size < 0 for size in shape):
            continue
        before = found[source]
        axes = _axes_of_result(node, known[source], shape)
        found[name] = MovedConstant(before.source, tuple(before.axis_of_source(axis) for axis in axes))
        known[name] = shape
    return found


def _axes_of_result(node: NodeProto, shape: Shape, result: Shape) -> list[int | None]:
    """For each axis of a layout operator's result, the input axis with the same elements; None if there is none."""
    if node.op_type == "Transpose":
        return [*attribute_of(node, "perm", range(len(shape))[::-1])]
    if node.op_type in RESHAPES:
        return [axis_in_shape(result, shape, axis) for axis in range(len(result))]
    return [*range(len(shape))]


def axis_in_shape(shape: Sequence[int], other: Sequence[int], axis: int) -> int | None:
    """The axis of `other` with the same elements as `axis` of `shape`; None where that axis is merged or split.

    Both are shapes of the same elements in the same order.
    """
    wanted = math.prod(shape[:axis]), shape[axis]
    return next((index for index in range(len(other)) if (math.prod(other[:index]), other[index]) == wanted), None)
