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
from pipeline.config.quantsim import parse_precision
from pipeline.errors import InternalError, UsageError
from pipeline.quantsim.calibration import MeasuredRanges, RangeMeasurement, calibrate, group_ranges, measure
from pipeline.quantsim.encodings import encode, encode_range, quantize
from pipeline.quantsim.histograms import Method, least_error_range
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


METHODS: tuple[Method, ...] = ("minmax", "percentile", "entropy", "mse")


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_calibration_goes_on_where_it_stopped(method: Method, tmp_path: Path) -> None:
    model = mlp()
    placement = place_all(model)
    stopped = RangeMeasurement(model, placement, method)
    *_, measured = map(stopped.add, list(samples(4))[:2])
    assert measured is not None
    measured.save(tmp_path / "calibration.npz", "key")
    known = MeasuredRanges.load(tmp_path / "calibration.npz", "key")
    measurement = RangeMeasurement(model, placement, method, known)
    later = [found.samples for sample in samples(4) if (found := measurement.add(sample)) is not None]
    assert later == [3, 4]
    ranges = group_ranges(measurement.finish(), placement, model)
    assert ranges == calibrate(model, placement, samples(4), method)  # bit for bit


def test_what_was_measured_for_other_settings_or_in_a_damaged_file_is_not_taken_up(tmp_path: Path) -> None:
    file = tmp_path / "calibration.npz"
    assert MeasuredRanges.load(file, "key") is None
    MeasuredRanges(3, {"x": (-1.0, 0.1)}).save(file, "key")
    assert MeasuredRanges.load(file, "key") == MeasuredRanges(3, {"x": (-1.0, 0.1)})
    assert MeasuredRanges.load(file, "another key") is None
    file.write_bytes(file.read_bytes()[:200])
    assert MeasuredRanges.load(file, "key") is None


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


def test_a_tensor_without_elements_has_no_extent() -> None:
    assert MeasuredRanges(1, {"x": (np.inf, -np.inf), "y": (-1.0, 2.0)}).extents() == {"y": (-1.0, 2.0)}


def test_a_sample_inside_of_a_histogram_adds_no_bin() -> None:
    model = model_of("g (float[N] x) => (float[N] y) { y = Neg(x) }")
    placement = place(model, [rule("op:*", None, "uint8")])
    data = [{"x": np.linspace(1, 9, 99, dtype=np.float32)}] * 2
    counts, _, *_ = measure(model, placement, data, "percentile").histograms["y"]
    assert len(counts) == len(measure(model, placement, data[:1], "percentile").histograms["y"][0])


GROWING_SAMPLES = [np.linspace(-1, 3, 500), np.linspace(-40, 9, 3000), np.linspace(-0.1, 0.1, 9000)]
SAMPLES_OF_METHODS = {
    "growing": GROWING_SAMPLES,
    "sizes below the first": [np.linspace(10, 11, 100), np.linspace(0, 1, 10000)],
    "zeros first": [np.zeros(50), np.linspace(-1e-4, 2e-4, 1000)],
    "a constant first, then far away": [np.full(50, 3.0), np.linspace(-1e4, 2e4, 1000)],
}


@pytest.mark.parametrize("name", SAMPLES_OF_METHODS)
@pytest.mark.parametrize(("method", "percentile"), [("percentile", 99.0), ("percentile", 60.0), ("entropy", 99.999)])
def test_samples_one_by_one_have_the_range_of_all_at_once(
    method: Method, percentile: float, name: str, tmp_path: Path
) -> None:
    """Within a bin of onnxruntime's calibrator, which counts all samples at once."""
    model = model_of("g (float[N] x) => (float[N] y) { y = Neg(x) }")
    data = [{"x": array.astype(np.float32)} for array in SAMPLES_OF_METHODS[name]]
    found = measure(model, place(model, [rule("op:*", None, "uint8")]), data, method, percentile=percentile).limits
    onnx.save(attach(model), tmp_path / "model.onnx")
    kind = {"percentile": CalibrationMethod.Percentile, "entropy": CalibrationMethod.Entropy}[method]
    settings = {"percentile": percentile} if method == "percentile" else {}
    path = str(tmp_path / "augmented.onnx")
    peer: Any = create_calibrator(
        tmp_path / "model.onnx", augmented_model_path=path, calibrate_method=kind, extra_options=settings
    )
    together = np.concatenate([sample["x"] for sample in data])
    peer.collect_data(Reader([{"x": together}]))
    edges = peer.collector.histogram_dict["y"][1]
    wanted = [float(limit) for limit in peer.compute_data()["y"].range_value]
    np.testing.assert_allclose(found["y"], wanted, rtol=0, atol=1.01 * float(edges[1] - edges[0]))


