"""How one tensor is quantized: `int8/channel`, `uint16`, `int4/block32`, `int6/asymmetric`, `fp8e4m3`, or `float`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from passes.encodings.encoding import FLOAT_NAMES, FloatType, Granularity, Precision

FLOAT: Final = "float"

LEAST_BITS: Final = 2
MOST_BITS: Final = 16

FLOATS: Final[Mapping[str, FloatType]] = {name: kind for kind, name in FLOAT_NAMES.items()}

FLOAT_BITS: Final = 8

NARROW_FLOAT: Final = r"(mx|nv|b)?(fp|float|f)_?\d|e\dm\d"
"""How the names of floats of a few bits begin: fp8, float8e4m3fn, float4e2m1, nvfp4, mxfp4, e4m3 …"""


def parse_precision(text: str) -> Precision | None:
    """Read a format as a configuration writes it; None for `float`.

    Signed formats are symmetric and unsigned ones asymmetric, unless the text says otherwise.

    Raises:
        ValueError: the message says what was found and what was expected.
    """
    if text == FLOAT:
        return None
    kind, *rest = text.split("/")
    float_type = FLOATS.get(kind)
    if float_type is None and re.match(NARROW_FLOAT, kind):
        raise ValueError(
            f"found the format {text!r}: of floats with few bits only {' and '.join(FLOATS)} are simulated; expected "
            "one of them, whole numbers, int2 to int16 or uint2 to uint16, or float, which leaves a tensor as it is"
        )
    number = re.fullmatch(r"(u?)int(\d+)", kind)
    if float_type is None and (number is None or not LEAST_BITS <= int(number[2]) <= MOST_BITS):
        raise ValueError(
            f"found the format {text!r}, expected int2 to int16, uint2 to uint16, {', '.join(FLOATS)}, or float, and "
            "behind it "
            "/channel or /block32 (a scale for each), /symmetric or /asymmetric"
        )
    signed = number is None or not number[1]
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
            if float_type and not symmetric:
                raise ValueError(f"found the format {text!r}: floats have no zero point, so they are symmetric")
        else:
            raise ValueError(
                f"found {part!r} in the format {text!r}, expected tensor, channel, block32 (or another size), "
                "symmetric or asymmetric"
            )
    bits = FLOAT_BITS if number is None else int(number[2])
    return Precision(bits, signed, symmetric, granularity, block, float_type)
