"""Measure the ranges of activations, one sample at a time; a stopped run is continued."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import count, takewhile
from pathlib import Path
from typing import Final
from zipfile import BadZipFile

import numpy as np

from passes.weights.detached import DetachedModel
from passes.weights.files import replace_when_done
from pipeline.config.quantsim import DEFAULT_PERCENTILE, CalibrationConfig
from pipeline.errors import InternalError, UsageError
from pipeline.quantsim.encodings import Range, check_stored
from pipeline.quantsim.histograms import (
    FiniteHistogramCollector,
    Histogram,
    Method,
    check_finite,
    hull,
    least_error_range,
)
from pipeline.quantsim.observation import EMPTY, Feeds, TensorObserver
from pipeline.quantsim.placement import Placement, constants_without_range
from pipeline.quantsim.samples import Samples
from pipeline.workspace import key_of


@dataclass(frozen=True, slots=True)
class MeasuredRanges:
    """The ranges and histograms after some samples.

    limits: the least and the greatest number of each tensor, as the method has them. Percentile and entropy have none
        before the last sample, and MSE none of tensors with numbers, since they depend on the format, but for those
        that are infinite or NaN on a sample, which have no histogram. Both are NaN where an element is, and the least
        is above the greatest where no sample has a number of the tensor, as of a cache of length 0.
    histograms: of each tensor that has elements; none for min-max.
    """

    samples: int
    limits: dict[str, Range]
    histograms: dict[str, Histogram] = field(default_factory=dict)

    def extents(self) -> dict[str, Range]:
        """The least and the greatest element of each tensor that has elements; NaN where one is."""
        counted = {name: (float(parts[2]), float(parts[3])) for name, parts in self.histograms.items()}
        return {name: limits for name, limits in self.limits.items() if not limits[0] > limits[1]} | counted

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
    model: DetachedModel, placement: Placement, samples: Iterable[Feeds], method: Method = "minmax"
) -> dict[str, Range]:
    """The range of each group of quantized tensors, by the name of the group: `measure`, and then `group_ranges`."""
    return group_ranges(measure(model, placement, samples, method), placement, model)


def measure(
    model: DetachedModel,
    placement: Placement,
    samples: Iterable[Feeds],
    method: Method = "minmax",
    percentile: float = DEFAULT_PERCENTILE,
) -> MeasuredRanges:
    """Measure the quantized tensors on all samples; the arguments and the errors are those of `RangeMeasurement`."""
    measurement = RangeMeasurement(model, placement, method, percentile=percentile)
    for sample in samples:
        measurement.add(sample)
    return measurement.finish()


class RangeMeasurement:
    """Measures the quantized tensors, a sample at a time.

    Args:
        model: in float.
        placement: which tensors are quantized.
        method: how a range follows from the elements.
        known: what a stopped run has measured; its samples come first again, and are not run.
        percentile: of the method of that name.
    """

    def __init__(
        self,
        model: DetachedModel,
        placement: Placement,
        method: Method = "minmax",
        known: MeasuredRanges | None = None,
        percentile: float = DEFAULT_PERCENTILE,
    ) -> None:
        self._wanted = sorted({name for names in _measured_tensors(placement).values() for name in names})
        self._tensors, self._method = TensorObserver(model, self._wanted, data=placement.names.data), method
        self._measured, self._done = known or MeasuredRanges(0, {}), 0
        self._collector: FiniteHistogramCollector | None = None
        if method != "minmax":
            extents = self._measured.extents().items()
            not_finite = {name: limits for name, limits in extents if not np.isfinite(limits).all()}
            self._collector = FiniteHistogramCollector(method, percentile, self._measured.histograms, not_finite)

    def add(self, sample: Feeds) -> MeasuredRanges | None:
        """Measure the tensors on one more sample, and return what has been measured so far; None where a stopped run
        has measured this sample.

        Raises:
            UsageError: the model does not run on the sample, or no bins divide the elements of a tensor.
        """
        self._done += 1
        if self._done <= self._measured.samples:
            return None
        if self._collector is None:
            limits = {
                name: hull(self._measured.limits.get(name), found)
                for name, found in self._tensors.find_extremes(sample, self._done).items()
            }
            self._measured = MeasuredRanges(self._done, limits)
        else:
            for name, array in self._tensors.walk(sample, self._done):
                self._collector.count(name, array)
            counted = {name: tuple(map(np.asarray, parts)) for name, parts in self._collector.histogram_dict.items()}
            self._measured = MeasuredRanges(self._done, dict(self._collector.not_finite), counted)
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
        return replace(measured, limits=empty | limits | collector.not_finite)


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
    tensors = [placed.site.tensor for placed in placement.quantized_sites()]
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
            found[group] = reduce(hull, limits)
        else:
            found[group] = least_error_range(histograms, formats[group]) if histograms else NO_NUMBERS
        if not np.isfinite(found[group]).all():
            check_stored(model, placement)
            check_finite(group, *found[group], placement.names, _describe_source(group, model, placement))
    for group, limits in _ranges_of_constants(model, placement).items():
        found[group] = hull(found.get(group), limits)  # a Concat of a constant and a computed tensor has one range
    return found


def _describe_source(tensor: str, model: DetachedModel, placement: Placement) -> str:
    """Which stored tensor is infinite that `tensor` is computed from, as a part of a sentence; empty where none is."""
    read = {name for node in model.index.ancestors([tensor]) for name in node.input}
    found = constants_without_range((placed.site for placed in placement.sites), model)
    return next((f", since {site.tensor!r} holds infinity or NaN" for site in found if site.tensor in read), "")


def _measured_tensors(placement: Placement) -> dict[str, list[str]]:
    """Group → the tensors whose ranges make up its own: those that are fed or computed, not moved there.

    Where all are moved, from a tensor that the model itself quantizes, they are measured themselves.
    """
    computed: dict[str, list[str]] = {}
    moved: dict[str, list[str]] = {}
    for placed in placement.quantized_sites():
        if placed.site.role in ("input", "activation"):
            (moved if placed.site.moves else computed).setdefault(placed.site.group, []).append(placed.site.tensor)
    return computed | {group: names for group, names in moved.items() if group not in computed}


def _ranges_of_constants(model: DetachedModel, placement: Placement) -> dict[str, Range]:
    """The range of the constants in each group, such as a table that Gather reads. A table counts also where it is the
    weight of a product, since Gather passes its elements on."""
    stored = model.index.initializers
    found: dict[str, Range] = {}
    groups = {
        placed.site.group for placed in placement.quantized_sites() if placed.site.role in ("constant", "activation")
    }
    for placed in placement.sites:
        site = placed.site
        if site.group in groups and site.tensor in stored and (site.role == "weight" or placed.precision is not None):
            array = model.array(stored[placed.site.tensor])
            found[placed.site.group] = hull(found.get(placed.site.group), (float(array.min()), float(array.max())))
    return found


NO_NUMBERS: Final[Range] = (0.0, 0.0)
"""The range of tensors that have no elements in any sample."""

RANGES: Final = "calibration.npz"
"""The file of ranges and histograms that are kept between runs, next to the results of stages."""

RANGES_VERSION: Final = 4
"""Of what that file holds; the ranges of another version are measured anew."""
