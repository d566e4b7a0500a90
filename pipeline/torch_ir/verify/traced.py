"""The model's own trace, run by torch's interpreter of fx graphs: the results of each of its calls, by place.

Names do not tell which node is which: torch names a region after the last call inside of it, and both sides number for
themselves. A place is the operator's plain name and how many calls of this name came before, in the order of
the run; a region of one branch, or of a loop, is gone through as often as it runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from pipeline.errors import Unsupported
from pipeline.importers.from_torch.functionalize import functional
from pipeline.importers.from_torch.operators import describe_operator
from pipeline.torch_ir.verify.original import copied, copied_model, same_randomness

__all__ = ["REGIONS", "Place", "Places", "Results", "traced"]

Place = tuple[str, int]

Results = dict[Place, list[torch.Tensor]]

REGIONS = frozenset({"cond", "while_loop", "scan", "wrap_with_set_grad_enabled", "wrap_with_autocast"})
"""Higher-order operators that call their bodies plainly; others map over a dim that their bodies do not see."""


class Places:
    """Asked for in the order of the run."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def of(self, name: str) -> Place:
        base = re.sub(r"_\d+$", "", name)
        self._seen[base] += 1
        return base, self._seen[base] - 1


def traced(model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any], *, functionalized: bool) -> Results:
    """Export a copy of `model` and run the program, all on copies.

    Raises:
        Exception: whatever torch.export or the model raises.
    """
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
    results: Results = {}
    with torch.no_grad(), same_randomness():
        _Recorder(program.graph_module, results, Places()).run(*flat)
    return results


class _Recorder(Interpreter):
    """Keeps the results of every call, copied: a later one may write into them."""

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
            args = pytree.tree_map_only(GraphModule, self._recorded, args)
        return super().call_function(target, args, kwargs)

    def _recorded(self, body: GraphModule) -> Callable[..., Any]:
        return lambda *operands: _Recorder(body, self._results, self._places).run(*operands)


def _name(target: Any) -> str:
    """What the IR calls a node of this operator; empty for what is no node of the IR."""
    try:
        operator = describe_operator(target)
    except Unsupported:  # `getitem`, numbers
        return ""
    return "" if operator.nothing or operator.same else operator.base
