"""Which floating type decides: the least precise one that a value was computed in."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from passes.context import PassContext
from passes.diff import DrawnInputs, compare_numbers, match_models
from passes.model.analysis import AnalyzedModel
from passes.optimize import draw_feeds
from passes.proof.numbers import DRAWN, Tolerance, compare
from passes.proof.numeric import NumericProver
from passes.proof.precision import computed_types
from passes.run.tracked import TrackedStructures
from passes.structures import Instance, structure_of
from passes.weights.detached import DetachedModel
from passes.weights.sharing import detached_copy
from tests.support.onnx_models import detached

X = "(float[2, 4] x)"

WAYS = {
    "its own type": (f"{X} => (float[2, 4] y) {{ y = Exp (x) }}", "float32"),
    "float64 of float32": (f"{X} => (double[2, 4] y) {{ e = Exp (x) y = Cast <to = 11> (e) }}", "float32"),
    "float32 of float16": (
        f"{X} => (float[2, 4] y) {{ h = Cast <to = 10> (x) e = Exp (h) y = Cast <to = 1> (e) }}",
        "float16",
    ),
    "float32 of bfloat16": (f"{X} => (float[2, 4] y) {{ h = Cast <to = 16> (x) y = Cast <to = 1> (h) }}", "bfloat16"),
    "float32 of float8": (
        f"{X} => (float[2, 4] y) {{ h = Cast <to = 17> (x) y = Cast <to = 1> (h) }}",
        "float8_e4m3fn",
    ),
    "float16 of bfloat16 of float64": (
        "(double[2, 4] x) => (float16[2, 4] y) { h = Cast <to = 16> (x) y = Cast <to = 10> (h) }",
        "bfloat16",
    ),
    "one of two operands": (
        f"{X} => (float[2, 4] y) {{ h = Cast <to = 10> (x) r = Cast <to = 1> (h) y = Add (x, r) }}",
        "float16",
    ),
    "quantized by float8": (
        f"{X} => (float[2, 4] y) <float s = {{0.1}}, float8e5m2 z = {{0}}>"
        "{ q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z) }",
        "float8_e5m2",
    ),
    "float16 after integers that stand for floats": (
        f"{X} => (float[2, 4] y) <float t = {{0.1}}, uint8 z = {{128}}>"
        "{ s = Cast <to = 10> (t) h = Cast <to = 10> (x) e = Exp (h) q = QuantizeLinear (e, s, z) "
        "n = Constant <value_ints = [2, 4]> () r = Reshape (q, n) y = DequantizeLinear (r, t, z) }",
        "8-bit steps",
    ),
    "after a quantizer of 16 bits": (
        f"{X} => (float[2, 4] y) <float t = {{0.1}}, uint16 z = {{128}}>"
        "{ q = QuantizeLinear (x, t, z) d = DequantizeLinear (q, t, z) y = Exp (d) }",
        "16-bit steps",
    ),
    "after dynamic quantization": (
        f"{X} => (float[2, 2] y) <int8[4, 2] w = {{1, 2, 3, 4, 5, 6, 7, 8}}>"
        "{ q, s, z = DynamicQuantizeLinear (x) n = MatMulInteger (q, w, z) c = Cast <to = 1> (n) y = Mul (c, s) }",
        "8-bit steps",
    ),
    "after a weight that is quantized": (
        f"{X} => (float[2, 2] y) <int8[4, 2] w = {{1, 2, 3, 4, 5, 6, 7, 8}}, float t = {{0.1}}>"
        "{ d = DequantizeLinear (w, t) y = MatMul (x, d) }",
        "float32",
    ),
    "in a branch": (
        "(float[2] x, bool c) => (float[2] y) { y = If (c) <then_branch = t () => (float[2] a) "
        "{ h = Cast <to = 10> (x) a = Cast <to = 1> (h) }, else_branch = e () => (float[2] b) { b = Neg (x) }> }",
        "float16",
    ),
    "in the second turn of a loop": (
        "(float[2] x) => (float[2] y) { m = Constant <value = int64 {3}> () t = Constant <value = bool {1}> () "
        "z, y = Loop (m, t, x, x) <body = b (int64 i, bool on, float[2] a, float[2] p) "
        "=> (bool o, float[2] c, float[2] d) "
        "{ o = Identity (on) h = Cast <to = 10> (a) c = Cast <to = 1> (h) d = Identity (a) }> }",
        "float16",
    ),
    "in a scan": (
        "(float[2] s, float[3, 2] x) => (float[2] y, float[3, 2] z) { y, z = Scan <num_scan_inputs = 1, "
        "body = b (float[2] u, float[2] v) => (float[2] w, float[2] k) "
        "{ h = Cast <to = 10> (v) k = Cast <to = 1> (h) w = Add (u, k) }> (s, x) }",
        "float16",
    ),
    # What does not count.
    "a detour of what only feeds a Shape": (
        f"{X} => (float[?, ?] y) {{ h = Cast <to = 10> (x) s = Shape (h) e = Expand (x, s) y = Exp (e) }}",
        "float32",
    ),
    "a detour of what only gives a type": (
        f"{X} => (float[2, 4] y) {{ h = Cast <to = 10> (x) g = Cast <to = 1> (h) y = CastLike (x, g) }}",
        "float32",
    ),
    "a detour that is not read": (f"{X} => (float[2, 4] y) {{ h = Cast <to = 10> (x) y = Neg (x) }}", "float32"),
    "a condition": (
        f"{X} => (float[2, 4] y) <float o = {{0.0}}>"
        "{ h = Cast <to = 10> (x) z = Cast <to = 10> (o) c = Greater (h, z) "
        "n = Neg (x) w = Where (c, x, n) y = Exp (w) }",
        "float32",
    ),
    "an index": (
        f"{X} => (float[2] y) <float[4] table = {{1, 2, 3, 4}}>"
        "{ h = Cast <to = 10> (x) i = ArgMax <axis = 1, keepdims = 0> (h) y = Gather (table, i) }",
        "",  # of rows of a table nothing is rounded: its own type
    ),
    "an input in half precision": (
        "(float16[2, 4] x) => (float[2, 4] y) { t = Transpose (x) r = Reshape (t, n) "
        "n = Constant <value_ints = [2, 4]> () f = Cast <to = 1> (r) y = Exp (f) }",
        "float32",
    ),
    "a table in half precision": (
        "(int64[2] x) => (float[2] y) <float16[4] table = {1, 2, 3, 4}>"
        "{ g = Gather (table, x) f = Cast <to = 1> (g) y = Exp (f) }",
        "float32",
    ),
    "a constant that was rounded": (
        f"{X} => (float[2, 4] y) <float[4] w = {{1, 2, 3, 4}}>"
        "{ h = Cast <to = 10> (w) e = Exp (h) f = Cast <to = 1> (e) y = Mul (x, f) }",
        "float32",
    ),
    "integers are exact": (
        f"{X} => (int64[2] y) {{ h = Cast <to = 10> (x) y = ArgMax <axis = 1, keepdims = 0> (h) }}",
        "",
    ),
}


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}')


@pytest.mark.parametrize("way", WAYS)
def test_the_type_that_decides(way: str) -> None:
    text, dtype = WAYS[way]
    model = detached(parse(text))
    names = [info.name for info in model.proto.graph.output]
    assert computed_types(model, names).get(names[-1], "") == dtype


def test_inside_of_a_function() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21, "own": 1]>
        g (float[2] x) => (float[2] y) { y = own.half (x) }
        <domain: "own", opset_import: ["": 21]>
        half (a) => (b) { h = Cast <to = 10> (a) b = Cast <to = 1> (h) }""")
    assert computed_types(detached(model), ["y"]) == {"y": "float16"}