def test_the_extent_of_a_tensor_is_that_of_its_values() -> None:
    model = model_of("g (float[4] x) => (float[4] y) { y = Neg(x) }")
    data = [{"x": np.array([-9000, 1, 2, 3], np.float32)}]
    for method in METHODS:
        assert measure(model, place(model, [rule("op:*", None, "uint8")]), data, method).extents()["x"] == (-9000, 3)


def test_the_percentile_is_that_of_the_configuration() -> None:
    model = model_of("g (float[1, 100000] x) => (float[1, 100000] y) { y = Neg(x) }")
    x = np.linspace(-1, 1, 100000, dtype=np.float32)[None]
    placement = place(model, [rule("op:*", None, "uint8")])
    found = measure(model, placement, [{"x": x}], "percentile", percentile=80.0).limits["y"]
    assert found == pytest.approx((-0.8, 0.8), abs=0.02)


@pytest.mark.parametrize("text", ["uint8", "int8", "int4", "uint3", "uint16", "int6/asymmetric"])
def test_mse_finds_the_range_of_least_error(text: str) -> None:
    """Against all values themselves, over a grid of both limits: a histogram of 2048 bins costs a percent or so."""
    draw = np.random.default_rng(1)
    x = draw.laplace(size=(1, 20000)).astype(np.float32)
    x[0, :2] = -15, 40
    model = model_of("g (float[1, 20000] x) => (float[1, 20000] y) { y = Identity(x) }")
    placement = place(model, [rule("op:*", None, text)])
    precision = placement.quantized_sites()[0].precision
    assert precision is not None
    found = calibrate(model, placement, [{"x": x}], "mse")["x"]

    def error(low: float, high: float) -> float:
        encoding = encode_range((low, high), precision)
        back = (quantize(x, encoding) - encoding.zero_point) * encoding.scale.astype(np.float64)
        return float(np.square(back - x).mean())

    shares = np.linspace(0.05, 1, 24)
    best = min(error(-15 * low, 40 * high) for low in shares for high in shares)
    assert error(*found) <= min(1.03 * best, 1.0001 * error(-15, 40))
    assert found[1] < 30 or precision.bits > 6  # two values of 20,000 are worth clipping for few bits alone


def test_mse_of_symmetric_int8_leaves_no_more_error_than_that_of_onnxsim() -> None:
    """onnxsim takes each value as the middle of its bin, so its threshold is another one."""
    from onnxsim.calibration import _mse_threshold_from_hist

    x = np.random.default_rng(4).standard_t(3, 50000).astype(np.float32)
    top = float(np.abs(x).max())
    counts, edges = np.histogram(x, 4096, range=(-top, top))
    histogram = (counts, edges, np.array(-top), np.array(top))
    precision = parse_precision("int8")
    assert precision is not None
    low, high = least_error_range([histogram], precision)
    threshold = float(_mse_threshold_from_hist(counts, edges, 400))

    def error(limits: tuple[float, float]) -> float:
        encoding = encode_range(limits, precision)
        return float(np.square(quantize(x, encoding) * encoding.scale.astype(np.float64) - x).mean())

    assert error((low, high)) <= 1.001 * error((-threshold, threshold)) < 1.05 * error((-top, top))


def test_tensors_that_share_an_encoding_have_one_range_of_least_error() -> None:
    """Few values of x reach far, but those of z lie there, so the range of both together has to."""
    draw = np.random.default_rng(0)
    x, z = (draw.laplace(size=(1, 5000)).astype(np.float32) * size for size in (1, 8))
    model = model_of("g (float[1, N] x, float[1, N] z) => (float[1, M] y) { y = Concat <axis = 1> (x, z) }")
    placement = place(model, [rule("op:*", None, "int4")])
    together = calibrate(model, placement, [{"x": x, "z": z}], "mse")
    alone = calibrate(model, placement, [{"x": x, "z": np.zeros_like(z)}], "mse")
    assert together.keys() == alone.keys() == {"x"}
    assert together["x"][1] > 2 * alone["x"][1]


@pytest.mark.parametrize("method", METHODS)
def test_a_concat_of_a_constant_and_a_computed_tensor_has_the_range_of_both(method: Method) -> None:
    """Such as ViT's token for the class, in front of the patches."""
    first = np.full((1, 1), -4, np.float32)
    model = model_of(
        """g (float[1, 64] x) => (float[1, 65] y) {
            r = Relu(x)
            y = Concat <axis = 1> (first, r)
        }""",
        first=first,
    )
    x = np.linspace(-9, 9, 64, dtype=np.float32)[None]
    low, high = calibrate(model, place(model, [rule("op:*", None, "uint16")]), [{"x": x}], method)["r"]
    assert low == -4
    assert high == pytest.approx(9, rel=0.02)  # entropy may leave the last of the values out


