"""Shapes and dtypes of values before nodes become ops: as the model declares them, as the caller fixes sizes, and as
they follow from the operands, by ONNX's inference or by a rule of our own.

A sequence of tensors is supported where SplitToSequence makes it and all places are constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference

from passes.custom_ops import declared_ops
from passes.graph.index import copy_of
from passes.suggest import plural
from pipeline.errors import SourceError, Unsupported, UsageError
from pipeline.importers.from_onnx.source import Attributes, element_type, ir_dtype, op_key
from pipeline.ir.graph import Dim, TensorSpec

Constants = Mapping[str, np.ndarray]
"""Inputs of a node whose elements are known and few."""

Specs = Mapping[str, TensorSpec]


def declared_spec(value: onnx.ValueInfoProto, dims: Mapping[str, int]) -> TensorSpec | None:
    """The spec that a ValueInfoProto declares, named sizes bound by `dims`; None where it is incomplete.

    A size with neither a value nor a name has the name "?".
    """
    if not value.type.HasField("tensor_type") or not value.type.tensor_type.elem_type:
        return None
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    sizes: list[Dim] = []
    for dim in tensor.shape.dim:
        known = dim.HasField("dim_value") and dim.dim_value >= 0
        sizes.append(dim.dim_value if known else dims.get(dim.dim_param, dim.dim_param or "?"))
    return TensorSpec(tuple(sizes), ir_dtype(tensor.elem_type, f"value {value.name!r}"))


class Sizes:
    """Sizes that the caller fixes: `dims`, and the named dims that follow from `shapes`.

    Raises:
        UsageError: a name that the model does not have, a size below 0, or a shape that does not fit.
    """

    def __init__(self, graph: onnx.GraphProto, dims: Mapping[str, int], shapes: Mapping[str, Sequence[int]]) -> None:
        self._graph = graph
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._check_dims(dims)
        self._check_shapes()
        self.dims = {**self._bound_by_shapes(), **dims}

    def of(self, value: onnx.ValueInfoProto) -> TensorSpec | None:
        """The spec of an input; None where the model's is incomplete."""
        spec = declared_spec(value, self.dims)
        if spec is None or value.name not in self._shapes:
            return spec
        return TensorSpec(self._shapes[value.name], spec.dtype)

    def missing(self) -> list[str]:
        """Names of dims that nothing fixes."""
        return [name for name in self._names() if name not in self.dims]

    def _names(self) -> list[str]:
        dims = (dim.dim_param for value in self._graph.input for dim in value.type.tensor_type.shape.dim)
        return list(dict.fromkeys(filter(None, dims)))

    def _bound_by_shapes(self) -> dict[str, int]:
        found: dict[str, set[int]] = {}
        for value in self._graph.input:
            for dim, size in zip(value.type.tensor_type.shape.dim, self._shapes.get(value.name, ()), strict=False):
                if dim.dim_param:
                    found.setdefault(dim.dim_param, set()).add(size)
        # Paddle calls every dynamic dim "?": a name with two sizes is ignored.
        return {name: sizes.pop() for name, sizes in found.items() if len(sizes) == 1}

    def _check_dims(self, dims: Mapping[str, int]) -> None:
        names = self._names()
        if strange := [name for name in dims if name not in names]:
            raise UsageError(
                f"dims: found {', '.join(map(repr, strange))}, expected names of dimensions of the inputs: "
                f"{', '.join(map(repr, names)) or 'this model has none'}"
            )
        for name, size in dims.items():
            if size < 0:
                raise UsageError(f"dims: found {name!r}: {size}, expected a size of at least 0")

    def _check_shapes(self) -> None:
        inputs = {value.name: value.type.tensor_type for value in self._graph.input}
        for name, shape in self._shapes.items():
            if name not in inputs:
                raise UsageError(f"shapes: found {name!r}, expected names of inputs: {', '.join(map(repr, inputs))}")
            own = [dim.dim_value if dim.dim_value > 0 else dim.dim_param or "?" for dim in inputs[name].shape.dim]
            fits = len(own) == len(shape) and all(isinstance(a, str) or a == b for a, b in zip(own, shape, strict=True))
            if inputs[name].HasField("shape") and not fits:
                raise UsageError(f"shapes: found {name!r}: {list(shape)}, which does not fit the model's {own}")


