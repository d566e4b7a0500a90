"""Measure the ranges of activations, one sample at a time; a stopped run is continued.

onnxruntime's collector counts the values of histograms. Neither it nor onnxsim has a search by squared error that is of
use here: onnxsim's `mse` knows symmetric int8 alone, and for 16 bits would clip what they can hold. So the search is
here, for any format, with onnxsim's objective (`onnxsim.calibration._mse_threshold_from_hist`, 0.8.1). The values of a
bin are taken as spread evenly over it, whose error is known in closed form; in the middle of their bin 16 bits would
have none.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Final, Literal
from zipfile import BadZipFile

import numpy as np
from onnxruntime.quantization.calibrate import HistogramCollector

from passes.rewrites.mask_constants import MASKING
from passes.weights.detached import DetachedModel
from passes.weights.files import replace_when_done
from pipeline.config.quantsim import DEFAULT_PERCENTILE, CalibrationConfig, Precision
from pipeline.errors import InternalError, UsageError
from pipeline.quantsim.encodings import Range, encode_range
from pipeline.quantsim.observation import EMPTY, Feeds, TensorObserver
from pipeline.quantsim.placement import Placement
from pipeline.quantsim.samples import Samples
from pipeline.workspace import key_of

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
        known: what a stopped run has measured.
    """

    def __init__(self, method: Method, percentile: float, known: MeasuredRanges) -> None:
        super().__init__(**{**COLLECTORS[method], "percentile": percentile}, scenario="same")
        self.histogram_dict = dict(known.histograms)
        self.infinite = {name: limits for name, limits in known.extents().items() if np.isinf(limits).any()}

    def count(self, name: str, array: np.ndarray) -> None:
        """Add the elements of a tensor."""
        if not array.size:
            return
        low, high = float(array.min()), float(array.max())
        if not np.isnan(low) and (np.isinf((low, high)).any() or name in self.infinite):  # no bins divide that
            counts = self.histogram_dict.pop(name, None)
            known = (float(counts[2]), float(counts[3])) if counts else self.infinite.get(name)
            self.infinite[name] = _hull(known, (low, high))
            return
        check_finite(name, low, high)
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
    return merged.astype(np.int64), limits, low, high, np.float64(size)


def _what_helps(low: float, high: float) -> str:
    """What to do where a histogram does not hold a range."""
    mask = "put clamp-mask into quantsim.prepare, as for a mask, or " if low <= -MASKING and high < MASKING else ""
    return f"{mask}set quantsim.calibration.method to minmax"


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


@dataclass(frozen=True, slots=True)
class MeasuredRanges:
    """The ranges and histograms after some samples.

    limits: the least and the greatest number of each tensor, as the method has them. Percentile and entropy have none
        before the last sample, and MSE none of tensors with numbers, since they depend on the format, but for those
        that are infinite on a sample, which have no histogram. The least is
        above the greatest where no sample has a number of the tensor, as of a cache of length 0.
    histograms: of each tensor that has numbers; none for min-max.
    """

    samples: int
    limits: dict[str, Range]
    histograms: dict[str, Histogram] = field(default_factory=dict)

    def extents(self) -> dict[str, Range]:
        """The least and the greatest number of each tensor that has numbers."""
        counted = {name: (float(parts[2]), float(parts[3])) for name, parts in self.histograms.items()}
        return {name: limits for name, limits in self.limits.items() if limits[0] <= limits[1]} | counted

    def save(self, path: Path, key: str) -> None:
        """Write all of it to a file, for a later run with the same key."""
        arrays = {
            "key": np.array(key),
            "samples": np.array(self.samples),
            "limits": np.array(list(self.limits.values()), np.float64).reshape(-1, 2),
            "tensors": np.array(list(self.limits), np.str_),
            "counted": np.array(list(self.histograms), np.str_),
        }
        for place, histogram in enumerate(self.histograms.values()):
            arrays |= {f"histogram/{place}/{part}": array for part, array in enumerate(histogram)}
        with replace_when_done(path) as temporary, temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: Path, key: str) -> MeasuredRanges | None:
        """What was saved for this key; None where there is nothing, or the file is damaged."""
        try:
            with path.open("rb") as file, np.load(file) as data:
                if data["key"].item() != key:
                    return None
                limits = zip(data["tensors"].tolist(), map(tuple, data["limits"].tolist()), strict=True)
                histograms = {name: _read_histogram(data, place) for place, name in enumerate(data["counted"].tolist())}
                return cls(int(data["samples"]), dict(limits), histograms)
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return None


