"""One call of an operator of torch, read from the attributes of its kernel call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.errors import Unsupported
from pipeline.ir import Attr, InputRef
from pipeline.runtime.kernels.base import Attrs, Ins
from pipeline.runtime.torch_args import argument, find_operator


@dataclass(frozen=True, slots=True)
class AtenCall:
    """An operator with its arguments: by position where the schema allows, else by name."""

    kind: str
    operator: torch._ops.OpOverload
    given: Mapping[str, Any]
    """Every argument that was given, by name."""
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    unread: Collection[int] = ()
    """Results that nobody reads, by number."""


@dataclass(frozen=True, slots=True)
class CallTemplate:
    """A call whose arguments are decoded except for its tensors."""

    kind: str
    operator: torch._ops.OpOverload
    fixed: Mapping[str, Any]
    """Arguments by name; undecoded where they have tensors."""
    tensors: Mapping[str, Attr]
    """The arguments that contain tensors, undecoded."""
    positional: Sequence[str]
    named: Sequence[str]
    unread: Collection[int]

    def call(self, ins: Ins) -> AtenCall:
        """The call on the tensors `ins`."""
        given = {**self.fixed, **{name: argument(item, ins) for name, item in self.tensors.items()}}
        args, kwargs = [given[name] for name in self.positional], {name: given[name] for name in self.named}
        return AtenCall(self.kind, self.operator, given, args, kwargs, self.unread)


def read_call(attrs: Attrs) -> CallTemplate:
    """The call of a kernel of the kind Aten.

    Raises:
        SourceError: torch does not know the operator.
        Unsupported: it writes to its arguments.
    """
    operator = pure_operator(attrs["op"])
    items: Mapping[str, Attr] = attrs["call"]
    tensors = {name: item for name, item in items.items() if _has_tensors(item)}
    fixed = {name: item if name in tensors else argument(item, ()) for name, item in items.items()}
    positional = []
    for parameter in operator._schema.arguments:
        if parameter.kwarg_only or parameter.name not in items:
            break
        positional.append(parameter.name)
    named = [name for name in items if name not in positional]
    return CallTemplate(attrs["op"], operator, fixed, tensors, positional, named, attrs.get("unread", ()))


def _has_tensors(item: Attr) -> bool:
    return isinstance(item, InputRef) or (isinstance(item, tuple) and any(map(_has_tensors, item)))


def pure_operator(kind: str) -> torch._ops.OpOverload:
    """The operator of this name, which must not write to its arguments.

    Raises:
        SourceError: torch does not know the operator.
        Unsupported: it writes to its arguments.
    """
    operator = find_operator(kind)
    if operator._schema.is_mutable:
        raise Unsupported(
            f"{kind} writes to its arguments, and a plan holds values: import the program that "
            "pipeline.importers.from_torch.functionalize gives"
        )
    return operator


def arguments(call: Mapping[str, Attr], ins: Ins, bodies: Sequence[Any] = ()) -> dict[str, Any]:
    """The arguments of a call by name, on these tensors and bodies."""
    return {name: argument(item, ins, bodies) for name, item in call.items()}
