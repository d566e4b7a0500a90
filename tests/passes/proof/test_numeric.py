"""Proof: what is compared, and whether a fault would be seen."""

from __future__ import annotations

import gc
import math

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from passes.context import PassContext, open_context
from passes.errors import ModelError, StepFailed
from passes.graph.index import copy_of
from passes.model.analysis import AnalyzedModel
from passes.optimize import draw_feeds
from passes.policy.policy import Policy
from passes.proof.draws import Draw
from passes.proof.numbers import TOLERANCES, Tolerance, compare
from passes.proof.numeric import NumericProver
from passes.proof.prover import Reference, Sensitivity
from passes.run.tracked import find_structures
from passes.structures import STRUCTURES
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from tests.support.onnx_models import attention, detached, matrix, model_of


def prover_of(model: onnx.ModelProto, context: PassContext) -> NumericProver:
    whole = detached(model)
    prover = NumericProver.of_itself([draw_feeds(whole, seed) for seed in range(2)], context)
    prover.watch(AnalyzedModel(whole), [])
    return prover


def with_weight(name: str, scale: float) -> onnx.ModelProto:
    model = attention()
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(scale), name))
    return model


def test_a_sound_model_has_no_error(context: PassContext) -> None:
    measurement = prover_of(attention(), context).measure(AnalyzedModel(detached(attention())))
    assert (measurement.why, measurement.max_abs) == ("", 0.0)


def test_a_changed_weight_is_seen(context: PassContext) -> None:
    measurement = prover_of(attention(), context).measure(AnalyzedModel(detached(with_weight("wo", 1.01))))
    assert measurement.why.startswith("y: max abs error")


def tiny_queries() -> onnx.ModelProto:
    """Q and K so small that softmax is flat with or without them: their loss cannot be seen in the output."""
    model = with_weight("wq", 1e-6)
    for tensor in model.graph.initializer:
        if tensor.name == "wk":
            tensor.CopyFrom(numpy_helper.from_array(matrix(32, 32, 1) * np.float32(1e-2), "wk"))
    return model


def zero_weight(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(np.zeros((32, 32), np.float32), name))
    return model


def test_the_output_alone_is_blind_and_the_values_at_kept_structures_are_not(context: PassContext) -> None:
    model = detached(tiny_queries())
    broken = detached(zero_weight(tiny_queries(), "wk"))
    prover = prover_of(tiny_queries(), context)
    assert prover.measure(AnalyzedModel(broken)).why == ""

    prover.watch(AnalyzedModel(model), STRUCTURES["qkv"].find(model).instances)
    power = prover.power()

    assert prover.measure(AnalyzedModel(broken)).why.startswith("k: max abs error")
    assert power.blind == ("attention 0",), "Q itself is below the tolerance, and that has to be said"


def test_power_is_measured_by_planting_a_fault(context: PassContext) -> None:
    model = detached(attention())
    prover = prover_of(attention(), context)
    prover.watch(AnalyzedModel(model), STRUCTURES["qkv"].find(model).instances)
    power = prover.power()
    assert power.blind == ()
    assert power.margin > 1000


WEIGHTED = """
g (float[2, 8, 32] x) => (float[2, 8, 32] a, float[2, 8, 32] b, float[16, 32] c, float[16, 32] d, float[16, 32] e)
<int64[2] flat = {16, 32}> {
    a = MatMul (x, wa)
    turned = Transpose <perm = [1, 0]> (wb)
    b = MatMul (x, turned)
    rows = Reshape (x, flat)
    c = Gemm <transB = 1> (rows, wc)
    d = Gemm <transB = 1> (rows, wd, bias)
    e = Sub (rows, bias)
}
"""


def weighted(scale: float) -> DetachedModel:
    """WEIGHTED with random weights, times `scale`."""
    wa, wb, wc, wd = (matrix(32, 32, seed) * np.float32(scale) for seed in range(4))
    return detached(model_of(WEIGHTED, wa=wa, wb=wb, wc=wc, wd=wd, bias=wa[0]))