def _read_histogram(data: Mapping[str, np.ndarray], place: int) -> Histogram:
    parts = takewhile(lambda part: f"histogram/{place}/{part}" in data, count())
    return tuple(data[f"histogram/{place}/{part}"] for part in parts)


def calibrate(
    model: DetachedModel,
    placement: Placement,
    samples: Iterable[Feeds],
    method: Method = "minmax",
    known: MeasuredRanges | None = None,
    observer: Callable[[MeasuredRanges], object] = lambda _: None,
) -> dict[str, Range]:
    """The range of each group of quantized tensors, by the name of the group: `measure`, and then `group_ranges`."""
    return group_ranges(measure(model, placement, samples, method, known, observer), placement, model)


def measure(
    model: DetachedModel,
    placement: Placement,
    samples: Iterable[Feeds],
    method: Method = "minmax",
    known: MeasuredRanges | None = None,
    observer: Callable[[MeasuredRanges], object] = lambda _: None,
    percentile: float = DEFAULT_PERCENTILE,
) -> MeasuredRanges:
    """Measure the quantized tensors on all samples.

    Args:
        model: in float.
        placement: which tensors are quantized.
        samples: input → array, in the order of the stopped run, if `known` is given.
        method: how a range follows from the elements.
        known: what a stopped run has measured; its samples are not run again.
        observer: called after each sample.
        percentile: of the method of that name.

    Raises:
        UsageError: no samples; or a tensor whose elements are counted is NaN on one of them.
    """
    measurement = RangeMeasurement(model, placement, method, known, percentile)
    for sample in samples:
        if (measured := measurement.add(sample)) is not None:
            observer(measured)
    return measurement.finish()


class RangeMeasurement:
    """Measures the quantized tensors, a sample at a time; the arguments are those of `measure`."""

    def __init__(
        self,
        model: DetachedModel,
        placement: Placement,
        method: Method = "minmax",
        known: MeasuredRanges | None = None,
        percentile: float = DEFAULT_PERCENTILE,
    ) -> None:
        self._wanted = sorted({name for names in _measured_tensors(placement).values() for name in names})
        self._tensors, self._method = TensorObserver(model, self._wanted), method
        self._measured, self._done = known or MeasuredRanges(0, {}), 0
        self._collector = None if method == "minmax" else FiniteHistogramCollector(method, percentile, self._measured)

    def add(self, sample: Feeds) -> MeasuredRanges | None:
        """Measure the tensors on one more sample, and return what has been measured so far; None where a stopped run
        has measured this sample.

        Raises:
            UsageError: a tensor whose elements are counted is NaN.
        """
        self._done += 1
        if self._done <= self._measured.samples:
            return None
        if self._collector is None:
            limits = {
                name: _hull(self._measured.limits.get(name), found)
                for name, found in self._tensors.find_extremes(sample, self._done).items()
            }
            self._measured = MeasuredRanges(self._done, limits)
        else:
            for name, array in self._tensors.walk(sample, self._done):
                self._collector.count(name, array)
            counted = _as_arrays(self._collector.histogram_dict)
            self._measured = MeasuredRanges(self._done, dict(self._collector.infinite), counted)
        return self._measured

    def finish(self) -> MeasuredRanges:
        """The ranges by the method.

        Raises:
            UsageError: there was no sample.
        """
        collector, measured = self._collector, self._measured
        if not self._done:
            raise UsageError("calibration: the data has no samples; expected at least one")
        if collector is None:
            return measured
        limits = collector.find_limits() if self._method != "mse" and measured.histograms else {}
        empty = dict.fromkeys(set(self._wanted) - measured.histograms.keys(), EMPTY)
        return replace(measured, limits=empty | limits | collector.infinite)


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """A measurement of ranges, and the file in which a later run finds them by their key."""

    measurement: RangeMeasurement
    file: Path
    key: str

    def finish(self, *, keep: bool) -> MeasuredRanges:
        """The ranges; unless `keep`, only a run that was stopped finds its file."""
        measured = self.measurement.finish()
        measured.save(self.file, self.key) if keep else self.file.unlink(missing_ok=True)
        return measured