def infer(
    node: onnx.NodeProto,
    opsets: Mapping[str, int],
    specs: Mapping[str, TensorSpec],
    constants: Mapping[str, np.ndarray],
) -> dict[str, TensorSpec]:
    """Specs of the outputs of `node`, as far as they are known; a size may be missing its number.

    A model of one node is made and inferred (0.1 ms): the values of `constants` decide shapes exactly, where a whole
    model's data propagation gives up at Range, Slice or a bound dimension.

    Raises:
        SourceError: ONNX's inference rejects the node.
    """
    declared_ops()  # ONNX knows the custom operators then
    types = {name: helper.make_tensor_type_proto(element_type(spec.dtype), spec.shape) for name, spec in specs.items()}
    graph = helper.make_graph(
        [with_defaults(node)],
        "one_node",
        [helper.make_value_info(name, kind) for name, kind in types.items() if name not in constants],
        [onnx.ValueInfoProto(name=name) for name in node.output if name],
        [numpy_helper.from_array(np.asarray(array, order="C"), name) for name, array in constants.items()],
    )
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    model = helper.make_model(graph, opset_imports=imports)
    vectors = [spec.shape[0] for spec in specs.values() if len(spec.shape) == 1]
    propagates = not any(isinstance(size, int) and size > MOST_PROPAGATED for size in vectors)
    try:
        inferred = shape_inference.infer_shapes(model, strict_mode=True, data_prop=propagates)
    except shape_inference.InferenceError as error:
        inputs = ", ".join(f"{name!r}: {spec.dtype}{list(spec.shape)}" for name, spec in specs.items())
        raise SourceError(
            f"node {node.name!r} ({node.op_type}) cannot read ({inputs}): {error}; "
            "check the model with onnx.checker.check_model(…, full_check=True), and the sizes given as dims"
        ) from error
    found = {value.name: declared_spec(value, {}) for value in inferred.graph.output}
    outputs = {name: spec for name, spec in found.items() if spec is not None}
    return fit_windows(node, specs, outputs) if op_key(node.domain, node.op_type) in WINDOWED else outputs


def with_defaults(proto: onnx.NodeProto) -> onnx.NodeProto:
    """`proto` with the default that ONNX's inference of STFT forgets: half of the bins (onnx 1.23)."""
    if proto.op_type != "STFT" or any(attribute.name == "onesided" for attribute in proto.attribute):
        return proto
    copy = copy_of(proto)
    copy.attribute.append(helper.make_attribute("onesided", 1))
    return copy


def fit_windows(
    node: onnx.NodeProto, specs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]
) -> dict[str, TensorSpec]:
    """The outputs of a pool or convolution, with no element where ceil_mode counts no window.

    The standard rounds the quotient down, or up with ceil_mode; ONNX's inference rounds a negative one towards zero.

    Raises:
        Unsupported: no window fits into the input with its pads; then the standard's text, ONNX's inference and
            onnxruntime do not count the same number of windows.
    """
    read, sizes = Attributes(node), specs[node.input[0]].sizes[2:]
    kernel = read.integers("kernel_shape") or specs[node.input[1]].sizes[2:]
    count, mode = len(kernel), read.text("auto_pad", "NOTSET")
    if count != len(sizes) or mode.startswith("SAME"):
        return dict(outputs)
    strides, dilations = (read.integers(name) or (1,) * count for name in ("strides", "dilations"))
    pads = (read.integers("pads") if mode != "VALID" else None) or (0,) * 2 * count
    hangs, none = read.flag("ceil_mode") and mode != "VALID", set[int]()
    rows = zip(sizes, kernel, strides, dilations, pads, pads[count:], strict=False)
    for axis, (size, window, stride, step, begin, end) in enumerate(rows, 2):
        whole, reach = size + begin + end, (window - 1) * step + 1
        if reach > whole and not (hangs and whole - reach > -2 * stride):
            raise Unsupported(
                f"node {node.name or node.output[0]!r} ({node.op_type}): its window reaches over {reach} elements of "
                f"axis {axis}, which has {whole} with its pads; rewrite the node, or give larger inputs"
            )
        if reach - whole >= stride:
            none.add(axis)
    return {
        name: TensorSpec(tuple(0 if axis in none else size for axis, size in enumerate(spec.shape)), spec.dtype)
        for name, spec in outputs.items()
    }


