"""Arithmetic of shapes over sizes that are fixed, as pictures."""

from __future__ import annotations

import numpy as np
import pytest

from passes.context import PassContext
from passes.rewrites.fold_shape import FoldShape
from passes.weights.sessions import Session
from tests.support.onnx_models import detached, model_of

INTS = {"zero": 0, "one": 1, "axis": [0], "two": [2], "four": [4], "last": [-1], "places": [1, 2], "hundred": [100]}


def folded(body: str, context: PassContext) -> tuple[list[str], list[list[int]]]:
    """The operators after the step, and the constants that it has written."""
    text = f'g (float["N", 6, 8] x) => (float[] y) {{ {body} }}'
    model = model_of(text, **{name: np.array(value) for name, value in INTS.items()})
    result = FoldShape().apply(detached(model), context)
    assert not FoldShape().apply(result.model, context).changed
    for count in (1, 3):
        feeds = {"x": np.arange(count * 48, dtype=np.float32).reshape(count, 6, 8)}
        found, expected = (Session.of(m).run(feeds)["y"] for m in (result.model, detached(model)))
        np.testing.assert_array_equal(found, expected)
    graph = result.model.proto.graph
    written = [result.model.array(t).tolist() for t in graph.initializer if t.name.endswith("/folded")]
    return [node.op_type for node in graph.node], written


SIZES = "s = Shape (x) n = Gather <axis = 0> (s, axis)"


@pytest.mark.parametrize(
    ("body", "ops", "constants"),
    [
        (f"{SIZES} f = Concat <axis = 0> (n, last, four) y = Reshape (x, f)", ["Reshape"], [[0, -1, 4]]),
        (f"{SIZES} t = Concat <axis = 0> (n, two, four, places2) y = Reshape (x, t)", ["Reshape"], [[0, 2, 4, 6]]),
        (f"{SIZES} m = Mul (n, two) t = Concat <axis = 0> (m, k) y = Reshape (x, t)", ["Reshape"], [[-1, 24]]),
        ("s = Shape (x) r = Gather <axis = 0> (s, places) e = ConstantOfShape (r) y = Add (x, e)",
         ["ConstantOfShape", "Add"], [[6, 8]]),
        ("s = Shape <start = 1, end = 2> (x) i = Squeeze (s, axis) h = Div (i, half) y = Gather <axis = 1> (x, h)",
         ["Gather"], [3]),
        ("s = Shape (x) r = Slice (s, first, third, axis, two) t = Concat <axis = 0> (last, r) y = Reshape (x, t)",
         ["Reshape"], [[-1, 6]]),
        ("s = Shape (x) c = Cast <to = 1> (s) y = ReduceSum (c)", ["Shape", "Cast", "ReduceSum"], []),
        ("s = Shape (x) a = Abs (s) y = Reshape (x, a)", ["Shape", "Abs", "Reshape"], []),
    ],
)  # fmt: skip
def test_sizes_that_are_fixed_are_constants(
    body: str, ops: list[str], constants: list[object], context: PassContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INTS, "places2", [6])
    monkeypatch.setitem(INTS, "k", [24])
    monkeypatch.setitem(INTS, "half", 2)
    monkeypatch.setitem(INTS, "first", [1])
    monkeypatch.setitem(INTS, "third", [3])
    assert folded(body, context) == (ops, constants)


def test_a_size_that_the_result_declares_is_a_constant(context: PassContext) -> None:
    text = f'g (float["N", 6, 8] x) => (float[3, 48] y) {{ {SIZES} f = Concat <axis = 0> (n, k) y = Reshape (x, f) }}'
    values = {name: np.array(value) for name, value in {**INTS, "k": [48]}.items()}
    result = FoldShape().apply(detached(model_of(text, **values)), context)
    graph = result.model.proto.graph
    assert [node.op_type for node in graph.node] == ["Reshape"]
    assert [result.model.array(t).tolist() for t in graph.initializer if t.name.endswith("/folded")] == [[3, 48]]
