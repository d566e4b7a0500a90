"""An IR that was put together by hand, of nodes and tensors, as the data that `reading` reads."""

from __future__ import annotations

from typing import Any

from pipeline.torch_ir.nodes import Parts

__all__ = ["by_hand"]


def by_hand(name: str, parts: Parts) -> dict[str, Any]:
    """`parts` under the keys of the JSON."""
    return {
        "model_name": name,
        "graph_inputs": [one.to_dict() for one in parts.graph_inputs],
        "graph_outputs": [one.to_dict() for one in parts.graph_outputs],
        "weights": [one.to_dict() for one in parts.weights],
        "weight_name_mapping": parts.weight_name_mapping,
        "nodes": [node.to_dict() for node in parts.nodes],
    }
