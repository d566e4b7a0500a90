"""Autocast regions that a trace on meta has passed over: there torch casts nothing, so the graph tells other dtypes."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pipeline.importers.from_torch.bodies import bodies_of
from pipeline.importers.from_torch.place import line_of
from pipeline.torch_ir.errors import ConversionError

__all__ = ["refuse_idle_autocast"]


def refuse_idle_autocast(program: ExportedProgram) -> None:
    """
    Raises:
        ConversionError: a region casts for the CPU, on which an IR runs, and was traced on meta.
    """
    for module in bodies_of(program.graph_module):
        for region in module.graph.find_nodes(op="call_function", target=REGION):
            if _is_idle(region):
                raise ConversionError(
                    f"autocast at {_place(module, region)} casts nothing on meta, so the graph would have other dtypes "
                    "than the model has on the CPU; expected a model on the CPU: trace it there, with strict=False"
                )


def _is_idle(region: Node) -> bool:
    device, _, enabled = region.args[:3]
    return bool(enabled) and device == "cpu" and any(map(_on_meta, region.all_input_nodes))


def _on_meta(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_meta


def _place(module: GraphModule, region: Node) -> str:
    """The line of the first call inside."""
    wrapped = region.args[4]
    body = module.get_submodule(str(wrapped.target)) if isinstance(wrapped, Node) else None
    nodes = body.graph.nodes if isinstance(body, GraphModule) else ()
    return next(filter(None, map(line_of, nodes)), "a line that is not known")


REGION = torch.ops.higher_order.wrap_with_autocast
