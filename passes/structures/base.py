"""What a structure is: something with a meaning in the graph, found by shape and judged by an independent checker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import onnx

from passes.weights import DetachedModel

__all__ = ["Found", "Instance", "KeptWeight", "Structure"]


@dataclass(frozen=True, slots=True)
class KeptWeight:
    """A weight matrix that has to be there in the end, bit for bit.

    `digests` are those of the matrix as it was and of its transpose: an optimizer may fold a Transpose into it.
    """

    role: str
    name: str
    digests: frozenset[str]


@dataclass(frozen=True, slots=True)
class Instance:
    """One occurrence of a structure in the model as it was exported."""

    kind: str
    name: str
    module: str
    """Torch module path from the exporter's metadata; empty where there is none."""
    weights: tuple[KeptWeight, ...]
    pins: tuple[onnx.ValueInfoProto, ...]
    """The values to hold visible across a pass, with the types that graph outputs need."""
    loose_pins: tuple[onnx.ValueInfoProto, ...] = ()
    """Values a little further on, behind which a pass may do more; it may also do too much, so they come second."""


@dataclass(frozen=True, slots=True)
class Found:
    """The instances of a kind, and what was seen instead where there are none."""

    instances: tuple[Instance, ...]
    instead: str = ""


class Structure(Protocol):
    """A kind of structure that can be kept or watched."""

    kind: ClassVar[str]
    what: ClassVar[str]

    def find(self, model: DetachedModel) -> Found:
        """Every instance in the exported model."""
        ...

    def lost(self, instances: Sequence[Instance], model: DetachedModel) -> dict[str, str]:
        """Name → reason of each instance that `model` has no more. Shares no code with `find`."""
        ...
