"""The error between two tensors, and the tolerance for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np

GAP: Final = 1e3
"""A factor between neighbouring magnitudes at which a new group begins; its square where there are few elements."""

EXPONENTS: Final = int(math.log2(GAP))
"""Magnitudes with a gap of `GAP` differ by at least this many powers of two."""

MANY: Final = 32

DRAWN: Final = "random"
"""In place of a floating type, for values that depend on random draws: no two programs draw the same."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """An element may differ by `atol + rtol · scale`, with the scale of its group (see `compare`)."""

    atol: float
    rtol: float


@dataclass(frozen=True, slots=True)
class Errors:
    """Distance of a result from what was expected, over all its elements.

    `max_rel` is relative to the element, where the element is not tiny against its group; `sqnr_db` is signal power
    over error power in dB, infinite for equal tensors. `excess` is the largest ratio of an error to its limit, `limit`
    the limit there. `why` is empty when the result is within tolerance. `judged_as` is the type whose tolerance held,
    or `DRAWN` where only shape and dtype were compared.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"ser_json_inf_nan": "strings"}
    """JSON has no infinity, so pydantic writes it as a string."""

    max_abs: float
    max_rel: float
    cosine: float
    sqnr_db: float
    limit: float
    excess: float
    why: str = ""
    judged_as: str = ""

    @property
    def ok(self) -> bool:
        return not self.why


NO_ERROR: Final = Errors(0.0, 0.0, 1.0, math.inf, 0.0, 0.0)
"""The errors of values that are equal in every bit."""


NOT_COMPARED: Final = Errors(math.nan, math.nan, math.nan, math.nan, math.nan, math.nan, judged_as=DRAWN)
"""The errors of values of which only shape and dtype were compared, since random values differ from run to run."""


def only_compared(errors: Mapping[str, Errors]) -> dict[str, Errors]:
    """The errors of the values that were compared element by element."""
    return {name: error for name, error in errors.items() if error.judged_as != DRAWN}


def compare(
    expected: np.ndarray,
    got: np.ndarray,
    tolerances: Mapping[str, Tolerance] | None = None,
    computed_in: str | None = "",
    share: float = 1.0,
) -> Errors:
    """Measure `got` against `expected`; integers, booleans and strings have to be equal.

    Floats are judged as their own type, or as the less precise type that they were `computed_in`. For `DRAWN` values
    only shape and dtype are compared.

    Elements are judged by the scale of their group. Values of one computation fill their range; where the sorted
    magnitudes leave a gap of `GAP` or more, the magnitudes above it are another group, such as the -3.4e38
    that masks a logit. Without groups a single -3.4e38 would hide any error in the other values.

    Args:
        expected: the value of the reference.
        got: the value to judge, of any shape and dtype.
        tolerances: dtype → tolerance, where the user has set one.
        computed_in: the least precise type in the computation; None for the value's own dtype.
        share: a factor on `atol`, for values that are as much smaller than those of the rest of the model.
    """
    if computed_in == DRAWN:
        return replace(_unlike(expected, got) or NOT_COMPARED, judged_as=DRAWN)
    own = str(expected.dtype)
    is_stepped = computed_in in STEPS.values() and expected.dtype.kind in "iu"
    judged_as = least_precise(own, computed_in) if own in ROUNDING or is_stepped else own
    tolerance = tolerance_for(judged_as, tolerances, own)
    if is_stepped:  # an integer number of steps
        tolerance = replace(tolerance, atol=max(1.0, tolerance.atol))
    tolerance = replace(tolerance, atol=tolerance.atol * share)
    errors = _compare_values(expected, got, tolerance, is_equal_only=not is_stepped)
    if errors.excess > 1.0 and judged_as != own and math.isfinite(errors.excess):
        errors = replace(errors, why=f"{errors.why} (the tolerance of {judged_as}, in which it was computed)")
    return replace(errors, judged_as=judged_as)


def least_precise(*dtypes: str | None) -> str:
    """The floating type with the largest rounding error; other types are ignored."""
    return max(
        (dtype for dtype in dtypes if dtype and dtype in ROUNDING), key=lambda dtype: ROUNDING[dtype], default=""
    )


