"""The step `to-float32`: compute in float32 what a model computes in floats of 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from passes.context import PassContext
from passes.graph.index import replace_all_uses_with, replace_entries, take_name, value_names
from passes.graph.op_facts import has_body
from passes.step import PassResult, Step
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class ToFloat32(Step, name="to-float32", reads="values"):
    """Compute in float32 in place of float16 and bfloat16. A simulation of quantization needs it. Inputs and outputs
    keep their types, by a Cast. float64 stays, since float32 does not hold its tolerance."""

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        whole = model.without_functions()
        if why := _why_not(whole):
            return PassResult(model, changed=False, why=why)
        proto, index = whole.copy_proto(), whole.index
        graph, taken = proto.graph, value_names(proto.graph)
        types = {info.name: info.type.tensor_type.elem_type for info in (*graph.input, *graph.output)}
        ends = {name: kind for name, kind in types.items() if kind in HALVES}
        for node in graph.node:
            widen_attributes(node)
        made = {name: kind for name, kind in ends.items() if name in index.producers}
        fed = {name: take_name(f"{name}/float32", taken) for name in ends.keys() - made.keys()}
        inner = {name: take_name(f"{name}/float32", taken) for name in made}
        replace_all_uses_with(graph.node, fed | inner)
        for node in graph.node:
            node.output[:] = [inner.get(name, name) for name in node.output]
        before = [_cast(name, wide, TensorProto.FLOAT) for name, wide in sorted(fed.items())]
        after = [_cast(inner[name], name, kind) for name, kind in made.items()]
        replace_entries(graph.node, [*before, *graph.node, *after])
        del graph.value_info[:]
        arrays = {
            name: whole.array(tensor).astype(np.float32)
            for name, tensor in index.initializers.items()
            if tensor.data_type in HALVES and name not in types
        }
        return PassResult(whole.with_proto(proto).with_arrays(arrays))


def _why_not(model: DetachedModel) -> str:
    """Why the step has nothing to do, or cannot do it; empty where it does."""
    index = model.index
    typed = [*(info.type.tensor_type.elem_type for info in index.types.values())]
    stored = [tensor.data_type for tensor in index.initializers.values()]
    if HALVES.isdisjoint((*typed, *stored)):
        return "no value is a float of 16 bits"
    if any(map(has_body, index.nodes)):
        return "the model has branches or loops, whose types stay"
    return "its weights are not read" if model.unread() else ""


def widen_attributes(node: NodeProto) -> None:
    """Put float32 into the attributes that name or hold floats of 16 bits, in place."""
    for attribute in node.attribute:
        if attribute.name in TYPES and attribute.i in HALVES:
            attribute.i = TensorProto.FLOAT
        if attribute.HasField("t") and attribute.t.data_type in HALVES:
            array = numpy_helper.to_array(attribute.t).astype(np.float32)
            attribute.t.CopyFrom(numpy_helper.from_array(array, attribute.t.name))


def _cast(name: str, result: str, kind: int) -> NodeProto:
    return helper.make_node("Cast", [name], [result], name=f"{result}/Cast", to=kind)


HALVES: Final = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})

TYPES: Final = ("dtype", "output_dtype", "softmax_precision", "stash_type", "to")
"""The attributes that name the type of a result, or of a computation."""
