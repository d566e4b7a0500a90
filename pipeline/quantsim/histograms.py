"""Histograms of the values of a tensor, and ranges by them: those of onnxruntime, or those of the least squared error.

onnxruntime's collector counts the values of histograms. Neither it nor onnxsim has a search by squared error that is of
use here: onnxsim's `mse` knows symmetric int8 alone, and for 16 bits would clip what they can hold. So the search is
here, for any format, with onnxsim's objective (`onnxsim.calibration._mse_threshold_from_hist`, 0.8.1). The values of a
bin are taken as spread evenly over it, whose error is known in closed form; in the middle of their bin 16 bits would
have none.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from onnxruntime.quantization.calibrate import HistogramCollector

from passes.rewrites.mask_constants import MASKING
from pipeline.config import OptionNames
from pipeline.config.quantsim import Precision
from pipeline.errors import UsageError
from pipeline.quantsim.encodings import Range, encode_range

Method = Literal["minmax", "percentile", "entropy", "mse"]

Histogram = tuple[np.ndarray, ...]
"""As onnxruntime's collector has it: counts, edges of the bins, the least and the greatest value; and, of signed
values, where the bins end."""

MOST_BINS: Final = 2**20
"""onnxruntime adds bins of the first sample's width until they reach the greatest value."""

CANDIDATES: Final = 100
"""Limits that are tried for each side of a range."""

ROUNDS: Final = 8
"""Each round moves both sides; a second or third changes nothing any more."""


class FiniteHistogramCollector(HistogramCollector):
    """onnxruntime's collector, which names a tensor that it cannot count, passes over one that has no elements, and
    prints nothing. It counts sample after sample what the calibrators of onnxruntime count at once, within a bin.

    Args:
        method: whose settings it has.
        percentile: of the method of that name.
        known: the histograms that a stopped run has made.
        not_finite: the tensors that were infinite or NaN there, and their limits.
    """

    def __init__(
        self, method: Method, percentile: float, known: Mapping[str, Histogram], not_finite: Mapping[str, Range]
    ) -> None:
        super().__init__(**{**COLLECTORS[method], "percentile": percentile}, scenario="same")
        self.histogram_dict = dict(known)
        self.not_finite = dict(not_finite)

    def count(self, name: str, array: np.ndarray) -> None:
        """Add the elements of a tensor."""
        if not array.size:
            return
        low, high = float(array.min()), float(array.max())
        if not np.isfinite((low, high)).all() or name in self.not_finite:  # no bins divide that
            counts = self.histogram_dict.pop(name, None)
            known = (float(counts[2]), float(counts[3])) if counts else self.not_finite.get(name)
            self.not_finite[name] = hull(known, (low, high))
            return
        try:
            with _quiet():
                self._count_finite(name, array, max(abs(low), abs(high)))
        except ValueError as error:  # numpy's: the edges of two bins are one number, or infinitely far apart
            raise UsageError(
                f"calibration: {name!r} reaches {low:g} to {high:g}, too narrow or too wide for the bins of a "
                f"histogram; {_what_helps(low, high)}"
            ) from error

    def find_limits(self) -> dict[str, Range]:
        """{tensor: the range by the method}."""
        if self.method == "entropy":
            found = self.histogram_dict.items()
            self.histogram_dict = {name: _merge_bins(known, self.num_quantized_bins) for name, known in found}
        with _quiet():
            found = self.compute_collection_result()
        return {name: (float(low), float(high)) for name, (low, high, *_) in found.items()}

    def _count_finite(self, name: str, array: np.ndarray, greatest: float) -> None:
        known = self.histogram_dict.get(name)
        if known is not None and known[2] == known[3]:  # the bins of a single number have any width
            del self.histogram_dict[name]
            self.collect({name: np.append(array, known[2])})
            counts, edges = self.histogram_dict[name][:2]
            number = abs(float(known[2])) if self.symmetric else float(known[2])
            counts[max(0, int(np.searchsorted(edges[1:-1], number, "right")))] += int(np.sum(known[0])) - 1
            return
        if known is not None:
            self._check_bins(name, greatest)
            if self.symmetric:  # of sizes: onnxruntime drops those below the first bin of the first sample
                self.histogram_dict[name] = _reach_down(known, float(np.abs(array).min()))
        self.collect({name: array})

    def _check_bins(self, name: str, greatest: float) -> None:
        edges = self.histogram_dict[name][1]
        width = float(edges[1] - edges[0])
        if width and greatest > width * MOST_BINS:
            raise UsageError(
                f"calibration: {name!r} reaches {greatest:g}, which is too far from the {float(edges[-1]):g} of the "
                "first samples for a histogram; set quantsim.calibration.method to minmax"
            )


def _reach_down(known: Histogram, least: float) -> Histogram:
    """A histogram of sizes with as many bins of one width before the first one as reach `least`."""
    counts, edges = known[:2]
    width = edges[1] - edges[0]
    more = math.ceil((float(edges[0]) - least) / float(width)) if width else 0
    if more <= 0:
        return known
    below = (edges[0] - width * np.arange(more, 0, -1)).astype(edges.dtype)
    return np.hstack((np.zeros(more, counts.dtype), counts)), np.hstack((below, edges)), *known[2:]


