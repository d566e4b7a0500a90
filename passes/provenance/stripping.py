"""A model without the metadata that says where its nodes come from: a fifth of a small file."""

from __future__ import annotations

from typing import Any, Final

import onnx

from passes.graph.traversal import every_graph
from passes.weights.detached import DetachedModel

MARK: Final = "onnxline.metadata"
STRIPPED: Final = "stripped"

OF_ONNXSIM: Final = "onnxsim."
"""Begins the keys under which onnxsim writes a report of its call into the model."""

MISSING: Final = (
    "the model was written without metadata (strip_metadata), so the torch modules, source lines and passes that its "
    "nodes come from are not in it; run again without that to see them"
)


def strip_metadata(model: DetachedModel) -> DetachedModel:
    """`model` without the metadata and doc strings of nodes, values, tensors and graphs, and with a mark that says so.

    The metadata of the model itself stays, since applications read it: labels, say.
    """
    proto = model.copy_proto()
    for graph in every_graph(proto.graph):
        _clear(graph, *graph.input, *graph.output, *graph.value_info, *graph.initializer, *graph.node)
    for function in proto.functions:
        _clear(function, *function.value_info, *function.node)
    written = [place for place, entry in enumerate(proto.metadata_props) if entry.key.startswith(OF_ONNXSIM)]
    for place in reversed(written):
        del proto.metadata_props[place]
    if not is_stripped(proto):
        proto.metadata_props.add(key=MARK, value=STRIPPED)
    return model.with_proto(proto)


def is_stripped(model: onnx.ModelProto) -> bool:
    """Whether `strip_metadata` has made the model."""
    return any((entry.key, entry.value) == (MARK, STRIPPED) for entry in model.metadata_props)


def _clear(*entries: Any) -> None:
    for entry in entries:
        for field in ("metadata_props", "doc_string"):
            entry.ClearField(field)
