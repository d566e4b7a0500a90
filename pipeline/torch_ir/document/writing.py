"""Graph ↔ the JSON of pytorch-ir, as dicts and lists. Its keys mean what they mean there; ours are added, and optional.

    model_name, pytorch_version, graph_inputs, graph_outputs, weights, weight_name_mapping, nodes, constants
    a tensor  {name, shape, dtype[, producer_node, producer_output_idx]}     ours: device, strides
    a node    {name, op_type, inputs, outputs, attrs}                        ours: module_path, line, call, bodies
    ours      format_version; dims {name: [least, most or null]}, guards, updates {state or input: its value after a
              run}, tied {weight: its other names in a checkpoint}, signature {inputs, outputs} (write_tree),
              unsaved [buffers that no checkpoint has]

A result of a node with several is used directly, as (producer_node, producer_output_idx): there are no `getitem` nodes.
They are read, though, so that files of pytorch-ir load. A body is {name, inputs, outputs, nodes[, constants]}.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.importers.from_torch.tensors import TensorPayload
from pipeline.ir import Graph, Op, Role, Value
from pipeline.torch_ir.calls import write_call
from pipeline.torch_ir.document.constants import write_constant
from pipeline.torch_ir.nodes import key_of, producer_of, stored_values

FORMAT_VERSION = 1


def tensor(value: Value, name: str | None = None) -> dict[str, Any]:
    """`value` under its own name or another, without its producer."""
    spec = value.spec
    found: dict[str, Any] = {"name": name or value.name, "shape": list(spec.shape), "dtype": spec.dtype}
    if spec.device != "cpu":
        found["device"] = spec.device
    if value.strides is not None:
        found["strides"] = list(value.strides)
    return found


def facts(graph: Graph) -> dict[str, Any]:
    """All sections but nodes and constants, in the order of the file."""
    names = [value.name for value in graph.values]
    weights = list(stored_values(graph))
    tied = {key_of(graph, value): list(graph.sources[value.vid][1:]) for value in weights if value.vid in graph.sources}
    found: dict[str, Any] = {
        "graph_inputs": [tensor(graph.values[vid]) for vid in graph.inputs],
        "graph_outputs": [tensor(graph.values[vid]) for vid in graph.outputs],
        "weights": [tensor(value, key_of(graph, value)) for value in weights],
        "weight_name_mapping": {value.name: key_of(graph, value) for value in weights},
    }
    ours = {
        "dims": {name: [span.least, span.most] for name, span in graph.dims.items()},
        "guards": list(graph.guards),
        "updates": {names[vid]: names[after] for vid, after in graph.updates.items()},
        "tied": {key: others for key, others in tied.items() if others},
    }
    return found | {key: item for key, item in ours.items() if item}


def nodes(graph: Graph) -> Iterator[dict[str, Any]]:
    """The nodes in order; all readers of a tensor share one dict."""
    used = [_used(graph, value) for value in graph.values]
    for op in graph.ops:
        node: dict[str, Any] = {
            "name": op.name,
            "op_type": op.kind,
            "inputs": [used[vid] for vid in op.inputs],
            "outputs": [tensor(graph.values[vid]) for vid in op.outputs],
            **write_call(op),
        }
        yield node | _extras(op)


def _used(graph: Graph, value: Value) -> dict[str, Any]:
    node, index = producer_of(graph, value)
    found = {"name": value.name, "shape": list(value.spec.shape), "dtype": value.spec.dtype}
    return found if node is None else found | {"producer_node": node, "producer_output_idx": index}


def _extras(op: Op) -> dict[str, Any]:
    found: dict[str, Any] = {"module_path": op.origin, "line": op.line, "bodies": [_body(body) for body in op.bodies]}
    return {key: item for key, item in found.items() if item}


def _body(graph: Graph) -> dict[str, Any]:
    constants = {
        value.name: write_constant(value.name, payload.tensor, None)
        for value in graph.with_role(Role.CONST)
        if isinstance(payload := graph.payloads.get(value.vid), TensorPayload)
    }
    return {
        "name": graph.name,
        "inputs": [tensor(graph.values[vid]) for vid in graph.inputs],
        "outputs": [graph.values[vid].name for vid in graph.outputs],
        "nodes": list(nodes(graph)),
        **({"constants": constants} if constants else {}),
    }
