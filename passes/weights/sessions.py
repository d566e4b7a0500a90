"""onnxruntime sessions over detached models: weights are shared with the session, and nothing is optimized."""

from __future__ import annotations

import math
import os
import re
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnx
import onnxruntime
import onnxruntime.capi.onnxruntime_pybind11_state as binding
from onnx import TensorProto, helper, numpy_helper
from onnx.inliner import inline_selected_functions

from passes.custom_ops.declarations import add_libraries, reference_ops
from passes.errors import StepFailed, StepTimedOut
from passes.graph.index import GraphIndex, drop_unread, initializers_of, replace_entries
from passes.graph.inference import types_of
from passes.graph.traversal import reads_of, without_sparse
from passes.visible import visible_line
from passes.weights.detached import DetachedModel
from passes.weights.evaluator import dequantize_stored, open_evaluator
from passes.weights.ort_values import run_session, value_of
from passes.weights.stand_ins import Weight, inline, point_to
from passes.worker.platforms import available_cores

if TYPE_CHECKING:
    from onnx.reference import ReferenceEvaluator

    from passes.weights.split_run import SplitRun

ANY_RUNTIME: Final = 10
"""An IR version that every supported release of onnxruntime accepts."""

PLANNED_NODES: Final = 1000
"""The most nodes for which onnxruntime plans the reuse of memory. For each value it searches all free buffers, so the
time to open a session is quadratic in the nodes: 12 s for 4,800, and 0.5 s without it. Quantizers count twice, as they
leave buffers of many types: for 834 nodes, 550 of them quantizers, it takes 0.18 s, and 0.02 s without it. In the order
of the graph few buffers are free at a time, and 14,000 nodes take 0.9 s with it and without."""

QUANTIZERS: Final = frozenset({"QuantizeLinear", "DequantizeLinear"})

HEAP_BYTES: Final = 32 * 2**20
"""The largest value of a run in the order of the graph for which memory is planned. glibc has values up to this size in
its heap, whose gaps grow without a plan: the noise of a chain of 120 values of 8 MiB takes 1.2 GB, and 70 MiB with it.
A larger value is given back to the system as soon as it is dropped, and a plan would keep its buffer to the end."""

GIVEN: Final = "given"
"""The file name in initializers whose values are passed to the session by name."""


