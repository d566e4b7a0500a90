"""ONNX's own evaluator, for what onnxruntime has no kernel for: with the user's operators, and a Loop and a Scan of
ours.

The Loop of onnx 1.23 joins the items of a scan output along their first axis and not along a new one, never enters a
body where the condition is left out, and stops where no turn is made. Its Scan knows the first axis alone, forwards.

Stored tensors in formats that onnxruntime has no kernels for are dequantized before a run: onnxruntime 1.31 has no
DequantizeLinear of floats of 4 bits, and none whose scales are powers of 2 in 8 bits. Such weights are constants, so a
run needs only the floats that they stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from passes.custom_ops.operator import CustomOp
from passes.graph.index import GraphIndex, copy_of, extract, replace_entries
from passes.graph.traversal import inline_functions
from passes.weights.stand_ins import Weight

if TYPE_CHECKING:
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun


def open_evaluator(proto: onnx.ModelProto, ops: Iterable[CustomOp] = ()) -> ReferenceEvaluator:
    """An evaluator of a model in which the references of `ops` compute their nodes.

    Raises:
        Exception: of many types, where the evaluator lacks an operator or the model is wrong.
    """
    from onnx.reference import ReferenceEvaluator  # a tenth of a second, which most models do not need

    if proto.functions:
        proto = inline_functions(proto)  # the evaluator hands new operators to bodies, and not to functions
    return ReferenceEvaluator(proto, new_ops=[*map(_adapt, ops), _loop(), _scan()])


def _adapt(op: CustomOp) -> type[OpRun]:
    """A custom operator as the evaluator takes it."""
    from onnx.reference.op_run import OpRun

    def _run(self: OpRun, *inputs: Any, **_: Any) -> tuple[np.ndarray, ...]:
        return tuple(op.run(self.onnx_node, inputs))

    return type(op.name, (OpRun,), {"op_domain": op.domain, "_run": _run})


@cache
def _loop() -> type[OpRun]:
    from onnx.reference.ops.op_loop import Loop as Base

    class Loop(Base):  # the evaluator finds the operator by the name of the class
        """The Loop of ONNX's standard, in turns: the body reads the number, the condition and what is carried."""

        body: ReferenceEvaluator  # the base sets both, by the names of attributes
        _run_body: Callable[..., Sequence[Any]]

        def _run(
            self, most: Any, condition: Any, *carried: Any, context: Any = None, attributes: Any = None, **given: Any
        ) -> tuple[Any, ...]:
            scanned: list[list[np.ndarray]] = [[] for _ in range(self.K)]
            goes_on, turn, bindings = condition is None or bool(condition), 0, given.get("bindings")
            while goes_on and (most is None or turn < most):
                fed = zip(self.body.input_names, (np.array(turn), np.array(goes_on), *carried), strict=True)
                results = self._run_body({**(context or {}), **dict(fed)}, attributes=attributes, bindings=bindings)
                goes_on, carried, turn = bool(results[0]), tuple(results[1 : 1 + self.N]), turn + 1
                for items, item in zip(scanned, results[1 + self.N :], strict=True):
                    items.append(item)
            declared = self.body.proto_.output[1 + self.N :]
            stacks = [
                np.stack(items) if items else _stack_none(kind) for items, kind in zip(scanned, declared, strict=True)
            ]
            return self._check_and_fix_outputs((*carried, *stacks))

    return Loop


