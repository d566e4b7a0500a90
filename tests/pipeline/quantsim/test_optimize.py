"""`quantsim.optimize`: the numbers are the library's, a weight that became worse stays, and failures are named."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from passes.encodings.aimet import read_aimet
from passes.encodings.encoding import fit_encodings
from passes.errors import PolicyError
from passes.weights.detached import DetachedModel, attach, read_model
from pipeline.cli import app
from pipeline.errors import UsageError
from pipeline.quantsim import algorithm, insert_qdq, optimize
from pipeline.quantsim.encodings import encode, quantize, round_trip
from pipeline.quantsim.optimize import Chosen, Optimization, OptimizedStep, compare
from pipeline.quantsim.optimizers import Optimizer, optimizers_of
from pipeline.quantsim.placement import Placement, place
from pipeline.quantsim.sensitivity import Layer
from pipeline.quantsim.simulation import compare_outputs
from tests.pipeline.quantsim.pictures_of_qdq import dependent_rows, model_of, rule

TWO_PRODUCTS = """g (float[16, 32] x) => (float[16, 8] y) {
    h = MatMul(x, first)
    r = Relu(h)
    t = Transpose <perm = [1, 0]> (second)
    y = Gemm(r, t)
}"""


def two_products() -> DetachedModel:
    draw = np.random.default_rng(0)
    first, second = draw.normal(size=(32, 24)), draw.normal(size=(8, 24))
    return model_of(TWO_PRODUCTS, first=first.astype(np.float32), second=second.astype(np.float32))


def run(
    tmp_path: Path, weights: str, *items: object, model: DetachedModel | None = None
) -> tuple[Placement, Chosen, tuple[OptimizedStep, ...]]:
    model = model or two_products()
    placement = place(model, [rule("op:*", weights, "float")])
    held = dependent_rows(2, seed=2)

    def rate(chosen: Chosen) -> float:
        quantized = insert_qdq(chosen.tune(model), encode(placement, {}, model, chosen.encodings))
        return compare_outputs(model, quantized, held)["y"].sqnr_db

    optimization = Optimization(model, placement, encode(placement, {}, model), lambda: held, rate, tmp_path)
    chosen, rows = optimization.run(optimizers_of(items), dependent_rows(4, seed=1))
    return placement, chosen, rows


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the library here: a process of its own imports onnxsim anew, which takes seconds."""

    def call(_: Optimizer, folder: Path) -> Any:
        algorithm.main(folder)
        return json.loads((folder / "found.json").read_text())

    monkeypatch.setattr(optimize, "call_library", call)


@pytest.mark.usefixtures("in_process")
def test_a_step_by_which_the_chain_gets_worse_is_undone(tmp_path: Path) -> None:
    model, ratios = two_products(), iter([20.0, 19.0])
    placement = place(model, [rule("op:*", "int4/channel", "float")])
    encodings = encode(placement, {}, model)
    optimization = Optimization(
        model,
        placement,
        encodings,
        lambda: dependent_rows(2, seed=2),
        lambda _: next(ratios),
        tmp_path,
        must_not_fall=True,
    )
    chosen, [row] = optimization.run(optimizers_of(["gptq"]), dependent_rows(4, seed=1))
    assert (row.status, row.outputs_db, dict(chosen.arrays)) == ("reverted", (20.0, 19.0), {})
    assert any(layer.taken for layer in row.layers)
    assert "outputs 20.00 → 19.00 dB, so it is undone: the chain is worse by it" in str(row)


@pytest.mark.usefixtures("in_process")
def test_gptq_takes_a_model_whose_products_read_its_inputs_alone(tmp_path: Path) -> None:
    model = model_of(
        "g (float[16, 32] x) => (float[16, 8] y) { y = MatMul(x, w) }",
        w=np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32),
    )
    _, chosen, [row] = run(tmp_path, "int4/channel", "gptq", model=model)
    assert row.status == "ran" and chosen.arrays.keys() == {"w"}


