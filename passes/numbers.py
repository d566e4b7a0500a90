"""How far apart two tensors are, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

__all__ = ["TOLERANCES", "Errors", "Tolerance", "compare", "tolerance_for"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A result may differ by `atol + rtol · max|expected|` anywhere."""

    atol: float
    rtol: float

    def limit(self, scale: float) -> float:
        return self.atol + self.rtol * scale


@dataclass(frozen=True, slots=True)
class Errors:
    """Distance of a result from what was expected, over all its elements.

    `max_rel` is relative to the element, where the element is not tiny against the tensor; `sqnr_db` is signal power
    over error power in dB, infinite for equal tensors. `why` is empty when the result is within tolerance.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"ser_json_inf_nan": "strings"}
    """JSON has no infinity; whoever writes these numbers with pydantic writes the word."""

    max_abs: float
    max_rel: float
    cosine: float
    sqnr_db: float
    limit: float
    why: str = ""

    @property
    def ok(self) -> bool:
        return not self.why


def compare(expected: np.ndarray, got: np.ndarray, tolerances: Mapping[str, Tolerance] | None = None) -> Errors:
    """Measure `got` against `expected`; integers and booleans have to be equal."""
    if expected.shape != got.shape:
        return _incomparable(f"shape {got.shape}, expected {expected.shape}")
    if expected.dtype != got.dtype:
        return _incomparable(f"dtype {got.dtype}, expected {expected.dtype}")
    if expected.dtype.kind in "OUS":
        return _exact() if (expected == got).all() else _incomparable("different strings")
    tolerance = tolerance_for(str(expected.dtype), tolerances)
    kind = np.complex128 if expected.dtype.kind == "c" else np.float64
    left, right = expected.astype(kind).ravel(), got.astype(kind).ravel()
    # Equal infinities and NaNs that were expected are no error; a difference there is an infinite one.
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    finite = np.isfinite(left) & np.isfinite(right)
    if not (same | finite).all():
        bad = int((~(same | finite)).sum())
        return _incomparable(f"{bad} of {left.size} elements are NaN or infinite on one side only")
    left, right = left[finite], right[finite]
    if left.size == 0:
        return _exact()
    magnitude, error = np.abs(left), np.abs(left - right)
    scale = float(magnitude.max())
    limit = tolerance.limit(scale)
    max_abs = float(error.max())
    floor = max(scale * 1e-3, np.finfo(np.float64).tiny)
    why = "" if max_abs <= limit else f"max abs error {max_abs:.3g} is over {limit:.3g}"
    return Errors(
        max_abs,
        float((error / np.maximum(magnitude, floor)).max()),
        _cosine(left, right),
        _sqnr(left, error),
        limit,
        why,
    )


def tolerance_for(dtype: str, overrides: Mapping[str, Tolerance] | None = None) -> Tolerance:
    return (overrides or {}).get(dtype) or TOLERANCES.get(dtype, Tolerance(0.0, 0.0))


def _cosine(left: np.ndarray, right: np.ndarray) -> float:
    norms = float(np.linalg.norm(left) * np.linalg.norm(right))
    return 1.0 if norms == 0.0 else float(np.vdot(left, right).real) / norms


def _sqnr(signal: np.ndarray, error: np.ndarray) -> float:
    noise = float(np.square(error).sum())
    power = float(np.square(np.abs(signal)).sum())
    if noise == 0.0:
        return math.inf
    return -math.inf if power == 0.0 else 10.0 * math.log10(power / noise)


def _exact() -> Errors:
    return Errors(0.0, 0.0, 1.0, math.inf, 0.0)


def _incomparable(why: str) -> Errors:
    return Errors(math.inf, math.inf, 0.0, -math.inf, 0.0, why)


TOLERANCES: Final[Mapping[str, Tolerance]] = {
    "float64": Tolerance(1e-12, 1e-10),
    "float32": Tolerance(1e-5, 1e-4),
    "float16": Tolerance(1e-3, 1e-2),
    "bfloat16": Tolerance(1e-2, 8e-2),
    "complex64": Tolerance(1e-5, 1e-4),
    "complex128": Tolerance(1e-12, 1e-10),
}
"""By dtype; docs/tolerances.md derives them. Two correct programs add the same products in another order: a dot product
of K terms then differs by about eps·√K of its scale, and a deep model adds such errors up layer by layer. Dtypes that
are not listed have to be equal."""
