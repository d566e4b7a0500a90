"""Types by ONNX's shape inference and constants by its reference evaluator, under limits of time and memory.

Shape inference always runs in a process with limits: it computes the values of small constants too, so a file of a
kilobyte in which 34 nodes double a constant takes all memory, and native code cannot be stopped in the process that
calls it. The evaluator runs in such a process if a constant grows, or its computation may not end.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, Final, TypeVar

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, TensorProto, TensorShapeProto, TypeProto, ValueInfoProto
from onnx.shape_inference import InferenceError

from passes.custom_ops.declarations import declared_ops
from passes.errors import InferenceStopped, ModelError, PolicyError, StepCrashed, StepFailed, StepTimedOut
from passes.graph.formatting import format_type
from passes.graph.index import GraphIndex, replace_entries
from passes.graph.op_facts import LAYOUT_OPS, domain_of
from passes.graph.traversal import every_graph, every_node, is_sparse, without_sparse
from passes.worker.client import Worker
from passes.worker.platforms import crowding, memory_limit

FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16)
"""The types of tensors that can be quantized."""

INTEGERS: Final = frozenset(
    {
        *(TensorProto.BOOL, TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64),
        *(TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64),
    }
)

EVERY_FLOAT: Final = (*FLOATS, TensorProto.BFLOAT16, TensorProto.DOUBLE)
"""`FLOATS`, and the float types that no quantizer takes."""

Dims = tuple[int | str | None, ...]
"""A shape: known sizes, names of symbolic sizes, and None for dims with neither."""


def infer_types(model: onnx.ModelProto, *, data_prop: bool = False) -> GraphProto:
    """The graph with the types of all values that inference can reach, also in bodies; if inference fails, the graph of
    `model` with the types that it declares.

    Args:
        model: the model, which does not change.
        data_prop: compute the values of sizes too, so that more shapes are known.
    """
    try:
        return infer_shapes(model, data_prop=data_prop).graph
    except InferenceError:
        return model.graph


def types_of(model: onnx.ModelProto) -> dict[str, ValueInfoProto]:
    """The inferred type of every value of the main graph that inference can reach."""
    return GraphIndex(infer_types(model)).types


def declare_rank(info: ValueInfoProto, rank: int) -> None:
    """Give a tensor of which no rank is declared `rank` open dims, in place; 0 leaves it as it is."""
    kind = info.type
    if rank and kind.WhichOneof("value") == "tensor_type" and not kind.tensor_type.HasField("shape"):
        kind.tensor_type.shape.dim.extend(TensorShapeProto.Dimension() for _ in range(rank))


def dims_of(info: ValueInfoProto) -> Dims | None:
    """The shape of a tensor; None where the rank is not known, and for a value that is no tensor."""
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim)


def float_tensors(model: onnx.ModelProto) -> frozenset[str]:
    """The names of the float values that are known of the model: its inputs, its outputs, and what shape inference
    finds of the rest."""
    return frozenset(float_shapes(model))


def float_shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...] | None]:
    """The same values with their shapes; None for one of unknown rank, and -1 for a dim that is open."""
    return {name: shape for name, (_, shape) in find_floats(model, FLOATS).items()}


def find_floats(
    model: onnx.ModelProto, types: Collection[int], *, in_bodies: bool = False
) -> dict[str, tuple[int, tuple[int, ...] | None]]:
    """The values of one of `types`, each with its type and its shape; values of bodies too if `in_bodies`."""
    inferred = infer_types(model)
    graphs = every_graph(inferred) if in_bodies else (inferred,)
    infos = (info for graph in graphs for info in GraphIndex(graph).types.values())
    kinds = ((info, info.type.tensor_type.elem_type) for info in infos)
    return {info.name: (kind, _sizes_of(info)) for info, kind in kinds if kind in types}


def _sizes_of(info: ValueInfoProto) -> tuple[int, ...] | None:
    dims = dims_of(info)
    return None if dims is None else tuple(dim if isinstance(dim, int) else -1 for dim in dims)


NEVER_GROW: Final = LAYOUT_OPS | {"Slice", "Split", "Cast", "DequantizeLinear"}
"""Operators whose outputs hold no more elements than their inputs, and take as long."""

MOST_SECONDS: Final = 10.0

Result = TypeVar("Result")


def evaluate(model: onnx.ModelProto) -> np.ndarray | None:
    """The output of a model without inputs; None where the evaluator cannot compute it, or not within its limits."""
    return evaluate_with(compute, model)


def evaluate_with(function: Callable[[bytes], Result], model: onnx.ModelProto) -> Result | None:
    """`evaluate`, for what `function` makes of the output: a digest, say, so that large values stay where they are
    computed.

    Args:
        function: gets the bytes of the model, and calls `compute`.
        model: without inputs, and with one output.
    """
    content = model.SerializeToString()
    try:
        if all(node.op_type in NEVER_GROW for node in model.graph.node):
            return function(content)
        return call_limited(function, MOST_SECONDS, content=content)
    except (StepFailed, ValueError):
        return None


def compute(content: bytes) -> np.ndarray | None:
    """`evaluate`, in this process.

    Raises:
        StepFailed: the evaluator lacks an operator, or fails.
    """
    from onnx.reference import ReferenceEvaluator  # a tenth of a second, which most runs do not need

    try:
        (values,) = ReferenceEvaluator(onnx.load_from_string(content)).run(None, {})
    except Exception as error:
        raise StepFailed(f"{type(error).__name__}: {error}") from error
    return values if isinstance(values, np.ndarray) else None


LEAST_SECONDS: Final = 20.0
SECONDS_PER_NODE: Final = 0.002
"""Time limit: the sum of both. Inference of a sound model takes a hundredth of it."""

MOST_MEMORY: Final = 8 * 2**30


def infer_shapes(
    model: ModelProto, *, check_type: bool = False, strict_mode: bool = False, data_prop: bool = False
) -> ModelProto:
    """`onnx.shape_inference.infer_shapes` under limits; `model` does not change.

    Raises:
        InferenceError: onnx refuses the model.
        InferenceStopped: it takes more time or memory than any sound model.
        ModelError: the inference of a custom operator of the user's fails.
    """
    flags = {"check_type": check_type, "strict_mode": strict_mode, "data_prop": data_prop}
    nodes = len(model.graph.node) + sum(len(function.node) for function in model.functions)
    limit = LEAST_SECONDS + SECONDS_PER_NODE * nodes
    try:
        inferred = call_limited(_infer, limit, model=model.SerializeToString(), flags=flags)
    except (StepCrashed, StepTimedOut) as failure:
        spent = f"{limit:.0f} s" if isinstance(failure, StepTimedOut) else "the memory that it may have"
        raise InferenceStopped(
            f"ONNX's shape inference of the model takes more than {spent}, and was stopped; is there a constant that "
            "node after node makes larger?"
        ) from failure
    except StepFailed as failure:
        raise InferenceError(str(failure)) from failure
    if isinstance(inferred, str):
        raise ModelError(inferred)
    return onnx.load_from_string(inferred)


def call_limited(function: Callable[..., Result], limit: float, **arguments: Any) -> Result:
    """Call a function of a module in the process, for `limit` seconds of a quiet machine at most.

    Raises:
        StepFailed: as `Worker.call`.
    """
    return _process_of(os.getpid()).call(function, limit * crowding(), arguments)


def start_process() -> None:
    """Start the inference process now, so that the first question does not wait for it."""
    _process_of(os.getpid()).start()


def load_schemas() -> bool:
    """In the process: have ONNX make its schemas, which takes 10 ms of the first question."""
    return onnx.defs.has("Add")


class _LimitedProcess:
    """The process that works for this one; threads take turns."""

    def __init__(self) -> None:
        memory = min(MOST_MEMORY, memory_limit() * 9 // 10)
        self._worker = Worker(memory_bytes=memory, preload=(__name__.removeprefix("_onnxline."),))
        self._turn = threading.Lock()

    def call(self, function: Callable[..., Result], limit: float, arguments: dict[str, Any]) -> Result:
        with self._turn:
            return self._worker.ask(function, within_s=limit, **arguments)

    def start(self) -> None:
        with self._turn:
            self._worker.begin(load_schemas)

    def close(self) -> None:
        self._worker.close()


@cache
def _process_of(process: int) -> _LimitedProcess:
    """The limited process for the process with this id: a fork must not use the limited process of its parent."""
    limited = _LimitedProcess()
    atexit.register(lambda: limited.close() if os.getpid() == process else None)
    return limited


def refuse_contradictions(model: ModelProto) -> None:
    """Refuse a model that declares another type for what a custom operator makes than the operator's `infer` says.

    Raises:
        ModelError: naming the node, and both types.
    """
    ops = declared_ops()
    nodes = [node for node in model.graph.node if (domain_of(node), node.op_type) in ops]
    if not nodes:
        return
    declared = {info.name: info.type for info in (*model.graph.value_info, *model.graph.output)}
    known = types_of(model)
    for node in nodes:
        op = ops[domain_of(node), node.op_type]
        inputs = [
            known[name].type if name in known else TypeProto(tensor_type={}) if name else None for name in node.input
        ]
        for name, kind in zip(node.output, op.output_types(inputs, node.attribute, len(node.output)), strict=False):
            if name in declared and not _may_be(kind, declared[name]):
                raise ModelError(
                    f"node {node.name or name!r} makes {name!r}, which the model declares as "
                    f"{format_type(declared[name])}, and `infer` of {op.key} says {format_type(kind)}; expected the "
                    "same dtype and sizes"
                )


def _may_be(found: TypeProto, declared: TypeProto) -> bool:
    """Whether a tensor can have both types: what one leaves open the other may say."""
    if not declared.tensor_type.elem_type:
        return True
    if found.tensor_type.elem_type != declared.tensor_type.elem_type:
        return False
    if not declared.tensor_type.HasField("shape"):
        return True
    ours, theirs = found.tensor_type.shape.dim, declared.tensor_type.shape.dim
    return len(ours) == len(theirs) and all(
        left.dim_value == right.dim_value
        for left, right in zip(ours, theirs, strict=True)
        if left.HasField("dim_value") and right.HasField("dim_value")
    )


def _infer(model: bytes, flags: dict[str, bool]) -> bytes | str:
    """The inferred model; a sentence where a custom operator of the user's is at fault."""
    try:
        declared_ops()  # ONNX knows them then
        proto = onnx.load_from_string(model)
        dense = without_sparse(proto)  # ONNX takes a sparse initializer for a value that no operator of tensors reads
        inferred = onnx.shape_inference.infer_shapes(dense, **flags)
    except (ModelError, PolicyError) as error:
        return str(error)
    if dense is proto:
        return inferred.SerializeToString()
    sparse = {node.output[0] for node in every_node(proto.graph) if is_sparse(node)}
    for graph, found in zip(every_graph(proto.graph), every_graph(inferred.graph), strict=True):
        replace_entries(graph.value_info, (info for info in found.value_info if info.name not in sparse))
        for own, typed in ((graph.input, found.input), (graph.output, found.output)):
            replace_entries(own, typed)
    return proto.SerializeToString()