@cache
def _scan() -> type[OpRun]:
    from onnx.reference.op_run import OpRun
    from onnx.reference.ops.op_scan import Scan as Base

    class Scan(Base):
        """The Scan of ONNX's standard along any axes, forwards or backwards; the base knows the first axis alone."""

        body: ReferenceEvaluator
        num_scan_inputs: int
        scan_input_axes: Sequence[int] | None
        scan_input_directions: Sequence[int] | None
        scan_output_axes: Sequence[int] | None
        scan_output_directions: Sequence[int] | None
        _run_body: Callable[..., Sequence[Any]]

        def __init__(self, node: NodeProto, parameters: Any) -> None:
            OpRun.__init__(self, node, parameters)  # that of the base refuses other axes

        def _run(self, *inputs: Any, context: Any = None, **given: Any) -> tuple[Any, ...]:
            count = self.num_scan_inputs
            carried, scanned = inputs[:-count], inputs[-count:]
            places = _places(self.scan_input_axes, self.scan_input_directions, count)
            turned = [
                _flip(np.moveaxis(array, axis, 0), back) for array, (axis, back) in zip(scanned, places, strict=True)
            ]
            declared = self.body.proto_.output[len(carried) :]
            made: list[list[np.ndarray]] = [[] for _ in declared]
            for items in zip(*turned, strict=True):
                fed = zip(self.body.input_names, (*carried, *items), strict=True)
                results = self._run_body({**(context or {}), **dict(fed)}, bindings=given.get("bindings"))
                carried = tuple(results[: len(carried)])
                for found, item in zip(made, results[len(carried) :], strict=True):
                    found.append(item)
            stacks = [
                np.stack(items) if items else _stack_none(kind) for items, kind in zip(made, declared, strict=True)
            ]
            places = _places(self.scan_output_axes, self.scan_output_directions, len(stacks))
            moved = (
                np.moveaxis(_flip(stack, back), 0, axis) for stack, (axis, back) in zip(stacks, places, strict=True)
            )
            return self._check_and_fix_outputs((*carried, *moved))

    return Scan


def _places(axes: Sequence[int] | None, directions: Sequence[int] | None, count: int) -> list[tuple[int, bool]]:
    """The axis of each scanned input or output, and whether it goes backwards."""
    return [(axis, bool(back)) for axis, back in zip(axes or [0] * count, directions or [0] * count, strict=True)]


def _flip(array: np.ndarray, back: bool) -> np.ndarray:
    return array[::-1] if back else array


def _stack_none(declared: ValueInfoProto) -> np.ndarray:
    """A scan output after no turn; an axis of unknown size has the size 0, as in onnxruntime."""
    kind = declared.type.tensor_type
    sizes: Sequence[int] = [dim.dim_value for dim in kind.shape.dim]
    return np.empty((0, *sizes), helper.tensor_dtype_to_np_dtype(kind.elem_type))


WITHOUT_KERNEL: Final = frozenset({TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E8M0})


def dequantize_stored(proto: onnx.ModelProto, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """Store in `proto`, in place, what DequantizeLinear makes of such tensors.

    Args:
        proto: the model, which is changed.
        weights: by initializer name, of those that hold no data of their own.

    Returns:
        `weights` with those that were made.
    """
    graph = proto.graph
    if not any(tensor.data_type in WITHOUT_KERNEL for tensor in graph.initializer):
        return weights
    index = GraphIndex(graph)
    stored: dict[str, TensorProto] = dict(index.initializers)

    def is_constant(name: str) -> bool:
        producer = index.producers.get(name)
        if producer is None or producer.op_type != "DequantizeLinear":
            return name in stored
        return all(map(is_constant, filter(None, producer.input)))

    def array_of(name: str) -> np.ndarray:
        if name not in stored:
            return dequantize(index.producers[name])
        return weights[name].array() if name in weights else numpy_helper.to_array(stored[name])

    def dequantize(node: NodeProto) -> np.ndarray:
        return _evaluate(node, {name: array_of(name) for name in node.input if name}, proto)

    folded: dict[str, Weight] = {}
    for node in graph.node:
        is_without = any(stored[name].data_type in WITHOUT_KERNEL for name in node.input if name in stored)
        if is_without and is_constant(node.output[0]) and node.op_type == "DequantizeLinear":
            array = np.ascontiguousarray(dequantize(node))
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            folded[node.output[0]] = Weight(array.shape, kind, array.reshape(-1).view(np.uint8), "")
    if not folded:
        return weights
    replace_entries(graph.node, [node for node in graph.node if folded.keys().isdisjoint(node.output)])
    for name, weight in folded.items():
        graph.initializer.add(name=name, data_type=weight.data_type, dims=weight.dims)
    return {**weights, **folded}


def _evaluate(node: NodeProto, feeds: dict[str, np.ndarray], proto: onnx.ModelProto) -> np.ndarray:
    from onnx.reference import ReferenceEvaluator  # a tenth of a second, which most sessions do not need

    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    outputs = [onnx.ValueInfoProto(name=node.output[0])]
    alone = extract(proto, [copy_of(node)], inputs=inputs, outputs=outputs, initializers=())
    results: Any = ReferenceEvaluator(alone).run(None, feeds)
    return np.asarray(results[0])