@pytest.mark.parametrize("scale", [1.0, 1e-6], ids=["seen", "blind"])
@pytest.mark.parametrize(("kept", "results"), [("MatMul", "ab"), ("Gemm", "cd"), ("Sub", "e")])
def test_the_margin_is_what_a_run_with_zeros_as_weights_gives(
    kept: str, results: str, scale: float, context: PassContext
) -> None:
    """Most products are zero then by arithmetic; what is left of the Sub is computed."""
    model = weighted(scale)
    feeds = draw_feeds(model, 0)
    watched = find_structures(model, Policy(keep=(f"op:{kept}",)), [])
    prover = NumericProver.of_itself([feeds], context)
    prover.watch(AnalyzedModel(model), watched.must_hold())

    expected, moved = (Session.of(candidate).run(feeds) for candidate in (model, weighted(0.0)))
    margin = min(compare(expected[name], moved[name]).excess for name in results)

    assert prover.power().margin == pytest.approx(margin)
    assert bool(prover.power().blind) == (margin <= 1) == (scale < 1)


def test_nan_in_the_reference_is_a_mistake(context: PassContext) -> None:
    model = detached(model_of("g (float[2] x) => (float[2] y) { y = Sqrt (x) }"))
    prover = NumericProver.of_itself([{"x": np.array([-1, 1], np.float32)}], context)
    with pytest.raises(ModelError, match="output 'y' of the reference holds NaN"):
        prover.watch(AnalyzedModel(model), [])
        prover.power()


def test_a_model_that_onnxruntime_refuses_is_a_failed_step(context: PassContext) -> None:
    prover = prover_of(attention(), context)
    broken = attention()
    broken.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(StepFailed, match="onnxruntime refuses the model"):
        prover.measure(AnalyzedModel(detached(broken)))


def test_an_error_of_onnxruntime_is_one_sentence_in_one_line(context: PassContext) -> None:
    joined = model_of("g (float[2] x) => (float[4] y) { y = Concat <axis = 0> (x, x) }")
    prover = prover_of(joined, context)
    broken = copy_of(joined)
    del broken.graph.node[0].attribute[:]
    with pytest.raises(StepFailed) as refusal:
        prover.measure(AnalyzedModel(detached(broken)))
    assert "Required attribute 'axis' is missing" in str(refusal.value)
    assert not any(sign in str(refusal.value) for sign in ("\n", "\\n", "Context"))


def test_a_proof_worker_that_has_died_gets_the_references_again(context: PassContext) -> None:
    prover = prover_of(attention(), context)
    prover.watch(AnalyzedModel(detached(attention())), [])
    prover.power()
    context.proofs.close()
    assert prover.measure(AnalyzedModel(detached(with_weight("wo", 1.01)))).why.startswith("y: max abs error")
    context.proofs.close()
    assert prover.run(AnalyzedModel(detached(attention()))).why == ""


def test_nothing_is_kept_for_provers_that_are_gone() -> None:
    """Whoever proves many models in one context would otherwise fill it with their inputs and values."""
    model = detached(attention())
    with open_context() as context:
        for _ in range(3):
            prover = prover_of(attention(), context)
            assert prover.measure(AnalyzedModel(model)).why == ""
        other = prover_of(attention(), PassContext(context.worker, context.folder, context.proofs))
        assert other.measure(AnalyzedModel(model)).why == prover.measure(AnalyzedModel(model)).why == ""
        gc.collect()
        assert len(list(context.folder.glob("proof-*"))) == 2


RESIZED = """
g (float[1, 1, 2, 2] x) => (float[1, 1, 4, 4] y) <float[4] scales = {1.0, 1.0, 2.0, 2.0}> {
    big = Resize (x, , scales)
    y = Neg (big)
}
"""


def test_a_fault_that_does_not_run_is_not_seen_and_costs_nothing(context: PassContext) -> None:
    """A Resize to nothing is refused by onnxruntime."""
    model = detached(model_of(RESIZED))
    watched = find_structures(model, Policy(keep=("op:Resize",)), [])
    prover = prover_of(model_of(RESIZED), context)
    prover.watch(AnalyzedModel(model), watched.must_hold())
    assert prover.measure(AnalyzedModel(model)).why == ""
    assert prover.power() == Sensitivity(0.0, ("big",))


def test_steps_see_the_inputs_that_the_user_gave_and_no_draws_next_to_them(context: PassContext) -> None:
    given = Reference({"x": np.ones(1)}, {}, "", Draw(0, {}, source="data.npz"))
    drawn = Reference({"x": np.zeros(1)}, {}, "", Draw(1, {}))
    assert NumericProver([given, drawn], context).feeds() == [given.feeds]
    assert NumericProver([drawn, drawn], context).feeds() == [drawn.feeds] * 2


