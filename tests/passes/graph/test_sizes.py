"""Types of all values at fixed sizes, where a model computes its own shapes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from passes.context import PassContext
from passes.graph.index import GraphIndex
from passes.graph.inference import dims_of, infer_types
from passes.graph.sizes import infer_at_sizes, is_open
from passes.tools import fix_shapes, inspect_model
from tests.support.onnx_models import matrix, model_of

SCALAR = """
g (float[2, 3, 4] x) => (float[a, b, c] y) <float[4, 5] w> {
  zero = Constant <value = int64 {0}> ()
  some = Constant <value_ints = [-1]> ()
  halves = Constant <value_ints = [2, 2]> ()
  s = Shape (x)
  rows = Gather (s, zero)
  list = Reshape (rows, some)
  shape = Concat <axis = 0> (list, some, halves)
  r = Reshape (x, shape)
  f = Reshape (r, four)
  y = MatMul (f, w)
}"""
"""torch's exporter writes the size of an axis as a scalar, and makes a list of it by a Reshape."""

EXPANDED = """
g (float[2, 1, 4] x, float[2, 3, 1] z) => (float[a, b, c] y) {
  m = Constant <value_ints = [-1, 3, -1]> ()
  ones = Constant <value_ints = [1, 1, 1]> ()
  wild = Constant <value_ints = [-1, -1, -1]> ()
  is = Equal (m, wild)
  shape = Where (is, ones, m)
  e = Expand (x, shape)
  hidden = Shape (e)
  filled = ConstantOfShape (hidden)
  y = Add (e, filled)
}"""
"""torch's older exporter writes `expand(-1, 3, -1)` so."""


FOO = """<ir_version: 9, opset_import: ["" : 18]>
g (float[2] x) => (float[n] y) { a = Foo (x) b = Shape (a) y = Expand (x, b) }"""


def shapes_of(graph: onnx.GraphProto) -> dict[str, object]:
    return {name: dims_of(info) for name, info in GraphIndex(graph).types.items()}


def scalar() -> onnx.ModelProto:
    return model_of(SCALAR, w=matrix(4, 5, 1), four=np.array([2, -1, 4]))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (scalar(), {"r": (2, 3, 2, 2), "f": (2, 3, 4), "y": (2, 3, 5)}),
        (model_of(EXPANDED), {"e": (2, 3, 4), "filled": (2, 3, 4), "y": (2, 3, 4)}),
    ],
    ids=["scalar", "expanded"],
)
def test_computed_shapes_are_followed(model: onnx.ModelProto, expected: dict[str, object]) -> None:
    found = shapes_of(infer_at_sizes(model))
    assert {name: found[name] for name in expected} == expected
    bare = shapes_of(infer_types(model, data_prop=True))
    assert {name: bare.get(name) for name in expected} != expected, "ONNX's own inference follows it by now"


def test_open_inputs_and_damaged_nodes_leave_the_types_as_they_are() -> None:
    model = scalar()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    assert infer_at_sizes(model) == infer_types(model, data_prop=True)
    unknown = onnx.parser.parse_model(FOO)
    assert infer_at_sizes(unknown) == infer_types(unknown, data_prop=True)


def test_what_is_counted_and_fixed_after_a_computed_shape(context: PassContext) -> None:
    model = scalar()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "words"
    facts = inspect_model(model, {"x": [2, 3, 4]})
    assert (facts.macs, facts.uncounted) == ({"MatMul": 2 * 3 * 4 * 5}, ())
    assert facts.peak is not None
    fixed = fix_shapes(model, {"x": [2, 3, 4]}, context=context).model.proto.graph
    assert dims_of(fixed.output[0]) == (2, 3, 5)
    assert not any(is_open(info) for info in fixed.value_info)
