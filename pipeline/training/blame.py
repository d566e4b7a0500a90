"""Where a step first had a number that is not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pipeline.ir import Graph, Op, Role
from pipeline.runtime.capture import RandomState
from pipeline.runtime.eager import Own, run_eager


def find_first_broken(graph: Graph, tensors: Mapping[str, torch.Tensor], random: RandomState | None) -> str:
    """A sentence on what has a number that is not finite first: a stored value or an input, else the result of an op.

    The step is run again, operator by operator, and draws the numbers that it drew from `random`: the state of torch's
    generator when the step began.
    """
    names = {value.name: value.vid for value in graph.values}
    given = [name for name, tensor in tensors.items() if not _is_finite(tensor)]
    if given:
        said = f"{', '.join(sorted(given))} held such numbers before the step"
        stored = [name for name in given if graph.values[names[name]].role is not Role.INPUT]
        return f"{said}, since an earlier step had a finite loss and other gradients: {ADVICE}" if stored else said
    broken: list[Op] = []

    def observe(op: Op, results: Sequence[torch.Tensor]) -> None:
        if not broken and not all(map(_is_finite, results)):
            broken.append(op)

    with torch.random.fork_rng(devices=[]):
        if random is not None and random.default is not None:
            torch.set_rng_state(random.default)
        run_eager(graph, tensors, observe=observe, own=OWN)
    if not broken:
        return "no operator gave such a number when the step was run again, operator by operator with sums of their own"
    op = broken[0]
    place = " · ".join(filter(None, (op.origin, op.line)))
    return f"the first operator that gave such a number is {op.name!r}, {op.operator}" + (
        f" ({place})" if place else ""
    )


def _keep_operands(op: Op, ins: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What an update gives back: here the old values, since nothing reads the new ones."""
    count = op.attrs.get("count", 1)
    assert isinstance(count, int)
    return [*ins[:count], *ins[2 * count :]][: len(op.outputs)]


def _do_not_skip(_: Op, ins: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [torch.zeros((), dtype=torch.float32, device=ins[0].device)]


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


ADVICE = "record with check_gradients=True to stop at that step"

OWN: Own = {**dict.fromkeys(("SGD", "Adam", "CountStep"), _keep_operands), "NotFinite": _do_not_skip}
"""Kinds that torch has no operator for."""
