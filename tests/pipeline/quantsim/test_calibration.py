"""Ranges: those that the values have, also of a run that was stopped and taken up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationMethod
from onnxruntime.quantization.calibrate import CalibrationDataReader, create_calibrator

from passes.weights.detached import DetachedModel, attach
from passes.weights.sessions import Session
from pipeline.errors import UsageError
from pipeline.quantsim.calibration import MeasuredRanges, Method, calibrate
from pipeline.quantsim.placement import Placement, place
from tests.pipeline.quantsim.pictures_of_qdq import mlp, model_of, rule


def samples(count: int) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(2)
    return [{"x": draw.standard_normal((2, 4)).astype(np.float32) * (1 + index)} for index in range(count)]


def place_all(model: DetachedModel) -> Placement:
    return place(model, [rule("op:*", "int8", "uint8")])


def test_ranges_are_those_of_the_values() -> None:
    model = mlp()
    ranges = calibrate(model, place_all(model), samples(4))
    values = [Session.of(model, ["h", "r"]).run(sample) | sample for sample in samples(4)]
    expected = {
        name: (min(float(one[name].min()) for one in values), max(float(one[name].max()) for one in values))
        for name in ("x", "h", "r", "y")
    }
    assert ranges == {name: pytest.approx(limits, rel=1e-6) for name, limits in expected.items()}


def test_a_stopped_calibration_goes_on_where_it_stopped() -> None:
    model = mlp()
    placement = place_all(model)
    seen: list[MeasuredRanges] = []

    class Stopped(Exception):
        pass

    def stop(ranges: MeasuredRanges) -> None:
        seen.append(ranges)
        if ranges.samples == 2:
            raise Stopped

    with pytest.raises(Stopped):
        calibrate(model, placement, samples(4), observer=stop)
    later: list[int] = []
    found = calibrate(
        model, placement, samples(4), known=seen[-1], observer=lambda ranges: later.append(ranges.samples)
    )
    assert later == [3, 4]
    assert found == calibrate(model, placement, samples(4))


@pytest.mark.parametrize("method", ["percentile", "entropy"])
def test_histograms_are_those_of_onnxruntime(method: Method, tmp_path: Path) -> None:
    model = model_of("g (float[1, 100000] x) => (float[1, 100000] y) { y = Neg(x) }")
    x = np.random.default_rng(0).standard_normal((1, 100000)).astype(np.float32)
    x[0, 0] = 1000
    found = calibrate(model, place(model, [rule("op:*", None, "uint8")]), [{"x": x}], method)
    onnx.save(attach(model), tmp_path / "model.onnx")
    kind = {"percentile": CalibrationMethod.Percentile, "entropy": CalibrationMethod.Entropy}[method]
    path = str(tmp_path / "augmented.onnx")
    peer = create_calibrator(tmp_path / "model.onnx", augmented_model_path=path, calibrate_method=kind)
    peer.collect_data(Reader([{"x": x}]))
    low, high = peer.compute_data()["y"].range_value
    assert found["y"] == (float(low), float(high))
    assert method == "entropy" or high < 10


class Reader(CalibrationDataReader):
    def __init__(self, rows: list[dict[str, np.ndarray]]) -> None:
        self.rows = rows

    def get_next(self) -> Any:
        return self.rows.pop() if self.rows else None


def test_a_table_has_the_range_of_its_numbers() -> None:
    model = model_of(
        "g (int64[3] i) => (float[3, 2] y) { y = Gather(table, i) }",
        table=np.array([[1, -2], [3, 4]], np.float32),
    )
    placement = place(model, [rule("op:*", "int8", "uint8")])
    assert calibrate(model, placement, [{"i": np.array([0, 0, 0])}]) == {"table": (-2.0, 4.0)}


def test_an_infinite_tensor_is_named() -> None:
    model = model_of("g (float[2] x) => (float[2] y) { y = Log(x) }")
    placement = place(model, [rule("op:*", None, "uint8")])
    with pytest.raises(UsageError, match="'y' reaches -inf to 0, which no scale can express; put clamp-mask"):
        calibrate(model, placement, [{"x": np.array([0, 1], np.float32)}])


def test_no_samples_are_refused() -> None:
    model = mlp()
    with pytest.raises(UsageError, match="the data has no samples"):
        calibrate(model, place_all(model), [])