def test_types_that_the_source_does_not_compute_in() -> None:
    """As of an exporter that goes through float16 where torch does not."""
    model = detached(parse(WAYS["float32 of float16"][0]))
    assert computed_types(model, ["y"], {"float32"}) == {"y": "float32"}
    assert computed_types(model, ["y"], {"float32", "float16"}) == {"y": "float16"}


@pytest.mark.parametrize(
    ("dtype", "off", "computed_in", "ok"),
    [
        (np.float64, 1.6e-5, "", False),
        (np.float64, 1.6e-5, "float32", True),
        (np.float64, 1e-3, "float32", False),
        (np.float32, 5e-3, "float16", True),
        (np.float32, 5e-3, "float64", False),  # a more precise way makes a value no better than its own type
        (np.int64, 1, "float16", False),
    ],
)
def test_judged_by_the_least_precise(dtype: type, off: float, computed_in: str, ok: bool) -> None:
    errors = compare(np.ones(3, dtype), np.array([1, 1, 1 + off]).astype(dtype), computed_in=computed_in)
    assert errors.ok is ok
    assert errors.judged_as == (
        computed_in if computed_in in ("float32", "float16") and off != 1 else np.dtype(dtype).name
    )


def test_overrides_by_dtype() -> None:
    first, off = np.ones(1), np.array([1.5])
    loose, strict = Tolerance(1.0, 0.0), Tolerance(0.0, 0.0)
    assert compare(first, off, {"float32": loose}, "float32").ok
    assert compare(first, off, {"float64": loose}, "float32").ok  # what was said of outputs of this type still holds
    assert not compare(first, off, {"float64": loose, "float32": strict}, "float32").ok
    assert "float16" in compare(first, off, computed_in="float16").why


DRAW = "r = RandomNormalLike (x)"

