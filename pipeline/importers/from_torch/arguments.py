"""One call of the traced graph as attributes: every argument that was given, by the name that the schema has for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch.fx import Node

from pipeline.errors import Unsupported
from pipeline.importers.from_torch.operators import Operator
from pipeline.ir import Attr, BodyRef, Graph, InputRef, TorchConst

__all__ = ["Arguments", "Meaning", "Number", "Several"]


@dataclass(frozen=True, slots=True)
class Several:
    """The results of a call that has more than one, in order; None for one that is no tensor."""

    vids: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Number:
    """A number, or nothing."""

    item: Attr


Meaning: TypeAlias = int | Several | Graph | Number
"""What a node of the traced graph stands for: a vid, several, the body of an op, or a number."""


class Arguments:
    """The inputs and bodies of one op, collected while its arguments are read."""

    def __init__(self, meaning: Callable[[Node], Meaning]) -> None:
        self.inputs: list[int] = []
        self.bodies: list[Graph] = []
        self._meaning = meaning

    def read(self, node: Node, operator: Operator) -> dict[str, Attr]:
        """The arguments of `node` by name, in the order of the schema; None where that is the default is left out.

        Raises:
            Unsupported: an argument that the IR cannot hold.
        """
        names, optional = operator.arguments, operator.optional
        given = dict(zip(names, node.args, strict=False))
        for index, operand in enumerate(node.args[len(names) :]):
            given[f"operand_{index}"] = operand
        if node.kwargs:
            given |= {name: node.kwargs[name] for name in (*names, *node.kwargs) if name in node.kwargs}
        return {name: self._item(item) for name, item in given.items() if item is not None or name not in optional}

    def _item(self, item: Any) -> Attr:
        kind = type(item)
        if kind is Node:
            return self._of(self._meaning(item))
        if kind in AS_THEY_ARE:
            return item
        if isinstance(item, list | tuple):
            return tuple(map(self._item, item))
        if isinstance(item, dict):
            return tuple((key, self._item(part)) for key, part in item.items())
        for types, word in WORDS:
            if isinstance(item, types):
                return TorchConst(word, str(item).removeprefix("torch."))
        raise Unsupported(f"an argument of type {kind.__name__} ({item!r}); the IR holds tensors, numbers and names")

    def _of(self, meaning: Meaning) -> Attr:
        if type(meaning) is int:
            self.inputs.append(meaning)
            return InputRef(len(self.inputs) - 1)
        if isinstance(meaning, Graph):
            self.bodies.append(meaning)
            return BodyRef(len(self.bodies) - 1)
        if isinstance(meaning, Several):
            return tuple(None if vid is None else self._of(vid) for vid in meaning.vids)
        return meaning.item if isinstance(meaning, Number) else None


AS_THEY_ARE = frozenset({bool, int, float, complex, str, type(None)})

WORDS = (
    (torch.dtype, "dtype"),
    (torch.device, "device"),
    (torch.layout, "layout"),
    (torch.memory_format, "memory_format"),
    (OpOverload, "operator"),
)
