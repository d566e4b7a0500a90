"""Attention on a device: each op names the kernel that torch chooses for its sizes, so the plan says which one runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.ir.graph import Graph
from pipeline.lowering.fusion.attention import put_fused
from pipeline.lowering.fusion.op_patterns import FLOATS, Attention, match_attention
from pipeline.lowering.fusion.rewrite import Rewrite
from pipeline.runtime.devices import Device
from pipeline.runtime.kernels.attention import find_backend
from pipeline.runtime.tensors import torch_dtype


def write_attention_backends(graph: Graph, device: Device) -> Graph:
    """`graph` with a backend in each attention whose sizes are known.

    torch's own operator becomes the kind that holds a backend. It stays where it has dropout, heads that share keys, or
    a mask of truth values: then torch chooses at each call.

    Args:
        graph: a graph whose values are on the CPU, before its operands have strides.
        device: where torch is asked for its choice.
    """
    rewrite = Rewrite(graph)
    for op in graph.ops:
        if op.kind == "ScaledDotProductAttention" and op.attrs["backend"] == "auto":
            causal, scale = bool(op.attrs["causal"]), float(op.attrs["scale"])  # type: ignore[arg-type]
            backend = _find_backend(graph, device, op.inputs, causal=causal, scale=scale)
            rewrite.replace(op, op.kind, op.inputs, op.outputs, {**op.attrs, "backend": backend})
        found = match_attention(op)
        operands = [] if found is None else _find_operands(graph, found)
        if found is not None and operands:
            scale = found.scale_of(graph)
            backend = _find_backend(graph, device, operands, causal=found.causal, scale=scale)
            put_fused(rewrite, op, operands, scale, causal=found.causal, backend=backend)
    return rewrite.build()


def _find_operands(graph: Graph, found: Attention) -> list[int]:
    """The operands of a call of torch's attention; empty where the kind with a backend does not take them."""
    operands = [found.query, found.key, found.value, *([] if found.mask is None else [found.mask])]
    specs = [graph.values[vid].spec for vid in operands]
    query, key, value = specs[:3]
    fits = all(
        spec.is_static and spec.rank == 4 and spec.dtype == query.dtype and spec.dtype in FLOATS for spec in specs
    )
    return operands if fits and query.shape[:2] == key.shape[:2] == value.shape[:2] else []


def _find_backend(graph: Graph, device: Device, operands: Sequence[int], *, causal: bool, scale: float) -> str:
    """What torch chooses for memory of these sizes; its elements are not read."""
    tensors = [
        torch.empty(value.spec.sizes, dtype=torch_dtype(value.spec.dtype), device=device.place)
        for value in (graph.values[vid] for vid in operands)
    ]
    query, key, value, *masks = tensors
    mask = masks[0].expand(*query.shape[:3], key.shape[2]) if masks else None
    return find_backend(query, key, value, mask, causal, scale)