@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_that_is_infinite_in_one_sample_is_named(method: Method) -> None:
    model = model_of("g (float[2] x) => (float[2] y) { y = Log(x) }")
    placement = place(model, [rule("op:*", None, "uint8")])
    data = [{"x": np.array(values, np.float32)} for values in ([1, 2], [0, 1])]
    with pytest.raises(UsageError, match="'y' reaches -inf to"):
        calibrate(model, placement, data, method)


def test_a_histogram_that_would_need_too_many_bins_is_refused() -> None:
    model = model_of("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    placement = place(model, [rule("op:*", None, "uint8")])
    data = [{"x": np.array(values, np.float32)} for values in ([1e-9, 0], [1, 2])]
    with pytest.raises(UsageError, match=r"'[xy]' reaches 2, which is too far .*method to minmax"):
        calibrate(model, placement, data, "mse")


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_printed(method: Method, capsys: pytest.CaptureFixture[str]) -> None:
    model = mlp()
    calibrate(model, place_all(model), samples(2), method)
    assert not capsys.readouterr().out  # onnxruntime's own lines would break --json


class Reader(CalibrationDataReader):
    def __init__(self, rows: list[dict[str, np.ndarray]]) -> None:
        self.rows = rows

    def get_next(self) -> Any:
        return self.rows.pop() if self.rows else None


def test_a_table_has_the_range_of_its_numbers() -> None:
    model = model_of(
        "g (int64[3] i) => (float[3, 2] y) { y = Gather(table, i) }", table=np.array([[1, -2], [3, 4]], np.float32)
    )
    placement = place(model, [rule("op:*", "int8", "uint8")])
    assert calibrate(model, placement, [{"i": np.array([0, 0, 0])}]) == {"table": (-2.0, 4.0)}


TIED = """g (int64[3] i) => (float[3, 4] y) {
    e = Gather(table, i)
    y = MatMul(e, turned)
}"""


@pytest.mark.parametrize("layout", ["", "turned = Transpose(table)\n"])
def test_what_is_gathered_from_a_weight_has_the_range_of_the_weight(layout: str) -> None:
    """An embedding that is the output projection too: its group has no tensor that is computed."""
    text = TIED.replace("y = ", f"{layout}y = ")
    model = model_of(
        text if layout else text.replace("turned", "table"), table=np.diag([1, 2, 3, -4]).astype(np.float32)
    )
    placement = place(model, [rule("op:*", "int8/channel", "uint8")])
    assert {placed.site.tensor: placed.site.role for placed in placement.sites} == {
        "table": "weight",
        "e": "activation",
        "y": "activation",
    }
    ranges = calibrate(model, placement, [{"i": np.array([0, 1, 3])}])
    assert ranges == {"table": (-4.0, 3.0), "y": (0.0, 16.0)}
    encodings = encode(placement, ranges, model)
    assert (encodings["table"].scale.shape, encodings["e"].scale.shape) == ((4,), ())


CACHE = """g (float[N, 4] past, float[2, 4] x) => (float[M, 4] present) {
    r = Relu(x)
    present = Concat <axis = 0> (past, r)
}"""


@pytest.mark.parametrize("method", METHODS)
def test_a_cache_of_length_0_is_taken(method: Method) -> None:
    model = model_of(CACHE)
    placement = place_all(model)
    x = np.linspace(-1, 2, 8, dtype=np.float32).reshape(2, 4)
    empty, full = ({"past": np.full((length, 4), 3, np.float32), "x": x} for length in (0, 2))
    assert calibrate(model, placement, [empty], method)["past"][1] == pytest.approx(2, rel=0.02)
    first = calibrate(model, placement, [empty, full], method)
    assert first == calibrate(model, placement, [full, empty], method)
    assert first["past"][1] == pytest.approx(3, rel=0.02)


@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_that_never_has_a_number_has_the_range_of_zero(method: Method) -> None:
    model = model_of("g (float[N, 4] past) => (float[N, 4] y) { y = Neg(past) }")
    ranges = calibrate(model, place_all(model), [{"past": np.zeros((0, 4), np.float32)}], method)
    assert ranges == {"past": (0.0, 0.0), "y": (0.0, 0.0)}


READ_IN_BODIES = """g (float[4] x, bool c) => (float[4] y) {
    y = If (c) <
        then_branch = th () => (float[4] n) { n = Neg(x) },
        else_branch = el () => (float[4] a) { a = Abs(x) }
    >
}"""


@pytest.mark.parametrize("method", METHODS)
def test_an_input_that_only_bodies_read_is_measured(method: Method) -> None:
    model = model_of(READ_IN_BODIES)
    data = {"x": np.linspace(-3, 5, 4, dtype=np.float32), "c": np.array(True)}
    found = calibrate(model, place_all(model), [data], method)
    assert found["x"] == pytest.approx((-3, 5), rel=0.05)
    assert found["y"] == pytest.approx((-5, 3), rel=0.05)


def test_a_tensor_that_was_not_measured_has_no_range() -> None:
    model = mlp()
    with pytest.raises(InternalError, match="'h' was not measured"):
        group_ranges(MeasuredRanges(1, {"x": (-1, 1)}), place_all(model), model)


def test_an_infinite_tensor_is_named() -> None:
    model = model_of("g (float[2] x) => (float[2] y) { y = Log(x) }")
    placement = place(model, [rule("op:*", None, "uint8")])
    with pytest.raises(UsageError, match="'y' reaches -inf to 0, which no scale can express; put clamp-mask"):
        calibrate(model, placement, [{"x": np.array([0, 1], np.float32)}])


def test_an_infinite_constant_is_named_where_its_result_is() -> None:
    bias = np.array([0, np.inf], np.float32)
    model = model_of("g (float[2] x) => (float[2] y) { a = Add(x, b) y = Relu(a) }", b=bias)
    placement = place(model, [rule("op:Relu", None, "uint8")])
    with pytest.raises(UsageError, match="'y' reaches 0 to inf, which no scale can express, since 'b' holds infinity"):
        calibrate(model, placement, [{"x": np.zeros(2, np.float32)}])


@pytest.mark.parametrize(("stored", "place_in_it"), [("w", (1, 0)), ("b", 1)])
def test_a_weight_or_bias_that_makes_a_tensor_nan_is_named_in_place_of_the_tensor(stored: str, place_in_it) -> None:
    weights = {"w": np.ones((2, 2), np.float32), "b": np.ones(2, np.float32)}
    weights[stored][place_in_it] = np.nan
    model = model_of("g (float[1, 2] x) => (float[1, 2] y) { y = Gemm (x, w, b) }", **weights)
    with pytest.raises(UsageError, match=f"the stored tensor '{stored}' holds infinity or NaN"):
        calibrate(model, place(model, [rule("op:*", "int8", "uint8")]), [{"x": np.ones((1, 2), np.float32)}])


def test_no_samples_are_refused() -> None:
    model = mlp()
    with pytest.raises(UsageError, match="the data has no samples"):
        calibrate(model, place_all(model), [])


@pytest.mark.parametrize(
    ("method", "numbers", "advice"),
    [
        ("percentile", [1, 1.00001], "set quants"),
        ("percentile", [-3e38, 3e38], "set quants"),
        ("mse", [-3e38, 1], "put clamp-mask into quantsim.prepare, as for a mask, or set quants"),
        ("entropy", [-3e38, 1], "put clamp-mask into"),
    ],
)
def test_a_range_that_no_bins_divide_is_refused(method: Method, numbers: list[float], advice: str) -> None:
    model = model_of("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    placement = place(model, [rule("tensor:x", None, "uint8")])
    with pytest.raises(
        UsageError, match=rf"'x' reaches .* too narrow or too wide for the bins of a histogram; {advice}"
    ):
        calibrate(model, placement, [{"x": np.array(numbers, np.float32)}], method)


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy", "mse"])
def test_an_infinite_output_in_float_is_not_calibrated(method: Method) -> None:
    model = model_of("g (float[4] x) => (float[4] y) { y = Reciprocal(x) }")
    placement = place(model, [rule("tensor:x", None, "uint8")])
    low, high = calibrate(model, placement, [{"x": np.array([0, 1, 2, 3], np.float32)}], method)["x"]
    assert low <= 0
    assert high == pytest.approx(3, rel=0.2)


def test_a_tensor_moved_from_one_that_the_model_quantizes_is_measured() -> None:
    """A Reshape of what a DequantizeLinear gives, which is left as it is, has a range of its own."""
    model = model_of("""g (uint8[4] x) => (float[2, 2] y) <float s = {0.5}, uint8 z = {0}, int64[2] shape = {2, 2}> {
        d = DequantizeLinear (x, s, z) r = Reshape (d, shape) y = Relu (r)
    }""")
    placement = place(model, [rule("op:Reshape", None, "uint8"), rule("op:Relu", None, "uint8")])
    assert calibrate(model, placement, [{"x": np.array([0, 2, 4, 8], np.uint8)}])["r"] == (0, 4)
