"""Sessions lay weights out one after the other, each when it is needed; and they can be stopped."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from onnx.parser import parse_model as parse
from onnxruntime.capi import onnxruntime_pybind11_state as binding

from passes.errors import StepFailed, StepTimedOut
from passes.weights.detached import detach, read_model
from passes.weights.evaluator import open_evaluator
from passes.weights.sessions import Session, expand_functions
from tests.support.onnx_models import model_of, square

CHAIN = """
g (float[2, 8] x) => (float[2, 8] y) {
    a = Relu (x)
    u = Transpose <perm = [1, 0]> (w0)
    b = MatMul (a, u)
    v = Transpose <perm = [1, 0]> (w1)
    c = MatMul (b, v)
    w = Transpose <perm = [1, 0]> (w2)
    y = MatMul (c, w)
}
"""


def operators_run(model: onnx.ModelProto, folder: Path) -> list[str]:
    """In the order in which onnxruntime runs them."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "run")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": np.ones((2, 8), np.float32)})
    events = json.loads(Path(session.end_profiling()).read_text())
    return [event["args"]["op_name"] for event in events if event["name"].endswith("kernel_time")]


def test_a_weight_is_transposed_when_it_is_needed(tmp_path: Path) -> None:
    model = model_of(CHAIN, **square("w0", "w1", "w2", size=8))
    assert operators_run(model, tmp_path)[:3] == ["Transpose"] * 3, "then it needs no help any more"
    Session(model, {})
    assert operators_run(model, tmp_path) == ["Relu", *["Transpose", "MatMul"] * 3]


FUNCTIONS = """g (float[2, 4, 8] x) => (float[2, 4, 8] y) {
    n = GroupNormalization <num_groups = 2> (x, scale, bias)
    y = HardSwish (n)
}"""


def test_functions_are_run_in_the_order_of_the_graph() -> None:
    """GroupNormalization has a function for the types of what it reads, and HardSwish one for all."""
    model = detach(model_of(FUNCTIONS, 21, scale=np.float32([1, 2, 3, 4]), bias=np.float32([0, 1, 0, 1])))
    x = {"x": np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)}
    ordered = Session.of(model, in_order=True)
    assert (ordered.run(x)["y"] == Session.of(model).run(x)["y"]).all()
    assert {"GroupNormalization", "HardSwish"}.isdisjoint(
        node.op_type for node in expand_functions(model.proto).graph.node
    )


def test_functions_stay_where_onnxruntime_does_not_list_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = detach(model_of(FUNCTIONS, 21, scale=np.float32([1, 2, 3, 4]), bias=np.float32([0, 1, 0, 1])))
    x = {"x": np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)}
    expected = Session.of(model, in_order=True).run(x)["y"]
    monkeypatch.delattr(binding, "get_all_opkernel_def")
    assert expand_functions(model.proto) is model.proto
    assert (Session.of(model, in_order=True).run(x)["y"] == expected).all()


def test_a_loop_without_an_end_is_stopped() -> None:
    body = "{b = Identity (c) x1 = Add (x0, one)}"
    endless = model_of(f"""
        g (float[2] x) => (float[2] y)
        <int64 turns = {{9223372036854775807}}, bool go = {{1}}, float one = {{1}}> {{
            y = Loop (turns, go, x) <body = body (int64 i, bool c, float[2] x0) => (bool b, float[2] x1) {body}>
        }}
    """)
    session = Session(endless, {})
    with pytest.raises(StepTimedOut, match=r"onnxruntime ran past 0\.1 s and was stopped"):
        session.run({"x": np.zeros(2, np.float32)}, within_s=0.1)


