"""Measure the ranges of activations by onnxruntime's calibrators, one sample at a time; a stopped run is continued."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Final, Literal
from zipfile import BadZipFile

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationMethod
from onnxruntime.quantization.calibrate import CalibrationDataReader, create_calibrator

from passes.graph.index import initializers_of
from passes.weights.detached import DetachedModel
from passes.weights.files import replace_when_done, save
from pipeline.config.quantsim import DEFAULT_PERCENTILE
from pipeline.errors import InternalError, OnnxlineError, UsageError
from pipeline.quantsim.encodings import Range
from pipeline.quantsim.histograms import FiniteHistogramCollector, Histogram, check_finite, least_error_range
from pipeline.quantsim.placement import Placement

Method = Literal["minmax", "percentile", "entropy", "mse"]

Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class MeasuredRanges:
    """The ranges and histograms after some samples.

    limits: the least and the greatest number of each tensor, as the method has them. Percentile and entropy have none
        before the last sample, and MSE none of tensors with numbers, since they depend on the format. The least is
        above the greatest where no sample has a number of the tensor, as of a cache of length 0.
    histograms: of each tensor that has numbers; none for min-max.
    """

    samples: int
    limits: dict[str, Range]
    histograms: dict[str, Histogram] = field(default_factory=dict)

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
        samples: in the order of the stopped run, if `known` is given.
        known: what a stopped run has measured; its samples are not run again.
        observer: called after each sample.
        percentile: of the method of that name.

    Raises:
        UsageError: no samples; or a tensor is infinite or NaN on one of them, which no scale can express.
    """
    wanted = sorted({name for names in _measured_tensors(placement).values() for name in names})
    measured = known or MeasuredRanges(0, {})
    done = 0
    with tempfile.TemporaryDirectory(prefix="onnxline-calibration-") as folder:
        calibrator = _open_calibrator(model, wanted, method, percentile, Path(folder))
        if method != "minmax":
            calibrator.collector = FiniteHistogramCollector(calibrator, measured.histograms, wanted)
        for sample in samples:
            done += 1
            if done <= measured.samples:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of NaN; `check_finite` names the tensor
                _collect(calibrator, sample, done)
                if method == "minmax":
                    measured = MeasuredRanges(done, _merge(measured.limits, _ranges_of(calibrator.compute_data())))
                else:
                    measured = MeasuredRanges(done, {}, _as_arrays(calibrator.collector.histogram_dict))
            observer(measured)
        if not done:
            raise UsageError("calibration: the data has no samples; expected at least one")
        if method != "minmax":
            counts = method != "mse" and measured.histograms
            limits = _ranges_of(calibrator.compute_data()) if counts else {}
            empty = dict.fromkeys(set(wanted) - measured.histograms.keys(), EMPTY)
            measured = replace(measured, limits=limits | empty)
    return measured


def group_ranges(measured: MeasuredRanges, placement: Placement, model: DetachedModel) -> dict[str, Range]:
    """The range of each group of quantized tensors of `placement`; `measured` has all of them that are computed.

    Raises:
        UsageError: a range is infinite or NaN.
        InternalError: nothing was measured of a group; without numbers it would get a scale that fits nothing.
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
    stored = initializers_of(model.proto.graph)
    found: dict[str, Range] = {}
    groups = {placed.site.group for placed in placement.quantized() if placed.site.role in ("constant", "activation")}
    for placed in placement.sites:
        site = placed.site
        if site.group in groups and site.tensor in stored and (site.role == "weight" or placed.precision is not None):
            array = model.array(stored[placed.site.tensor])
            found[placed.site.group] = _hull(found.get(placed.site.group), (float(array.min()), float(array.max())))
    return found


def _open_calibrator(
    model: DetachedModel, tensors: Sequence[str], method: Method, percentile: float, folder: Path
) -> Any:
    """One of onnxruntime's calibrators. It measures the float tensors that the model has type information of, and that
    a node outside of bodies reads or makes. So the model is given to it with the types of `tensors`, and with a node
    that reads each input that only bodies read."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    outputs = {info.name for info in proto.graph.output}
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        for name in tensors
        if name not in outputs
    )
    known = {name for node in proto.graph.node for name in (*node.input, *node.output)}
    unseen = (name for name in tensors if name not in known)
    proto.graph.node.extend(onnx.helper.make_node("Identity", [name], [f"{name}/measured"]) for name in unseen)
    path = folder / "model.onnx"
    save(model.with_proto(proto), path)
    return create_calibrator(
        path,
        augmented_model_path=str(folder / "augmented.onnx"),
        calibrate_method=METHODS[method],
        use_external_data_format=model.nbytes() > EXTERNAL_FROM,
        extra_options={"percentile": percentile} if method == "percentile" else SETTINGS.get(method, {}),
    )


def _collect(calibrator: Any, sample: Feeds, number: int) -> None:
    try:
        calibrator.collect_data(_OneSample(sample))
    except OnnxlineError:
        raise
    except Exception as error:  # native code, with classes of its own
        shapes = ", ".join(f"{name}: {list(array.shape)}" for name, array in sample.items())
        raise UsageError(
            f"calibration: the model does not run on sample {number} ({shapes}): {error}; give samples of other sizes "
            "(quantsim.calibration.data)"
        ) from error


class _OneSample(CalibrationDataReader):
    """Hands out one sample, and then nothing."""

    def __init__(self, sample: Feeds) -> None:
        self._samples = [dict(sample)]

    def get_next(self) -> Any:
        return self._samples.pop() if self._samples else None


def _ranges_of(data: Any) -> dict[str, Range]:
    return {
        name: (float(np.min(entry.range_value[0])), float(np.max(entry.range_value[1]))) for name, entry in data.items()
    }


def _merge(known: Mapping[str, Range], ranges: Mapping[str, Range]) -> dict[str, Range]:
    return {name: _hull(known.get(name), found) for name, found in ranges.items()}


def _hull(known: Range | None, found: Range) -> Range:
    return (min(known[0], found[0]), max(known[1], found[1])) if known else found


EMPTY: Final[Range] = (np.inf, -np.inf)
"""The limits of a tensor that was measured, and had no number in any sample."""

NO_NUMBERS: Final[Range] = (0.0, 0.0)
"""The range of tensors that have no numbers in any sample."""

METHODS: Final[Mapping[Method, CalibrationMethod]] = {
    "minmax": CalibrationMethod.MinMax,
    "percentile": CalibrationMethod.Percentile,
    "entropy": CalibrationMethod.Entropy,
    "mse": CalibrationMethod.Percentile,
}

SETTINGS: Final[Mapping[Method, Mapping[str, object]]] = {"mse": {"symmetric": False}}
"""onnxruntime counts the values of its percentile without their signs, which an asymmetric range needs."""


EXTERNAL_FROM: Final = 2**30
"""Bytes of a model from which on onnxruntime writes the weights of its copies to files of their own."""