# Comparison: what counts as equal, by dtype.

NAN, INF = np.nan, np.inf


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("expected", "got", "ok"),
    [
        (f32(1, 2), f32(1, 2), True),
        (f32(1, 2), f32(1, 2.0001), True),
        (f32(1, 2), f32(1, 2.001), False),
        (f32(0, 0), f32(0, 1e-6), True),
        (f32(0, 1000), f32(0.05, 1000), True),  # small against the tensor's own scale
        (f32(1, NAN), f32(1, NAN), True),
        (f32(1, 2), f32(1, NAN), False),
        (f32(1, INF), f32(1, INF), True),
        (f32(1, INF), f32(1, -INF), False),
        (f32(1, 2), f32(1, 2).reshape(1, 2), False),
        (f32(1, 2), f32(1, 2).astype(np.float64), False),
        (np.array([1, 2]), np.array([1, 3]), False),
        (np.array([True]), np.array([True]), True),
        (np.array([1, 2], ml_dtypes.bfloat16), np.array([1, 2.015625], ml_dtypes.bfloat16), True),
        (np.array(["a"], object), np.array(["b"], object), False),
        (f32(), f32(), True),
    ],
)
def test_within_tolerance(expected: np.ndarray, got: np.ndarray, ok: bool) -> None:
    assert compare(expected, got).ok is ok


def test_the_four_numbers() -> None:
    errors = compare(f32(3, 4), f32(3, 4.5))
    assert errors.max_abs == 0.5
    assert errors.max_rel == 0.125
    assert math.isclose(errors.cosine, (9 + 18) / (5 * math.sqrt(9 + 20.25)))
    assert math.isclose(errors.sqnr_db, 20.0)
    assert errors.why == "max abs error 0.5 is over 0.00041"


def test_equal_tensors_have_infinite_sqnr() -> None:
    assert compare(f32(1), f32(1)).sqnr_db == math.inf


def test_a_tolerance_can_be_given() -> None:
    assert compare(f32(1), f32(1.5), {"float32": Tolerance(1, 0)}).ok


def test_every_float_dtype_has_a_tolerance_and_they_widen_as_bits_go() -> None:
    order = ["float64", "float32", "float16", "bfloat16"]
    limits = [TOLERANCES[dtype].rtol for dtype in order]
    assert limits == sorted(limits)


def with_fill(scale: float, fill: float) -> np.ndarray:
    values = (np.random.default_rng(0).standard_normal((64, 64)) * scale).astype(np.float32)
    values[:, 40:] = fill
    return values


@pytest.mark.parametrize("fill", [np.finfo(np.float32).min, -1e9, -1e5])
def test_a_mask_does_not_hide_an_error_in_what_it_leaves(fill: float) -> None:
    expected = with_fill(1.0, fill)
    got = expected.copy()
    got[:, :40] = 0.0
    errors = compare(expected, got)
    assert errors.why
    assert errors.excess > 1000
    assert errors.sqnr_db < 15
    assert compare(expected, expected * np.float32(1 - 1e-6)).ok


def test_a_few_values_near_zero_do_not_make_a_group_of_their_own() -> None:
    """The least of many values may be 1,000 times below the next by chance; its error is that of the whole tensor."""
    expected = np.linspace(50, 100, 1000).astype(np.float32)
    expected[:3] = [1e-6, 1e-2, 0.0]
    assert compare(expected, expected + np.float32(3e-3)).ok


def test_integers_are_not_rounded_to_floats() -> None:
    errors = compare(np.array([2**53], np.int64), np.array([2**53 + 1], np.int64))
    assert errors.why == "1 of 1 elements differ, and int64 has to be equal"


@pytest.mark.parametrize(("expected", "got"), [(1.7e308, -1.7e308), (0.0, 1e300), (1e-200, 1e200), (1e-300, 1e10)])
def test_errors_beyond_float64_are_measured_without_a_warning(expected: float, got: float) -> None:
    errors = compare(np.array([expected, 1e-9]), np.array([got, 1e-9]))
    assert not errors.ok
    assert errors.max_abs == abs(expected - got)
    assert not math.isnan(errors.cosine)
    assert not math.isnan(errors.sqnr_db)


def test_zeros_are_alike_and_unlike_anything_else() -> None:
    zeros, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    assert (compare(zeros, zeros).cosine, compare(zeros, ones).cosine, compare(ones, zeros).cosine) == (1.0, 0.0, 0.0)
