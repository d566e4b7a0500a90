"""The first node whose result is not the model's.

The model is exported afresh, with the test inputs, and torch's own interpreter of fx graphs runs that program node by
node; neither the reading importer nor the runtimes of this package take part. The third node of the IR that is called
`linear` is held against the third one there, whatever their numbers, since the IR counts its own. The first that
differs in the order of the program is at fault: all that it reads agreed.

This needs torch.export to take the model. Where the IR was extracted by another torch, or edited, some nodes have no
counterpart: they are passed over, and counted in what is said.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Interpreter, Node
from torch.utils import _pytree as pytree

from pipeline.importers.from_torch.functional import functional
from pipeline.ir import Op
from pipeline.torch_ir.execute import IRExecutor
from pipeline.torch_ir.verify.numbers import compare
from pipeline.torch_ir.verify.original import copied, copied_model, same_randomness

__all__ = ["first_divergence"]

Place = tuple[str, int]
"""The name of a node without its number, and how many of this name came before."""

Results = dict[Place, list[torch.Tensor]]


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
        expected = _traced(model, inputs, kwargs, functionalized=not executor.writes)
    except Exception as error:  # torch.export, and whatever the user's module raises in it
        return f"unknown: the model cannot be traced with these inputs ({type(error).__name__}: {error})"
    walk = _Walk(expected, rtol, atol)
    try:
        with same_randomness():
            executor.observe(copied(tuple(inputs)), copied(dict(kwargs)), None, walk.see)
    except _Found:
        return walk.found
    except Exception as error:  # an operator of torch's: the node is the one after the last that was seen
        return f"after node {walk.last!r} the IR does not run: {error}" if walk.last else None
    if walk.unmatched:
        others = f"{walk.unmatched} node(s) of the IR have no counterpart in a trace of the model"
        return f"not found: {others}, and all others agree"
    return "not found: every node agrees with a trace of the model"


class _Places:
    """The places of nodes, asked for in the order of the program."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def of(self, name: str) -> Place:
        base = re.sub(r"_\d+$", "", name)
        self._seen[base] += 1
        return base, self._seen[base] - 1


class _Found(Exception):
    """Ends the run: what comes after the first divergence is of no interest."""


@dataclass
class _Walk:
    """Goes along with the run of the IR."""

    expected: Results
    rtol: float | None
    atol: float | None
    found: str = ""
    last: str = ""
    unmatched: int = 0
    places: _Places = field(default_factory=_Places)

    def see(self, op: Op, results: Sequence[torch.Tensor]) -> None:
        self.last = op.name
        wanted = self.expected.get(self.places.of(op.name))
        if wanted is None or len(wanted) != len(results):
            self.unmatched += 1
            return
        for left, right in zip(wanted, results, strict=True):
            difference = compare(left, right, self.rtol, self.atol)
            if not difference.is_close:
                place = ", ".join(filter(None, (op.origin and f"module {op.origin}", op.line)))
                largest = f", max difference {difference.max_diff:.2e}" if math.isfinite(difference.max_diff) else ""
                self.found = f"node {op.name!r} ({op.kind}{'; ' if place else ''}{place}): {difference.why}{largest}"
                raise _Found


class _Recorder(Interpreter):
    """Keeps the results of every call, copied: a later one may write into them."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(program.graph_module)
        self.results: Results = {}
        self._places = _Places()

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            tensors = [leaf.clone() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.results[self._places.of(n.name)] = tensors
        return result


def _traced(model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any], functionalized: bool) -> Results:
    own = copied_model(model)
    args, named = copied(tuple(inputs)), copied(dict(kwargs))
    program = torch.export.export(own, args, named, strict=False)
    program = functional(program) if functionalized else program
    given = iter(pytree.tree_leaves((args, named)))
    flat = []
    for spec in program.graph_signature.input_specs:
        held = program.state_dict if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) else program.constants
        name = spec.target or ""
        flat.append(next(given) if spec.kind is InputKind.USER_INPUT else held.get(name, program.constants.get(name)))
    recorder = _Recorder(program)
    with torch.no_grad(), same_randomness():
        recorder.run(*flat)
    return recorder.results