class Session:
    """A model ready to run on the CPU with graph optimization off.

    onnxruntime's own fusions would hide what a pass did (measured: 1.8e-7 against exactly 0), and prepacking would copy
    the weights.

    Args:
        proto: is changed; its initializers named in `weights` hold no data of their own.
        weights: by initializer name.
        extra_outputs: values to return with the model's outputs.
        in_order: whether the nodes run in the order of the graph, as far as their inputs allow. onnxruntime walks back
            from the outputs, so it runs many small outputs last, and holds all values that they are computed from.
        may_evaluate: whether ONNX's own evaluator may run it where onnxruntime has no kernel. Custom operators that the
            user declared are computed by their references, or by onnxruntime where they have a library.

    Raises:
        StepFailed: onnxruntime refuses the model.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        weights: Mapping[str, Weight],
        extra_outputs: Sequence[str] = (),
        *,
        in_order: bool = False,
        may_evaluate: bool = False,
    ) -> None:
        proto = without_sparse(proto)  # onnxruntime finds no sparse Constant that is an output too
        weights = dequantize_stored(proto, weights)
        taken = GraphIndex(proto.graph).outputs
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in extra_outputs if name not in taken)
        drop_unread(proto.graph)  # onnxruntime drops them itself and then fails to find the value passed for them
        if in_order:
            proto = expand_functions(proto)
        (_put_fixed_late if in_order else _put_fixed_first)(proto.graph)
        proto.ir_version = min(proto.ir_version, _ir_version_of(proto))
        known = initializers_of(proto.graph).keys() & weights.keys()
        self.inputs = tuple(entry.name for entry in proto.graph.input if entry.name not in known)
        self.outputs = tuple(entry.name for entry in proto.graph.output)
        self._evaluator: ReferenceEvaluator | None = None
        self._split = _split_run(proto, weights, may_evaluate=may_evaluate)
        if self._split is not None:
            return
        shared = _share(proto.graph, weights)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.intra_op_num_threads = count_threads()
        options.enable_cpu_mem_arena = False  # an arena grows by doubling, and never shrinks
        if in_order:
            options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
            # Otherwise onnxruntime copies each DequantizeLinear that is read twice, and the copies run last.
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        searched = sum(2 if node.op_type in QUANTIZERS else 1 for node in proto.graph.node)
        options.enable_mem_reuse = _find_largest(proto.graph) <= HEAP_BYTES if in_order else searched <= PLANNED_NODES
        options.add_session_config_entry("session.disable_prepacking", "1")
        # Idle threads that spin take the cores from the process that runs the passes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        add_libraries(options)
        for name, (value, _) in shared.items():
            options.add_initializer(name, value)
        self._kept_alive = shared
        largest = max((weight.data.nbytes for weight in weights.values()), default=0)
        self._reopen = partial(_open_session, proto, options, largest)
        self._options = options
        try:
            self._session = self._reopen()
        except StepFailed as refusal:
            if not may_evaluate or not lacks_kernel(refusal):
                raise
            self._evaluator = _open_evaluator(proto, weights, refusal)

    @property
    def is_evaluated(self) -> bool:
        """Whether ONNX's own evaluator has the model, or has run a part of it: onnxruntime lacks a kernel."""
        return self._evaluator is not None or (self._split is not None and self._split.is_evaluated)

    @classmethod
    def of(cls, model: DetachedModel, extra_outputs: Sequence[str] = (), *, in_order: bool = False) -> Session:
        """A session of `model`, in this process; the other arguments are those of the class."""
        proto = model.copy_proto()
        weights = {name: model.weight(tensor) for name, tensor in initializers_of(proto.graph).items()}
        stored = {name: weight for name, weight in weights.items() if weight is not None}
        return cls(proto, stored, extra_outputs, in_order=in_order)

    def output_infos(self) -> tuple[onnx.ValueInfoProto, ...]:
        """The types of the outputs that are tensors, as onnxruntime infers them; none where it runs only parts."""
        found = self._session.get_outputs() if self._evaluator is None and self._split is None else ()
        kinds = [(entry, entry.type.removeprefix("tensor(").removesuffix(")").upper()) for entry in found]
        return tuple(
            helper.make_tensor_value_info(entry.name, TensorProto.DataType.Value(kind), entry.shape or None)
            for entry, kind in kinds
            if kind in dict(TensorProto.DataType.items())
        )

    def run(self, feeds: Mapping[str, np.ndarray], *, within_s: float | None = None) -> dict[str, np.ndarray]:
        """Outputs by name.

        Args:
            feeds: input → array.
            within_s: seconds after which onnxruntime stops before its next node; None in a worker, whose own limit ends
                the process.

        Raises:
            StepFailed: onnxruntime stopped with an error.
            StepTimedOut: the run was stopped.
        """
        given = {name: array for name, array in feeds.items() if name in self.inputs}
        if self._split is not None:
            return self._split.run(given, within_s=within_s)
        if self._evaluator is not None:
            return _evaluate(self._evaluator, self.outputs, given)
        options = onnxruntime.RunOptions()
        timer = threading.Timer(within_s or 0.0, setattr, (options, "terminate", True))
        if within_s is not None:
            timer.start()
        try:
            results = run_session(self._session, self.outputs, given, options)
        except Exception as error:
            if REUSED in str(error) and self._options.enable_mem_reuse:
                self._options.enable_mem_reuse = False
                self._session = self._reopen()
                return self.run(feeds, within_s=within_s)
            if options.terminate:
                raise StepTimedOut(f"onnxruntime ran past {round(within_s or 0, 1):g} s and was stopped") from error
            raise StepFailed(f"onnxruntime stopped: {first_words(error)}") from error
        finally:
            timer.cancel()
        return {name: as_array(name, result) for name, result in zip(self.outputs, results, strict=True)}


def as_array(name: str, result: object) -> np.ndarray:
    """The output `name` as one array: a sequence of tensors is the stack of its items.

    Raises:
        StepFailed: the items of the sequence have no shape in common.
    """
    shapes = dict.fromkeys(np.shape(item) for item in result) if isinstance(result, list) else {}
    if len(shapes) > 1:
        raise StepFailed(
            f"output {name!r} is a sequence of tensors of different shapes ({', '.join(map(str, shapes))}), expected a "
            "tensor, or a sequence whose items have one shape: nothing else is compared"
        )
    return np.asarray(result)


def _ir_version_of(proto: onnx.ModelProto) -> int:
    """The IR version of its opsets: onnxruntime refuses a later one even if the model uses nothing of it."""
    try:
        return max(ANY_RUNTIME, onnx.helper.find_min_ir_version_for(proto.opset_import, ignore_unknown=True))
    except ValueError:
        return proto.ir_version


def count_threads() -> int:
    """One thread per core if this process may use only some of the cores, which onnxruntime ignores; 0: its default."""
    given = len(available_cores())
    return given if given < (os.cpu_count() or 1) else 0


def _put_fixed_first(graph: onnx.GraphProto) -> None:
    """Let nodes that depend on no input, such as the Transpose of a weight, run when they are needed.

    onnxruntime walks from the outputs back, and of a node's producers it first runs the last in graph order.
    It would transpose all weights before anything else, and hold a second copy of them.
    """
    fixed = _fixed_values(graph)
    graph.node.sort(key=lambda node: not fixed.issuperset(node.output))


