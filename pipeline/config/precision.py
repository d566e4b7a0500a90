"""How one tensor is quantized: `int8/channel`, `uint16`, `int4/block32`, `int6/tensor/asymmetric`, or `float`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["BIAS", "FLOAT", "LEAST_BITS", "MOST_BITS", "Granularity", "Precision", "parse_precision"]

Granularity = Literal["tensor", "channel", "block"]

FLOAT: Final = "float"

LEAST_BITS: Final = 2
MOST_BITS: Final = 16


@dataclass(frozen=True, slots=True)
class Precision:
    """An integer format.

    A symmetric one has its zero point in the middle; then a signed format leaves its lowest number unused, as
    onnxruntime does, so that -x and x are equally exact.
    """

    bits: int
    signed: bool
    symmetric: bool
    granularity: Granularity = "tensor"
    block: int = 0
    """Elements that share a scale, where `granularity` is "block"."""

    @property
    def lowest(self) -> int:
        return -(2 ** (self.bits - 1)) + self.symmetric if self.signed else 0

    @property
    def highest(self) -> int:
        return 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 1

    @property
    def stored_bits(self) -> int:
        """The bits of the narrowest ONNX type that holds these numbers."""
        return next(bits for bits in (4, 8, 16, 32) if bits >= self.bits)

    @property
    def onnx_name(self) -> str:
        """The ONNX dtype that holds these numbers, as `TensorProto.DataType` names it."""
        return f"{'' if self.signed else 'U'}INT{self.stored_bits}"

    @property
    def fills_its_type(self) -> bool:
        """Whether the ONNX dtype has no further numbers, apart from an unused lowest one."""
        return self.bits == self.stored_bits

    def per_tensor(self) -> Precision:
        """The same numbers with one scale for the whole tensor."""
        return Precision(self.bits, self.signed, self.symmetric)

    def __str__(self) -> str:
        size = {"tensor": "", "channel": "/channel", "block": f"/block{self.block}"}[self.granularity]
        usual = self.symmetric == self.signed
        return f"{'' if self.signed else 'u'}int{self.bits}{size}" + (
            "" if usual else "/symmetric" if self.symmetric else "/asymmetric"
        )


BIAS: Final = Precision(32, signed=True, symmetric=True)
"""A bias is added to a sum of products in 32 bits."""


def parse_precision(text: str) -> Precision | None:
    """Read a format as a configuration writes it; None for `float`.

    Signed formats are symmetric and unsigned ones asymmetric, unless the text says otherwise.

    Raises:
        ValueError: the message says what was found and what was expected.
    """
    if text == FLOAT:
        return None
    kind, *rest = text.split("/")
    number = re.fullmatch(r"(u?)int(\d+)", kind)
    if number is None or not LEAST_BITS <= int(number[2]) <= MOST_BITS:
        raise ValueError(
            f"found the format {text!r}, expected int2 to int16, uint2 to uint16, or float, and behind it "
            "/channel or /block32 (a scale for each), /symmetric or /asymmetric"
        )
    signed = not number[1]
    granularity: Granularity = "tensor"
    block, symmetric = 0, signed
    for part in rest:
        size = re.fullmatch(r"block(\d+)", part)
        if size is not None and int(size[1]) > 1:
            granularity, block = "block", int(size[1])
        elif part in ("tensor", "channel"):
            granularity = part
        elif part in ("symmetric", "asymmetric"):
            symmetric = part == "symmetric"
        else:
            raise ValueError(
                f"found {part!r} in the format {text!r}, expected tensor, channel, block32 (or another size), "
                "symmetric or asymmetric"
            )
    return Precision(int(number[2]), signed, symmetric, granularity, block)
