"""Nodes as functions of `register_op` write them down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeline.ir import Graph, Op
from pipeline.ir.attr import Attr, Use, parts
from pipeline.torch_ir.call import resolve, spelled
from pipeline.torch_ir.errors import ConversionError
from pipeline.torch_ir.nodes import OpNode, TensorMeta, as_attr, as_torch, parts_of
from pipeline.torch_ir.registry import NodeInfo, Registry, looked_up

__all__ = ["converted"]


def converted(graph: Graph, registry: Registry) -> Graph:
    """`graph` with the ops that `registry` has a conversion for as that has them: other type, attributes, or inputs.

    Raises:
        ConversionError: it gives another node than one on these tensors with these outputs.
    """
    if not any(looked_up(registry.conversions, op.kind) for op in graph.ops):
        return graph
    vids = {value.name: value.vid for value in graph.values}
    nodes = parts_of(graph).nodes
    return replace(graph, ops=tuple(_op(op, node, vids, registry) for op, node in zip(graph.ops, nodes, strict=True)))


def _op(op: Op, node: OpNode, vids: Mapping[str, int], registry: Registry) -> Op:
    convert = looked_up(registry.conversions, op.kind)
    if convert is None:
        return op
    info = NodeInfo(node.name, resolve(op.kind) or op.kind, list(node.inputs), list(node.outputs), dict(node.attrs))
    made = convert(info)
    if not isinstance(made, OpNode) or _names(made.outputs) != _names(node.outputs):
        raise ConversionError(
            f"node {op.name!r}: the registered conversion of {op.kind} gave {made!r:.200}; "
            f"expected an OpNode with the outputs {', '.join(_names(node.outputs))}"
        )
    if unknown := [name for name in _names(made.inputs) if name not in vids]:
        raise ConversionError(
            f"node {op.name!r}: the registered conversion of {op.kind} reads {unknown[0]!r}; no such tensor"
        )
    inputs = tuple(vids[name] for name in _names(made.inputs))
    same = made.op_type == op.kind and inputs == op.inputs and made.attrs == dict(spelled(op, as_torch))
    return op if same else replace(op, kind=made.op_type, inputs=inputs, attrs=_attrs(op, made, inputs))


def _attrs(op: Op, made: OpNode, inputs: tuple[int, ...]) -> dict[str, Attr]:
    """Where the tensors are still those of the call, they keep their places in it."""
    tensors = {name: item for name, item in op.attrs.items() if any(type(part) is Use for part in parts(item))}
    own = {name: as_attr(item) for name, item in made.attrs.items() if not name.startswith("_tensor_list_")}
    return {**(tensors if inputs == op.inputs else {}), **own}


def _names(metas: list[TensorMeta]) -> list[str]:
    return [meta.name for meta in metas]
