"""The first node whose result is not the model's.

The model is exported afresh, with the test inputs, and torch's own interpreter runs that program beside the IR
(traced.py). The third call of `linear` in the IR is held against the third one there, those in the bodies of branches
and loops among them. The first that differs in the order of the run is at fault: all that it reads agreed.

This needs torch.export to take the model. Where the IR was extracted by another torch, or edited, some nodes have no
counterpart: they are passed over, and named in what is said, since one of them may be the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeline.ir import Graph, Op
from pipeline.runtime import higher_order
from pipeline.runtime.eager import Own, apply, run_eager
from pipeline.runtime.torch_args import argument, tensors_in
from pipeline.torch_ir.execute import IRExecutor
from pipeline.torch_ir.registry import kinds_of
from pipeline.torch_ir.verify.numbers import compare
from pipeline.torch_ir.verify.original import copied, same_randomness
from pipeline.torch_ir.verify.traced import REGIONS, Places, Results, traced

__all__ = ["first_divergence"]

Tensors = Sequence[torch.Tensor]


def first_divergence(
    executor: IRExecutor,
    model: nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    rtol: float | None = None,
    atol: float | None = None,
) -> str | None:
    """A sentence: which node parts from the model first, by how much, and where it comes from; or that none does.

    None where no node runs: the inputs or the weights are refused.
    """
    try:
        expected = traced(model, inputs, kwargs, functionalized=not executor.writes)
    except Exception as error:  # torch.export, and whatever the user's module raises in it
        return f"unknown: the model cannot be traced with these inputs ({type(error).__name__}: {error})"
    walk = _Walk(expected, rtol, atol)
    try:
        with same_randomness():
            executor.observe(copied(tuple(inputs)), copied(dict(kwargs)), walk.beside)
    except _Found:
        return walk.found
    except Exception as error:  # an operator of torch's: the node is the one after the last that was seen
        return f"after node {walk.last!r} the IR does not run: {error}" if walk.last else None
    if walk.unmatched:
        return f"not found: {walk.passed_over()}, and all others agree"
    return "not found: every node agrees with a trace of the model"


class _Found(Exception):
    """Ends the run: what comes after the first divergence is of no interest."""


@dataclass
class _Walk:
    """Goes along with the run of the IR, in the place of every operator of it."""

    expected: Results
    rtol: float | None
    atol: float | None
    found: str = ""
    last: str = ""
    unmatched: list[str] = field(default_factory=list)
    places: Places = field(default_factory=Places)

    def beside(self, graph: Graph, own: Own) -> Own:
        """An executor for every kind of op in `graph` that runs it as before, and compares what comes out."""
        watched = {}
        watched |= {kind: partial(self._run, own, watched) for kind in kinds_of(graph)}
        return watched

    def _run(self, own: Own, watched: Own, op: Op, ins: Tensors) -> Tensors:
        region = op.kind.removeprefix("higher_order.") in REGIONS and op.kind not in own
        results = _entered(op, ins, watched) if region else apply(op, ins, own)
        self._see(op, results)
        return results

    def _see(self, op: Op, results: Tensors) -> None:
        self.last = op.name
        wanted = self.expected.get(self.places.of(op.name))
        if wanted is None or len(wanted) != len(results):
            self.unmatched.append(op.name)
            return
        for left, right in zip(wanted, results, strict=True):
            difference = compare(left, right, self.rtol, self.atol)
            if not difference.is_close:
                place = ", ".join(filter(None, (op.origin and f"module {op.origin}", op.line)))
                largest = f", max difference {difference.max_diff:.2e}" if math.isfinite(difference.max_diff) else ""
                before = f"; before it, {self.passed_over()}" if self.unmatched else ""
                where = f"{op.kind}{'; ' if place else ''}{place}"
                self.found = f"node {op.name!r} ({where}): {difference.why}{largest}{before}"
                raise _Found

    def passed_over(self) -> str:
        """The nodes that were compared with nothing."""
        names = list(dict.fromkeys(self.unmatched))  # those of a loop come as often as it runs
        others = [f"and {len(names) - MOST} more"] if len(names) > MOST else []
        has = "1 node has" if len(names) == 1 else f"{len(names)} nodes have"
        return f"{has} no counterpart in a trace of the model ({', '.join([*names[:MOST], *others])})"


def _entered(op: Op, ins: Tensors, watched: Own) -> Tensors:
    """The results of a region, whose bodies are run op by op."""
    bodies = [partial(_body, body, watched) for body in op.bodies]
    given = {name: argument(item, ins, bodies) for name, item in op.attrs.items()}
    return list(tensors_in(higher_order.call(op.kind.removeprefix("higher_order."), given)))


def _body(body: Graph, watched: Own, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values = body.values
    given = {values[vid].name: tensor for vid, tensor in zip(body.inputs, tensors, strict=True)}
    outputs = run_eager(body, given, check=False, own=watched).outputs
    return tuple(outputs[values[vid].name] for vid in body.outputs)


MOST = 4
"""Names that are told of nodes without a counterpart."""