RANDOM = {
    f"{X} => (float[2, 4] y) {{ {DRAW} y = Add (x, r) }}": DRAWN,
    f"{X} => (bool[2, 4] y) {{ {DRAW} y = Less (x, r) }}": DRAWN,
    f"{X} => (float[4, 2] y) {{ {DRAW} y = Transpose (r) }}": DRAWN,
    f"(int64[1] n) => (float[n] y) {{ x = ConstantOfShape (n) {DRAW} y = Neg (r) }}": DRAWN,
    f"{X} => (int64[2] y) {{ {DRAW} y = Shape (r) }}": "",
    f"{X} => (float[2, 4] y) {{ {DRAW} y = Neg (x) }}": "float32",
    f"{X} => (float[2, 4] y) {{ {DRAW} c = CastLike (x, r) y = Neg (c) }}": "float32",
    f"{X} => (float[2, 4] y) {{ y = Dropout (x) }}": "float32",
    f"{X} => (float[2, 4] y) <float q = {{0.5}}, bool t = {{0}}> {{ y = Dropout (x, q, t) }}": "float32",
    f"{X} => (float[2, 4] y) <float q = {{0.5}}, bool t = {{1}}> {{ y = Dropout (x, q, t) }}": DRAWN,
    "(float[2] x, bool c) => (float[2] y) { y = If (c) <then_branch = t () => (float[2] a) "
    "{ a = RandomNormalLike (x) }, else_branch = e () => (float[2] b) { b = Neg (x) }> }": DRAWN,
    "(float[2] x) => (float[2] y) { r = RandomUniform <shape = [1]> () h = Constant <value_float = 0.5> () "
    "l = Less (r, h) c = Squeeze (l) y = If (c) <then_branch = t () => (float[2] a) { a = Abs (x) }, "
    "else_branch = e () => (float[2] b) { b = Neg (x) }> }": DRAWN,
}


@pytest.mark.parametrize("graph", RANDOM)
def test_what_depends_on_random_numbers(graph: str) -> None:
    model = detached(parse(graph))
    assert computed_types(model, ["y"]).get("y", "") == RANDOM[graph]


def test_of_random_numbers_only_shape_and_dtype_are_compared() -> None:
    first, other = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    assert compare(first, other, computed_in=DRAWN).ok
    assert not compare(first, other.T, computed_in=DRAWN).ok
    assert not compare(first, other.astype(np.float64), computed_in=DRAWN).ok


def test_a_pass_does_not_loosen_the_tolerance_that_it_is_judged_by(context: PassContext) -> None:
    """The model from before it decides, both for outputs and for values at kept structures."""
    before = detached_copy(parse("(float[2, 8] x) => (float[2, 8] y) { a = Exp (x) y = Neg (a) }"), context.spill)
    after = parse(
        "(float[2, 8] x) => (float[2, 8] y) { h = Cast <to = 10> (x) a = Exp (h) f = Cast <to = 1> (a) y = Neg (f) }"
    )
    prover = NumericProver.of_itself([draw_feeds(before, 0)], context)
    prover.watch(AnalyzedModel(before), ())
    measurement = prover.measure(AnalyzedModel(detached_copy(after, context.spill)))
    assert measurement.errors["y"].judged_as == "float32"
    assert not measurement.errors["y"].ok


def test_a_network_in_half_precision_with_an_output_in_single(context: PassContext) -> None:
    """One rounding of a half, which float32's tolerance refuses, is no error."""
    signature = "(float[2, 64] x) => (float[2, 64] y)"
    nodes = "f = Constant <value_float = {}> () c = Cast <to = 10> (f) h = Cast <to = 10> (x) "
    nodes += "e = Exp (h) m = Mul (e, c) y = Cast <to = 1> (m)"
    before, after = (
        detached_copy(parse(f"{signature} {{ {nodes.format(factor)} }}"), context.spill) for factor in (7.0, 7.004)
    )
    feeds = [draw_feeds(before, 0)]
    prover = NumericProver.of_itself(feeds, context)
    prover.watch(AnalyzedModel(before), ())
    for errors in (
        prover.measure(AnalyzedModel(after)).errors["y"],
        compare_numbers(match_models(before, after), [DrawnInputs("draw 0", feeds[0])], context).outputs["y"],
    ):
        assert (errors.judged_as, errors.ok) == ("float16", True)
        assert errors.max_abs > 1e-3  # more than float32 is allowed


def test_values_at_kept_structures(context: PassContext) -> None:
    """They are judged by their own way: here the sum is computed in float16, what it is compared with in float32."""
    nodes = "a = Exp (x) h = Cast <to = 10> (a) b = Cast <to = 1> (h) y = Neg (b)"
    model = detached_copy(parse(f"(float[2, 8] x) => (float[2, 8] y) {{ {nodes} }}"), context.spill)
    instances = tuple(instance for name in ("Exp", "Cast") for instance in structure(f"op:{name}", model))
    prover = NumericProver.of_itself([draw_feeds(model, 0)], context)
    prover.watch(AnalyzedModel(model), instances)
    inner = prover.measure(AnalyzedModel(model)).inner
    assert {name: errors.judged_as for name, errors in inner.items()} == {
        "a": "float32",
        "h": "float16",
        "b": "float16",
    }


def structure(kind: str, model: DetachedModel) -> tuple[Instance, ...]:
    finder = structure_of(kind)
    assert finder is not None
    kept = TrackedStructures({kind: finder.find(model).instances}, frozenset({kind}), frozenset({kind}))
    return tuple(kept.must_hold())
