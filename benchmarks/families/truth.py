"""The independent truth: which Q, K and V projections torch computes with, by the names in its module tree.

Knows nothing of ONNX, nor of what attention looks like. A module that owns three projections with the names of Q, K
and V is an attention module. A layer may be called again (ALBERT), or not at all (the text tower of a model that was
only shown an image), so calls are counted: those whose value changes with the model's inputs, since a projection of
learned queries is a constant, and whose value the outputs depend on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from passes.weights import digest_of
from pipeline.export.arrays import to_torch
from pipeline.export.inputs import draw_inputs
from pipeline.export.quiet import quiet
from pipeline.export.source import TorchSource
from pipeline.export.tree import refill

__all__ = ["Triple", "triples_that_ran"]


@dataclass(frozen=True, slots=True)
class Triple:
    """One attention module. `digests` are of its Q, K and V weights as torch holds them; it counts `times` times."""

    module: str
    digests: tuple[str, str, str]
    times: int


@dataclass(frozen=True, slots=True)
class _Projection:
    """A weight, and the module whose calls are counted: the projection itself, or the owner of a bare parameter."""

    weight: torch.Tensor
    runs: nn.Module


def triples_that_ran(source: TorchSource, other: Collection[str] = ()) -> tuple[Triple, ...]:
    """Run the module on two draws; returns each attention module whose three projections ran.

    `other` are classes that have three such projections, but no softmax over Q·Kᵀ.
    """
    owned = dict(_owned(source.module, other))
    watched = {id(one.runs): one.runs for projections in owned.values() for one in projections}
    first, second = (_calls(source, list(watched.values()), seed) for seed in range(2))
    counts = {
        module: sum(a.matters and not torch.equal(a.value, b.value) for a, b in zip(calls, second[module], strict=True))
        for module, calls in first.items()
    }
    triples = []
    for module, projections in owned.items():
        times = min(counts[id(one.runs)] for one in projections)
        query, key, value = (digest_of(one.weight.detach().numpy()) for one in projections)
        if times:
            triples.append(Triple(module, (query, key, value), times))
    return tuple(triples)


@dataclass(frozen=True, slots=True)
class _Call:
    """What one call of a module gave, and whether the outputs of the model depend on it."""

    value: torch.Tensor
    matters: bool


def _calls(source: TorchSource, modules: Sequence[nn.Module], seed: int) -> dict[int, list[_Call]]:
    """The calls of each of `modules`, by its id, while the model runs on a draw."""
    made: list[tuple[int, torch.Tensor]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        made.append((id(module), _tensors(output)[0]))

    drawn = {name: to_torch(array) for name, array in draw_inputs(source.inputs, {}, seed).items()}
    example = refill(source.module, source.example, drawn)
    hooks = [module.register_forward_hook(note) for module in modules]
    with quiet(), torch.enable_grad():
        result = source.module(*example.args, **example.kwargs)
    for hook in hooks:
        hook.remove()
    reached = torch.stack([tensor.sum() for tensor in _tensors(result) if tensor.requires_grad]).sum()
    followed = [value for _, value in made if value.requires_grad]  # Reformer's layers run without gradients
    gradients = torch.autograd.grad(reached, followed, allow_unused=True) if followed else ()
    unused = {id(value) for value, gradient in zip(followed, gradients, strict=True) if gradient is None}
    calls: dict[int, list[_Call]] = {id(module): [] for module in modules}
    for module, value in made:
        calls[module].append(_Call(value.detach(), id(value) not in unused))
    return calls


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _owned(root: nn.Module, other: Collection[str]) -> Iterator[tuple[str, tuple[_Projection, ...]]]:
    """Each attention module's path with its Q, K and V."""
    for path, module in root.named_modules():
        for names in NAMES if type(module).__name__ not in other else ():
            projections = [found for name in names if (found := _projection(module, name)) is not None]
            if len(projections) == 3:
                yield f"{path}.{names[0]}", tuple(projections)


def _projection(owner: nn.Module, name: str) -> _Projection | None:
    child = getattr(owner, name, None)
    if isinstance(child, nn.Parameter) and child.dim() >= 2:
        return _Projection(child, owner)
    if not isinstance(child, nn.Module):
        return None
    leaves = [leaf for leaf in child.modules() if _is_pointwise(leaf)]
    return _Projection(leaves[0].get_parameter("weight"), leaves[0]) if len(leaves) == 1 else None


def _is_pointwise(module: nn.Module) -> bool:
    """A product with a matrix at each place: `nn.Linear`, what transformers has in its stead, or a 1×1 Conv."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return set(module.kernel_size) == {1} and module.in_channels > module.groups
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2 and not isinstance(module, nn.Embedding)


NAMES: Final = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("wq", "wk", "wv"),
    ("Wq", "Wk", "Wv"),
    ("q_head", "k_head", "v_head"),
    ("to_q", "to_k", "to_v"),
    ("linear_q", "linear_k", "linear_v"),
    ("project_q", "project_k", "project_v"),
    ("projection_query", "projection_key", "projection_value"),
)
"""What transformers calls the three projections of one attention."""
