"""Initializers that are graph inputs as well.

Before IR version 4 every initializer had to be a graph input, and onnxruntime still treats it as a constant. Since IR
version 4 it is a default that callers may override, so no pass may fold it or drop it.
"""

from __future__ import annotations

from typing import Final

import onnx

from passes.graph.index import GraphIndex, initializers_of
from passes.suggest import plural
from passes.weights.detached import DetachedModel

FREE_INITIALIZERS: Final = 4
"""The first IR version in which an initializer need not be a graph input as well."""

NAMED: Final = 3


def free_initializers(model: DetachedModel) -> DetachedModel:
    """A model of an older IR version as one of version 4, in which initializers are no inputs."""
    if not 0 < model.proto.ir_version < FREE_INITIALIZERS:
        return model
    proto = model.copy_proto()
    drop_default_inputs(proto.graph)
    proto.ir_version = FREE_INITIALIZERS
    return model.with_proto(proto)


def drop_default_inputs(graph: onnx.GraphProto) -> set[str]:
    """Take the inputs away that are initializers, in place; returns their names."""
    names = _defaults(graph)
    for place in reversed([place for place, info in enumerate(graph.input) if info.name in names]):
        del graph.input[place]
    return names


def restore_version(source: DetachedModel, final: DetachedModel) -> DetachedModel:
    """`final` in the older IR version of `source`, with its initializers as inputs; itself if its opsets are newer."""
    is_older = 0 < source.proto.ir_version < FREE_INITIALIZERS
    if not is_older or list(source.proto.opset_import) != list(final.proto.opset_import):
        return final
    proto = final.copy_proto()
    proto.ir_version = source.proto.ir_version
    declare_initializers(proto.graph)
    return final.with_proto(proto)


def declare_initializers(graph: onnx.GraphProto) -> None:
    """Make an input of each initializer, in place, as IR versions before 4 have it."""
    declared = GraphIndex(graph).inputs
    graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        for tensor in graph.initializer
        if tensor.name not in declared
    )


def hide_defaults(graph: onnx.GraphProto) -> None:
    """Leave the inputs without their defaults, in place, so that no pass can take these for constants."""
    hidden = _defaults(graph)
    for place in reversed([place for place, tensor in enumerate(graph.initializer) if tensor.name in hidden]):
        del graph.initializer[place]


def with_defaults(before: DetachedModel, after: DetachedModel) -> DetachedModel:
    """`after` with the defaults that inputs of `before` have; an input that it has dropped comes back."""
    graph, hidden = before.proto.graph, _defaults(before.proto.graph)
    if not hidden:
        return after
    proto = after.copy_proto()
    has = {entry.name for entry in (*proto.graph.input, *proto.graph.initializer)}
    proto.graph.input.extend(info for info in graph.input if info.name in hidden - has)
    proto.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in hidden)
    return DetachedModel(proto, {**before.weights, **after.weights})


def describe_defaults(model: DetachedModel) -> str:
    """A sentence on the initializers that callers may override; empty where there are none."""
    names = sorted(_defaults(model.proto.graph))
    if not names or model.proto.ir_version < FREE_INITIALIZERS:
        return ""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    are = "is an input, too" if len(names) == 1 else "are inputs, too"
    return (
        f"{plural(len(names), 'initializer')} {are} ({', '.join(names[:NAMED])}{more}): callers may override what is "
        "stored there, so no pass folds it; the step fix-defaults before it makes constants of them"
    )


def _defaults(graph: onnx.GraphProto) -> set[str]:
    return initializers_of(graph).keys() & GraphIndex(graph).inputs.keys()
