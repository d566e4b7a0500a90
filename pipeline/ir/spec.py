"""What is known of a tensor before any tensor exists: shape, dtype, device. Never an address or an offset."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

__all__ = ["DTYPE_BITS", "Dim", "TensorSpec"]

Dim = int | str
"""A size, or the name of a dimension that is fixed per feed signature."""

DTYPE_BITS: Final[dict[str, int]] = {
    "bool": 8,
    "uint8": 8,
    "int8": 8,
    "uint16": 16,
    "int16": 16,
    "uint32": 32,
    "int32": 32,
    "uint64": 64,
    "int64": 64,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "float8_e5m2fnuz": 8,
    "bfloat16": 16,
    "float16": 16,
    "float32": 32,
    "float64": 64,
    "complex64": 64,
    "complex128": 128,
}
"""Bits per element by dtype name; the names are torch's, without the `torch.`"""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and device of a value.

    `shape` holds sizes, or names of dynamic dims; `dtype` is a key of `DTYPE_BITS`.

    Raises:
        ValueError: an unknown dtype, or a negative size.
    """

    shape: tuple[Dim, ...]
    dtype: str
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BITS:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BITS)}")
        if any(isinstance(dim, int) and dim < 0 for dim in self.shape):
            raise ValueError(f"a size may not be negative: {self.shape}")

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_static(self) -> bool:
        return all(isinstance(dim, int) for dim in self.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of a static spec.

        Raises:
            ValueError: a dimension is still a name.
        """
        sizes = tuple(dim for dim in self.shape if isinstance(dim, int))
        if len(sizes) != len(self.shape):
            raise ValueError(f"shape {self.shape} still has named dims; bind them first")
        return sizes

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous tensor of this spec."""
        return self.numel * DTYPE_BITS[self.dtype] // 8
