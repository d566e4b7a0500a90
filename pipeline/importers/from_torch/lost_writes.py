"""Writes through views that torch's functionalization loses (torch 2.13): they are refused, since nothing else tells.

A write to a view becomes a new value of what it is a view of, by the inverse of each view on the way. The inverse of
`unfold` has zeros where no window lies, and not what was there; those of an `expand` and of an `as_strided` over itself
add up, or choose one of, what is written to the same place.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from pipeline.errors import Unsupported
from pipeline.importers.from_torch.functional import arguments_of, writing, written
from pipeline.importers.from_torch.hidden import memories_at
from pipeline.importers.from_torch.operators import operator_of
from pipeline.importers.from_torch.place import line_of

__all__ = ["refuse_lost_writes"]


def refuse_lost_writes(program: ExportedProgram) -> None:
    """
    Raises:
        Unsupported: an op writes through a view that leaves elements out, or that shows one of them several times.
    """
    for node in writing(program):
        for target in arguments_of(node, written(node)):
            for view in _views_to_the_root(target):
                if reason := _loses(view):
                    raise Unsupported(
                        f"node {node.name!r} ({line_of(node) or 'no line is known'}) writes through {view.name!r}, a "
                        f"view that {reason}, and torch's functionalization loses what such a write does to the rest: "
                        "write to slices or to a clone in its place, or extract with functionalize=False"
                    )


def _views_to_the_root(node: Node) -> Iterator[Node]:
    """`node`, what it is a view of, and so on."""
    pending = [node]
    for one in pending:  # which grows meanwhile
        yield one
        if one.op != "placeholder":
            pending += (source for source in _sources(one) if source not in pending)


def _sources(node: Node) -> list[Node]:
    """What `node` is a view of: by its schema, or since both lie in one memory."""
    if node.target is getitem:
        return node.all_input_nodes
    declared = arguments_of(node, operator_of(node.target).viewed) if isinstance(node.target, OpOverload) else []
    return declared or [other for other in node.all_input_nodes if memories_at(node) & memories_at(other)]


def _loses(node: Node) -> str:
    """What is wrong with `node` as a view to write through; "" where nothing is."""
    shown = node.meta.get("val")
    if not isinstance(shown, torch.Tensor) or node.op == "placeholder":
        return ""
    if node.target is UNFOLD:
        whole = node.all_input_nodes[0].meta["val"]
        if not statically_known_true(shown.numel() >= whole.numel()):
            return "leaves elements out"
    return "shows one element in several places" if _overlaps(shown) else ""


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two places of `tensor` may be one element; sizes that are symbols are taken to be more than 1."""
    axes = [
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if not statically_known_true(size == 1)
    ]
    if any(statically_known_true(stride == 0) for stride, _ in axes):
        return True
    if not all(isinstance(number, int) for axis in axes for number in axis):
        return False
    reach = 0
    for stride, size in sorted(axes):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


UNFOLD = torch.ops.aten.unfold.default
