"""The index that finders read: constants after layout, values that are the same, and what an optimizer may fold."""

from __future__ import annotations

import numpy as np
import pytest

from passes.structures.axes import inputs_with_axis
from passes.structures.view import GraphView, modules_of
from tests.support.onnx_models import detached
from tests.support.structure_models import drawn

TEXT = """
g (float[2, 4] x, int64[n, 3] i) => (float[2, 4] y, float[1] z) <float[4] w, double third = {0.25}> {
    two = Constant <value_float = 2.0> ()
    axes = Constant <value_ints = [1, 2]> ()
    row = Constant <value_ints = [1]> ()
    same = Cast <to = 1> (third)
    like = CastLike (two, x)
    flat = Reshape (like, row)
    root = Sqrt (two)
    v = Add (w, w)
    fixed = Shape (x)
    free = Shape (i)
    noise = RandomUniform <shape = [1]> ()
    x1 = Identity (x)
    x2 = Cast <to = 11> (x1)
    a = Relu (x1)
    b = Neg (x2)
    y = Mul (a, v)
    z = Add (noise, flat)
}"""


@pytest.fixture(scope="module")
def view() -> GraphView:
    return GraphView(detached(drawn(TEXT)))


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("two", 2.0),
        ("like", 2.0),
        ("flat", 2.0),
        ("same", 0.25),
        ("root", None),
        ("w", None),
        ("x", None),
        ("axes", None),
    ],
)
def test_scalars_after_layout_and_casts(view: GraphView, name: str, number: float | None) -> None:
    assert view.scalar(name) == number


def test_small_constants(view: GraphView) -> None:
    numbers = view.small_constant("axes")
    assert numbers is not None
    np.testing.assert_array_equal(numbers, [1, 2])
    assert view.small_constant("v") is None


def test_what_may_be_folded(view: GraphView) -> None:
    names = {name for node in view.nodes for name in node.output} & view.folded
    assert names == {"two", "axes", "row", "same", "like", "flat", "root", "v", "fixed"}


def test_the_same_value_and_who_reads_it(view: GraphView) -> None:
    assert view.source("x2") == "x"
    assert {node.output[0] for node in view.find_consumers("x")} == {"fixed", "a", "b"}
    assert [node.output[0] for node in view.find_consumers("x", "Neg", "Abs")] == ["b"]
    producer = view.find_producer("y", "Mul")
    assert producer is not None
    assert view.find_producer("y", "Add") is None


def test_sizes(view: GraphView) -> None:
    assert view.dims("i") == ("n", 3)
    assert view.dims("nothing") is None


def test_modules_around_a_node() -> None:
    node = drawn("g (float[1] x) => (float[1] y) { y = Neg (x) }").graph.node[0]
    assert modules_of(node) == ()
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'model', 'model.layers.0', 'neg']")
    assert modules_of(node) == ("model", "model.layers.0")


def test_an_axis_that_a_squeezed_value_does_not_have_is_not_known() -> None:
    text = "g (float[2, 1, 3] x) => (float[2, 3] y) { at = Constant <value_ints = [1]> () y = Squeeze (x, at) }"
    model = detached(drawn(text))
    squeeze = model.proto.graph.node[-1]
    found = {axis: dict(inputs_with_axis(GraphView(model), squeeze, axis)) for axis in (-1, -2, -3, -4)}
    assert found == {-1: {"x": -1}, -2: {"x": -3}, -3: {"x": None}, -4: {"x": None}}


def test_a_squeeze_of_named_axes_leaves_other_axes_of_size_1() -> None:
    text = "g (float[1, 1, 3] x) => (float[1, 3] y) { at = Constant <value_ints = [1]> () y = Squeeze (x, at) }"
    model = detached(drawn(text))
    found = {axis: dict(inputs_with_axis(GraphView(model), model.proto.graph.node[-1], axis)) for axis in (-1, -2)}
    assert found == {-1: {"x": -1}, -2: {"x": -3}}
