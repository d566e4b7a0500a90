"""Hostile passes: rows of a table that no draw reads are compared as weights, whatever reads them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from passes import Status
from passes.context import PassContext
from tests.passes.proof.test_hostile import POSITIONS, all_reverted, gaps, run, statuses
from tests.support.onnx_models import matrix, model_of

TEXT = """
g (int64[N, M] ids, float[N, M, 4] x) => (float[N, M, 4] y, float[N, M, 50] z) {
    e = Gather (table, ids)
    h = Add (e, x)
    turned = Transpose <perm = [1, 0]> (table) z = MatMul (h, turned)
    y = Tanh (h)
}
"""


def embedding(text: str = TEXT, rows: int = 50, **weights: np.ndarray) -> onnx.ModelProto:
    return model_of(text, table=np.random.default_rng(0).standard_normal((rows, 4)).astype(np.float32), **weights)


ALONE = TEXT.replace(", float[N, M, 50] z", "").replace(
    "turned = Transpose <perm = [1, 0]> (table) z = MatMul (h, turned)", ""
)

ROWS = (
    ("change_row", {"row": 0}),
    ("change_row", {"row": 49}),
    ("change_row", {"row": 23}),
    ("change_row", {"row": -2}),
    ("swap_rows", {}),
    ("cut_off", {"to": 49}),
    ("cut_off", {"to": 40}),
    ("pad_and_change", {}),
    ("half_in_other_place", {}),
    ("own_table", {}),
    ("as_one_hot", {}),
    ("has_index", {"index": 0}),
    ("has_index", {"index": 49}),
)


def test_rows_of_a_table_that_no_draw_reads_are_compared_as_weights(context: PassContext) -> None:
    result = run(embedding(ALONE), context, *ROWS)
    assert statuses(result) == all_reverted(*ROWS)
    [table] = result.coverage.tables
    assert (table.name, table.op, table.rows, table.compared) == ("table", "Gather", 50, True)
    assert table.read is not None and 10 < table.read < 50
    reasons = {(row.name, row.reason) for row in result.rows}
    assert ("cut_off", "differs: the table 'table' has lost its rows 40 to 49") in reasons
    assert any("which Gather reads, has other row" in reason for _, reason in reasons)


def test_the_right_table_alive_for_others_does_not_hide_the_wrong_one(context: PassContext) -> None:
    """As with tied weights: the logits go on reading the right table."""
    steps = (("own_table", {}),)
    assert statuses(run(embedding(), context, *steps)) == all_reverted(*steps)


def test_all_rows_but_the_ones_that_are_read(context: PassContext) -> None:
    feeds = [{"ids": np.array([[3, 4]]), "x": np.zeros((1, 2, 4), np.float32)}]
    steps = (("zero_rest", {"read": [3, 4]}), ("cut_off", {"to": 5}))
    result = run(embedding(ALONE), context, *steps, feeds=feeds)
    assert statuses(result) == all_reverted(*steps)
    assert [(table.rows, table.read) for table in result.coverage.tables] == [(50, 2)]


@pytest.mark.parametrize("step", ["transpose_table", "split_table", "put_behind", "store_doubles"])
def test_a_table_in_another_layout_is_the_same_table(step: str, context: PassContext) -> None:
    """And rows that are changed after that are seen."""
    result = run(embedding(ALONE), context, (step, {}))
    assert statuses(result) == [(step, Status.RAN)], result.rows[0].reason
    assert result.coverage.tables[0].compared and gaps(result) == []


def test_a_row_is_seen_in_a_table_in_another_layout(context: PassContext) -> None:
    steps = (("put_behind", {}), ("change_row", {"row": 33}), ("cut_off", {"to": 45}))
    result = run(embedding(ALONE), context, *steps)
    assert statuses(result) == [("put_behind", Status.RAN), *all_reverted(*steps[1:])]


def test_a_table_in_no_known_form_is_not_covered(context: PassContext) -> None:
    result = run(embedding(ALONE, rows=500), context, ("scaled", {}))
    assert result.rows[0].status is Status.RAN
    assert not result.coverage.tables[0].compared
    assert any("'table'" in gap for gap in result.coverage.not_covered)


HOT = {
    "OneHot and Gemm": "h = OneHot (ids, depth, bits) y = Gemm (h, table)",
    "OneHot and Einsum": 'h = OneHot (ids, depth, bits) y = Einsum <equation = "nr,rc->nc"> (h, table)',
    "OneHot along the first axis": "h = OneHot <axis = 0> (ids, depth, bits) t = Transpose (h) y = MatMul (t, table)",
    "after the table": "h = OneHot <axis = 0> (ids, depth, bits) t = Transpose (table) "
    "u = MatMul (t, h) y = Transpose (u)",
    "Equal": "i = Unsqueeze (ids, one) e = Equal (i, numbers) h = Cast <to = 1> (e) y = MatMul (h, table)",
}


@pytest.mark.parametrize("case", HOT)
def test_products_with_zeros_and_ones_look_up_rows_too(case: str, context: PassContext) -> None:
    constants = {"depth": np.array(50), "bits": np.array([0, 1], np.float32), "one": np.array([1])}
    model = embedding(f"g (int64[N] ids) => (float[N, 4] y) {{ {HOT[case]} }}", **constants, numbers=np.arange(50))
    steps = (("change_row", {"row": 23}), ("has_index", {"index": 49}))
    result = run(model, context, *steps)
    assert statuses(result) == all_reverted(*steps)
    [table] = result.coverage.tables
    assert table.rows == 50 and table.read is not None and 2 < table.read < 40 and table.compared


def test_a_table_of_equal_rows_is_no_loss(context: PassContext) -> None:
    """As the segments of a text, which are all zero where nobody gives any."""
    text = """
    g (int64[N] ids) => (float[N, 4] y) {
        size = Constant <value_ints = [32]> () kinds = Expand (zero, size) k = Gather (kinds, ids) y = Gather (table, k)
    }
    """
    result = run(embedding(text, zero=np.array([0])), context, ("as_zeros", {"output": "k"}))
    assert result.rows[0].status is Status.RAN
    assert not [gap for gap in result.coverage.not_covered if "'kinds'" in gap]


EMBEDS = """
g (int32[N, M] ids, int32[N, M] kinds) => (float[N, M, 4] y) {
    y, z = com.microsoft.EmbedLayerNormalization (ids, kinds, table, places, two, scale, shift)
}
"""


def test_tables_of_a_fused_operator(context: PassContext) -> None:
    tables = {"places": matrix(16, 4, 1), "two": matrix(2, 4, 2)}
    tables |= {"table": matrix(50, 4, 0), "scale": np.ones(4, np.float32), "shift": np.zeros(4, np.float32)}
    model = onnx.parser.parse_model('<ir_version: 9, opset_import: ["": 20, "com.microsoft": 1]>' + EMBEDS)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in tables.items())
    steps = (("change_row", {"row": 23}), ("change_row", {"table": "places", "row": 12}))
    result = run(model, context, *steps)
    assert statuses(result) == all_reverted(*steps)
    assert {table.name: table.rows for table in result.coverage.tables} == {"table": 50, "places": 16, "two": 2}


OTHER_TABLES = """
g (int64[batch] ids, int64[batch, 2] places) => (float[3, batch] a, float[batch, 4] b, float[batch, 2] c) {
    column = Unsqueeze (ids, one)
    shape = Constant <value_ints = [1, 4]> ()
    spread = Expand (column, shape)
    a = Gather <axis = 1> (wide, ids)
    b = GatherElements (tall, spread)
    c = GatherND (deep, places)
}
"""


def test_other_ways_to_look_up(context: PassContext) -> None:
    tables = {"wide": matrix(3, 20, 0), "tall": matrix(20, 4, 1), "deep": matrix(40, 4, 2).reshape(20, 4, 2)}
    model = model_of(OTHER_TABLES, one=np.array([1]), **tables)
    steps = (
        ("change_row", {"table": "wide", "row": 9, "axis": 1}),
        ("cut_off", {"table": "wide", "to": 19, "axis": 1}),
        ("change_row", {"table": "tall", "row": 11}),
        ("change_row", {"table": "deep", "row": 19}),
        ("cut_off", {"table": "deep", "to": 18}),
    )
    result = run(model, context, *steps)
    assert statuses(result) == all_reverted(*steps)
    assert {table.name: table.rows for table in result.coverage.tables} == {"wide": 20, "tall": 20, "deep": 20}


def test_rows_after_the_longest_sequence(context: PassContext) -> None:
    model = model_of(POSITIONS, w1=matrix(4, 4, 0), positions=matrix(16, 4, 1), zero=np.array([0]))
    steps = (("change_row", {"table": "positions", "row": 12}), ("cut_off", {"table": "positions", "to": 10}))
    result = run(model, context, *steps)
    assert statuses(result) == all_reverted(*steps)
    assert [(table.rows, table.read, table.compared) for table in result.coverage.tables] == [(16, 13, True)]


def test_a_table_that_is_listed_as_an_input_too_is_a_table(context: PassContext) -> None:
    """As files of IR version 3 have it."""
    model = embedding(ALONE)
    model.ir_version = 3
    model.graph.input.append(onnx.helper.make_tensor_value_info("table", onnx.TensorProto.FLOAT, [50, 4]))
    steps = (("change_row", {"row": 23}),)
    assert statuses(run(model, context, *steps)) == all_reverted(*steps)


def test_a_table_inside_of_a_branch_is_compared_too(context: PassContext) -> None:
    text = """
    g (int64[N] ids, bool which) => (float[N, 4] y) {
        y = If (which) <
            then_branch = one () => (float[N, 4] a) { a = Gather (table, ids) },
            else_branch = other () => (float[N, 4] b) { c = Gather (table, ids) b = Neg (c) }
        >
    }
    """
    steps = (("change_row", {"row": 23}), ("cut_off", {"to": 49}))
    result = run(embedding(text), context, *steps)
    assert statuses(result) == all_reverted(*steps)
    assert [(table.rows, table.read, table.compared) for table in result.coverage.tables] == [(50, None, True)] * 2
    assert [(branch.then_taken, branch.else_taken) for branch in result.coverage.branches] == [(True, True)]