def test_a_sequence_of_tensors_of_different_shapes_is_refused() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[4, 3] x) => (seq(float) s) <int64[2] sizes = {1, 3}> {
        r = Relu(x)
        s = SplitToSequence <axis = 0> (r, sizes)
    }"""
    session = Session(onnx.parser.parse_model(text), {})
    with pytest.raises(StepFailed, match=r"'s' is a sequence of tensors of different shapes \(\(1, 3\), \(3, 3\)\)"):
        session.run({"x": np.ones((4, 3), np.float32)})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(bfloat16[2] x) => (bfloat16[2] y) { y = Mul (x, x) }", "no Mul of opset 14 for bfloat16 of node 'made'"),
        ("(float[2] x) => (float[2] y) { y = RandomNormalLike (x) }", "of opset 22 for the types of node 'made'"),
    ],
)
def test_a_rare_type_without_a_kernel_is_named(text: str, said: str) -> None:
    """As in the alibi of Falcon, which is bfloat16 in a model in float32."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 22]> g {text}')
    model.graph.node[0].name = "made"
    with pytest.raises(StepFailed, match=said):
        Session(model, {})


BEYOND_NUMPY = {
    ml_dtypes.bfloat16: 21,
    ml_dtypes.float8_e4m3fn: 21,
    ml_dtypes.float8_e4m3fnuz: 21,
    ml_dtypes.float8_e5m2: 21,
    ml_dtypes.float8_e5m2fnuz: 21,
    ml_dtypes.int4: 21,
    ml_dtypes.uint4: 21,
    ml_dtypes.int2: 25,
    ml_dtypes.uint2: 25,
}
"""{dtype: the first opset that has it}; the float of 4 bits has no kernels in onnxruntime."""


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_weights_of_dtypes_that_numpy_has_not_are_shared_too(dtype: type) -> None:
    text = "g (float[1] x) => (float[64, 64] y) { f = Cast <to = 1> (w) y = Mul (f, x) }"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    weight = (np.arange(64 * 64).reshape(64, 64) % 29).astype(dtype)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    detached = detach(model)
    assert detached.weight(detached.proto.graph.initializer[0]) is not None
    found = Session.of(detached).run({"x": np.ones(1, np.float32)})["y"]
    np.testing.assert_array_equal(found, weight.astype(np.float32))