def _compare_values(
    expected: np.ndarray, got: np.ndarray, tolerance: Tolerance, *, is_equal_only: bool = True
) -> Errors:
    """The errors under `tolerance`; `is_equal_only` whether unequal integers are wrong by any distance."""
    if (unlike := _unlike(expected, got)) is not None:
        return unlike
    if same_bits(expected, got):
        return NO_ERROR
    if expected.dtype.kind in "OUS":
        return NO_ERROR if (expected == got).all() else _incomparable("different strings")
    if is_equal_only and expected.dtype.kind in "biu" and not (expected == got).all():
        return _different(expected, got)
    kind = np.complex128 if expected.dtype.kind == "c" else np.float64
    left, right = expected.astype(kind).ravel(), got.astype(kind).ravel()
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(left - right)
    if not np.isfinite(error).all():
        # Equal infinities and NaNs that were expected are no error; a difference there is an infinite one.
        same = (left == right) | (np.isnan(left) & np.isnan(right))
        finite = np.isfinite(left) & np.isfinite(right)
        if not (same | finite).all():
            bad = int((~(same | finite)).sum())
            return _incomparable(f"{bad} of {left.size} elements are NaN or infinite on one side only")
        left, right, error = left[finite], right[finite], error[finite]
    with np.errstate(over="ignore", invalid="ignore"):  # ratios and squares of float64 values may be infinite
        return _measure(left, right, error, tolerance) if left.size else NO_ERROR


def _unlike(expected: np.ndarray, got: np.ndarray) -> Errors | None:
    """The error for a different shape or dtype; None if both are equal."""
    if expected.shape != got.shape:
        return _incomparable(f"shape {got.shape}, expected {expected.shape}")
    if expected.dtype != got.dtype:
        return _incomparable(f"dtype {got.dtype}, expected {expected.dtype}")
    return None


def _measure(left: np.ndarray, right: np.ndarray, error: np.ndarray, tolerance: Tolerance) -> Errors:
    """The errors of finite elements (at least one). Their scales, limits and units are one number each where they can
    be, since comparisons take a quarter of the time of a proof."""
    magnitude = np.abs(left)
    scales = np.asarray(_group_scales(magnitude))
    limits = tolerance.atol + tolerance.rtol * scales
    worst = int((error / np.maximum(limits, TINY) if limits.ndim else error).argmax())
    limit = float(np.broadcast_to(limits, error.shape)[worst])
    excess = float(error[worst]) / max(limit, TINY)
    why = "" if excess <= 1.0 else f"max abs error {error[worst]:.3g} is over {limit:.3g}"
    units = np.where(scales > 0, scales, 1.0)
    largest, relative = float(error.max()), float((error / np.maximum(magnitude, units * 1e-3)).max())
    if units.ndim or not 1 / SQUARED < units < SQUARED:
        left, right, error = left / units, right / units, error / units
    return Errors(largest, relative, _cosine(left, right), _sqnr(left, error), limit, excess, why)


TINY: Final = float(np.finfo(np.float64).tiny)

SQUARED: Final = 1e100
"""Values of this scale and of its inverse have squares in float64, and so have sums of these."""


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two arrays have the same shape, dtype and bytes; so NaN is equal to itself."""
    if left is right:
        return True
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.dtype.kind in "OUS":
        return bool((left == right).all())
    word = f"u{min(left.itemsize, 8)}"
    left_words, right_words = (np.ascontiguousarray(array).reshape(-1).view(word) for array in (left, right))
    return np.array_equal(left_words, right_words)


def _group_scales(magnitude: np.ndarray) -> np.ndarray:
    """For each element the largest magnitude of its group; one number if they are all of one group."""
    if not _may_leave_a_gap(magnitude):
        return magnitude.max(initial=0.0)
    ordered = np.sort(magnitude[magnitude > 0])
    # The least values of a computation may leave gaps by chance, so a group needs other elements below the gap.
    many = ordered.size >= 2 * MANY
    below = max(MANY, ordered.size // 100) if many else (ordered.size + 1) // 2
    gaps = np.flatnonzero(ordered[1:] / ordered[:-1] >= (GAP if many else GAP**2))
    tops = ordered[np.append(gaps[gaps + 1 >= below], ordered.size - 1)]
    return tops[np.searchsorted(tops, magnitude)]


def _may_leave_a_gap(magnitude: np.ndarray) -> bool:
    """Whether consecutive powers of two hold no magnitude; far quicker than sorting the magnitudes.

    Args:
        magnitude: float64, 0 or more.
    """
    counts = np.bincount(magnitude.view(np.int64) >> MANTISSA_BITS)  # by the exponent, which is 0 for 0
    occupied = np.flatnonzero(counts[1:])
    if counts.size and counts[0] and (np.count_nonzero(magnitude) != magnitude.size - counts[0]):
        return True  # subnormal values
    return bool((np.diff(occupied) >= EXPONENTS).any())


MANTISSA_BITS: Final = 52


def tolerance_for(dtype: str, overrides: Mapping[str, Tolerance] | None = None, own: str = "") -> Tolerance:
    """That of `dtype`: as overridden, or else as overridden for the value's `own` type, or else as documented."""
    chosen = overrides or {}
    return chosen.get(dtype) or chosen.get(own) or TOLERANCES.get(dtype, Tolerance(0.0, 0.0))