def test_gptq_gives_the_numbers_of_its_library_and_is_better_on_samples_that_it_has_not_seen(tmp_path: Path) -> None:
    """onnxsim's own call on its own form of the model, and its scalar arithmetic: blocks of 8 of int4."""
    from onnxsim import apply_gptq

    model = two_products()
    placement, chosen, (row,) = run(tmp_path, "int4/block8", "gptq", model=model)
    assert (row.status, row.left, row.release.split()[0]) == ("ran", {}, "onnxsim")
    assert row.outputs_db is not None and row.outputs_db[1] > row.outputs_db[0] + 3
    assert [layer.taken for layer in row.layers] == [True, True]
    assert all(layer.after_db > layer.before_db + 3 for layer in row.layers)
    nearest = insert_qdq(model, encode(placement, {}, model))
    library = apply_gptq(attach(model), attach(nearest), [dict(sample) for sample in dependent_rows(4, seed=1)])
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in library.graph.initializer}
    ours = quantize(chosen.arrays["first"], chosen.encodings["first"])
    np.testing.assert_array_equal(ours, stored["first_quantized"].astype(np.int64))


@pytest.mark.usefixtures("in_process")
def test_each_channel_and_any_bits_and_a_stored_transpose(tmp_path: Path) -> None:
    _, chosen, (row,) = run(tmp_path, "int3/channel", {"gptq": {"percdamp": 0.02}})
    assert {layer.weight for layer in row.layers if layer.taken} == {"first", "second"}
    for name, array in chosen.arrays.items():
        encoding = chosen.encodings[name]
        assert np.abs(quantize(array, encoding)).max() <= 3
        np.testing.assert_array_equal(round_trip(array, encoding, is_stored=True), array)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("weights", ["uint4/block8", "uint4/channel", "int4/block7"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_with_zero_points_and_in_the_order_of_the_activations(
    tmp_path: Path, weights: str, act_order: bool
) -> None:
    """Column by column as in the paper, in another arithmetic: the rest of a row is fitted anew."""
    draw = np.random.default_rng(0)
    array = (draw.normal(size=(32, 6)) + 0.4).astype(np.float32)
    model = model_of("g (float[16, 32] x) => (float[16, 6] y) { y = MatMul(x, w) }", w=array)
    placement, chosen, (row,) = run(
        tmp_path, weights, {"gptq": {"act_order": act_order, "percdamp": 0.01}}, model=model
    )
    assert row.status == "ran" and row.outputs_db is not None and row.outputs_db[1] > row.outputs_db[0] + 2
    data = np.concatenate([sample["x"] for sample in dependent_rows(4, seed=1)]).astype(np.float64)
    hessian = data.T @ data
    damped = hessian + 0.01 * np.trace(hessian) / 32 * np.eye(32)
    encoding = encode(placement, {}, model)["w"]
    scale, zero = (
        np.broadcast_to(encoding.spread(array, part), array.shape) for part in (encoding.scale, encoding.zero_point)
    )
    order = np.argsort(-np.diag(hessian), kind="stable") if act_order else np.arange(32)
    left, found = array.astype(np.float64), np.zeros(array.shape, np.int64)
    for done, column in enumerate(order, 1):
        precision, rest = encoding.precision, order[done:]
        exact = left[column] / scale[column] + zero[column]
        found[column] = np.clip(np.rint(exact), precision.lowest, precision.highest)
        lost = left[column] - (found[column] - zero[column]) * scale[column]
        left[rest] += np.linalg.solve(damped[np.ix_(rest, rest)], np.outer(damped[rest, column], lost))
    np.testing.assert_array_equal(quantize(chosen.arrays["w"], chosen.encodings["w"]), found)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("weights", ["int3/channel", "uint3/block8", "int3"])
def test_distill_fits_all_weights_to_the_outputs_and_gives_the_same_bits_again(tmp_path: Path, weights: str) -> None:
    model = two_products()
    steps = ["gptq", {"distill": {"iterations": 60}}]
    (placement, chosen, rows), (_, again, _) = (run(tmp_path / name, weights, *steps, model=model) for name in "ab")
    by_layer, whole = rows
    assert by_layer.outputs_db is not None and whole.outputs_db is not None
    assert (whole.status, whole.outputs_db[0]) == ("ran", by_layer.outputs_db[1])
    assert whole.outputs_db[1] > whole.outputs_db[0] + 0.2
    for name, array in chosen.arrays.items():
        encoding = chosen.encodings[name]
        integers = quantize(array, encoding)
        assert integers.min() >= encoding.precision.lowest and integers.max() <= encoding.precision.highest
        np.testing.assert_array_equal(round_trip(array, encoding, is_stored=True), array)
        assert not np.array_equal(encoding.scale, encode(placement, {}, model)[name].scale)
        assert array.tobytes() == again.arrays[name].tobytes()
        assert encoding.scale.tobytes() == again.encodings[name].scale.tobytes()


def test_distill_is_undone_as_a_whole_where_the_outputs_get_worse(tmp_path: Path) -> None:
    _, chosen, (row,) = run(tmp_path, "int4/channel", {"distill": {"iterations": 3, "rate": 2.0}})
    assert (row.status, dict(chosen.arrays)) == ("reverted", {})
    assert str(row).endswith(f"dB, so it is undone: the outputs are worse by it; {row.seconds:.1f} s")


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ("y = Round(a)", "no gradient goes through 1 operator of the model: Round"),
        ("b = Abs(a) c = Mul(b, half) y = Sqrt(c)", "an output or a gradient of the model is not finite"),
    ],
)
def test_distill_fails_where_no_gradient_goes_through(tmp_path: Path, nodes: str, reason: str) -> None:
    text = f"g (float[16, 32] x) => (float[16, 8] y) {{ a = MatMul(x, w) {nodes} }}"
    weights = {"w": np.ones((32, 8), np.float32), "half": np.array([0, 1] * 4, np.float32)}
    model = model_of(text, **weights)
    _, chosen, (row,) = run(tmp_path, "int4/channel", {"distill": {"iterations": 4}}, model=model)
    assert (row.status, dict(chosen.arrays)) == ("failed", {})
    assert reason in row.reason


