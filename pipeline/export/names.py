"""Graph inputs and outputs under the names of the source."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from pipeline.errors import Unsupported

__all__ = ["name_inputs_and_outputs"]


def name_inputs_and_outputs(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Rename in place, by position.

    Where one value is returned twice, or an input or a weight is returned as it is, an Identity gives the output
    a value of its own: ONNX wants distinct output names.

    Raises:
        Unsupported: the graph has another number of inputs or outputs than the module.
    """
    graph = model.graph
    _check_count("inputs", [value.name for value in graph.inputs], inputs)
    _check_count("outputs", [value.name for value in graph.outputs], outputs)
    _make_outputs_distinct(graph)
    named = [*zip(graph.inputs, inputs, strict=True), *zip(graph.outputs, outputs, strict=True)]
    _step_aside(model, {name: value for value, name in named})
    for value, name in named:
        value.name = name


def _check_count(what: str, found: Sequence[str | None], expected: Sequence[str]) -> None:
    if len(found) != len(expected):
        raise Unsupported(
            f"the exported graph has {len(found)} {what} ({', '.join(map(str, found))}) and the module "
            f"{len(expected)} ({', '.join(expected)}); does forward write into a buffer, or return a constant?"
        )


def _make_outputs_distinct(graph: ir.Graph) -> None:
    seen: set[ir.Value] = set()
    for index, value in enumerate(list(graph.outputs)):
        if value.producer() is not None and value not in seen:
            seen.add(value)
            continue
        node = ir.node("Identity", [value], name=f"identity_output_{index}")
        own = node.outputs[0]
        own.type, own.shape = value.type, value.shape
        graph.append(node)
        graph.outputs[index] = own
        seen.add(own)


def _step_aside(model: ir.Model, wanted: dict[str, ir.Value]) -> None:
    """Give another name to each value that stands in the way of a wanted one."""
    values = [value for node in ir.traversal.RecursiveGraphIterator(model.graph) for value in node.outputs]
    values += [*model.graph.inputs, *model.graph.initializers.values()]
    taken = {value.name for value in values} | set(wanted)
    for value in values:
        name = value.name or ""
        if name not in wanted or wanted[name] is value:
            continue
        count = 1
        while (fresh := f"{name}_{count}") in taken:
            count += 1
        taken.add(fresh)
        value.name = fresh
