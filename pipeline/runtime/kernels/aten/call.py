"""One call of an operator of torch, read from the attributes of its kernel call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pipeline.errors import Unsupported
from pipeline.ir.json_attr import read_attr
from pipeline.runtime.kernels.base import Attrs, Ins, Launch, Outs
from pipeline.runtime.words import argument, operator_of

__all__ = ["Call", "Quick", "arguments", "into", "pure_operator", "read"]


@dataclass(frozen=True, slots=True)
class Call:
    """An operator with its arguments, those that stand first in its schema by position."""

    kind: str
    operator: torch._ops.OpOverload
    given: Mapping[str, Any]
    """Every argument that was given, by name."""
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


Quick = Callable[[Call, Outs], Launch | None]
"""A quicker way than the operator's own; None where it does not fit this call."""


def read(attrs: Attrs, ins: Ins) -> Call:
    """The call of a kernel of the kind Aten.

    Raises:
        SourceMistake: torch does not know the operator.
        Unsupported: it writes to its arguments.
    """
    operator = pure_operator(attrs["op"])
    given = arguments(attrs["call"], ins)
    rest = dict(given)
    args = []
    for parameter in operator._schema.arguments:
        if parameter.kwarg_only or parameter.name not in rest:
            break
        args.append(rest.pop(parameter.name))
    return Call(attrs["op"], operator, given, args, rest)


def pure_operator(kind: str) -> torch._ops.OpOverload:
    """The operator of this name, if it makes values and writes none.

    Raises:
        SourceMistake: torch does not know the operator.
        Unsupported: it writes to its arguments.
    """
    operator = operator_of(kind)
    if operator._schema.is_mutable:
        raise Unsupported(
            f"{kind} writes to its arguments, and a plan holds values: import the program that "
            "pipeline.importers.from_torch.functional gives"
        )
    return operator


def arguments(text: str, ins: Ins, bodies: Sequence[Any] = ()) -> dict[str, Any]:
    """The arguments by name, from the text that `pipeline.lowering.aten.call` wrote."""
    return {name: argument(read_attr(item), ins, bodies) for name, item in json.loads(text).items()}


def into(function: Callable[..., Any]) -> Quick:
    """By a function of torch's Python binding with the same arguments and `out=`, which costs half a call by schema."""

    def quick(call: Call, outs: Outs) -> Launch:
        return partial(function, *call.args, **call.kwargs, out=outs[0])

    return quick