def test_a_step_that_takes_nothing_says_so(tmp_path: Path) -> None:
    _, _, (row,) = run(tmp_path, "int4/channel", "bias-correction")  # two products without a bias
    assert row.status == "reverted"
    assert str(row).startswith("optimize bias-correction (onnxsim): it takes nothing of the model; outputs ")


def test_distill_says_how_much_memory_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.quantsim.distill.memory_limit", lambda: 2**15)
    _, chosen, (row,) = run(tmp_path, "int4/channel", "distill")
    assert (row.status, dict(chosen.arrays)) == ("failed", {})
    assert row.reason == (
        "it holds 9 arrays of the size of each weight, 33.8 KiB, and this machine has 32.0 KiB of memory"
    )


def test_distill_passes_over_an_output_of_zeros(tmp_path: Path) -> None:
    """`z` is zero in float on all that is fitted to, and not where it is quantized: its noise has no ratio."""
    weight = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    most = np.max([sample["x"] @ weight for sample in dependent_rows(4, seed=1)], axis=(0, 1)) + np.float32(1e-3)
    text = "g (float[16, 32] x) => (float[16, 8] z, float[16, 8] y) { y = MatMul(x, w) a = Sub(y, most) z = Relu(a) }"
    model = model_of(text, w=weight, most=most)
    _, _, (row,) = run(tmp_path, "int3/channel", {"distill": {"iterations": 20}}, model=model)
    assert row.status == "ran" and row.outputs_db is not None and row.outputs_db[1] > row.outputs_db[0]


@pytest.mark.usefixtures("in_process")
def test_a_step_gives_the_same_bits_again(tmp_path: Path) -> None:
    first, second = (run(tmp_path / name, "int4/block8", "gptq")[1] for name in ("first", "second"))
    assert first.names == second.names == {"first", "second"}
    for name, array in first.arrays.items():
        assert array.tobytes() == second.arrays[name].tobytes()
    for name, encoding in first.encodings.items():
        assert encoding.scale.tobytes() == second.encodings[name].scale.tobytes()


@pytest.mark.usefixtures("in_process")
def test_bias_correction_adds_what_the_mean_of_each_channel_has_lost(tmp_path: Path) -> None:
    """Bit for bit as onnxsim's own call. The mean of the data is not zero; a Gemm has a bias, and an Add holds one."""
    from onnxsim import correct_bias

    draw = np.random.default_rng(0)
    shapes = {"first": (32, 24), "bias": (24,), "second": (24, 8), "row": (1, 8)}
    constants = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    text = """g (float[16, 32] x) => (float[16, 8] y) {
        h = Gemm(x, first, bias) r = Relu(h) m = MatMul(r, second) y = Add(m, row)
    }"""
    model = model_of(text, **constants)
    placement, chosen, (row,) = run(tmp_path, "int2/channel", "bias-correction", model=model)
    assert (row.status, {layer.weight for layer in row.layers}) == ("ran", {"bias", "row"})
    rounded = round_trip(constants["first"], chosen.encodings["first"], is_stored=True)
    data = np.concatenate([sample["x"] for sample in dependent_rows(4, seed=1)])
    lost = (data @ (constants["first"] - rounded)).mean(axis=0)
    np.testing.assert_allclose(chosen.arrays["bias"] - constants["bias"], lost, atol=1e-4)
    nearest = insert_qdq(model, encode(placement, {}, model))
    library = correct_bias(attach(model), attach(nearest), [dict(sample) for sample in dependent_rows(4, seed=1)])
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in library.graph.initializer}
    np.testing.assert_array_equal(chosen.arrays["bias"], constants["bias"] + stored["h_bias_correction"].ravel())
    other = place(model, [rule("op:*", "int2/channel", "float"), rule("tensor:first", "int8/channel")])
    assert not chosen.suit(other).arrays, "the corrections are those of these weights"
    assert chosen.suit(placement).arrays.keys() == chosen.arrays.keys()