def like_first_input(node: onnx.NodeProto, specs: Specs, _: Constants) -> dict[str, TensorSpec]:
    """Output 0, and the sum that an operator with a skip connection gives as output 3."""
    return {name: specs[node.input[0]] for name in (node.output[0], *node.output[3:4]) if name}


def unpooled_shape(node: onnx.NodeProto, specs: Specs, constants: Constants) -> dict[str, TensorSpec]:
    """MaxUnpool with the shape of its output as input 2."""
    if len(node.input) < 3 or node.input[2] not in constants:
        return {}
    shape = tuple(int(size) for size in constants[node.input[2]])
    return {node.output[0]: TensorSpec(shape, specs[node.input[0]].dtype)}


def distances_shape(node: onnx.NodeProto, specs: Specs, _: Constants) -> dict[str, TensorSpec]:
    first, second = (specs[name] for name in node.input)
    return {node.output[0]: TensorSpec((first.shape[0], second.shape[0]), first.dtype)}


def product_shape(node: onnx.NodeProto, specs: Specs, _: Constants) -> dict[str, TensorSpec]:
    """FusedMatMul, whose operands may be transposed."""
    read = Attributes(node)
    types = {}
    for name, flag in zip(node.input, ("transA", "transB"), strict=False):
        shape, dtype = specs[name].shape, specs[name].dtype
        types[flag] = TensorSpec((*shape[:-2], *shape[:-3:-1]) if read.flag(flag) and len(shape) > 1 else shape, dtype)
    return infer(helper.make_node("MatMul", list(types), [node.output[0]]), {"": 13}, types, {})


def unpacked_product_shape(node: onnx.NodeProto, specs: Specs, _: Constants) -> dict[str, TensorSpec]:
    """MatMulNBits: a row of N elements for each row of x."""
    x = specs[node.input[0]]
    return {node.output[0]: TensorSpec((*x.shape[:-1], Attributes(node).integer("N")), x.dtype)}


@dataclass(frozen=True, slots=True)
class TensorSequence:
    """The tensors of a sequence as Split makes them, and as SequenceAt reads them."""

    axis: int
    sizes: tuple[int, ...]
    parts: tuple[TensorSpec, ...]
    """Specs as Split makes them."""
    items: tuple[TensorSpec, ...]
    """Specs as SequenceAt reads them: without the axis if keepdims is 0."""
    names: dict[int, str] = field(default_factory=dict)
    """Place → the output of the first SequenceAt that reads it."""

    def pick(self, index: int, name: str) -> TensorSpec:
        """The spec of the tensor at `index`; records that it is called `name`."""
        if not -len(self.items) <= index < len(self.items):
            raise SourceError(
                f"{name!r} is read from place {index} of a sequence of {plural(len(self.items), 'tensor')}"
            )
        place = range(len(self.items))[index]
        self.names.setdefault(place, name)
        return self.items[place]


