"""Elementwise kernels against ONNX's reference, each also written over its operand where its row says that it may."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch

from pipeline.errors import Unsupported
from pipeline.importers import from_onnx
from pipeline.ir.graph import TensorSpec
from pipeline.ops import GraphBuilder, emitter_of
from pipeline.ops.aten import call_attrs
from pipeline.ops.aten.memory import POINTWISE
from pipeline.runtime import compile_graph
from pipeline.runtime.operators import random_normal
from pipeline.runtime.tensors import to_numpy, torch_dtype
from tests.pipeline.runtime.kernels.kernel_reference import (
    OWN_KINDS,
    Case,
    assert_close,
    expected,
    graph_of,
    ints,
    rand,
)

POSITIVE = rand(3, 4, low=0.1, high=3)
ROW, COLUMN = rand(4), rand(3, 1, low=0.5, high=2)
BITS = rand(3, 4) > 0
ODD = np.array([math.nan, math.inf, -math.inf, -0.5, 0.5, 1.5, 2.5, -1.5], np.float32)
HALF = rand(3, 4, dtype="float16")
DOUBLE = rand(3, 4, dtype="float64")
UNSIGNED = np.array([1, 2, 255, 40000, 65535], np.int64)
HUGE = np.array([0.4, -3.3, 464.0, 465.0, -1e6, math.inf, -math.inf, math.nan], np.float32)
NONZERO = np.array([3, -3, 2, -2], np.int64)

CASES = [
    *(Case(kind, [rand(2, 3, 4), rand(3, 1, high=3)]) for kind in ("Add", "Sub", "Mul", "Div", "Min", "Max")),
    *(Case(kind, [HALF, HALF[0]]) for kind in ("Add", "Mul", "Max")),
    *(Case(kind, [DOUBLE, DOUBLE[0]]) for kind in ("Add", "Div")),
    *(Case(kind, [ints(3, 4), NONZERO]) for kind in ("Add", "Sub", "Mul", "Min", "Max")),
    Case("Div", [np.array([7, -7, 7, -7]), np.array([2, 2, -2, -2])], by_ort=True, note="truncates"),
    Case("Pow", [POSITIVE, ROW]),
    Case("Pow", [rand(3, 4), np.array(3, np.float32)], note="cube"),
    Case("Pow", [rand(3, 4), np.array([2], np.int64)], note="int_exponent"),
    Case("Pow", [ints(3, 4), np.array([2, 3, 1, 0])]),
    Case("Pow", [ints(4, low=0), np.array([2.0, 0.5, 1.0, 0.0], np.float32)], note="float_exponent"),
    Case("Mod", [ints(3, 4), NONZERO], {"fmod": False}),
    Case("Mod", [ints(3, 4), NONZERO], {"fmod": True}, {"fmod": 1}),
    Case("Mod", [rand(3, 4), COLUMN], {"fmod": True}, {"fmod": 1}),
    Case("PRelu", [rand(2, 3, 4), COLUMN]),
    *(Case(kind, [BITS, BITS[0]]) for kind in ("And", "Or", "Xor")),
    *(
        Case(kind, [array, array[0]])
        for kind in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
        for array in (rand(3, 4), ints(3, 4))
    ),
    Case("Not", [BITS]),
    *(Case(kind, [rand(3, 4)]) for kind in ("Neg", "Abs", "Sign", "Relu", "Exp", "Sin", "Cos", "Erf", "Tanh")),
    *(Case(kind, [rand(3, 4)]) for kind in ("Sigmoid", "HardSwish", "Softplus", "Identity", "Reciprocal")),
    *(Case(kind, [HALF]) for kind in ("Neg", "Exp", "Tanh", "Sigmoid")),
    *(Case(kind, [DOUBLE]) for kind in ("Exp", "Tanh", "Softplus")),
    *(Case(kind, [ints(3, 4)]) for kind in ("Neg", "Abs", "Sign", "Relu", "Identity")),
    *(Case(kind, [POSITIVE]) for kind in ("Sqrt", "Log")),
    *(Case(kind, [ODD]) for kind in ("Floor", "Ceil", "Round", "IsNaN", "IsInf", "Relu", "Abs")),
    Case("Softplus", [np.array([-60, -30, 0, 30, 60], np.float64)], note="far_out"),
    Case("Gelu", [rand(3, 4)], {"approximate": "none"}),
    Case("Gelu", [rand(3, 4)], {"approximate": "tanh"}, {"approximate": "tanh"}),
    Case("Silu", [rand(3, 4)], op="Swish"),
    Case("LeakyRelu", [rand(3, 4)], {"alpha": 0.25}, {"alpha": 0.25}),
    Case("Elu", [rand(3, 4)], {"alpha": 1.5}, {"alpha": 1.5}),
    Case("HardSigmoid", [rand(3, 4)], {"alpha": 0.4, "beta": 0.3}, {"alpha": 0.4, "beta": 0.3}),
    Case("Clip", [ODD], {"min": -1.0, "max": 1.0}, extra=[np.array(-1, "f4"), np.array(1, "f4")]),
    Case("Clip", [rand(3, 4)], {"min": -math.inf, "max": 1.0}, extra=[None, np.array(1, np.float32)]),
    Case(
        "Clip", [rand(3, 4)], {"min": 1.0, "max": -1.0}, extra=[np.array(1, "f4"), np.array(-1, "f4")], note="max_wins"
    ),
    Case("Clip", [HALF], {"min": -1e9, "max": 1e9}, note="beyond_the_dtype"),
    Case("Clip", [ints(3, 4)], {"min": -3, "max": 5}, extra=[np.array(-3), np.array(5)]),
    Case("Where", [BITS, rand(3, 4), ROW]),
    Case("Where", [BITS, np.array(7, np.float32), rand(3, 4)]),
    Case("Cast", [rand(3, 4)], {"to": "int64"}, {"to": 7}),
    Case("Cast", [rand(3, 4)], {"to": "float16"}, {"to": 10}),
    Case("Cast", [ints(3, 4)], {"to": "float32"}, {"to": 1}),
    Case("Cast", [ints(3, 4, low=0, high=2)], {"to": "bool"}, {"to": 9}),
    Case("Cast", [BITS], {"to": "int32"}, {"to": 6}),
    *(
        Case(kind, [UNSIGNED.astype(dtype), UNSIGNED[::-1].astype(dtype)], attrs)
        for dtype in ("uint16", "uint32", "uint64")
        for kind, attrs in [
            *((kind, {}) for kind in ("Add", "Sub", "Mul", "Div", "Min", "Max")),
            *((kind, {}) for kind in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")),
            ("Mod", {"fmod": False}),
        ]
    ),
    *(
        Case("CastUnsaturated", [HUGE], {"to": to}, {"to": number, "saturate": 0}, op="Cast")
        for to, number in [("float8_e4m3fn", 17), ("float8_e4m3fnuz", 18), ("float8_e5m2", 19), ("float8_e5m2fnuz", 20)]
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_like_onnx(case: Case) -> None:
    results = expected(case)
    found = compile_graph(graph_of(case, results)).run({f"in{at}": array for at, array in enumerate(case.inputs)})
    assert_close(to_numpy(found["out0"]), results[0])


@pytest.mark.parametrize("case", [case for case in CASES if case.kind not in OWN_KINDS], ids=str)
def test_like_onnx_in_place(case: Case) -> None:
    """Each operand in turn is a tmp value that dies here; where shape and dtype allow it, the result replaces it."""
    results = expected(case)
    for position in range(len(case.inputs)):
        graph = graph_of(case, results, through_tmp=[position])
        program = compile_graph(graph)
        operand = case.inputs[position]
        same = (operand.shape, operand.dtype) == (results[0].shape, results[0].dtype)
        if len(graph.ops) == 2 and graph.ops[1].kind in POINTWISE:
            assert bool(program.plan.alias) == same
        found = program.run({f"in{at}": array for at, array in enumerate(case.inputs)})
        assert_close(to_numpy(found["out0"]), results[0])


@pytest.mark.parametrize(("to", "limit"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_a_cast_to_float8_saturates(to: str, limit: float) -> None:
    """The ONNX specification's table for saturate=True; torch's own conversion gives NaN or infinity."""
    x = np.array([1e6, -1e6, math.inf, 0.3, 0.0], np.float32)
    builder = GraphBuilder("cast")
    vid = builder.input("x", TensorSpec(x.shape, "float32"))
    attrs = call_attrs("onnxline.cast_float8.default", 1, {"to": to})
    (y,) = builder.emit("onnxline.cast_float8.default", [vid], [("y", TensorSpec(x.shape, to))], attrs)
    found = compile_graph(builder.build([y])).run({"x": x})["y"].float().tolist()
    assert found == [limit, -limit, limit, 0.3125, 0.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fnuz", "float8_e5m2"])
def test_a_cast_to_float8_that_does_not_saturate_reads_every_float(dtype: str) -> None:
    x = torch.tensor([240.0, 0.3, -1.0]).to(torch_dtype(dtype))
    builder, target = GraphBuilder("cast"), TensorSpec((3,), "float8_e4m3fn")
    vid = builder.input("x", TensorSpec((3,), dtype))
    attrs = call_attrs("onnxline.cast_float8.default", 1, {"to": target.dtype, "saturate": False})
    (y,) = builder.emit("onnxline.cast_float8.default", [vid], [("y", target)], attrs)
    found = compile_graph(builder.build([y])).run({"x": x})["y"].float().tolist()
    assert found == [x[0].float().item(), 0.3125, -1.0]


def test_bfloat16_like_ml_dtypes() -> None:
    a, b = (rand(3, 4, high=high).astype(ml_dtypes.bfloat16) for high in (2, 3))
    spec = TensorSpec(a.shape, "bfloat16")
    builder = GraphBuilder("bfloat16")
    vids = [builder.input(name, spec) for name in ("a", "b")]
    attrs = call_attrs("aten.mul.Tensor", 2, {})
    program = compile_graph(builder.build(builder.emit("aten.mul.Tensor", vids, [("y", spec)], attrs)))
    np.testing.assert_array_equal(
        program.run({"a": a, "b": b})["y"].float().numpy(), np.multiply(a, b).astype(np.float32)
    )


def test_the_gradient_of_a_cast_to_float8_is_that_of_its_result() -> None:
    x = torch.tensor([0.3, -2.0, 1e6], requires_grad=True)
    (torch.ops.onnxline.cast_float8(x, "float8_e4m3fn").float() * torch.tensor([1.0, 2.0, 4.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 2.0, 4.0]


# Kinds that draw: the distribution, the seeds, and that runs repeat. No other program draws the same numbers.

N = 100_000
FAR = 5 / N**0.5
"""Five standard deviations of a mean of N numbers that have a standard deviation of 1."""


def draw(text: str, runs: int = 1, opset: int = 22, **feeds: np.ndarray) -> list[dict[str, Any]]:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')
    program = compile_graph(from_onnx(model, emitter_of=emitter_of))
    return [{name: value.float().numpy() for name, value in program.run(feeds).items()} for _ in range(runs)]


def test_normal_numbers_have_their_mean_and_scale() -> None:
    (actual,) = draw(
        f"g () => (float[{N}] y) {{ y = RandomNormal <shape = [{N}], mean = 3.0, scale = 2.0, seed = 7.0> () }}"
    )
    scaled = (actual["y"] - 3) / 2
    assert abs(scaled.mean()) < FAR and abs(scaled.std() - 1) < FAR
    assert abs((scaled**3).mean()) < 15**0.5 * FAR  # a cube of a normal number has a variance of 15


def test_normal_numbers_have_the_digits_of_their_dtype() -> None:
    """`random_normal` draws float64 in float64: a float32 in its place has 24 of 53 bits."""
    y = random_normal([N], 0.0, 1.0, "float64", 7, None)
    assert (y != y.float().double()).any()


@pytest.mark.parametrize("dtype", ["float16", "float", "double", "bfloat16"])
def test_uniform_numbers_fill_their_range(dtype: str) -> None:
    (actual,) = draw(
        f"g ({dtype}[{N}] x) => ({dtype}[{N}] y) {{ y = RandomUniformLike <low = -1.0, high = 3.0> (x) }}",
        x=np.zeros(N, {"float": np.float32, "double": np.float64}.get(dtype, np.float16))
        if dtype != "bfloat16"
        else np.zeros(N, onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)),
    )
    y = actual["y"]
    assert -1 <= y.min() < -0.99 and 2.98 < y.max() <= 3
    assert abs(y.mean() - 1) < 2 * FAR + 1e-3  # and what rounding to bfloat16 adds


def test_bernoulli_draws_each_element_by_its_own_share() -> None:
    shares = np.repeat([0.0, 0.25, 1.0], N).astype(np.float32).reshape(3, N)
    (actual,) = draw(
        f"g (float[3, {N}] x) => (int32[3, {N}] y) {{ y = Bernoulli <dtype = 6, seed = 1.0> (x) }}", x=shares
    )
    assert set(np.unique(actual["y"])) == {0, 1}
    assert np.allclose(actual["y"].mean(1), [0, 0.25, 1], atol=FAR) and actual["y"][0].max() == 0


def test_multinomial_takes_log_probabilities() -> None:
    logs = np.array([[0.0, 0.0, np.log(2)], [-np.inf, 3.0, -np.inf]], np.float32)  # of no sum in particular
    (actual,) = draw(
        f"g (float[2, 3] x) => (int64[2, {N}] y) {{ y = Multinomial <dtype = 7, sample_size = {N}> (x) }}", x=logs
    )
    counts = [np.bincount(row.astype(int), minlength=3) / N for row in actual["y"]]
    assert np.allclose(counts, [[0.25, 0.25, 0.5], [0, 1, 0]], atol=FAR)


DROPOUT = f"""g (float[{N}] x) => (float[{N}] y, bool[{N}] m) {{
    r = Constant <value_float = 0.2> () t = Constant <value = bool {{1}}> () y, m = Dropout (x, r, t) }}"""


def test_dropout_in_training_scales_what_it_keeps() -> None:
    (actual,) = draw(DROPOUT, x=np.full(N, 4, np.float32))
    assert abs(actual["m"].mean() - 0.8) < FAR
    assert np.allclose(actual["y"], np.where(actual["m"], 5, 0))


def test_dropout_at_inference_keeps_all() -> None:
    (actual,) = draw("g (float[2, 3] x) => (bool[2, 3] m) { y, m = Dropout (x) }", x=np.zeros((2, 3), np.float32))
    assert actual["m"].all() and actual["m"].shape == (2, 3)


def test_runs_repeat_and_two_ops_do_not() -> None:
    first, second = draw(
        "g () => (float[9] a, float[9] b) { a = RandomNormal <shape = [9]> () b = RandomNormal <shape = [9]> () }", 2
    )
    assert np.array_equal(first["a"], second["a"]) and not np.array_equal(first["a"], first["b"])


def test_a_seed_is_what_counts() -> None:
    draws = "a = {0} <seed = 0.1> (x) b = {0} <seed = 0.1> (x) c = {0} <seed = 0.2> (x)".format("RandomUniformLike")
    (actual,) = draw(f"g (float[9] x) => (float[9] a, float[9] b, float[9] c) {{ {draws} }}", x=np.zeros(9, np.float32))
    assert np.array_equal(actual["a"], actual["b"]) and not np.array_equal(actual["a"], actual["c"])


def test_a_dropout_of_all_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"ratio is 1\.0"):
        draw(DROPOUT.replace("0.2", "1.0"), x=np.zeros(N, np.float32))
