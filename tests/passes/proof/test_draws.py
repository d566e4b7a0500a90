"""What is drawn where nobody gives inputs: open dims in two sizes, where the model runs so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxoptimizer
import pytest

import passes
from passes import ModelError, Status
from passes.context import PassContext
from passes.optimize import draw_feeds, open_dims, second_sizes
from passes.proof.lookups import rows_by_input
from tests.support.onnx_models import detached

HEADER = '<ir_version: 8, opset_import: ["": 18]>'
SHAPED = f"{HEADER} g (float[N,M] x) => (int64[2] y) {{ s = Shape (x) y = Neg (s) }}"
SQUARE = f"{HEADER} g (float[N,M] x) => (float[N,M] y, int64[2] z) {{ a = MatMul (x, x) y = Add (a, x) z = Shape (x) }}"
FIXED = (
    f"{HEADER} g (float[N] x) => (float y, int64[1] z) <float[2] w = {{1, 2}}> {{ y = MatMul (x, w) z = Shape (x) }}"
)
NEVER = f"{HEADER} g (float[N] x) => (float y) <float[5] w = {{1, 2, 3, 4, 5}}> {{ y = MatMul (x, w) }}"

CACHED = f"""{HEADER} g (float[2,past_length] past, float[2,length] x, float[2,total_length] mask) => (float[2,n] y) {{
    both = Concat <axis = 1> (past, x) y = Mul (both, mask)
}}"""

EMPTY = f"""{HEADER} g (int64[2] lengths, float[2] x) => (float[2] y) {{
    n = Cast <to = 1> (lengths) m = Mul (x, n) y = Div (m, n)
}}"""

CODE = """
from onnx import helper

def fold(model, *, to):
    for place, node in enumerate(model.graph.node):
        if node.op_type == "Shape":
            constant = helper.make_node("Constant", [], list(node.output), value_ints=to)
            model.graph.node.remove(node)
            model.graph.node.insert(place, constant)
            return model
"""


@pytest.fixture
def fold(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(CODE)
    return f"{tmp_path}/own.py:fold"


def test_the_sizes_that_show_most_come_first() -> None:
    assert list(second_sizes(["N", "M"])) == [{"N": 3, "M": 4}, {"N": 3, "M": 3}, {"N": 2, "M": 2}]
    assert list(second_sizes(["N"])) == [{"N": 3}, {"N": 2}]
    assert list(second_sizes([])) == [{}]


def test_dims_of_one_name_are_drawn_alike() -> None:
    model = detached(
        onnx.parser.parse_model(f"{HEADER} g (float[N,3] x, int64[M,N] i) => (float[N,3] y) {{ y = Neg (x) }}")
    )
    assert open_dims(model.proto) == ("N", "M")
    drawn = draw_feeds(model, 1, sizes={"N": 3, "M": 4})
    assert {name: array.shape for name, array in drawn.items()} == {"x": (3, 3), "i": (4, 3)}
    assert {name: array.shape for name, array in draw_feeds(model, 0).items()} == {"x": (2, 3), "i": (2, 2)}


def test_indices_stay_within_a_table_that_is_computed() -> None:
    text = "g (int64[9] ids) => (float[9] y) <float[3] w = {1, 2, 3}> { t = Neg (w) y = Gather (t, ids) }"
    assert rows_by_input(detached(onnx.parser.parse_model(f"{HEADER} {text}"))) == {"ids": 3}


@pytest.mark.parametrize("total", ["total_length", "past_length + length", "length+past_length"])
def test_a_dim_that_is_the_sum_of_others_by_its_name(total: str, context: PassContext) -> None:
    model = onnx.parser.parse_model(CACHED)
    model.graph.input[2].type.tensor_type.shape.dim[1].dim_param = total
    assert open_dims(model) == ("past_length", "length")
    drawn = draw_feeds(detached(model), 1, sizes={"past_length": 3, "length": 4})
    assert {name: array.shape for name, array in drawn.items()} == {"past": (2, 3), "x": (2, 4), "mask": (2, 7)}
    run = passes.optimize(model, recipe=["eliminate_identity"], context=context)
    assert list(run.coverage.sizes) == ["past_length", "length"]
    assert all({1, 2, 7, 8} <= set(sizes) for sizes in run.coverage.sizes.values())


def test_a_name_without_its_summands_is_a_dim_of_its_own() -> None:
    model = onnx.parser.parse_model(CACHED.replace("past_length", "before"))
    assert open_dims(model) == ("before", "length", "total_length")


@pytest.mark.parametrize(
    ("text", "status"), [(SHAPED, Status.REVERTED), (SQUARE, Status.REVERTED), (FIXED, Status.RAN)]
)
def test_a_size_that_became_a_constant_is_seen_where_the_model_has_another(
    text: str, status: Status, fold: str, context: PassContext
) -> None:
    """The second runs on squares alone, and the third at 2 alone."""
    to = [2] if text is FIXED else [2, 2]
    run = passes.optimize(onnx.parser.parse_model(text), recipe=[{fold: {"to": to}}], context=context)
    assert run.rows[0].status is status


def test_inputs_of_ones_own_are_the_only_ones(fold: str, context: PassContext) -> None:
    feeds = [{"x": np.ones((2, 2), np.float32)}]
    run = passes.optimize(
        onnx.parser.parse_model(SHAPED), recipe=[{fold: {"to": [2, 2]}}], feeds=feeds, context=context
    )
    assert run.rows[0].status is Status.RAN


def test_a_model_that_runs_at_no_size_is_a_mistake(context: PassContext) -> None:
    with pytest.raises(ModelError, match="the model does not run as it is"):
        passes.optimize(
            onnx.parser.parse_model(NEVER), recipe=[{"onnxsim": {"skip_shape_inference": True}}], context=context
        )


@pytest.mark.parametrize("text", [SHAPED, SQUARE, FIXED])
def test_a_guard_compares_numbers_where_the_model_runs(text: str) -> None:
    with passes.guard(quiet=True, compare=False) as log:
        onnxoptimizer.optimize(onnx.parser.parse_model(text), ["eliminate_identity"])
    assert [call.proof for call in log.calls] == ["numbers"]


def test_a_model_that_makes_nan_of_zeros_is_drawn_without(context: PassContext) -> None:
    """A length of 0 makes the mean of nothing."""
    run = passes.optimize(onnx.parser.parse_model(EMPTY), recipe=["eliminate_identity"], context=context)
    assert "not drawn: zeros in integers (output 'y' holds NaN there)" in run.coverage.not_covered