@pytest.mark.parametrize("dtype", BEYOND_NUMPY)
def test_values_of_dtypes_that_numpy_has_not_are_fed_and_given(dtype: type) -> None:
    """An inner value too, which `compare` and pins ask for: int4, int2 and two kinds of float8 were refused."""
    model = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["" : OPSET]>
        g (KIND[N, 3] x, KIND s) => (KIND[N, 3] y, float[N, 3] f, KIND t) {
            f = Cast <to = 1> (x)
            inner = Cast <to = CODE> (f)
            y = Cast <to = CODE> (f)
            g = Cast <to = 1> (s)
            t = Cast <to = CODE> (g)
        }
        """.replace("KIND", str(np.dtype(dtype)).replace("_", ""))
        .replace("OPSET", str(BEYOND_NUMPY[dtype]))
        .replace("CODE", str(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))))
    )
    for rows in (3, 0):
        x = (np.arange(rows * 6).reshape(3, -1).T[::2] % 2).astype(dtype)  # no rows in one piece, 9 elements
        found = Session.of(detach(model), ["inner"]).run({"x": x, "s": np.array(1, dtype)})
        assert {found[name].dtype for name in ("y", "inner", "t")} == {x.dtype}
        assert (found["t"].shape, float(found["t"])) == ((), 1)
        np.testing.assert_array_equal(found["y"], x)
        np.testing.assert_array_equal(found["inner"], x)
        np.testing.assert_array_equal(found["f"], x.astype(np.float32))
        np.testing.assert_array_equal(found["f"], x.astype(np.float32))


def test_declared_sizes_that_do_not_hold_cost_no_run() -> None:
    """The text detector declares sizes by formulas that are wrong for small images: onnxruntime gives one buffer to two
    sizes then."""
    spec = find_spec("rapidocr")
    if spec is None or spec.origin is None:
        pytest.skip("the extra models is not installed")
    model = read_model(next(Path(spec.origin).parent.glob("models/*det_small.onnx")))
    found = Session.of(model).run({"x": np.zeros((2, 3, 4, 4), np.float32)})
    assert [array.shape[0] for array in found.values()] == [2]


def test_a_later_ir_version_runs_next_to_a_domain_of_the_users() -> None:
    model = model_of("g (float[2] x) => (float[2] y) { y = Neg (x) }")
    model.opset_import.add(domain="com.acme", version=1)
    model.ir_version = 99
    np.testing.assert_array_equal(Session.of(detach(model)).run({"x": np.ones(2, np.float32)})["y"], [-1, -1])


# ONNX's evaluator with a Loop and a Scan of ours, next to onnxruntime.

LOOP = """
<ir_version: 10, opset_import: ["" : 20, "own" : 1]>
g (float[2, 4] x, int64 n) => (float[2, 4] y, float[2, 4] z, float[T, 2, 4] rows, int64[T] turns)
    <bool yes = {1}, float[4] w = {1, 2, 3, 4}> {
    y, z, rows, turns = CALL
}
<domain: "own", opset_import: ["" : 20]> F (n, yes, x, w) => (y, z, rows, turns) {
    y, z, rows, turns = Loop (n, yes, x, x) <body =
        b (int64 i, bool goes, float[2, 4] a, float[2, 4] b) =>
          (bool more, float[2, 4] c, float[2, 4] d, float[2, 4] e, int64 k) {
            two = Constant <value_int = 2> ()
            more = Less (i, two)
            c = Add (a, w)
            d = Mul (b, c)
            e = Relu (d)
            k = Identity (i)
    }>
}
"""


@pytest.mark.parametrize("turns", [0, 1, 2, 9])
@pytest.mark.parametrize("call", ["own.F (n, yes, x, w)", "own.F (n, , x, w)"], ids=["a condition", "none"])
def test_a_loop_makes_its_turns(call: str, turns: int) -> None:
    model = parse(LOOP.replace("CALL", call))
    feeds = {"x": np.arange(-4, 4, dtype=np.float32).reshape(2, 4), "n": np.array(turns)}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results: tuple[Any, ...] = (session.run(None, feeds), open_evaluator(model).run(None, feeds))
    for expected, found in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


SCAN = """
<ir_version: 9, opset_import: ["" : 18]>
g (float[3, 4] start, float[SHAPE] x, float[1] c) => (float[3, 4] last, float[?, ?, ?] y, float[?, ?, ?] z) {
    outer = Neg (c)
    last, y, z = Scan <body = b (float[3, 4] a, float[3, 4] e) => (float[3, 4] f, float[3, 4] g, float[3, 4] h) {
        f = Sub (a, e)
        g = Mul (f, outer)
        h = Abs (f)
    }, num_scan_inputs = 1 ATTRIBUTES> (start, x)
}
"""


@pytest.mark.parametrize(
    ("attributes", "shape"),
    [
        ("", (5, 3, 4)),
        (", scan_input_axes = [1], scan_output_axes = [2, -2]", (3, 5, 4)),
        (", scan_input_axes = [-1], scan_input_directions = [1]", (3, 4, 5)),
        (", scan_output_directions = [1, 0], scan_output_axes = [1, 1]", (5, 3, 4)),
    ],
)
def test_a_scan_goes_along_any_axis(attributes: str, shape: tuple[int, ...]) -> None:
    text = SCAN.replace("ATTRIBUTES", attributes).replace("SHAPE", ", ".join(map(str, shape)))
    model, draw = parse(text.replace("[?, ?, ?]", "[M, N, K]")), np.random.default_rng(0)
    feeds = {"start": (3, 4), "x": shape, "c": (1,)}
    arrays = {name: draw.standard_normal(sizes, np.float32) for name, sizes in feeds.items()}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results: tuple[Any, ...] = (session.run(None, arrays), open_evaluator(model).run(None, arrays))
    for expected, found in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)
