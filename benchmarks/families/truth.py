"""The independent truth: which Q, K and V projections torch computes with, by the names in its module tree.

Knows nothing of ONNX, nor of what attention looks like. A module that owns three projections with the names of Q, K
and V is an attention module, and so is torch's own, which holds the three in one parameter. A layer may be called again
(ALBERT), or not at all (the text tower of a model that was only shown an image), so calls are counted: those whose
value changes with the model's inputs, since a projection of learned queries is a constant, and whose value the outputs
depend on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from passes.weights.stand_ins import digest_of
from pipeline.export.call_watch import capture_output
from pipeline.export.source import TorchSource, draw_inputs
from pipeline.export.tree import refill
from pipeline.runtime.tensors import to_torch


@dataclass(frozen=True, slots=True)
class Triple:
    """One attention module. `digests` are of its Q, K and V weights as torch holds them; it counts `times` times."""

    module: str
    digests: tuple[str, str, str]
    times: int


@dataclass(frozen=True, slots=True)
class _Projection:
    """A weight, the module that is called to project with it, and the one that owns all three.

    The first is the second where the weight is a bare parameter (XLNet).
    """

    weight: torch.Tensor
    leaf: nn.Module
    owner: nn.Module


class _Slice(nn.Module):
    """One of the three matrices that `nn.MultiheadAttention` holds in one parameter."""

    owner: nn.MultiheadAttention
    place: int

    def __init__(self, owner: nn.MultiheadAttention, place: int) -> None:
        super().__init__()
        object.__setattr__(self, "owner", owner)  # it is no part of this one
        self.place = place

    def weight(self) -> torch.Tensor:
        return self.owner.get_parameter("in_proj_weight").chunk(3)[self.place]


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the model, by the ids of modules and weights: what calls gave and whether an output depends on it,
    and the weights that outputs depend on."""

    calls: Mapping[int, Sequence[tuple[torch.Tensor, bool]]]
    weights: frozenset[int]

    def of(self, projection: _Projection) -> Sequence[tuple[torch.Tensor, bool]]:
        """The calls of a projection; of its owner, if that reads the weight without calling anything (WavLM)."""
        calls = self.calls[id(projection.leaf)]
        return calls or (self.calls[id(projection.owner)] if id(projection.weight) in self.weights else ())


def triples_that_ran(source: TorchSource, other: Collection[str] = ()) -> tuple[Triple, ...]:
    """Run the module on two draws; returns each attention module whose three projections ran.

    `other` are classes that have three such projections, but no softmax over Q·Kᵀ.
    """
    owned = dict(_owned(source.module, other))
    projections = [one for three in owned.values() for one in three]
    # The second draw is far off the first, since deep in a random model little of the input may be left.
    first, second = _run(source, projections, 0, 1.0), _run(source, projections, 1, 100.0)
    triples = []
    for module, three in owned.items():
        times = min(_counted(first.of(one), second.of(one)) for one in three)
        query, key, value = (digest_of(one.weight.detach().numpy()) for one in three)
        if times:
            triples.append(Triple(module, (query, key, value), times))
    return tuple(triples)


def _counted(first: Sequence[tuple[torch.Tensor, bool]], second: Sequence[tuple[torch.Tensor, bool]]) -> int:
    """Calls whose value changes, and matters."""
    return sum(matters and not torch.equal(a, b) for (a, matters), (b, _) in zip(first, second, strict=True))


def _run(source: TorchSource, projections: Sequence[_Projection], seed: int, scale: float) -> _Run:
    """Run the model on a draw whose floats are taken times `scale`."""
    made: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    slices = [one.leaf for one in projections if isinstance(one.leaf, _Slice)]
    packed = {id(one.owner) for one in slices}

    def note(module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        result = _tensors(output)[0]
        if id(module) not in packed:
            made.append((id(module), result, result))
            return
        given = dict(zip(_PACKED, args, strict=False)) | dict(kwargs)
        if given["key"] is given["value"]:
            return  # torch multiplies with two or three of the matrices at once
        for leaf in slices:
            if leaf.owner is module:
                value = nn.functional.linear(given[_PACKED[leaf.place]], leaf.weight())
                made.append((id(leaf), value, result))

    drawn = {name: to_torch(array) for name, array in draw_inputs(source.inputs, {}, seed).items()}
    drawn = {name: tensor * scale if tensor.is_floating_point() else tensor for name, tensor in drawn.items()}
    example = refill(source.module, source.example, drawn)
    watched = {id(module): module for one in projections for module in (one.leaf, one.owner)}
    hooked = [module for module in watched.values() if not isinstance(module, _Slice)]
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in hooked]
    with capture_output(), torch.enable_grad():
        result = source.module(*example.args, **example.kwargs)
    for hook in hooks:
        hook.remove()
    # Reformer's layers run without gradients: there every call is taken to matter.
    candidates = (*(result for _, _, result in made), *(one.weight for one in projections))
    followed = [tensor for tensor in candidates if tensor.requires_grad]
    reached = torch.stack([tensor.sum() for tensor in _tensors(result) if tensor.requires_grad]).sum()
    gradients = torch.autograd.grad(reached, followed, allow_unused=True) if followed else ()
    unused = {id(tensor) for tensor, gradient in zip(followed, gradients, strict=True) if gradient is None}
    calls: dict[int, list[tuple[torch.Tensor, bool]]] = {id(module): [] for module in watched.values()}
    for module, value, result in made:
        calls[module].append((value.detach(), id(result) not in unused))
    return _Run(calls, frozenset(id(one.weight) for one in projections) - unused)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _owned(root: nn.Module, other: Collection[str]) -> Iterator[tuple[str, tuple[_Projection, ...]]]:
    """Each attention module's path with its Q, K and V."""
    for path, module in root.named_modules():
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            leaves = [_Slice(module, place) for place in range(3)]
            yield f"{path}.in_proj_weight", tuple(_Projection(leaf.weight(), leaf, module) for leaf in leaves)
        for names in NAMES if type(module).__name__ not in other else ():
            projections = [found for name in names if (found := _projection(module, name)) is not None]
            if len(projections) == 3:
                yield f"{path}.{names[0]}", tuple(projections)


def _projection(owner: nn.Module, name: str) -> _Projection | None:
    child = getattr(owner, name, None)
    if isinstance(child, nn.Parameter) and child.dim() >= 2:
        return _Projection(child, owner, owner)
    if not isinstance(child, nn.Module):
        return None
    leaves = [leaf for leaf in child.modules() if _is_pointwise(leaf)]
    return _Projection(leaves[0].get_parameter("weight"), leaves[0], owner) if len(leaves) == 1 else None


def _is_pointwise(module: nn.Module) -> bool:
    """A product with a matrix at each place: `nn.Linear`, what transformers has in its stead, or a 1×1 Conv."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return set(module.kernel_size) == {1} and module.in_channels > module.groups
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2 and not isinstance(module, nn.Embedding)


_PACKED: Final = ("query", "key", "value")
"""The arguments of `nn.MultiheadAttention` that it projects."""

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
    ("layout_query", "layout_key", "layout_value"),
    ("q_content_proj", "k_content_proj", "v_proj"),
    ("self_attn_query_content_proj", "self_attn_key_content_proj", "self_attn_value_proj"),
    ("cross_attn_query_content_proj", "cross_attn_key_content_proj", "cross_attn_value_proj"),
)
"""What transformers calls the three projections of one attention."""