def _find_largest(graph: onnx.GraphProto) -> int:
    """The size in bytes of the largest value whose shape is known, of float32."""
    shapes = ([dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in graph.value_info)
    return max((4 * math.prod(shape) for shape in shapes), default=0)


def expand_functions(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Replace operators without a kernel by the nodes of their functions, which onnxruntime would run after all others.

    An operator that reads a value of unknown type is left as it is: it costs memory, and no result depends on it.
    """
    kernels = _operators_in(getattr(binding, "get_all_opkernel_def", list))  # not public: a build may leave it out
    functions = {node.op_type for node in proto.graph.node if not node.domain} - kernels
    if not kernels or not functions:
        return proto
    typed, names = onnx.shape_inference.infer_shapes(proto), [("", name) for name in sorted(functions)]
    typed.graph.value_info.extend(  # the inliner asks for their types, too
        helper.make_tensor_value_info(stored.name, stored.data_type, stored.dims) for stored in typed.graph.initializer
    )
    try:
        expanded = inline_selected_functions(typed, names, inline_schema_functions=True)
    except RuntimeError:
        return proto
    replace_entries(expanded.graph.value_info, proto.graph.value_info)
    return expanded


@cache  # onnxruntime makes the list of 1,500 kernels anew for each call: 0.01 s
def _operators_in(list_kernels: Callable[[], Sequence[Any]]) -> frozenset[str]:
    """The operators with a kernel, and Constant, which is stored; none where nothing is listed."""
    names = {kernel.op_name for kernel in list_kernels() if not kernel.domain}
    return frozenset(names | {"Constant"} if names else ())


def _put_fixed_late(graph: onnx.GraphProto) -> None:
    """For a run in this order: put nodes that depend on no input directly before the first node that reads them.

    So is each DequantizeLinear, whose result is larger than what it reads.
    """
    fixed, first, places = _fixed_values(graph), dict[str, int](), list[int]()
    for index in reversed(range(len(graph.node))):
        node, place = graph.node[index], index
        if fixed.issuperset(node.output) or node.op_type == "DequantizeLinear":
            place = min((first[name] for name in node.output if name in first), default=index)
        places.append(place)
        first |= {name: min(place, first.get(name, place)) for name in reads_of(node)}
    places.reverse()
    order = sorted(range(len(places)), key=places.__getitem__)  # stable: a node stays before those that read it
    replace_entries(graph.node, [graph.node[index] for index in order])


def _fixed_values(graph: onnx.GraphProto) -> set[str]:
    """The values that depend on no input."""
    fixed = {"", *initializers_of(graph)}
    for node in graph.node:
        if fixed.issuperset(reads_of(node)):
            fixed.update(node.output)
    return fixed


def _open_session(
    proto: onnx.ModelProto, options: onnxruntime.SessionOptions, largest: int
) -> onnxruntime.InferenceSession:
    """The session. onnxruntime never reads the data file that the initializers refer to, but checks that the file
    exists and is long enough."""
    with tempfile.TemporaryDirectory(prefix="onnxline-") as folder:
        with Path(folder, GIVEN).open("wb") as file:
            file.truncate(largest)
        path = Path(folder, "model.onnx")
        path.write_bytes(proto.SerializeToString())
        try:
            return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            advice = DECLARE if UNKNOWN in str(error) else ""
            raise StepFailed(f"onnxruntime refuses the model: {words_on(error, proto)}{advice}") from error


def words_on(error: Exception, proto: onnx.ModelProto) -> str:
    """`first_words`, with the types of a node of `proto` for which onnxruntime has no kernel."""
    return first_words(error).replace("for the types", _describe_types(error, proto))


def _describe_types(error: Exception, proto: onnx.ModelProto) -> str:
    """For which of the types that a node reads onnxruntime has few kernels."""
    lack = NO_KERNEL.search(str(error))
    read = [name for node in proto.graph.node if lack and lack[3] and node.name == lack[3] for name in node.input]
    known = types_of(proto) if read else {}
    types = {known[name].type.tensor_type.elem_type for name in read if name in known}
    rare = [TensorProto.DataType.Name(kind).lower() for kind in RARE if kind in types]
    return f"for {' and '.join(rare)}" if rare else "for the types"


RARE: Final = (TensorProto.BFLOAT16, TensorProto.FLOAT16, TensorProto.DOUBLE)
"""Types of which onnxruntime's CPU provider has few kernels."""


def first_words(error: Exception) -> str:
    """What an error of onnxruntime says, without its blocks of context and our file, in one line; a kernel that it
    lacks is named in our words."""
    words = " ".join(str(error).partition("==> Context")[0].split())
    if (lack := NO_KERNEL.search(words)) is not None:
        where = f" of node {lack[3]!r}" if lack[3] else ""
        words = f"onnxruntime's CPU provider has no {lack[1]} of opset {lack[2]} for the types{where} (NOT_IMPLEMENTED)"
    return visible_line(re.sub(r"Load model from .*? failed: ?(Fatal error: )?", "", words))


NO_KERNEL: Final = re.compile(
    r"(?:find an implementation|Failed to find kernel) for (\w+)\((\d+)\) (?:node with name |\(node:)'(.*?)'(?: ep:|$)"
)


def describe_refusal(error: Exception) -> str:
    """Why onnxruntime does not run a model: what it lacks, or else its own words."""
    words = first_words(error)
    if (lack := re.search(rf"(\S+):(\w+)\(-?\d+\) {UNKNOWN}", words)) is not None:
        return f"onnxruntime has no operator {lack[1]}::{lack[2]}"
    return words


def lacks_kernel(refusal: Exception) -> bool:
    """Whether onnxruntime refused a model since it has no kernel for an operator, a dtype or an opset."""
    return isinstance(refusal, StepFailed) and any(sign in str(refusal) for sign in LACKING)


def _split_run(proto: onnx.ModelProto, weights: Mapping[str, Weight], *, may_evaluate: bool) -> SplitRun | None:
    """How a model is run whose custom operators have a reference of the user's; None for any other model."""
    ops = reference_ops()
    if not ops:
        return None
    from passes.weights.split_run import CustomNodes, SplitRun

    def open_session(part: onnx.ModelProto) -> Session:
        held = {name: weights[name] for name in initializers_of(part.graph) if name in weights}
        return Session(part, held, may_evaluate=may_evaluate)

    def array_of(tensor: TensorProto) -> np.ndarray:
        return weights[tensor.name].array() if tensor.name in weights else numpy_helper.to_array(tensor)

    custom = CustomNodes(proto, ops)
    is_used = any(map(custom.has, proto.graph.node))
    return SplitRun(proto, array_of, open_session, ops) if is_used else None


def _open_evaluator(proto: onnx.ModelProto, weights: Mapping[str, Weight], refusal: StepFailed) -> ReferenceEvaluator:
    """ONNX's own evaluator, for a model with an operator or a dtype that onnxruntime has no kernel for.

    Raises:
        StepFailed: the model is too large for it, or it lacks an operator too: what onnxruntime said.
    """
    if sum(weight.data.nbytes for weight in weights.values()) > MOST_EVALUATED:
        raise refusal
    for tensor in proto.graph.initializer:
        if tensor.name in weights:
            inline(tensor, weights[tensor.name].data)
    try:
        return open_evaluator(proto)
    except Exception as error:  # it raises errors of many types
        raise refusal from error


def _evaluate(evaluator: ReferenceEvaluator, outputs: Sequence[str], feeds: Mapping[str, np.ndarray]) -> Arrays:
    try:
        results: Any = evaluator.run(list(outputs), dict(feeds))
    except Exception as error:  # it raises errors of many types
        raise StepFailed(
            f"onnxruntime has no kernel for an operator of the model, or for its dtype, and ONNX's evaluator stopped "
            f"({error}); expected a model in float32 or float16"
        ) from error
    return {name: as_array(name, result) for name, result in zip(outputs, results, strict=True)}


Arrays = dict[str, np.ndarray]

REUSED: Final = "attempting to re-use buffer"
"""What onnxruntime says where it has planned by a declared shape that does not hold at these sizes, of a dim whose name
stands for several sizes, say. Without the reuse of memory it runs."""

UNKNOWN: Final = "is not a registered function/op"

DECLARE: Final = (
    "; declare the operator with a reference in numpy (docs/how-to/custom-ops.md): --custom-ops ops.py, custom_ops: "
    "ops.py"
)

LACKING: Final = ("NOT_IMPLEMENTED", UNKNOWN, "is under development and support for this")
"""Parts of what onnxruntime says of a model for whose operators, dtypes or opset it has no kernels."""

MOST_EVALUATED: Final = 2**26
"""Bytes of weights up to which ONNX's evaluator is tried; it is written in Python."""


Shared = dict[str, tuple[onnxruntime.OrtValue, np.ndarray]]


def _share(graph: onnx.GraphProto, weights: Mapping[str, Weight]) -> Shared:
    """Turn initializers into references to values that are passed to the session by name."""
    shared: Shared = {}
    for tensor in graph.initializer:
        weight = weights.get(tensor.name)
        if weight is None:
            continue
        point_to(tensor, GIVEN, 0, weight.data.nbytes)
        shared[tensor.name] = _ort_value(weight)
    return shared


def _ort_value(weight: Weight) -> tuple[onnxruntime.OrtValue, np.ndarray]:
    """The weight as onnxruntime's value over the same memory, with the array that owns it."""
    array = weight.array()
    if not array.flags.aligned:
        array = array.copy()
    return value_of(array), array