def split_sequence(attributes: Attributes, spec: TensorSpec, split: np.ndarray | None) -> TensorSequence:
    """The result of SplitToSequence for a tensor of `spec`; `split` is its input 1: one size, all sizes, or None."""
    axis = attributes.integer("axis")
    if not -spec.rank <= axis < spec.rank:
        raise SourceError(f"SplitToSequence has the axis {axis}, and what it splits has {spec.rank} axes")
    axis %= spec.rank
    sizes = _sizes(spec.sizes[axis], split)
    parts = tuple(TensorSpec((*spec.shape[:axis], size, *spec.shape[axis + 1 :]), spec.dtype) for size in sizes)
    items = parts
    if split is None and not attributes.flag("keepdims", True):
        items = tuple(TensorSpec((*spec.shape[:axis], *spec.shape[axis + 1 :]), spec.dtype) for _ in sizes)
    return TensorSequence(axis, sizes, parts, items)


def _sizes(total: int, split: np.ndarray | None) -> tuple[int, ...]:
    """How long each piece of `total` is; `split` is one size for all but the last, or the size of each."""
    if split is not None and split.ndim:
        sizes = tuple(int(size) for size in split.reshape(-1))
        if sum(sizes) != total or any(size < 0 for size in sizes):
            raise SourceError(f"SplitToSequence splits {total} into {list(sizes)}; expected sizes that make {total}")
        return sizes
    step = 1 if split is None else int(split.item())
    if step < 1:
        raise SourceError(f"SplitToSequence splits {total} into pieces of {step}; expected 1 or more")
    if total > MOST_PIECES * step:
        raise Unsupported(f"SplitToSequence makes {total // step:,} tensors; expected {MOST_PIECES:,} at most")
    return tuple(min(step, total - start) for start in range(0, total, step))


def value_arguments(key: str, node: onnx.NodeProto) -> list[str]:
    """The names of the inputs of `node` that have to be known numbers; `key` as `op_key` gives it."""
    places = range(len(node.input)) if key in EVERY else PLACES.get(key, ())
    return [node.input[place] for place in places if place < len(node.input) and node.input[place]]


MOST_PROPAGATED = 4096
"""Elements of a vector that may be a shape: ONNX's inference makes a symbol for each of them."""

MOST_PIECES = 2**16
"""Tensors of one sequence."""

WINDOWED = frozenset({"AveragePool", "Conv", "LpPool", "MaxPool"})

LIKE_FIRST = (
    "GroupNormalization", "SimplifiedLayerNormalization", "com.microsoft::BiasGelu", "com.microsoft::FastGelu",
    "com.microsoft::Gelu", "com.microsoft::Inverse", "com.microsoft::QuickGelu",
    "com.microsoft::SkipLayerNormalization", "com.microsoft::SkipSimplifiedLayerNormalization", "com.microsoft::Trilu",
)  # fmt: skip

OWN_SHAPES: dict[str, Callable[[onnx.NodeProto, Specs, Constants], dict[str, TensorSpec]]] = {
    **dict.fromkeys(LIKE_FIRST, like_first_input),
    "MaxUnpool": unpooled_shape,
    "com.microsoft::CDist": distances_shape,
    "com.microsoft::FusedMatMul": product_shape,
    "com.microsoft::MatMulNBits": unpacked_product_shape,
}
"""Shapes of operators that ONNX's shape inference does not know, those of onnxruntime's own domain among them."""


REDUCTIONS = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare",
)  # fmt: skip

EVERY = frozenset({"Range", "ConstantOfShape", "HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix"})

PLACES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(REDUCTIONS, (1,)),
    "AffineGrid": (1,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "CumProd": (1,),
    "CumSum": (1,),
    "DFT": (1, 2),
    "Dropout": (1, 2),
    "Expand": (1,),
    "If": (0,),
    "MaxUnpool": (2,),
    "OneHot": (1,),
    "Pad": (1, 2, 3),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "SequenceAt": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "SplitToSequence": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
    "com.microsoft::Range": (0, 1, 2),
}
