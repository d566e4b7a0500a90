"""What is known of a structure, as data: all that finders and checkers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import onnx

from passes.model.rounding import Sums

__all__ = [
    "CAST_TO",
    "MOST_COMPUTED",
    "MOST_HOPS",
    "Boundary",
    "Core",
    "CoreNode",
    "Crossing",
    "Found",
    "Instance",
    "KeptWeight",
    "Wiring",
]


@dataclass(frozen=True, slots=True)
class KeptWeight:
    """A weight matrix that has to be there in the end, bit for bit; `name` is that of the stored tensor.

    `digests` are those of the matrix as it was and of its transpose: an optimizer may fold a Transpose into it.
    """

    role: str
    name: str
    digests: frozenset[str]
    rounded: Sums | None = None
    """Of a matrix that is computed from stored tensors: its numbers to rounding, which is all that folding keeps."""


@dataclass(frozen=True, slots=True)
class CoreNode:
    """A node that makes a structure what it is, as it is known without its name."""

    ops: frozenset[str]
    """`Softmax`, or `com.microsoft.Gelu`; several where one may stand for another (MatMul, Gemm)."""
    attributes: frozenset[tuple[str, object]]
    weights: tuple[frozenset[str], ...]
    """For each weight that it reads, the digests that count as that weight."""
    reads: tuple[CoreNode, ...]
    """The core nodes that it is computed from, through nothing but layout."""
    computed: int = 0
    """How many of its inputs have to be computed and not constant."""
    allow_gaps: bool = False
    """`reads` may be `MOST_HOPS` nodes away: a scale, a mask or a bias between them is not the structure's."""


@dataclass(frozen=True, slots=True)
class Core:
    """What of an instance has to stand.

    `value` is what the last core node makes. `copies`, which the checker fills in, counts the nodes of the exported
    model that look like `last`: one for each instance with such a core, and others may look alike by chance.
    """

    last: CoreNode
    value: str
    copies: int = 0


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that crosses a boundary: as it is computed, and as it is read, with nothing but layout in between."""

    value: str
    read_as: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where a part of the graph begins and ends.

    `sources`, which the checker fills in, are the graph inputs that `outputs` were computed from without passing
    through `inputs`.
    """

    inputs: tuple[Crossing, ...]
    outputs: tuple[Crossing, ...]
    sources: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Wiring:
    """How the kept matrices of an instance come to the products of two computed values, in the exported model.

    `company` has for each matrix, and each operand of such a product that it comes to, how many matrices come there
    that belong to no instance. `strangers` counts the operands in the whole model that no kept matrix comes to.
    """

    company: tuple[tuple[int, ...], ...]
    strangers: int


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
    relaxed_pins: tuple[onnx.ValueInfoProto, ...] = ()
    """Values a little further on, behind which a pass may do more; it may also do too much, so they come second."""
    wide_pins: tuple[onnx.ValueInfoProto, ...] = ()
    """Values further on still, for a step that can leave out what is known to break this kind of structure."""
    core: Core | None = None
    wiring: Wiring | None = None
    """Filled in by the checker."""
    boundary: Boundary | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """The instances of a kind, and what was seen instead where there are none."""

    instances: tuple[Instance, ...]
    instead: str = ""


MOST_HOPS: Final = 10
"""How many nodes may lie between two core nodes that allow gaps."""

MOST_COMPUTED: Final = 2**16
"""Numbers of a tensor that a constant is computed from, for its digest to be that of the numbers: scales and biases."""

CAST_TO: Final = ">"
"""Stands in a digest before the ONNX dtype that the tensor is cast to."""
