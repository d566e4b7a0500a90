"""Find nodes whose declared results are not those that their operators make.

A traced IR has none; one that was edited or damaged may. Each operator is run on the meta device, on tensors as they
are declared, so nothing is computed. Operators that do not run on meta are skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from pipeline.ir import Graph, Op, TensorSpec
from pipeline.ir.bind import bind_dims, dim_names, dims_of
from pipeline.lowering.aten.views import MOVES
from pipeline.runtime.eager import apply
from pipeline.runtime.run_errors import place_of
from pipeline.runtime.tensors import dtype_name, torch_dtype
from pipeline.torch_ir.calls import arguments
from pipeline.torch_ir.errors import ExecutionError

__all__ = ["explain_wrong_results", "refuse_other_moves"]


def refuse_other_moves(graph: Graph) -> None:
    """Refuse wrong results of operators that only move elements: a plan takes their declared results without a call.

    Raises:
        ExecutionError: one of them makes others.
    """
    with torch.no_grad():
        said = [*_find_mismatches(graph, (op for op in graph.ops if op.kind in MOVES))]
    if said:
        raise ExecutionError("\n".join(_find_all_mismatches(graph) or said))  # list all: another node may be the cause


def explain_wrong_results(
    graph: Graph, inputs: Mapping[str, torch.Tensor], own: Container[str]
) -> ExecutionError | None:
    """The error for a failed run on `inputs`, if declared results are wrong; ops of a kind in `own` are skipped."""
    if dim_names(graph):
        graph = bind_dims(graph, dims_of(graph, {name: tuple(tensor.shape) for name, tensor in inputs.items()}))
    said = _find_all_mismatches(graph, own)
    return ExecutionError("\n".join(said)) if said else None


def _find_all_mismatches(graph: Graph, own: Container[str] = ()) -> list[str]:
    with torch.no_grad(), torch.device("meta"), warnings.catch_warnings(action="ignore"):
        return [*_find_mismatches(graph, (op for op in graph.ops if op.kind not in own))]


def _find_mismatches(graph: Graph, ops: Iterable[Op]) -> Iterator[str]:
    for op in ops:
        if not op.bodies and not _on_a_device(op):
            ins, outs = ([graph.values[vid].spec for vid in vids] for vids in (op.inputs, op.outputs))
            if said := _wrong(op, ins, outs):
                yield f"{place_of(op)}: {said}; correct the node, or extract the IR again"


def _wrong(op: Op, ins: Sequence[TensorSpec], outs: Sequence[TensorSpec]) -> str:
    if "device" in op.attrs:
        op = replace(op, attrs={name: item for name, item in op.attrs.items() if name != "device"})
    try:
        made = apply(op, [torch.empty(one.sizes, dtype=torch_dtype(one.dtype), device="meta") for one in ins], {})
    except NotImplementedError:
        return ""
    except (RuntimeError, IndexError, TypeError, ValueError, OverflowError, AssertionError) as error:
        found = ", ".join(f"{one.dtype}{list(one.shape)}" for one in ins)
        return f"torch refuses it on {found or 'no tensors'} ({str(error).partition(chr(10))[0]})"
    shown = [f"{dtype_name(one.dtype)}{list(one.shape)}" for one in made]
    expected = [f"{one.dtype}{list(one.shape)}" for one in outs]
    if shown == expected:
        return ""
    return f"found {', '.join(expected)} in the IR for what it makes, expected {', '.join(shown)}"


def _on_a_device(op: Op) -> bool:
    """Whether the operator requires a device, as `to.device` does."""
    return any(one.required for one in arguments(op.kind) if one.name == "device")