def _cosine(left: np.ndarray, right: np.ndarray) -> float:
    norms = math.sqrt(_inner_product(left, left)) * math.sqrt(_inner_product(right, right))
    if not math.isfinite(norms):
        return 0.0  # as of values that cannot be compared
    if norms == 0.0:
        return float(not left.any() and not right.any())
    return _inner_product(left, right) / norms


def _inner_product(left: np.ndarray, right: np.ndarray) -> float:
    """The real part of the inner product, by one thread: those of BLAS spin, which took five times as long on busy
    cores as all the rest of a comparison."""
    return float(np.einsum("i,i->", left.conj(), right).real)


def _sqnr(signal: np.ndarray, error: np.ndarray) -> float:
    noise, power = (_inner_product(array, array) for array in (error, signal))
    if noise == 0.0:
        return math.inf
    ratio = power / noise  # 0 where the error of float64 values is beyond float64
    return 10.0 * math.log10(ratio) if ratio > 0.0 else -math.inf


def _different(expected: np.ndarray, got: np.ndarray) -> Errors:
    """The errors of unequal integers, which are never within tolerance."""
    left, right = expected.astype(np.float64).ravel(), got.astype(np.float64).ravel()
    count = int((expected != got).sum())
    largest = float(np.abs(left - right).max()) or 1.0
    why = f"{count} of {left.size} elements differ, and {expected.dtype} has to be equal"
    return Errors(largest, math.inf, _cosine(left, right), _sqnr(left, left - right), 0.0, math.inf, why)


def _incomparable(why: str) -> Errors:
    return Errors(math.inf, math.inf, 0.0, -math.inf, 0.0, math.inf, why)


STEPS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("int16", "uint16"), "16-bit steps"),
    **dict.fromkeys(("int8", "uint8"), "8-bit steps"),
    **dict.fromkeys(("int4", "uint4"), "4-bit steps"),
    **dict.fromkeys(("int2", "uint2"), "2-bit steps"),
}
"""Type that a quantizer rounds to → name of the tolerance for values computed from its result.

Correct programs may round a number between two steps to either step. Every value computed from that number may move by
one step of the scale of its tensor, which is the range of the tensor over the number of steps."""

TOLERANCES: Final[Mapping[str, Tolerance]] = {
    "float64": Tolerance(1e-12, 1e-10),
    "float32": Tolerance(1e-5, 1e-4),
    "float16": Tolerance(1e-3, 1e-2),
    "bfloat16": Tolerance(1e-2, 8e-2),
    "complex64": Tolerance(1e-5, 1e-4),
    "complex128": Tolerance(1e-12, 1e-10),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz"), Tolerance(1e-2, 1.25e-1)),
    **dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz"), Tolerance(1e-2, 2.5e-1)),
    "float4_e2m1fn": Tolerance(1e-2, 5e-1),
    "16-bit steps": Tolerance(1e-5, 1e-4),
    "8-bit steps": Tolerance(1e-5, 8e-3),
    "4-bit steps": Tolerance(1e-5, 1.5e-1),
    "2-bit steps": Tolerance(1e-5, 1.0),
}
"""By dtype; docs/reference/tolerances.md derives them.

Two correct programs add the same products in another order: a dot product of K terms then differs by about eps·√K of
its scale, and a deep model adds such errors up layer by layer. Dtypes that are not listed have to be equal."""

ROUNDING: Final[Mapping[str, float]] = {
    **dict.fromkeys(("float64", "complex128"), 2**-53),
    **dict.fromkeys(("float32", "complex64"), 2**-24),
    "float16": 2**-11,
    "bfloat16": 2**-8,
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz"), 2**-4),
    **dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz"), 2**-3),
    "float4_e2m1fn": 2**-2,
    "16-bit steps": 2**-15,
    "8-bit steps": 2**-7,
    "4-bit steps": 2**-3,
    "2-bit steps": 2**-1,
}
"""Floating type → the relative error of one rounding."""
