"""onnxoptimizer: one of its passes a step, on the detached model, since none of them computes with weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Final

import onnx
from onnx import GraphProto, TensorProto

from passes.context import PassContext
from passes.errors import StepFailed
from passes.external.call_names import ShortNames, number_nodes, quote_own_names, restore_names
from passes.external.pieces import GraphPieces, can_be_cut
from passes.graph.index import copy_of
from passes.graph.traversal import every_graph, every_node
from passes.step import Description, PassResult, Step, structure, values
from passes.weights.detached import DetachedModel

NAME: Final = "onnxoptimizer"

DESTROYS: Final[Mapping[str, tuple[str, ...]]] = {
    "fuse_qkv": ("qkv",),
    "fuse_bn_into_conv": ("batchnorm",),
    "fuse_matmul_add_bias_into_gemm": ("residual",),
    "eliminate_common_subexpression": ("qkv",),
    "replace_einsum_with_matmul": ("attention",),
}

DESTROYS_EQUALS: Final = ("eliminate_common_subexpression",)

DESCRIPTIONS: Final[Mapping[str, Description]] = {
    "nop": structure("Do nothing; the library's own pass for tests"),
    "adjust_add": structure("Put the constant operand of an Add on the right, where other passes look for it"),
    "adjust_slice_and_matmul": structure(
        "Put a Slice of a constant behind the product with another constant, so that the product can be folded"
    ),
    "eliminate_common_subexpression": values("Compute what is computed several times only once"),
    "eliminate_consecutive_idempotent_ops": structure(
        "Of two Relu, Ceil, Floor, Round, Sign or Reshape in a row, drop the first"
    ),
    "eliminate_deadend": structure("Drop operators whose results nothing reads"),
    "eliminate_duplicate_initializer": values("Keep one of several initializers that hold the same numbers"),
    "eliminate_identity": structure("Drop Identity"),
    "eliminate_if_with_const_cond": structure("Put the branch in place of an If whose condition is a constant"),
    "eliminate_nop_cast": structure("Drop a Cast to the dtype that the value has already"),
    "eliminate_nop_concat": structure("Drop a Concat of a single value"),
    "eliminate_nop_dropout": structure("Drop a Dropout of ratio 0"),
    "eliminate_nop_expand": structure("Drop an Expand to the shape that the value has already"),
    "eliminate_nop_flatten": structure("Drop a Flatten that leaves the shape as it is"),
    "eliminate_nop_monotone_argmax": structure(
        "Drop Softmax, LogSoftmax, Exp, Log or Sqrt in front of an ArgMax, which sees the same order without it"
    ),
    "eliminate_nop_pad": structure("Drop a Pad by 0"),
    "eliminate_nop_reshape": structure("Drop a Reshape to the shape that the value has already"),
    "eliminate_nop_split": structure("Drop a Split into a single piece"),
    "eliminate_nop_transpose": structure("Drop a Transpose that moves no axis"),
    "eliminate_nop_with_unit": values("Drop + 0, − 0, × 1, ÷ 1, ** 1, and what else an operand makes void"),
    "eliminate_shape_gather": structure("Put a constant in place of a Gather of one known dim of a Shape"),
    "eliminate_shape_op": structure("Put a constant in place of a Shape that is known"),
    "eliminate_slice_after_shape": structure("Put a constant in place of a Slice of known dims of a Shape"),
    "eliminate_unused_initializer": structure("Drop initializers that nothing reads"),
    "extract_constant_to_initializer": structure("Make an initializer of each Constant"),
    "fuse_add_bias_into_conv": structure("Make the Add behind a Conv its bias"),
    "fuse_bn_into_conv": structure(
        "Put BatchNormalization into the weight and bias of the Conv before it, by operators on constants that are "
        "left to be folded"
    ),
    "fuse_concat_into_reshape": structure("Make a constant with −1 of a target shape put together by Concat"),
    "fuse_consecutive_concats": structure("Make one Concat of a Concat into a Concat over the same axis"),
    "fuse_consecutive_log_softmax": structure("Make LogSoftmax of Softmax and Log"),
    "fuse_consecutive_reduce_unsqueeze": structure("Make keepdims of an Unsqueeze behind a reduction of that axis"),
    "fuse_consecutive_slices": structure("Make one Slice of two Slices over different axes"),
    "fuse_consecutive_squeezes": structure("Make one Squeeze of two in a row"),
    "fuse_consecutive_transposes": structure("Make one Transpose of two in a row, or none if they cancel"),
    "fuse_consecutive_unsqueezes": structure("Make one Unsqueeze of two in a row"),
    "fuse_matmul_add_bias_into_gemm": structure("Make Gemm of a MatMul of matrices and the Add of a bias"),
    "fuse_pad_into_conv": structure("Put a Pad by 0 into the pads of the Conv behind it"),
    "fuse_pad_into_pool": structure("Put a Pad into the pads of the AveragePool or MaxPool behind it"),
    "fuse_qkv": structure("Merge three MatMuls that read the same value into one, with a Split behind it"),
    "fuse_transpose_into_gemm": structure("Put the Transpose of an operand of Gemm into transA or transB"),
    "lift_lexical_references": structure(
        "Write at each If and Loop, in an attribute __control_inputs that is not ONNX, what it reads from around it"
    ),
    "rename_input_output": structure("Give the model's inputs and outputs other names, by number"),
    "replace_einsum_with_matmul": structure("Make MatMul of an Einsum that is a product of matrices"),
    "rewrite_input_dtype": structure("Make int32 inputs of the model's int64 inputs, with a Cast behind each"),
    "rewrite_where": structure("Drop a Not in front of Where by exchanging its two values"),
    "set_unique_name_for_nodes": structure(
        "Give a name to every operator that has none; names alone are no change, so a run gives the old ones back"
    ),
    "split_init": structure("Keep the part that depends on constants alone, and drop the rest of the model"),
    "split_predict": structure("Keep the part that depends on inputs, and make inputs of what the other part computes"),
}

COMPARING: Final = frozenset({"eliminate_common_subexpression", "eliminate_duplicate_initializer"})
"""The passes that compare tensors by their content."""

INCOMPARABLE: Final = frozenset(
    {
        TensorProto.FLOAT8E4M3FN,
        TensorProto.FLOAT8E4M3FNUZ,
        TensorProto.FLOAT8E5M2,
        TensorProto.FLOAT8E5M2FNUZ,
        TensorProto.UINT4,
        TensorProto.INT4,
        TensorProto.FLOAT4E2M1,
    }
)
"""Dtypes that onnxoptimizer 0.4.2 reads and writes, and for which these two passes raise "no supported data type"."""

ENCLOSED: Final = b"onnxline.enclosed/"
"""Begins the bytes of a tensor that another one is enclosed in."""

REMEMBERED: Final = 4
"""Models that are kept as the library is given them, on either side: passes in a row are tried on the same one."""


@dataclass(frozen=True, slots=True)
class OnnxOptimizerPass(Step):
    """Run one named pass of onnxoptimizer once."""

    name: str
    source: str = field(default=NAME, init=False)
    destroys: ClassVar[Mapping[str, tuple[str, ...]]] = DESTROYS
    destroys_equals: ClassVar[tuple[str, ...]] = DESTROYS_EQUALS
    describes: ClassVar[Mapping[str, Description]] = DESCRIPTIONS
    joins_neighbours: ClassVar[bool] = True

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        return _apply([self.name], model, context)

    def join(self, following: Sequence[Step]) -> OnnxOptimizerPasses:
        return OnnxOptimizerPasses((self.name, *(step.name for step in following)))


@dataclass(frozen=True, slots=True)
class OnnxOptimizerPasses(Step):
    """Run several named passes in one call of the library, which reads and writes the model once."""

    names: tuple[str, ...]
    source: str = field(default=NAME, init=False)

    @property
    def name(self) -> str:  # type: ignore[override]
        return ", ".join(self.names)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        return _apply(self.names, model, context)

    def call_library(self, model: onnx.ModelProto) -> onnx.ModelProto:
        return call_optimize(model, self.names)

    def format_call(self) -> str:
        return f"onnxoptimizer.optimize(model, {list(self.names)})"


def passes_of(names: Sequence[str]) -> tuple[OnnxOptimizerPass, ...]:
    """A step for each of `names`."""
    return tuple(map(OnnxOptimizerPass, names))


def available() -> tuple[str, ...]:
    """Every pass of the installed release."""
    import onnxoptimizer

    return tuple(onnxoptimizer.get_available_passes())


def default_set() -> tuple[str, ...]:
    """The fuse-and-eliminate set that `default` stands for, in the library's order."""
    import onnxoptimizer

    return tuple(onnxoptimizer.get_fuse_and_elimination_passes())


