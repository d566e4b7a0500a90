"""The data that finders and checkers of structures share."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, Self

import numpy as np
import onnx


@dataclass(frozen=True, slots=True)
class Sums:
    """`size` elements with this `norm`; `weighed` are sums of all elements with random factors, relative to the norm.

    `unit` is the rounding of their type. Matrices that are not equal have sums about 1 apart.
    """

    size: int
    norm: float
    weighed: tuple[float, ...]
    unit: float

    def is_close(self, other: Sums) -> bool:
        """Whether both may be the same matrix, rounded differently."""
        room = ROUNDINGS * max(self.unit, other.unit)
        return (
            self.size == other.size
            and abs(self.norm - other.norm) <= room * self.norm
            and bool(np.allclose(self.weighed, other.weighed, rtol=0, atol=room))
        )


@dataclass(frozen=True, slots=True)
class KeptWeight:
    """A weight matrix that the final model must contain, bit for bit; `name` is the name of the stored tensor.

    `digests` are the digests of the matrix and of its transpose: an optimizer may fold a Transpose into the matrix.
    """

    role: str
    name: str
    digests: frozenset[str]
    rounded: Sums | None = None
    """For a matrix computed from stored tensors: sums that identify it up to rounding, as folding may round."""
    is_exact: bool = False
    """Whether a difference in rounding counts too, as it does for integers times a scale."""


@dataclass(frozen=True, slots=True)
class CoreNode:
    """A node that defines a structure, described without its name."""

    ops: frozenset[str]
    """`Softmax`, or `com.microsoft.Gelu`; several where one product may replace another."""
    attributes: frozenset[tuple[str, object]]
    weights: tuple[frozenset[str], ...]
    """For each weight that it reads, the digests that count as that weight."""
    reads: tuple[CoreNode, ...]
    """The core nodes that it is computed from, through layout ops only."""
    computed: int = 0
    """How many of its inputs must not be constant."""
    allow_gaps: bool = False
    """Whether `reads` may be up to `MOST_HOPS` nodes away, with a scale, a mask or a bias in between."""


@dataclass(frozen=True, slots=True)
class Core:
    """The nodes of an instance that a model must keep.

    `value` is the output of the last core node. `copies`, which the checker fills in, counts the nodes of the exported
    model that look like `last`: one for each instance with an equal core, and nodes that look alike by chance.
    """

    last: CoreNode
    value: str
    copies: int = 0


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that crosses a boundary: its name where it is computed, and where it is read, after layout ops only."""

    value: str
    read_as: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Boundary:
    """The values at which a part of the graph begins and ends.

    `sources`, which the checker fills in, are the graph inputs that `outputs` were computed from without passing
    through `inputs`.
    """

    inputs: tuple[Crossing, ...]
    outputs: tuple[Crossing, ...]
    sources: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Wiring:
    """How the kept matrices of an instance reach the products of two computed values, in the exported model.

    `other_weights`: for each matrix, and each operand of such a product that the matrix reaches, the number of matrices
    outside every instance that also reach the operand. `unreached_operands`: the number of operands in the whole model
    that no kept matrix reaches.
    """

    other_weights: tuple[tuple[int, ...], ...]
    unreached_operands: int


class PinSite(NamedTuple):
    """The values at which one kept value can be pinned, in order downstream, with the types that graph outputs need."""

    tight: onnx.ValueInfoProto
    """The value itself, the first choice."""
    after_bias: onnx.ValueInfoProto
    """The second choice: it leaves a pass more room, including room to break the structure."""
    after_reshape: onnx.ValueInfoProto
    """The last choice, after the bias and all reshapes: for a step without the passes that are known to break this
    kind."""

    @classmethod
    def only(cls, value: onnx.ValueInfoProto) -> Self:
        """The site of a value that can be pinned at itself alone."""
        return cls(value, value, value)


@dataclass(frozen=True, slots=True)
class Instance:
    """One occurrence of a structure in the exported model."""

    kind: str
    name: str
    module: str
    """Torch module path from the exporter's metadata; empty where there is none."""
    weights: tuple[KeptWeight, ...]
    pins: tuple[PinSite, ...]
    """Where to pin each kept value during a pass."""
    core: Core | None = None
    wiring: Wiring | None = None
    """Filled in by the checker."""
    boundary: Boundary | None = None

    @property
    def values(self) -> tuple[str, ...]:
        """The names of all values that a pin may hold, first those of the tight pins."""
        return tuple(dict.fromkeys(info.name for infos in zip(*self.pins, strict=True) for info in infos))

    @property
    def results(self) -> tuple[str, ...]:
        """The values that the instance makes for the nodes after it."""
        if self.core is not None:
            return (self.core.value,)
        if self.boundary is not None:
            return tuple(crossing.value for crossing in self.boundary.outputs)
        return tuple(site.tight.name for site in self.pins)

    @property
    def weight_results(self) -> tuple[str, ...]:
        """The values that the instance's own weights make: a fault in its weights has to show there."""
        tight = tuple(site.tight.name for site in self.pins)
        if self.core is None and self.boundary is None:
            return tight
        return tuple(name for name in tight if self.core and self.weights and name == self.core.value)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The instances of a kind; where there are none, `instead` says what the model has, and `remedy` what to do."""

    instances: tuple[Instance, ...]
    instead: str = ""
    remedy: str = ""


def sums_of(array: np.ndarray) -> Sums:
    """The sums of a matrix; a stack counts as its matrices joined."""
    rows = array.reshape(array.shape[0] if array.ndim else 1, -1).astype(np.float64)
    norm = float(np.linalg.norm(rows))
    weighed: list[float] = []
    for ones, others in pairwise(np.random.default_rng(0).integers(0, 2**31, FACTORS)):
        left, right = (_factors(seed, rows.shape[0]) for seed in (ones, others))
        above, below = (_factors(seed, rows.shape[1]) for seed in (ones, others))
        # Sorted, since the transposed matrix has the two in the other order.
        weighed += sorted((float(left @ rows @ below), float(right @ rows @ above)))
    unit = float(np.finfo(array.dtype).eps) if array.dtype.kind == "f" else UNIT
    return Sums(array.size, norm, tuple(value / norm if norm else 0.0 for value in weighed), unit)


def _factors(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng([int(seed), count]).standard_normal(count)


FACTORS: Final = 4

ROUNDINGS: Final = 64
"""Units of rounding by which sums over a row may differ, such as those of weight norm."""

UNIT: Final = float(np.finfo(np.float32).eps)
"""The rounding for types that are not floats."""

MOST_HOPS: Final = 10
"""The most nodes between two core nodes that allow gaps."""

MOST_COMPUTED: Final = 2**16
"""The most elements of a tensor from which a constant is computed for its digest: enough for scales and biases."""

CAST_TO: Final = ">"
"""Precedes, in a digest, the ONNX dtype that the tensor is cast to."""

QUANTIZED: Final = "quantized "
"""Begins the digest of a tensor that DequantizeLinear makes: the digest of the stored tensor, then for each of the one
or two nodes after it the digests of scale and zero point, the axis and the block size, separated by slashes."""

PACKED: Final = " packed "
"""Follows the digest of the matrix of a MatMulNBits: the digests of scales, zero points and group indices, the bits and
the block size, separated by slashes."""
