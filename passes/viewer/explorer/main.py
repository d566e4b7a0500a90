"""The extension of Model Explorer: an adapter for ONNX files, with modules, structures and provenance."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

from typing import Any

from model_explorer import Adapter, AdapterMetadata
from model_explorer import graph_builder as forms

from passes.viewer.explorer import ADAPTER, graph_id, graph_nodes
from passes.viewer.page import view_data
from passes.weights.detached import open_model


class OnnxlineAdapter(Adapter):
    """Gives Model Explorer the scene of an ONNX file."""

    metadata = AdapterMetadata(
        id=ADAPTER,
        name="onnxline",
        description="ONNX with torch modules, structures, and the pass that made each node",
        fileExts=["onnx"],
    )

    def convert(self, model_path: str, settings: dict[str, Any]) -> dict[str, Any]:
        """The graph of the ONNX file `model_path`.

        Raises:
            ModelError: it cannot be read.
        """
        del settings
        (scene,) = view_data(open_model(model_path))["scenes"]
        return {"graphs": [forms.Graph(id=graph_id(model_path), nodes=[_node(node) for node in graph_nodes(scene)])]}


def _node(node: dict[str, Any]) -> Any:
    return forms.GraphNode(
        id=node["id"],
        label=node["label"],
        namespace=node["namespace"],
        attrs=[forms.KeyValue(**entry) for entry in node["attrs"]],
        incomingEdges=[forms.IncomingEdge(**edge) for edge in node["incomingEdges"]],
        outputsMetadata=[
            forms.MetadataItem(item["id"], [forms.KeyValue(**entry) for entry in item["attrs"]])
            for item in node["outputsMetadata"]
        ],
    )