@pytest.mark.usefixtures("in_process")
def test_a_whole_simulation_is_judged_on_samples_that_were_held_out(tmp_path: Path) -> None:
    onnx.save(attach(two_products()), tmp_path / "two.onnx")
    (tmp_path / "data").mkdir()
    for index, sample in enumerate(dependent_rows(8, seed=1)):
        np.savez(tmp_path / "data" / f"{index}.npz", **dict(sample))  # type: ignore[arg-type]
    config = """
model: {onnx: two.onnx}
passes: {recipe: []}
quantsim:
  profile: weight-only
  rules: {"op:*": {weights: int4/channel, activations: uint16}}
  optimize: [gptq]
  calibration: {data: data}
"""
    (tmp_path / "two.yaml").write_text(config)
    out = tmp_path / "out"
    shown = CliRunner().invoke(app, ["quantsim", str(tmp_path / "two.yaml"), "--out", str(out), "--verbose"])
    assert shown.exit_code == 0, shown.output
    assert "note: ranges and steps are fitted to 6 samples, and all is judged on 2 others" in shown.output
    assert "optimize gptq (onnxsim " in shown.output
    assert "2 of 2 layers better on samples that it did not see" in shown.output
    report = json.loads((out / "quantsim.json").read_text())
    (step,), (output,) = report["optimized"], report["outputs"].values()
    assert output["sqnr_db"] == pytest.approx(step["outputs_db"][1])
    rounded, quantized = (read_model(out / name) for name in ("model.rounded.onnx", "model.qdq.onnx"))
    encodings = fit_encodings(read_aimet(out / "model.encodings")[0], rounded)
    again = insert_qdq(rounded, encodings)
    for name in ("first_quantized", "second_quantized"):
        np.testing.assert_array_equal(
            again.array(again.index.initializers[name]), quantized.array(quantized.index.initializers[name])
        )


@pytest.mark.skipif("AIMET_PYTHON" not in os.environ, reason="AIMET_PYTHON names no interpreter")
@pytest.mark.parametrize("weight", ["first", "third"])
def test_seq_mse_takes_one_product_and_leaves_the_others_in_float(tmp_path: Path, weight: str) -> None:
    """AIMET's own call needs the others named, and then fails where the first product is one of them."""
    draw = np.random.default_rng(0)
    shapes = {"first": (32, 24), "second": (24, 16), "third": (16, 8)}
    constants = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    text = """g (float[16, 32] x) => (float[16, 8] y) {
        a = MatMul(x, first) b = Relu(a) c = MatMul(b, second) d = Relu(c) y = MatMul(d, third)
    }"""
    model = model_of(text, 21, **constants)
    placement = place(model, [rule("op:*", "float", "float"), rule(f"tensor:{weight}", "int3/channel")])
    held = dependent_rows(2, seed=2)
    optimization = Optimization(model, placement, encode(placement, {}, model), lambda: held, lambda _: 0.0, tmp_path)
    steps = optimizers_of([{"seq-mse": {"python": os.environ["AIMET_PYTHON"]}}])
    chosen, (row,) = optimization.run(steps, dependent_rows(4, seed=1))
    assert (row.status, [layer.weight for layer in row.layers]) == ("ran", [weight])
    assert not np.array_equal(chosen.encodings[weight].scale, encode(placement, {}, model)[weight].scale)


