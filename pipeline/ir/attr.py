"""What an attribute of an Op can hold: plain data, and names for the few things that are neither data nor tensors.

An Op of the ONNX importer has numbers, strings, and tuples of one type. An Op of the torch importer (kind
`aten.linear.default`) holds its whole call: every argument that was given, by the name that the operator's schema has
for it. Tensors stand there as `Use`, so None among tensors, tensor lists and tensor keyword arguments keep their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Attr", "Body", "Plain", "Size", "Use", "Word", "parts"]

Plain: TypeAlias = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
"""What a kernel's packed attributes and a constraint can hold."""


@dataclass(frozen=True, slots=True)
class Use:
    """The tensor `op.inputs[index]`, at this place of the call."""

    index: int


@dataclass(frozen=True, slots=True)
class Body:
    """The subgraph `op.bodies[index]`, at this place of the call."""

    index: int


@dataclass(frozen=True, slots=True)
class Word:
    """A constant of torch by its kind and name: `Word("dtype", "bfloat16")`, `Word("memory_format", "channels_last")`.

    Kinds: dtype, device, layout, memory_format; other kinds are carried along.
    """

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Size:
    """A number that follows from named dims, as an expression: `Size("2*batch + 1")`, `Size("ToFloat(batch)")`."""

    expression: str


Scalar: TypeAlias = bool | int | float | complex | str | Use | Body | Word | Size | None
Attr: TypeAlias = Scalar | tuple["Attr", ...]


def parts(item: Attr) -> Iterator[Scalar]:
    """What `item` holds, tuples opened at every depth, in order."""
    if isinstance(item, tuple):
        for part in item:
            yield from parts(part)
    else:
        yield item
