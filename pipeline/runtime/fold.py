"""Compute at compile time what depends on constants only: positions, masks, tables of angles."""

from __future__ import annotations

from dataclasses import replace

import torch

from pipeline.importers.from_torch.tensors import TensorPayload
from pipeline.ir import Graph, Op, Role
from pipeline.ir.builder import GraphFacts, ValueDecl, assemble
from pipeline.lowering.lower import memory_order
from pipeline.ops.aten import is_call
from pipeline.ops.aten.typed import HIGHER_ORDER
from pipeline.ops.layout import traced_strides
from pipeline.runtime.eager import apply, in_traced_order
from pipeline.runtime.kernels.aten.call import pure_operator
from pipeline.runtime.slots import stored_tensor

LARGEST = 2**24
"""Bytes of one folded result; a larger one costs more memory than it saves time."""


def fold_constants(graph: Graph) -> Graph:
    """`graph` without torch's operators on constants only; their results become constants with the same vids.

    Random numbers are drawn at each run. Weights are not folded: the results would double their memory.

    Raises:
        SourceError: an operator that torch does not know.
        Unsupported: an operator that writes to its arguments.
    """
    known: dict[int, torch.Tensor] = {}
    ops: list[Op] = []
    for op in graph.ops:
        operator = pure_operator(op.kind) if is_call(op.kind) and not op.kind.startswith(HIGHER_ORDER) else None
        if operator is None or not _is_constant(graph, op, operator, known):
            ops.append(replace(op, oid=len(ops)))
            continue
        ins = [known[vid] if vid in known else _read_stored(graph, vid) for vid in op.inputs]
        with torch.no_grad():
            known.update(zip(op.outputs, apply(op, in_traced_order(graph, op, ins), {}), strict=True))
    return _with_constants(graph, ops, known) if known else graph


def _is_constant(graph: Graph, op: Op, operator: torch._ops.OpOverload, known: dict[int, torch.Tensor]) -> bool:
    specs = [graph.values[vid].spec for vid in op.outputs]
    if any(not spec.is_static or spec.nbytes > LARGEST for spec in specs):
        return False
    if any(vid not in known and not _is_stored(graph, vid) for vid in op.inputs):
        return False
    return torch.Tag.nondeterministic_seeded not in operator.tags


def _is_stored(graph: Graph, vid: int) -> bool:
    """Whether `vid` is a constant with a payload and dense memory: a payload has elements, not gaps or overlaps."""
    value = graph.values[vid]
    dense = value.strides is None or memory_order(value) is not None
    return value.role is Role.CONST and vid in graph.payloads and dense


def _read_stored(graph: Graph, vid: int) -> torch.Tensor:
    return stored_tensor(graph.payloads[vid], traced_strides(graph.values[vid]))


def _with_constants(graph: Graph, ops: list[Op], known: dict[int, torch.Tensor]) -> Graph:
    decls = [
        ValueDecl(value.name, value.spec, Role.CONST if value.vid in known else value.role, value.strides)
        for value in graph.values
    ]
    payloads = {graph.values[vid].name: payload for vid, payload in graph.payloads.items()}
    payloads |= {graph.values[vid].name: TensorPayload(tensor) for vid, tensor in known.items()}
    facts = GraphFacts(graph.updates, graph.sources, graph.dims, graph.guards)
    return assemble(graph.name, decls, ops, graph.inputs, graph.outputs, payloads, facts=facts)
