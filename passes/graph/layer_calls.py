"""Layer functions, in whose place a model calls one body several times; and the same model without them.

A layer function is a local function in the domain `LAYERS`. Its first call stands for the layer whose nodes are its
body; the metadata of function and calls say which torch module each is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from onnx import FunctionProto, ModelProto, NodeProto, ValueInfoProto

LAYERS: Final = "onnxline.layers"
"""The domain of layer functions."""

MODULE_KEY: Final = "onnxline.layer"
"""The metadata key of the torch module that a function's body was, and of the module that a call is."""

_PATHS: Final = ("namespace", "pkg.torch.onnx.name_scopes")
"""The metadata keys whose values hold module paths."""


def layer_functions(model: ModelProto) -> dict[str, FunctionProto]:
    """The layer functions of `model` by name."""
    return {function.name: function for function in model.functions if function.domain == LAYERS}


def count_nodes(model: ModelProto) -> int:
    """The nodes of the graph, and those of each layer function once."""
    return len(model.graph.node) + sum(len(function.node) for function in layer_functions(model).values())


def module_of(entry: FunctionProto | NodeProto) -> str:
    """The torch module that a layer function, or a call of one, stands for."""
    return next((prop.value for prop in entry.metadata_props if prop.key == MODULE_KEY), "")


def inner_name(call: NodeProto, name: str) -> str:
    """The name, outside of a function, of the value `name` that its body computes for `call`."""
    return f"{call.output[0]}/{name}"


def inline_layers(model: ModelProto) -> ModelProto:
    """`model` with the body of each layer function in place of its calls; itself where it has none.

    The values of its graph keep their names, and each node says of which module it is.
    """
    functions = layer_functions(model)
    if not functions:
        return model
    whole = ModelProto()
    whole.CopyFrom(model)
    graph = whole.graph
    del graph.node[:], whole.functions[:]
    for node in model.graph.node:
        if node.domain == LAYERS and node.op_type in functions:
            function = functions[node.op_type]
            graph.node.extend(_nodes_of(node, function))
            graph.value_info.extend(_types_of(node, function))
        else:
            graph.node.add().CopyFrom(node)
    whole.functions.extend(function for function in model.functions if function.domain != LAYERS)
    kept = [entry for entry in model.opset_import if entry.domain != LAYERS]
    del whole.opset_import[:]
    whole.opset_import.extend(kept)
    return whole


def _nodes_of(call: NodeProto, function: FunctionProto) -> Iterator[NodeProto]:
    names = _names(call, function)
    modules = (module_of(function), module_of(call))
    for node in function.node:
        copy = rename_values(node, lambda name: names.get(name, inner_name(call, name)))
        copy.name = inner_name(call, node.name) if node.name else ""
        for prop in copy.metadata_props:
            if prop.key in _PATHS:
                prop.value = rename_module(prop.value, *modules)
        yield copy


def _types_of(call: NodeProto, function: FunctionProto) -> Iterator[ValueInfoProto]:
    names = _names(call, function)
    for info in function.value_info:
        if info.name not in names:
            copy = ValueInfoProto()
            copy.CopyFrom(info)
            copy.name = inner_name(call, info.name)
            yield copy


def _names(call: NodeProto, function: FunctionProto) -> dict[str, str]:
    made = zip(function.output, call.output, strict=True)
    return {**dict(zip(function.input, call.input, strict=True)), **{inner: outer for inner, outer in made if outer}}


def rename_values(node: NodeProto, new_name: Callable[[str], str]) -> NodeProto:
    """A copy of a node that reads and makes values of other names; what is left out stays so."""
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [new_name(name) if name else "" for name in node.input]
    copy.output[:] = [new_name(name) if name else "" for name in node.output]
    return copy


def rename_module(text: str, old: str, new: str) -> str:
    """`text` with the path `new` wherever it has the module path `old`, or that of a module inside of it."""
    return re.sub(rf"(?<![\w.]){re.escape(old)}(?![\w])", lambda _: new, text) if old and new else text
