"""Ranges of activations, by onnxruntime's calibrators, one sample at a time; what is known survives a stopped run."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationMethod
from onnxruntime.quantization.calibrate import CalibrationDataReader, create_calibrator

from passes.weights.detached import DetachedModel
from passes.weights.files import save
from pipeline.errors import UsageError
from pipeline.quantsim.encodings import Range
from pipeline.quantsim.placement import Placement

__all__ = ["MeasuredRanges", "Method", "calibrate"]

Method = Literal["minmax", "percentile", "entropy"]

Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class MeasuredRanges:
    """What is known after some samples: the least and the greatest number of each tensor."""

    samples: int
    limits: dict[str, Range]


def calibrate(
    model: DetachedModel,
    placement: Placement,
    samples: Iterable[Feeds],
    method: Method = "minmax",
    known: MeasuredRanges | None = None,
    observer: Callable[[MeasuredRanges], object] = lambda _: None,
) -> dict[str, Range]:
    """The range of each group of quantized tensors, by the name of the group.

    Args:
        samples: in the order of the stopped run, if `known` is given.
        known: min-max ranges of a stopped run; its samples are not run again.
        observer: called after each sample. Histograms have no ranges before the last one.

    Raises:
        UsageError: no samples; or a tensor is infinite or NaN on one of them, which no scale can express.
    """
    groups = _measured_tensors(placement)
    wanted = sorted({name for names in groups.values() for name in names})
    measured: dict[str, Range] = dict(known.limits) if known else {}
    done = 0
    with tempfile.TemporaryDirectory(prefix="onnxline-calibration-") as folder:
        calibrator = _open_calibrator(model, wanted, method, Path(folder))
        for sample in samples:
            done += 1
            if known and done <= known.samples:
                continue
            calibrator.collect_data(_OneSample(sample))
            if method == "minmax":
                measured = _merge(measured, _ranges_of(calibrator.compute_data()))
            observer(MeasuredRanges(done, measured))
        if not done:
            raise UsageError("calibration: the data has no samples; expected at least one")
        if method != "minmax":
            measured = _ranges_of(calibrator.compute_data())
    return {group: _check_range(group, names, measured) for group, names in groups.items()} | _stored(model, placement)


def _measured_tensors(placement: Placement) -> dict[str, list[str]]:
    """Group → the tensors whose ranges make up its own: those that are fed or computed, not moved there."""
    groups: dict[str, list[str]] = {}
    for placed in placement.quantized():
        if placed.site.role in ("input", "activation"):
            names = groups.setdefault(placed.site.group, [])
            if not placed.site.moves:
                names.append(placed.site.tensor)
    return {group: names for group, names in groups.items() if names}


def _stored(model: DetachedModel, placement: Placement) -> dict[str, Range]:
    """The ranges of the groups that begin with a constant: of a table that is only gathered from, say."""
    stored = {tensor.name: tensor for tensor in model.proto.graph.initializer}
    found: dict[str, Range] = {}
    for placed in placement.quantized():
        if placed.site.role == "constant":
            array = model.array(stored[placed.site.tensor])
            found[placed.site.group] = _hull(found.get(placed.site.group), (float(array.min()), float(array.max())))
    return found


def _open_calibrator(model: DetachedModel, tensors: Iterable[str], method: Method, folder: Path) -> Any:
    """One of onnxruntime's calibrators. It measures the float tensors that the model has type information of, so the
    model is given to it with that of `tensors` alone."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    outputs = {info.name for info in proto.graph.output}
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        for name in tensors
        if name not in outputs
    )
    path = folder / "model.onnx"
    save(model.with_proto(proto), path)
    return create_calibrator(
        path,
        augmented_model_path=str(folder / "augmented.onnx"),
        calibrate_method=METHODS[method],
        use_external_data_format=model.nbytes() > EXTERNAL_FROM,
    )


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


def _check_range(group: str, names: Iterable[str], measured: Mapping[str, Range]) -> Range:
    low = min(measured[name][0] for name in names)
    high = max(measured[name][1] for name in names)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UsageError(
            f"calibration: {group!r} reaches {low:g} to {high:g}, which no scale can express; put clamp-mask into the "
            "recipe if it is a mask, or leave the tensor in float: quantsim.rules, tensor:NAME: {activations: float}"
        )
    return low, high


METHODS: Final[Mapping[Method, CalibrationMethod]] = {
    "minmax": CalibrationMethod.MinMax,
    "percentile": CalibrationMethod.Percentile,
    "entropy": CalibrationMethod.Entropy,
}

EXTERNAL_FROM: Final = 2**30
"""Bytes of a model from which on onnxruntime writes the weights of its copies to files of their own."""
