"""Histograms of activations, and the range that leaves a format the least squared error.

onnxruntime's collector counts the values. Neither it nor onnxsim has a search by squared error that is of use here:
onnxsim's `mse` knows symmetric int8 alone, and for 16 bits would clip what they can hold. So the search is here, for
any format, with onnxsim's objective (`onnxsim.calibration._mse_threshold_from_hist`, 0.8.1). The values of a bin are
taken as spread evenly over it, whose error is known in closed form; in the middle of their bin 16 bits would have none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from onnxruntime.quantization.calibrate import HistogramCollector

from pipeline.config.quantsim import Precision
from pipeline.errors import UsageError
from pipeline.quantsim.encodings import Range, encode_range

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
    """onnxruntime's collector, which names a tensor that it cannot count, passes over one that has no numbers, and
    prints nothing.

    Args:
        calibrator: onnxruntime's, whose settings it has.
        wanted: the tensors to count; onnxruntime has the outputs of the model besides, which may be infinite.
        known: the histograms of a stopped run.
    """

    def __init__(self, calibrator: Any, known: Mapping[str, Histogram], wanted: Collection[str]) -> None:
        super().__init__(
            method=calibrator.method,
            symmetric=calibrator.symmetric,
            num_bins=calibrator.num_bins,
            num_quantized_bins=calibrator.num_quantized_bins,
            percentile=calibrator.percentile,
            scenario=calibrator.scenario,
        )
        self.histogram_dict = dict(known)
        self._wanted = frozenset(wanted)

    def collect(self, name_to_arr: Mapping[str, Any]) -> None:
        for name, arrays in name_to_arr.items():
            array = np.asarray(arrays)
            if not array.size or name not in self._wanted:
                continue
            low, high = float(array.min()), float(array.max())
            check_finite(name, low, high)
            self._check_bins(name, max(abs(low), abs(high)))
            try:
                with _quiet():
                    super().collect({name: arrays})
            except ValueError as error:  # numpy's: the edges of two bins are one number, or infinitely far apart
                raise UsageError(
                    f"calibration: {name!r} reaches {low:g} to {high:g}, which is too narrow or too wide for the bins "
                    "of a histogram; set quantsim.calibration.method to minmax"
                ) from error

    def compute_collection_result(self) -> Any:
        with _quiet():
            return super().compute_collection_result()

    def _check_bins(self, name: str, greatest: float) -> None:
        if name not in self.histogram_dict:
            return
        edges = self.histogram_dict[name][1]
        width = float(edges[1] - edges[0])
        if width and greatest > width * MOST_BINS:
            raise UsageError(
                f"calibration: {name!r} reaches {greatest:g}, which is too far from the {float(edges[-1]):g} of the "
                "first samples for a histogram; set quantsim.calibration.method to minmax"
            )


def check_finite(tensor: str, low: float, high: float) -> None:
    """Refuse a range that no scale can express.

    Raises:
        UsageError: naming the tensor, and what to do.
    """
    if not (np.isfinite(low) and np.isfinite(high)):
        raise UsageError(
            f"calibration: {tensor!r} reaches {low:g} to {high:g}, which no scale can express; put clamp-mask into the "
            "recipe if it is a mask, or leave the tensor in float: quantsim.rules, tensor:NAME: {activations: float}"
        )


def least_error_range(histograms: Iterable[Histogram], precision: Precision) -> Range:
    """The range within the observed one that leaves `precision` the least squared error on all values that share it.

    Each side is searched for the other's best, in turn, until neither moves, and both together where the format is
    symmetric; so the result is never worse than the observed range, from which the search starts.
    """
    if precision.float_type:
        raise UsageError(
            f"calibration: mse searches among whole numbers, and {precision} has none; set quantsim.calibration.method "
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
    """onnxruntime prints its progress to standard output, where `--json` writes."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