def _merge_bins(known: Histogram, bins: int) -> Histogram:
    """A histogram of signed values with as many bins as onnxruntime begins with, which reach the greatest size."""
    counts, edges, low, high = known[:4]
    size = max(abs(float(low)), abs(float(high)))
    centers = ((edges[1:] + edges[:-1]) / 2).clip(-size, size)
    merged, limits = np.histogram(centers, bins, range=(-size, size), weights=counts)
    return merged.astype(np.int64), limits, low, high, np.asarray(size)


def _what_helps(low: float, high: float) -> str:
    """What to do where a histogram does not hold a range."""
    mask = "put clamp-mask into quantsim.prepare, as for a mask, or " if low <= -MASKING and high < MASKING else ""
    return f"{mask}set quantsim.calibration.method to minmax"


def check_finite(tensor: str, low: float, high: float, names: OptionNames, why: str = "") -> None:
    """Refuse a range that no scale can express; `names` are the words of the message, and `why` a part of it.

    Raises:
        UsageError: naming the tensor, and what to do.
    """
    if not (np.isfinite(low) and np.isfinite(high)):
        found = "is NaN on a sample" if np.isnan(low) else f"reaches {low:g} to {high:g}"
        raise UsageError(
            f"calibration: {tensor!r} {found}, which no scale can express{why}; {names.step.format('clamp-mask')} if "
            "it is a mask that a Softmax reads, fuse_pad_into_pool likewise if a Pad of -inf makes it for MaxPool, or "
            f"leave the tensor in float: {names.in_float.format(f'tensor:{tensor}', 'activations')}"
        )


def least_error_range(histograms: Iterable[Histogram], precision: Precision) -> Range:
    """The range within the observed one that leaves `precision` the least squared error on all values that share it.

    Each side is searched for the other's best, in turn, until neither moves, and both together where the format is
    symmetric; so the result is never worse than the observed range, from which the search starts.
    """
    if precision.float_type:
        raise UsageError(
            f"calibration: mse searches among integers, and {precision} has none; set quantsim.calibration.method "
            "to minmax, percentile or entropy"
        )
    known = list(histograms)
    counts = np.concatenate([histogram[0] for histogram in known])
    lows = np.concatenate([histogram[1][:-1] for histogram in known]).astype(np.float64)
    highs = np.concatenate([histogram[1][1:] for histogram in known]).astype(np.float64)
    observed = min(float(entry[2]) for entry in known), max(float(entry[3]) for entry in known)
    edges = np.stack([lows, highs]).clip(*observed)  # the outermost bins reach further than any value
    is_used = (counts > 0) & (edges[0] < edges[1])
    edges = edges[:, is_used]
    density = counts[is_used] / (edges[1] - edges[0])
    best, error = observed, _squared_error(observed, density, edges, precision)
    sides = [(0, 1)] if precision.symmetric else [(0,), (1,)]  # a symmetric range has one limit
    for _ in range(ROUNDS):
        before = best
        for moved in sides:
            for part in range(1, CANDIDATES):
                low, high = (observed[side] * part / CANDIDATES if side in moved else best[side] for side in range(2))
                found = _squared_error((low, high), density, edges, precision)
                if found < error:
                    best, error = (low, high), found
        if best == before:
            break
    return best


def _squared_error(limits: Range, density: np.ndarray, edges: np.ndarray, precision: Precision) -> float:
    """The squared error of all values if `limits` is the range of the format.

    In units of the scale, an error of rounding r has the integral r³/3 within a step, and 1/12 over each whole one;
    beyond the last step r goes on growing, which is the error of clipping.
    """
    encoding = encode_range(limits, precision)
    scale, zero = float(encoding.scale), int(encoding.zero_point)
    places = edges / scale
    steps = np.clip(np.rint(places), precision.lowest - zero, precision.highest - zero)
    low, high = steps / 12 + (places - steps) ** 3 / 3
    return float((density * (high - low)).sum()) * scale**3


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what onnxruntime prints to standard output, where `--json` writes, and numpy's warnings of bins that
    overflow, which become an error."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def hull(known: Range | None, found: Range) -> Range:
    """Both together, or `found` alone; NaN where one of them is."""
    return (float(np.minimum(known[0], found[0])), float(np.maximum(known[1], found[1]))) if known else found


COLLECTORS: Final[Mapping[Method, Mapping[str, Any]]] = {
    "percentile": {"method": "percentile", "symmetric": True, "num_bins": 2048, "num_quantized_bins": None},
    "entropy": {"method": "entropy", "symmetric": False, "num_bins": 2048, "num_quantized_bins": 128},
    "mse": {"method": "percentile", "symmetric": False, "num_bins": 2048, "num_quantized_bins": None},
}
"""The settings of onnxruntime's collector, as its calibrators have them, but for the bins of entropy: the library has
128 of all samples, into which these are merged at the end. It counts the values of its percentile without their signs,
which an asymmetric range needs."""
