"""An IR that was put together by hand, of nodes and tensors, as the data that `reading` reads."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.torch_ir.nodes import OpNode, Parts, TensorMeta

__all__ = ["by_hand"]


def by_hand(name: str, parts: Parts) -> dict[str, Any]:
    """`parts` under the keys of the JSON."""
    return {
        "model_name": name,
        "graph_inputs": [_tensor(one) for one in parts.graph_inputs],
        "graph_outputs": [_tensor(one) for one in parts.graph_outputs],
        "weights": [_tensor(one) for one in parts.weights],
        "weight_name_mapping": parts.weight_name_mapping,
        "nodes": [_node(node) for node in parts.nodes],
    }


def _tensor(meta: TensorMeta) -> dict[str, Any]:
    return {"name": meta.name, "shape": list(meta.shape), "dtype": meta.dtype}


def _node(node: OpNode) -> dict[str, Any]:
    return {
        "name": node.name,
        "op_type": node.op_type,
        "inputs": [_tensor(one) for one in node.inputs],
        "outputs": [_tensor(one) for one in node.outputs],
        "attrs": {name: _plain(item) for name, item in node.attrs.items()},
    }


def _plain(item: Any) -> Any:
    """torch's own constants by name, as the JSON has them."""
    if isinstance(item, list | tuple):
        return [_plain(part) for part in item]
    return str(item) if isinstance(item, torch.dtype | torch.device | torch.layout | torch.memory_format) else item