def _apply(names: Sequence[str], model: DetachedModel, context: PassContext) -> PassResult:
    nodes = model.proto.graph.node
    try:
        source = _serialize_numbered(model.proto, context)
        output: PassOutput | None = context.worker.call(optimize, model=source, names=list(names))
    except StepFailed as failure:
        failure.args = (quote_own_names(str(failure), nodes),)
        raise
    if output is None:
        return PassResult(model, changed=False)
    proto = onnx.load_from_string(output.model)
    restore_names(proto, output.names, nodes)
    return PassResult(model.with_proto(proto))


def _serialize_numbered(proto: onnx.ModelProto, context: PassContext) -> bytes:
    """The model with numbered nodes, serialized; a model is known again by identity."""
    remembered: list[tuple[onnx.ModelProto, bytes]] = context.cache.setdefault(NAME, [])
    for known, content in remembered:
        if known is proto:
            return content
    numbered = copy_of(proto)
    number_nodes(numbered)
    remembered[:] = [*remembered, (proto, numbered.SerializeToString())][-REMEMBERED:]
    return remembered[-1][1]


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What passes made: a serialized model with numbered nodes, and the names that these had."""

    model: bytes
    names: Sequence[str]


def optimize(desk: dict[str, Any], model: bytes, names: Sequence[str]) -> PassOutput | None:
    """In the worker: run passes `names` on a serialized `model` with numbered nodes in one call; None: no change."""
    remembered: dict[bytes, _PreparedModel] = desk.setdefault(NAME, {})
    prepared = remembered.pop(model, None) or _PreparedModel.read(model)
    remembered[model] = prepared
    content = prepared.run(names)
    output = None
    if content is not None:
        following, its_names = prepared.prepare_next(content)
        remembered[following.source] = following  # most are sound, so the next pass is given this one
        output = PassOutput(following.source, its_names)
    for forgotten in list(remembered)[:-REMEMBERED]:
        del remembered[forgotten]
    return output


def call_optimize(model: onnx.ModelProto, names: Sequence[str], *, fixed_point: bool = False) -> onnx.ModelProto:
    """In the worker: the result of `onnxoptimizer.optimize` on a model, called as its users call it."""
    import onnxoptimizer

    return onnxoptimizer.optimize(model, list(names), fixed_point)


class _PreparedModel:
    """A serialized model with short names, ready for the library."""

    def __init__(self, source: bytes, short: ShortNames, proto: onnx.ModelProto, *, is_written: bool) -> None:
        self.source = source
        self._short = short
        self._bytes = proto.SerializeToString()
        self._pieces = GraphPieces(proto, self._optimize) if can_be_cut(proto) else None
        self._has_incomparable = any(tensor.data_type in INCOMPARABLE for tensor in _every_tensor(proto.graph))
        self._is_written = is_written
        """Whether it is in the form in which the library writes a model."""

    @classmethod
    def read(cls, source: bytes) -> _PreparedModel:
        proto = onnx.load_from_string(source)
        return cls(source, ShortNames(proto.graph), proto, is_written=False)

    def run(self, names: Sequence[str]) -> bytes | None:
        """Run passes in order; None if the result is the same model."""
        if self._pieces is not None:
            pieces = self._pieces.run(names)
            return None if pieces is None else pieces.model.SerializeToString()
        content = self._optimize(self._bytes, names)
        self._is_written |= content == self._bytes
        is_same = content == self._bytes or (not self._is_written and content == self._rewritten)
        return None if is_same else content

    @cached_property
    def _rewritten(self) -> bytes:
        """The same model as the library writes it: what `nop` makes, byte for byte."""
        return self._optimize(self._bytes, ["nop"])

    def _optimize(self, model: bytes, names: Sequence[str]) -> bytes:
        # What onnxoptimizer.optimize calls, which reads and writes the result once more: a third of a pass.
        from onnxoptimizer import onnx_opt_cpp2py_export as library  # type: ignore[attr-defined]

        try:
            if not self._has_incomparable or COMPARING.isdisjoint(names):
                return library.optimize(model, list(names))
            model = library.optimize(model, ["nop"])  # a result is compared to tensors as the library writes them
            for compares, group in itertools.groupby(names, COMPARING.__contains__):
                model = _enclose_tensors(model) if compares else model
                model = library.optimize(model, list(group))
                model = _release_tensors(model) if compares else model
        except Exception as error:
            error.args = (self._short.quote_own_names(str(error)),)
            raise
        return model

    def prepare_next(self, content: bytes) -> tuple[_PreparedModel, Sequence[str]]:
        """What passes have made, ready for the next one, with the names that values have outside; and the names that
        its nodes had."""
        proto = onnx.load_from_string(content)
        names = number_nodes(proto)
        full = copy_of(proto)
        self._short.restore(full.graph)
        return _PreparedModel(full.SerializeToString(), self._short, proto, is_written=True), names


def _enclose_tensors(model: bytes) -> bytes:
    """Put bytes in place of each tensor that the library cannot compare: equal ones for equal dtype, dims and data."""
    proto = onnx.load_from_string(model)
    for tensor in _every_tensor(proto.graph):
        if tensor.data_type in INCOMPARABLE:
            bare = TensorProto.FromString(tensor.SerializeToString())
            bare.ClearField("name")
            content = ENCLOSED + bare.SerializeToString(deterministic=True)
            _replace(tensor, TensorProto(dims=[len(content)], data_type=TensorProto.UINT8, raw_data=content))
    return proto.SerializeToString()


def _release_tensors(model: bytes) -> bytes:
    """Put the tensors back that `_enclose_tensors` took."""
    proto = onnx.load_from_string(model)
    for tensor in _every_tensor(proto.graph):
        if tensor.raw_data.startswith(ENCLOSED):
            _replace(tensor, TensorProto.FromString(tensor.raw_data.removeprefix(ENCLOSED)))
    return proto.SerializeToString()


def _replace(tensor: TensorProto, other: TensorProto) -> None:
    """Put `other` in the place of a tensor, under its name. No name and an empty one are not the same bytes."""
    if tensor.HasField("name"):
        other.name = tensor.name
    tensor.CopyFrom(other)


def _every_tensor(graph: GraphProto) -> Iterator[TensorProto]:
    """The tensors of a graph and of its bodies, initializers and attributes."""
    for owner in every_graph(graph):
        yield from owner.initializer
    for node in every_node(graph):
        yield from (entry.t for entry in node.attribute if entry.HasField("t"))
