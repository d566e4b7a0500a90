"""Two backends walk over a model: what they compute is the same, and a planted difference is named where it begins.

A difference is planted as a second model with the same names, in which one node computes something else. numpy says
what is expected.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from pipeline.errors import Unsupported
from pipeline.verify.backends import BACKENDS, Backend, OnnxFile
from pipeline.verify.divergence import BackendComparison, compare_backends

HEADER = '<ir_version: 10, opset_import: ["": 20]>'

MIXED = """(float[1,4,6,6] x, int64[3] rows) => (float[3,8] y, float[1,8,6,6] c)
    <float[8,4,3,3] w, float[36,8] p, float[5,8] table, float[8] one> {
        c = Conv <pads = [1,1,1,1]> (x, w)
        r = Relu (c)
        shape = Constant <value = int64[2] {8, 36}> ()
        flat = Reshape (r, shape)
        mixed = MatMul (flat, p)
        s = Softmax (mixed)
        turned = Transpose <perm = [1,0]> (s)
        norm = LayerNormalization (turned, one)
        picked = Gather (table, rows)
        y = MatMul (picked, norm)
    }"""

CHAIN = """(float[4,8] x) => (float[4,8] y) <float[8,8] w> {
    a = MatMul (x, w)
    b = Abs (a)
    left = Sigmoid (b)
    right = Neg (b)
    joined = Add (left, right)
    y = Mul (joined, b)
}"""


def write(path: Path, text: str, **weights: np.ndarray) -> OnnxFile:
    """The model of `text`; its initializers are seeded, but those that are given."""
    model = onnx.parser.parse_model(f"{HEADER} m {declared(text)}")
    for tensor in model.graph.initializer:
        shape, dtype = tuple(tensor.dims), onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        drawn = np.random.default_rng(len(tensor.name)).normal(size=shape)
        array = weights.get(tensor.name, drawn).astype(dtype)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(model, path)
    return OnnxFile(path)


def declared(text: str) -> str:
    """The parser wants numbers of an initializer; one stands for all, until `write` puts in others."""

    def filled(match: re.Match[str]) -> str:
        count = int(np.prod([int(size) for size in match[2].split(",")]))
        return f"{match[1]}[{match[2]}] {match[3]} = {{{', '.join(['0'] * count)}}}"

    head, begin, rest = text.partition("<")
    stored, end, body = rest.partition("> {")
    return head + begin + re.sub(r"(\w+)\[([\d,]+)\] (\w+)", filled, stored) + end + body


def feeds() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {"x": draw.normal(size=(1, 4, 6, 6)).astype(np.float32), "rows": np.array([4, 0, 2])}


def chain_feed() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)}


def compare(
    first: Backend, second: Backend, model: OnnxFile, feed: dict[str, np.ndarray], *, first_only: bool = True
) -> BackendComparison:
    graph = model.graph_for({name: array.shape for name, array in feed.items()})
    return compare_backends(first, second, graph, feed, first_only=first_only)


@pytest.mark.parametrize("pair", [("torch", "plan"), ("plan", "onnxruntime"), ("onnxruntime", "torch")])
def test_backends_agree_on_every_value(tmp_path: Path, pair: tuple[str, str]) -> None:
    """Also where the plan reuses memory, computes in place, or makes views."""
    model = write(tmp_path / "mixed.onnx", MIXED)
    found = compare(BACKENDS[pair[0]](model), BACKENDS[pair[1]](model), model, feeds())
    assert found.divergences == ()
    # The Constant is no value of the plan, whose Reshape has it as an attribute.
    assert found.compared == 9
    assert {*found.only_first, *found.only_second} == ({"shape"} if "onnxruntime" in pair else set())
    assert 0 <= found.worst[1] < 1


@pytest.mark.parametrize("pair", [("torch", "plan"), ("plan", "onnxruntime"), ("onnxruntime", "torch")])
def test_the_first_value_that_differs_is_named(tmp_path: Path, pair: tuple[str, str]) -> None:
    straight = write(tmp_path / "straight.onnx", CHAIN)
    bent = write(tmp_path / "bent.onnx", CHAIN.replace("Neg (b)", "Floor (b)"))
    found = compare(BACKENDS[pair[0]](straight), BACKENDS[pair[1]](bent), straight, chain_feed())
    (only,) = found.divergences
    assert (only.value, only.kind, only.type) == ("right", "Neg", "float32[4, 8]")
    assert found.compared == 4  # a, b, left, right

    weight = onnx.load(tmp_path / "straight.onnx").graph.initializer[0]
    b = np.abs(chain_feed()["x"] @ onnx.numpy_helper.to_array(weight))
    difference = np.abs(-b - np.floor(b))
    place = np.unravel_index(difference.argmax(), b.shape)
    assert only.errors.max_abs == pytest.approx(difference.max(), rel=1e-5)
    assert only.worst is not None
    assert only.worst.index == place
    assert float(only.worst.first) == pytest.approx(-b[place], rel=1e-5)
    assert float(only.worst.second) == np.floor(b[place])
    assert only.first.mean == pytest.approx(-b.mean(), rel=1e-5)
    assert (only.second.least, only.second.largest) == (np.floor(b).min(), np.floor(b).max())
    (read,) = only.inputs
    assert (read.name, read.role, read.type) == ("b", "tmp", "float32[4, 8]")
    assert read.statistics is not None
    assert read.statistics.deviation == pytest.approx(b.std(), rel=1e-4)
    assert read.largest_difference is not None
    assert read.largest_difference < 1e-5


def test_without_first_only_all_that_follow_are_listed_too(tmp_path: Path) -> None:
    straight = write(tmp_path / "straight.onnx", CHAIN)
    bent = write(tmp_path / "bent.onnx", CHAIN.replace("Neg (b)", "Floor (b)"))
    found = compare(BACKENDS["plan"](bent), BACKENDS["torch"](straight), straight, chain_feed(), first_only=False)
    assert [divergence.value for divergence in found.divergences] == ["right", "joined", "y"]
    assert found.compared == 6


def test_a_not_a_number_on_one_side_is_the_worst_element(tmp_path: Path) -> None:
    straight = write(tmp_path / "straight.onnx", CHAIN)
    bent = write(
        tmp_path / "bent.onnx",
        CHAIN.replace("Neg (b)", "Log (right0)").replace("    right =", "    right0 = Neg (b)\n    right ="),
    )
    found = compare(BACKENDS["torch"](straight), BACKENDS["plan"](bent), straight, chain_feed())
    (only,) = found.divergences
    assert only.worst is not None
    assert (only.value, only.worst.second, only.second.nan) == ("right", "nan", 32)
    assert found.only_second == ("right0",)


@pytest.mark.parametrize(("inner", "expected"), [("float16", ()), ("float", ("back",))])
def test_a_value_is_judged_by_the_least_precise_type_on_its_way(
    tmp_path: Path, inner: str, expected: tuple[str, ...]
) -> None:
    """Half a thousandth is a rounding of float16, also after a cast to float32."""
    number = {"float16": 10, "float": 1}[inner]
    text = f"""({inner}[8] x) => (float[8] y) <{inner}[8] w> {{
        scaled = Mul (x, w)
        back = Cast <to = 1> (scaled)
        y = Neg (back)
    }}"""
    text = text if number == 10 else text.replace("Cast <to = 1>", "Abs")
    one = write(tmp_path / "one.onnx", text, w=np.full(8, 1.0))
    other = write(tmp_path / "other.onnx", text, w=np.full(8, 1.001))
    x = np.linspace(1, 2, 8).astype(np.float16 if number == 10 else np.float32)
    found = compare(BACKENDS["torch"](one), BACKENDS["plan"](other), one, {"x": x}, first_only=False)
    assert [divergence.value for divergence in found.divergences][1:2] == list(expected)


def test_random_numbers_are_no_difference(tmp_path: Path) -> None:
    text = """(float[64] x) => (float[64] y) {
        noise = RandomNormalLike (x)
        y = Add (x, noise)
    }"""
    model = write(tmp_path / "noise.onnx", text)
    found = compare(BACKENDS["torch"](model), BACKENDS["plan"](model), model, {"x": np.zeros(64, np.float32)})
    assert (found.compared, found.divergences) == (2, ())


def test_a_model_that_runs_in_segments_cannot_be_walked(tmp_path: Path) -> None:
    model = write(tmp_path / "odd.onnx", "(float[2, 4] x) => (int64[2, n] y) { y = NonZero (x) }")
    with pytest.raises(Unsupported, match="NonZero"):
        compare(BACKENDS["plan"](model), BACKENDS["onnxruntime"](model), model, {"x": np.ones((2, 4), np.float32)})


@pytest.mark.parametrize(
    ("straight", "bent", "x", "worst", "why"),
    [
        (
            "(int64[3] x) => (int64[3] y) { y = Abs (x) }",
            "(int64[3] x) => (int64[3] y) <int64[3] one> { y = Add (x, one) }",
            np.array([7, 2**62, 2**62]),
            ((2,), "4611686018427387904", "4611686018427387905"),
            "1 of 3 elements differ, and int64 has to be equal",
        ),
        (
            "(double[2] x) => (double[2] y) { y = Identity (x) }",
            "(double[2] x) => (double[2] y) { y = Neg (x) }",
            np.array([1.0, 1.7e308]),
            ((1,), "1.7e+308", "-1.7e+308"),
            "max abs error inf is over 1.7e+298",
        ),
        (
            "(float[0] x) => (float[0] y) { y = Abs (x) }",
            "(float[0] x) => (double[0] y) { y = Cast <to = 11> (x) }",
            np.zeros(0, np.float32),
            None,
            "dtype float64, expected float32",
        ),
    ],
)
def test_the_worst_element_of_numbers_at_the_ends_of_their_types(
    tmp_path: Path, straight: str, bent: str, x: np.ndarray, worst: tuple[tuple[int, ...], str, str] | None, why: str
) -> None:
    """float64 does not tell 2**62 from its neighbour, has no 3.4e308, and an empty tensor has no element."""
    one = write(tmp_path / "straight.onnx", straight)
    other = write(tmp_path / "bent.onnx", bent, one=np.array([0, 0, 1]))
    (only,) = compare(BACKENDS["torch"](one), BACKENDS["plan"](other), one, {"x": x}).divergences
    found = None if only.worst is None else (only.worst.index, only.worst.first, only.worst.second)
    assert (found, only.errors.why) == (worst, why)
    assert np.isfinite([only.first.mean, only.first.deviation]).all()