def open_calibration(
    model: DetachedModel, placement: Placement, settings: CalibrationConfig, samples: Samples, folder: Path
) -> Calibration:
    """A measurement of the quantized tensors, which goes on where a stopped run with the same arguments has ended.

    Args:
        model: in float.
        placement: which tensors are quantized.
        settings: the method of the ranges.
        samples: say which data this is; the measurement gets it one by one.
        folder: for the file of the ranges.
    """
    graph = hashlib.sha256(model.proto.SerializeToString(deterministic=True)).hexdigest()
    tensors = [placed.site.tensor for placed in placement.quantized()]
    known = settings.model_dump(mode="json"), samples.fitted, samples.identity()
    key, file = key_of(RANGES_VERSION, *known, graph, tensors), folder / RANGES
    found = MeasuredRanges.load(file, key)
    return Calibration(RangeMeasurement(model, placement, settings.method, found, settings.percentile), file, key)


def group_ranges(measured: MeasuredRanges, placement: Placement, model: DetachedModel) -> dict[str, Range]:
    """The range of each group of quantized tensors of `placement`; `measured` has all of them that are computed.

    Raises:
        UsageError: a range is infinite or NaN.
        InternalError: nothing was measured of a group; without data it would get a scale that fits nothing.
    """
    formats = {
        placed.site.group: placed.precision
        for placed in placement.sites
        if placed.precision is not None and placed.site.role != "weight"
    }
    found: dict[str, Range] = {}
    for group, names in _measured_tensors(placement).items():
        if measured.limits.keys().isdisjoint(names) and measured.histograms.keys().isdisjoint(names):
            raise InternalError(f"calibration: {group!r} was not measured, so it has no range")
        limits = [known for name in names if (known := measured.limits.get(name)) and not known[0] > known[1]]
        histograms = [measured.histograms[name] for name in names if name in measured.histograms]
        if limits:
            found[group] = min(low for low, _ in limits), max(high for _, high in limits)
        else:
            found[group] = least_error_range(histograms, formats[group]) if histograms else NO_NUMBERS
        check_finite(group, *found[group])
    for group, limits in _ranges_of_constants(model, placement).items():
        found[group] = _hull(found.get(group), limits)  # a Concat of a constant and a computed tensor has one range
    return found


def _as_arrays(histograms: Mapping[str, Sequence[Any]]) -> dict[str, Histogram]:
    return {name: tuple(map(np.asarray, parts)) for name, parts in histograms.items()}


def _measured_tensors(placement: Placement) -> dict[str, list[str]]:
    """Group → the tensors whose ranges make up its own: those that are fed or computed, not moved there.

    Where all are moved, from a tensor that the model itself quantizes, they are measured themselves.
    """
    computed: dict[str, list[str]] = {}
    moved: dict[str, list[str]] = {}
    for placed in placement.quantized():
        if placed.site.role in ("input", "activation"):
            (moved if placed.site.moves else computed).setdefault(placed.site.group, []).append(placed.site.tensor)
    return computed | {group: names for group, names in moved.items() if group not in computed}


def _ranges_of_constants(model: DetachedModel, placement: Placement) -> dict[str, Range]:
    """The range of the constants in each group, such as a table that Gather reads. A table counts also where it is the
    weight of a product, since Gather hands on its numbers."""
    stored = model.index.initializers
    found: dict[str, Range] = {}
    groups = {placed.site.group for placed in placement.quantized() if placed.site.role in ("constant", "activation")}
    for placed in placement.sites:
        site = placed.site
        if site.group in groups and site.tensor in stored and (site.role == "weight" or placed.precision is not None):
            array = model.array(stored[placed.site.tensor])
            found[placed.site.group] = _hull(found.get(placed.site.group), (float(array.min()), float(array.max())))
    return found


def _hull(known: Range | None, found: Range) -> Range:
    """Both together; NaN stays NaN, which Python's min may lose."""
    return (float(np.minimum(known[0], found[0])), float(np.maximum(known[1], found[1]))) if known else found


COLLECTORS: Final[Mapping[Method, Mapping[str, Any]]] = {
    "percentile": {"method": "percentile", "symmetric": True, "num_bins": 2048, "num_quantized_bins": None},
    "entropy": {"method": "entropy", "symmetric": False, "num_bins": 2048, "num_quantized_bins": 128},
    "mse": {"method": "percentile", "symmetric": False, "num_bins": 2048, "num_quantized_bins": None},
}
"""The settings of onnxruntime's collector, as its calibrators have them, but for the bins of entropy: the library has
128 of all samples, into which these are merged at the end. It counts the values of its percentile without their signs,
which an asymmetric range needs."""

NO_NUMBERS: Final[Range] = (0.0, 0.0)
"""The range of tensors that have no numbers in any sample."""

RANGES: Final = "calibration.npz"
"""The file of ranges and histograms that are kept between runs, next to the results of stages."""

RANGES_VERSION: Final = 3
"""Of what that file holds; the ranges of another version are measured anew."""
