"""The encoding of a stored tensor whose slices along one axis are those of another, each multiplied by a factor.

That is what a BatchNormalization leaves that is folded into the weight in front of it. If the slices have scales of
their own, the factor goes into these, and the whole numbers stay as they are. With one scale for all slices they
cannot: then there is no such encoding, and the reason says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from passes.encodings.encoding import Encoding, NoEncoding

Array = np.ndarray[Any, np.dtype[Any]]

LEAST_NUMBERS: Final = 2
"""The fewest numbers of a slice that show a factor; of one number alone any other is a multiple."""

ROUNDING: Final = 4
"""Units of the last place: both the factor and the product are rounded, in either model."""


def scale_encoding(array: Array, encoding: Encoding, scaled: Array) -> Encoding | None:
    """The encoding by which `scaled` becomes the whole numbers that `array` becomes; None if it is no multiple of it.

    Raises:
        NoEncoding: it is one, and no encoding of the same format does that.
    """
    if array.shape != scaled.shape or array.dtype != scaled.dtype:
        return None
    first = encoding.axis or 0
    for axis in sorted(range(array.ndim), key=lambda axis: axis != first):
        factors = _find_factors(array, scaled, axis)
        if factors is not None:
            return _multiply(array, encoding, factors, axis)
    return None


def _find_factors(array: Array, scaled: Array, axis: int) -> Array | None:
    """The factor of each slice along `axis`; that of a slice of zeros is one."""
    olds, news = (np.moveaxis(one, axis, 0).reshape(one.shape[axis], -1).astype(np.float64) for one in (array, scaled))
    if olds.shape[1] < LEAST_NUMBERS or not (np.isfinite(olds).all() and np.isfinite(news).all()):
        return None
    at = np.abs(olds).argmax(axis=1)[:, None]
    largest, made = (np.take_along_axis(one, at, axis=1)[:, 0] for one in (olds, news))
    factors = np.divide(made, largest, out=np.ones_like(made), where=largest != 0)
    limits = np.finfo(array.dtype)
    wanted = olds * factors[:, None]
    allowed = ROUNDING * (limits.eps * np.abs(wanted) + limits.smallest_subnormal)
    return factors if bool((np.abs(news - wanted) <= allowed).all()) else None


def _multiply(array: Array, encoding: Encoding, factors: Array, axis: int) -> Encoding:
    """The encoding with the factors of the slices along `axis` in its scales."""
    if not factors.all():
        raise NoEncoding("a factor of zero takes all numbers of a slice away")
    is_along = encoding.axis is not None and (axis == encoding.axis) == (encoding.precision.granularity == "channel")
    if not is_along:
        if not np.allclose(factors, factors[0], rtol=1e-6, atol=0.0):
            raise NoEncoding(
                f"each slice along axis {axis} is multiplied by a factor of its own, which its scales cannot follow"
            )
        factors = factors[:1]
    shape = [1] * encoding.scale.ndim
    if encoding.scale.ndim:
        shape[0 if encoding.precision.granularity == "channel" else axis] = -1
    spread = np.broadcast_to(factors.reshape(shape), encoding.scale.shape)
    scale = (encoding.scale.astype(np.float64) * np.abs(spread)).astype(np.float32)
    if not scale.all():
        raise NoEncoding("its factors are too small for a scale of 32 bits")
    return replace(encoding, scale=scale, zero_point=_mirror(array, encoding, spread < 0))


def _mirror(array: Array, encoding: Encoding, is_mirrored: Array) -> Array:
    """The zero points where numbers whose scales are marked in `is_mirrored` have changed their sign."""
    if not is_mirrored.any():
        return encoding.zero_point
    precision = encoding.precision
    if not precision.symmetric:
        return np.where(is_mirrored, precision.lowest + precision.highest - encoding.zero_point, encoding.zero_point)
    zero, scale, marked = (encoding.spread(array, one) for one in (encoding.zero_point, encoding.scale, is_mirrored))
    mirrored = zero - np.rint(array.astype(np.float64) / scale)
    if (np.broadcast_to(marked, array.shape) & ((mirrored < precision.lowest) | (mirrored > precision.highest))).any():
        raise NoEncoding("a negative factor turns its lowest number into one that its format does not have")
    return encoding.zero_point
