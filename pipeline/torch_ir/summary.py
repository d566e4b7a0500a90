"""An IR in figures: the fields of pytorch-ir's `info`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.ir import Dim
from pipeline.torch_ir.document.nodes import stored_values
from pipeline.torch_ir.ir import IR


def summary(ir: IR) -> dict[str, Any]:
    """Plain data, for JSON. `total_parameters` counts elements of weights, buffers and constants."""
    graph = ir.graph
    weights = list(stored_values(graph))
    return {
        "model_name": ir.model_name,
        "num_nodes": len(graph.ops),
        "num_inputs": len(graph.inputs),
        "num_outputs": len(graph.outputs),
        "num_weights": len(weights),
        "total_parameters": sum(math.prod(value.spec.sizes) for value in weights),
        "input_shapes": {graph.values[vid].name: list(graph.values[vid].spec.shape) for vid in graph.inputs},
        "output_shapes": {graph.values[vid].name: list(graph.values[vid].spec.shape) for vid in graph.outputs},
        "op_distribution": dict(Counter(op.kind for op in graph.ops).most_common()),
    }


def summary_text(found: Mapping[str, Any]) -> str:
    """`summary` for people."""
    return "\n".join(_lines(found))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"Model: {found['model_name']}"
    yield f"Nodes: {found['num_nodes']}"
    yield f"Inputs: {found['num_inputs']}"
    yield f"Outputs: {found['num_outputs']}"
    yield f"Weights: {found['num_weights']}"
    yield f"Total parameters: {found['total_parameters']:,}"
    for title, key in (("Input shapes", "input_shapes"), ("Output shapes", "output_shapes")):
        yield ""
        yield f"{title}:"
        yield from (f"  {name}: {_shape(shape)}" for name, shape in found[key].items())
    yield ""
    yield "Op distribution:"
    yield from (f"  {kind}: {count}" for kind, count in found["op_distribution"].items())


def _shape(shape: Sequence[Dim]) -> str:
    return f"[{', '.join(map(str, shape))}]"
