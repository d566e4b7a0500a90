"""An ONNX node on another runtime: the user's reference of a custom operator, onnxruntime, or where that has no such
operator ONNX's reference evaluator.

Operands and results pass through numpy, so the kernel cannot be captured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from google.protobuf import json_format
from onnx import helper

from passes.custom_ops.declarations import add_libraries, reference_ops
from passes.errors import PassError
from passes.weights.split_run import CustomNodes, compute_node
from pipeline.errors import SourceError, Unsupported
from pipeline.ops import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Launch, Outs, misfit
from pipeline.runtime.tensors import as_tensor, to_numpy

Evaluate = Callable[[dict[str, Any]], list[Any]]

NEWEST_IR = 10
"""An IR version that both runtimes read."""


class ForeignNode:
    """A node with its evaluator, for inputs of fixed types.

    Raises:
        Unsupported: neither runtime has the operator for these types.
    """

    def __init__(
        self, node: onnx.NodeProto, opsets: dict[str, int], types: Sequence[onnx.TypeProto | None], *, outputs: int
    ) -> None:
        """`types` are those of the inputs, None for one that is left out; `outputs` says how many are asked for."""
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        self.types = list(types)
        self._names = [f"x{place}" if kind is not None else "" for place, kind in enumerate(types)]
        copy.input[:] = self._names
        copy.output[:] = [f"y{place}" for place in range(outputs)]
        inputs = [
            onnx.ValueInfoProto(name=name, type=kind)
            for name, kind in zip(self._names, types, strict=True)
            if kind is not None
        ]
        values = [onnx.ValueInfoProto(name=name) for name in copy.output]
        graph = helper.make_graph([copy], "one_node", inputs, values)
        imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        self._model = helper.make_model(graph, opset_imports=imports, ir_version=NEWEST_IR)
        self.runtime, self._evaluate = _evaluator(self._model)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs for arrays, lists of arrays or None.

        Raises:
            Unsupported: the runtime fails on these values, and the reference evaluator too.
        """
        feed = {name: value for name, value in zip(self._names, inputs, strict=True) if name}
        try:
            return self._evaluate(feed)
        except PassError:
            raise
        except Exception as error:  # native code, and code of many authors
            if self.runtime == "onnx.reference":
                raise Unsupported(f"{self.runtime} fails on {self._model.graph.node[0].op_type}: {error}") from error
            self.runtime, self._evaluate = "onnx.reference", _reference(self._model)
            return self.run(inputs)


def type_of(value: Any) -> onnx.TypeProto | None:
    """The ONNX type of an array, or of a list of arrays; None for what is left out."""
    if value is None:
        return None
    if isinstance(value, list):
        inner = type_of(value[0]) if value else helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)
        assert inner is not None
        if inner.HasField("tensor_type"):
            inner.tensor_type.ClearField("shape")
        return helper.make_sequence_type_proto(inner)
    array = np.asarray(value)
    if array.dtype.kind in "OUS":
        return helper.make_tensor_type_proto(onnx.TensorProto.STRING, array.shape)
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def _evaluator(model: onnx.ModelProto) -> tuple[str, Evaluate]:
    ops = reference_ops()
    node = model.graph.node[0]
    if ops and CustomNodes(model, ops).has(node):
        return "numpy", lambda feed: [*compute_node(node, model, feed, ops).values()]
    if all(_is_fed_by_numpy(value.type) for value in model.graph.input):
        try:
            return "onnxruntime", _onnxruntime(model)
        except (
            Exception
        ):  # it raises errors of any type for what it does not know, of which the reference may know some
            pass
    return "onnx.reference", _reference(model)


def _is_fed_by_numpy(kind: onnx.TypeProto) -> bool:
    """Whether onnxruntime takes a numpy array of the type: it knows none of ml_dtypes."""
    if not kind.HasField("tensor_type"):
        return False
    dtype = helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)
    return dtype.type.__module__ != ml_dtypes.__name__


def _onnxruntime(model: onnx.ModelProto) -> Evaluate:
    import onnxruntime  # 18 MiB, for graphs with such a node

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    add_libraries(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for value in session.get_outputs():
        if any(word in value.type for word in ("bfloat16", "float8", "int4", "float4")):
            raise TypeError(f"numpy has no {value.type}")
    return lambda feed: list(session.run(None, feed))


def _reference(model: onnx.ModelProto) -> Evaluate:
    from onnx.reference import ReferenceEvaluator  # 200 modules, for operators that onnxruntime lacks

    try:
        evaluator = ReferenceEvaluator(model)
    except Exception as error:
        raise Unsupported(
            f"neither onnxruntime nor ONNX's reference evaluator runs {model.graph.node[0].op_type}: {error}"
        ) from error
    return lambda feed: list(evaluator.run(None, feed) or [])


def onnx_node(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    try:
        proto = json_format.ParseDict(json.loads(attrs["node"]), onnx.NodeProto())
    except (ValueError, json_format.ParseError) as error:
        raise SourceError(
            f"OnnxNode {attrs['op']}: its attribute `node` is no node of ONNX in JSON ({error})"
        ) from error
    given = iter(ins)
    types = [type_of(to_numpy(next(given))) if mark else None for mark in attrs["inputs"]]
    node = ForeignNode(proto, {proto.domain: attrs["opset"]}, types, outputs=len(attrs["outputs"]))
    wanted = [place for place, mark in enumerate(attrs["outputs"]) if mark]
    return partial(_compute, node, list(ins), list(outs), [bool(mark) for mark in attrs["inputs"]], wanted)


def _compute(
    node: ForeignNode, ins: list[torch.Tensor], outs: list[torch.Tensor], given: list[bool], wanted: list[int]
) -> None:
    arrays = iter([to_numpy(tensor) for tensor in ins])
    found = node.run([next(arrays) if mark else None for mark in given])
    for place, out in zip(wanted, outs, strict=True):
        result = as_tensor(np.asarray(found[place]))
        if result.numel() != out.numel() or result.dtype is not out.dtype:
            raise misfit(result, out)
        out.copy_(result.reshape(out.shape))


KERNELS: dict[Kind, Kernel] = {Kind.OnnxNode: onnx_node}