def test_a_library_that_fails_is_a_failed_step_and_no_rounding_under_its_name(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "Traceback" >&2\necho "ImportError: no numbers today" >&2\nexit 1\n')
    python.chmod(0o755)
    _, chosen, (row,) = run(tmp_path / "job", "int4/channel", {"gptq": {"python": str(python)}})
    assert (row.status, row.reason) == ("failed", "ImportError: no numbers today")
    assert not chosen.arrays
    assert str(row) == (
        "optimize gptq failed, so every weight keeps the rounding that it had: ImportError: no numbers today"
    )


def test_a_convolution_is_left_and_the_reason_is_said(tmp_path: Path) -> None:
    text = "g (float[16, 32] x) => (float[16, 4, 32] y) { a = Unsqueeze(x, axis) y = Conv(a, w) }"
    weights = {"w": np.ones((4, 1, 1), np.float32), "axis": np.array([1])}
    _, _, (row,) = run(tmp_path, "int4/channel", "gptq", model=model_of(text, **weights))
    assert (row.status, row.left) == ("reverted", {"w": "Conv is no product of computed rows with a matrix"})


def test_a_weight_that_became_worse_for_all_its_layers_together_is_not_taken() -> None:
    model = model_of(
        "g (float[2, 2] x) => (float[2, 2] y, float[2, 2] z) { a = MatMul(x, w) y = MatMul(a, w) z = MatMul(x, v) }",
        w=np.eye(2, dtype=np.float32),
        v=np.eye(2, dtype=np.float32),
    )
    layers = {node.output[0]: Layer((node,)) for node in model.proto.graph.node}
    encodings = encode(place(model, [rule("op:*", "int4", "float")]), {}, model)
    before, after = {"a": 0.01, "y": 0.01, "z": 0.01}, {"a": 0.001, "y": 0.1, "z": 0.001}
    rows, better = compare(layers, Chosen(encodings), before, after)
    assert better == ["v"]
    assert {(row.layer, round(row.before_db), round(row.after_db), row.taken) for row in rows} == {
        ("a", 20, 30, False),
        ("y", 20, 10, False),
        ("z", 20, 30, True),
    }


def test_what_was_chosen_holds_for_the_same_format_alone() -> None:
    model = two_products()
    placement = place(model, [rule("op:*", "int4/channel", "float")])
    encodings = encode(placement, {}, model)
    chosen = Chosen(encodings, {"first": np.zeros((32, 24), np.float32)})
    other = place(model, [rule("op:*", "int4/channel", "float"), rule("tensor:first", "int8/channel")])
    assert (chosen.suit(placement).arrays.keys(), chosen.suit(other).arrays) == ({"first"}, {})
    assert chosen.suit(other).encodings.keys() == {"second"}
    tuned = chosen.tune(model)
    assert not tuned.array(tuned.index.initializers["first"]).any()
    assert model.array(model.index.initializers["first"]).any(), "the float model stays"


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("gptk", "no step 'gptk'; did you mean 'gptq'?"),
        ("awq", "awq rounds nothing; put it into quantsim.prepare"),
        ({"gptq": {"percdamp": "much"}}, "quantsim.optimize: 'gptq': percdamp is 'much'; expected a number"),
        ({"gptq": {"damp": 1}}, "quantsim.optimize: 'gptq' does not take these options: no option 'damp'"),
        ({"gptq": {"python": "/no/python"}}, "python is '/no/python', which is no program"),
        ({"distill": {"python": sys.executable}}, "distill: found python, expected none"),
        ({"distill": {"iterations": 0}}, "distill: iterations is 0; expected a finite number of 1 or more"),
        ({"distill": {"rate": float("nan")}}, "distill: rate is nan; expected a finite number of 0 or more"),
        ({"gptq": {"seed": -1}}, "gptq: seed is -1; expected a finite number of 0 or more"),
    ],
)
def test_a_step_or_an_option_that_there_is_not_is_named(item: object, message: str) -> None:
    with pytest.raises((UsageError, PolicyError)) as error:
        optimizers_of([item])
    assert message in str(error.value)


def test_a_library_that_is_not_there_is_named_with_its_extra() -> None:
    pytest.importorskip("onnxsim")
    assert optimizers_of([{"seq-mse": {"python": sys.executable}}])[0].name == "seq-mse"
    if "aimet_onnx" not in sys.modules:
        with pytest.raises(UsageError, match=r"seq-mse needs aimet_onnx: an extra: pip install 'onnxline\[aimet\]'"):
            optimizers_of(["seq-mse"])
