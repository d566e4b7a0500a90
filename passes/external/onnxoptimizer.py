"""onnxoptimizer: one of its passes a step, on the detached model, since none of them computes with weights.

The library is not called where a model has nothing that a pass looks for, since each call reads and writes the model.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Final, TypeVar

import onnx
from onnx import GraphProto, TensorProto

from passes.context import PassContext
from passes.errors import StepFailed
from passes.external.installed import installed_version, read_table
from passes.external.pieces import EXTRACT, GraphPieces, can_be_cut
from passes.external.through_files import ShortNames, number_nodes, quote_own_names, restore_names
from passes.graph.index import copy_of
from passes.graph.traversal import every_graph, every_node
from passes.step import Description, PassResult, Step
from passes.weights.detached import DetachedModel, detach

NAME: Final = "onnxoptimizer"

RELEASE: Final = "0.4.2"
"""The release whose patterns are in `LOOKS_FOR`."""


def may_change(name: str, links: Collection[str]) -> bool:
    """Whether a model has anything that a pass looks for.

    Args:
        name: the pass.
        links: of the model, as `find_links` returns them.

    Returns:
        False where the pass surely changes nothing; true for a pass that is not in `LOOKS_FOR`, and for other releases
        of the library.
    """
    if name not in LOOKS_FOR or installed_version(NAME) != RELEASE:
        return True
    return any(pattern in links for pattern in LOOKS_FOR[name].split())


def find_links(proto: onnx.ModelProto) -> frozenset[str]:
    """Each operator of a model, as `Conv`; each operator with one whose result it reads, as `Add(Conv)`; each operator
    that reads one value three times, as `MatMul*3`; and what is unread, as `UNREAD_NODE` and `UNREAD_TENSOR`."""
    nodes, graphs = list(every_node(proto.graph)), list(every_graph(proto.graph))
    made_by = {name: node.op_type for node in nodes for name in node.output}
    reads = Counter((node.op_type, name) for node in nodes for name in node.input)
    read = {name for _, name in reads} | {info.name for graph in graphs for info in graph.output}
    # The library does not count what a body reads of the graph around it.
    is_nested = len(graphs) > 1
    links = {node.op_type for node in nodes}
    links |= {f"{reader}({made_by[name]})" for reader, name in reads if name in made_by}
    links |= {f"{reader}*3" for (reader, _), count in reads.items() if count > 2}
    if is_nested or any(read.isdisjoint(node.output) for node in nodes):
        links.add(UNREAD_NODE)
    if is_nested or any(tensor.name not in read for tensor in proto.graph.initializer):
        links.add(UNREAD_TENSOR)
    return frozenset(links)


UNREAD_NODE: Final = "unread-node"
"""A node of which nothing is read."""

UNREAD_TENSOR: Final = "unread-tensor"
"""A stored tensor that nothing reads."""


LOOKS_FOR: Final[Mapping[str, str]] = {
    "nop": "",
    "adjust_add": "Add",
    "adjust_slice_and_matmul": "MatMul(Slice)",
    "eliminate_consecutive_idempotent_ops": "Ceil(Ceil) Floor(Floor) Relu(Relu) Reshape(Reshape) Round(Round) "
    "Sign(Sign)",
    "eliminate_deadend": UNREAD_NODE,
    "eliminate_identity": "Identity",
    "eliminate_if_with_const_cond": "If",
    "eliminate_nop_cast": "Cast",
    "eliminate_nop_concat": "Concat",
    "eliminate_nop_dropout": "Dropout",
    "eliminate_nop_expand": "Expand",
    "eliminate_nop_flatten": "Flatten",
    "eliminate_nop_monotone_argmax": "ArgMax",
    "eliminate_nop_pad": "Pad",
    "eliminate_nop_reshape": "Reshape",
    "eliminate_nop_split": "Split",
    "eliminate_nop_transpose": "Transpose",
    "eliminate_shape_gather": "Gather(Shape)",
    "eliminate_shape_op": "Shape",
    "eliminate_slice_after_shape": "Slice(Shape)",
    "eliminate_unused_initializer": UNREAD_TENSOR,
    "extract_constant_to_initializer": "Constant",
    "fuse_add_bias_into_conv": "Add(Conv)",
    "fuse_bn_into_conv": "BatchNormalization(Conv)",
    "fuse_concat_into_reshape": "Reshape(Concat) Reshape(Cast)",
    "fuse_consecutive_concats": "Concat(Concat)",
    "fuse_consecutive_log_softmax": "Log(Softmax)",
    "fuse_consecutive_reduce_unsqueeze": "Unsqueeze(ReduceL1) Unsqueeze(ReduceL2) Unsqueeze(ReduceLogSum) "
    "Unsqueeze(ReduceLogSumExp) Unsqueeze(ReduceMax) Unsqueeze(ReduceMean) Unsqueeze(ReduceMin) Unsqueeze(ReduceProd) "
    "Unsqueeze(ReduceSum) Unsqueeze(ReduceSumSquare)",
    "fuse_consecutive_slices": "Slice(Slice)",
    "fuse_consecutive_squeezes": "Squeeze(Squeeze)",
    "fuse_consecutive_transposes": "Transpose(Transpose)",
    "fuse_consecutive_unsqueezes": "Unsqueeze(Unsqueeze)",
    "fuse_matmul_add_bias_into_gemm": "Add(MatMul)",
    "fuse_pad_into_conv": "Conv(Pad)",
    "fuse_pad_into_pool": "AveragePool(Pad) MaxPool(Pad)",
    "fuse_qkv": "MatMul*3",
    "fuse_transpose_into_gemm": "Gemm(Transpose)",
    "replace_einsum_with_matmul": "Einsum",
    "rewrite_where": "Where(Not)",
}
"""Pass → what a model must have for the pass to do anything, one of several; `Add(Conv)` is an Add that reads the
result of a Conv. From the patterns in the library's sources. A call of the library that changes nothing takes 8 ms on
600 nodes, since it reads and writes the model."""


Made = TypeVar("Made")

TABLE: Final = read_table(NAME)

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
    destroys: ClassVar[Mapping[str, tuple[str, ...]]] = TABLE.destroys
    destroys_equals: ClassVar[tuple[str, ...]] = TABLE.destroys_equals
    describes: ClassVar[Mapping[str, Description]] = TABLE.describes

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
    if not any(may_change(name, _links_of(model.proto, context)) for name in names):
        return PassResult(model, changed=False)
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
    if EXTRACT not in names:
        return PassResult(model.with_proto(proto))
    detached = detach(proto, known=model.weights)  # what were constants would be sent along with every later pass
    return PassResult(DetachedModel(proto, {**model.weights, **detached.weights}))


def _links_of(proto: onnx.ModelProto, context: PassContext) -> frozenset[str]:
    return _remember(f"{NAME} links", proto, context, find_links)


def _serialize_numbered(proto: onnx.ModelProto, context: PassContext) -> bytes:
    """The model with numbered nodes, serialized."""
    return _remember(NAME, proto, context, _number)


def _number(proto: onnx.ModelProto) -> bytes:
    numbered = copy_of(proto)
    number_nodes(numbered)
    for node in every_node(numbered.graph):
        del node.metadata_props[:]  # the library drops it, and to read that of an exported model is a third of a call
    return numbered.SerializeToString()


def _remember(key: str, proto: onnx.ModelProto, context: PassContext, make: Callable[[onnx.ModelProto], Made]) -> Made:
    """What `make` makes of a model; a model is known again by identity."""
    remembered: list[tuple[onnx.ModelProto, Made]] = context.cache.setdefault(key, [])
    for known, content in remembered:
        if known is proto:
            return content
    remembered[:] = [*remembered, (proto, make(proto))][-REMEMBERED:]
    return remembered[-1][1]


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What passes made: a serialized model with numbered nodes, and the names that these had."""

    model: bytes
    names: Sequence[str]


def optimize(worker_state: dict[str, Any], model: bytes, names: Sequence[str]) -> PassOutput | None:
    """In the worker: run passes `names` on a serialized `model` with numbered nodes in one call; None: no change."""
    remembered: dict[bytes, _PreparedModel] = worker_state.setdefault(NAME, {})
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
