"""Find the first node of an IR whose result is not the model's.

The model is exported again, with the test inputs, and torch's interpreter of fx graphs runs that program and keeps the
results of each call. Then the IR runs, and the third call of `linear` is compared with the third one there, calls in
the bodies of branches and loops included. The first that differs, in the order of the run, is at fault: everything it
reads agreed.

This needs torch.export to take the model. Where the IR was extracted by another torch, or edited, some nodes have no
counterpart: they are skipped, and named in the result, since one of them may be the first.

Names do not identify nodes: torch names a region after the last call inside of it, and both sides number separately.
So a call is identified by its Place: the operator's plain name, and how many calls of this name ran before. The body
of a branch or loop counts each time it runs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from pipeline.errors import Unsupported
from pipeline.importers.from_torch.functionalize import functionalize_program
from pipeline.importers.from_torch.operators import describe_operator
from pipeline.ir import Graph, Op
from pipeline.runtime.eager import Own, apply, as_function, call_higher_order
from pipeline.runtime.torch_args import argument, tensors_in
from pipeline.torch_ir.execute import IRExecutor
from pipeline.torch_ir.registry import kinds_of
from pipeline.torch_ir.verify.comparison import compare
from pipeline.torch_ir.verify.original import copied_model, copy_arguments, same_randomness

Place = tuple[str, int]

Results = dict[Place, list[torch.Tensor]]

REGIONS = frozenset({"cond", "while_loop", "scan", "wrap_with_set_grad_enabled", "wrap_with_autocast"})
"""Higher-order operators that call their bodies on whole tensors; others map over a dim."""


class Places:
    """Assigns places to calls, in the order of the run."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def of(self, name: str) -> Place:
        base = re.sub(r"_\d+$", "", name)
        self._seen[base] += 1
        return base, self._seen[base] - 1


def run_traced_model(
    model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any], *, functionalized: bool
) -> Results:
    """Export a copy of `model` and run the program, all on copies.

    Raises:
        Exception: whatever torch.export or the model raises.
    """
    own = copied_model(model)
    args, named = copy_arguments(tuple(inputs)), copy_arguments(dict(kwargs))
    program = torch.export.export(own, args, named, strict=False)
    program = functionalize_program(program) if functionalized else program
    given = iter(pytree.tree_leaves((args, named)))
    flat = []
    for spec in program.graph_signature.input_specs:
        held = program.state_dict if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) else program.constants
        name = spec.target or ""
        flat.append(next(given) if spec.kind is InputKind.USER_INPUT else held.get(name, program.constants.get(name)))
    results: Results = {}
    with torch.no_grad(), same_randomness():
        _TraceRecorder(program.graph_module, results, Places()).run(*flat)
    return results


class _TraceRecorder(Interpreter):
    """Keeps copies of the results of every call, since a later call may write into them."""

    def __init__(self, module: GraphModule, results: Results, places: Places) -> None:
        super().__init__(module)
        self._results = results
        self._places = places

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        name = _name(n.target) if n.op == "call_function" else ""
        if name:
            tensors = [leaf.clone() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self._results[self._places.of(name)] = tensors
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, HigherOrderOperator) and target.name() in REGIONS:
            args = pytree.tree_map_only(GraphModule, self._record_body, args)
        return super().call_function(target, args, kwargs)

    def _record_body(self, body: GraphModule) -> Callable[..., Any]:
        return lambda *operands: _TraceRecorder(body, self._results, self._places).run(*operands)


def _name(target: Any) -> str:
    """The base name of the IR's nodes of this operator; "" if the IR has no node for it."""
    try:
        operator = describe_operator(target)
    except Unsupported:  # `getitem`, numbers
        return ""
    return "" if operator.nothing or operator.same else operator.base


Tensors = Sequence[torch.Tensor]


def first_divergence(
    executor: IRExecutor,
    model: nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    rtol: float | None = None,
    atol: float | None = None,
) -> str | None:
    """A sentence: which node differs from the model first, by how much, and where it is called; or that none does.

    None if no node ran, because the inputs or the weights are refused.
    """
    try:
        expected = run_traced_model(model, inputs, kwargs, functionalized=not executor.writes)
    except Exception as error:  # torch.export, and whatever the user's module raises in it
        return f"unknown: the model cannot be traced with these inputs ({type(error).__name__}: {error})"
    walk = _DivergenceFinder(expected, rtol, atol)
    try:
        with same_randomness():
            executor.observe(copy_arguments(tuple(inputs)), copy_arguments(dict(kwargs)), walk.observers)
    except _DivergenceFound:
        return walk.found
    except Exception as error:  # an operator of torch's: the node is the one after the last that was seen
        return f"after node {walk.last!r} the IR does not run: {error}" if walk.last else None
    if walk.unmatched:
        return f"not found: {walk.describe_unmatched()}, and all others agree"
    return "not found: every node agrees with a trace of the model"


class _DivergenceFound(Exception):
    """Ends the run at the first divergence."""


@dataclass
class _DivergenceFinder:
    """Replaces every operator in a run of the IR, to compare its results with the traced ones."""

    expected: Results
    rtol: float | None
    atol: float | None
    found: str = ""
    last: str = ""
    unmatched: list[str] = field(default_factory=list)
    places: Places = field(default_factory=Places)

    def observers(self, graph: Graph, own: Own) -> Own:
        """An executor for every kind of op in `graph` that runs it as before, and compares what comes out."""
        watched = {}
        watched |= {kind: partial(self._run, own, watched) for kind in kinds_of(graph)}
        return watched

    def _run(self, own: Own, watched: Own, op: Op, ins: Tensors) -> Tensors:
        region = op.kind.removeprefix("higher_order.") in REGIONS and op.kind not in own
        results = _run_region(op, ins, watched) if region else apply(op, ins, own)
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
                before = f"; before it, {self.describe_unmatched()}" if self.unmatched else ""
                where = f"{op.kind}{'; ' if place else ''}{place}"
                self.found = f"node {op.name!r} ({where}): {difference.why}{largest}{before}"
                raise _DivergenceFound

    def describe_unmatched(self) -> str:
        """The nodes that were compared with nothing."""
        names = list(dict.fromkeys(self.unmatched))  # those of a loop come as often as it runs
        others = [f"and {len(names) - MOST} more"] if len(names) > MOST else []
        has = "1 node has" if len(names) == 1 else f"{len(names)} nodes have"
        return f"{has} no counterpart in a trace of the model ({', '.join([*names[:MOST], *others])})"


def _run_region(op: Op, ins: Tensors, watched: Own) -> Tensors:
    """The results of a region, whose bodies are run op by op."""
    bodies = [as_function(body, watched) for body in op.bodies]
    given = {name: argument(item, ins, bodies) for name, item in op.attrs.items()}
    return list(tensors_in(call_higher_order(op.kind.removeprefix("higher_order."), given)))


MOST = 4
"""Nodes without a counterpart that are named."""
