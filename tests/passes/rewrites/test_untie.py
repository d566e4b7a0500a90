"""Untying of weights, and tying them again: before and after as pictures, names, and what shares memory."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import passes
from passes.context import PassContext
from passes.errors import PolicyError
from passes.model.analysis import AnalyzedModel
from passes.provenance import annotations_of
from passes.rewrites.untie import Tie, Untie
from passes.weights.detached import DetachedModel, attach
from passes.weights.sessions import Session
from tests.support.onnx_models import detached, matrix, model_of
from tests.support.onnx_text import body

TIED = """g (int64[2] tokens) => (float[2, 64] y) {
    x = Gather (table, tokens)
    turned = Transpose <perm = [1, 0]> (table)
    y = MatMul (x, turned)
}"""


def untie(model: onnx.ModelProto, context: PassContext) -> DetachedModel:
    return Untie().apply(detached(model), context).model


def place(model: onnx.ModelProto, modules: list[str]) -> onnx.ModelProto:
    """`model` with its nodes in these modules, as torch's exporter writes them."""
    for node, module in zip(model.graph.node, modules, strict=True):
        if module:
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr(["", module, "call"]))
            node.metadata_props.add(key="pkg.torch.onnx.class_hierarchy", value=repr(["M", "L", "aten.mm.default"]))
    return model


def test_every_reader_gets_a_weight_that_shares_its_bytes(context: PassContext) -> None:
    model = model_of(TIED, table=matrix(64, 32, 0))
    after = untie(model, context)
    assert body(after.proto) == [
        *("x = Gather (table, tokens)", "turned = Transpose (table_2)", "y = MatMul (x, turned)")
    ]
    first, second = (after.weight(tensor) for tensor in after.proto.graph.initializer)
    assert first is not None and first is second
    onnx.checker.check_model(attach(after), full_check=True)
    assert not Untie().apply(after, context).changed
    feeds = {"tokens": np.array([3, 60])}
    before = Session.of(detached(model)).run(feeds)["y"]
    np.testing.assert_array_equal(Session.of(after).run(feeds)["y"], before)


def test_readers_of_one_module_share_a_weight(context: PassContext) -> None:
    text = """g (float[4, 4] x) => (float[4, 4] y) {
        a = MatMul (x, w) b = MatMul (a, w) c = MatMul (b, w) d = MatMul (c, w) y = MatMul (d, w)
    }"""
    model = place(model_of(text, w=matrix(4, 4, 0), w_2=matrix(1, 2, 0)), ["one", "two", "one", "", ""])
    assert body(untie(model, context).proto) == [
        *("a = MatMul (x, w)", "b = MatMul (a, w_3)", "c = MatMul (b, w)"),
        *("d = MatMul (c, w_4)", "y = MatMul (d, w_5)"),
    ]


def test_products_and_other_operators_get_weights_of_their_own(context: PassContext) -> None:
    text = """g (float[4, 4] x, int64[4] rows) => (float[4, 4] y, int64[2] n) {
        a = MatMul (x, w) b = MatMul (a, w) c = Add (b, added) d = Sub (c, added)
        e = Gather (table, rows) f = Gather (table, rows) t = Transpose (table) g = MatMul (d, t)
        h = Add (e, f) y = Add (g, h) n = Shape (w)
    }"""
    model = detached(model_of(text, w=matrix(4, 4, 0), added=matrix(4, 4, 1), table=matrix(4, 4, 2)))
    step = Untie(by_operator=True)
    after = step.apply(model, context)
    before, found = body(model.proto), body(after.model.proto)
    assert [line for line in found if line not in before] == ["t = Transpose (table_2)"]
    assert after.why == "1 copy of tied weights"
    assert not step.apply(after.model, context).changed
    with pytest.raises(PolicyError, match="give one of them"):
        Untie(each_node=True, by_operator=True).check(context)


def test_each_node_gets_a_weight_also_in_one_module(context: PassContext) -> None:
    text = """g (float[4, 4] x) => (float[4, 4] y) {
        a = MatMul (x, w) b = MatMul (w, a) c = Add (w, w) d = Add (b, c) y = MatMul (d, w)
    }"""
    model = place(model_of(text, w=matrix(4, 4, 0)), ["one", "one", "one", "one", "two"])
    assert body(untie(model, context).proto) == [
        *("a = MatMul (x, w)", "b = MatMul (w, a)", "c = Add (w, w)", "d = Add (b, c)", "y = MatMul (d, w_2)"),
    ]
    after = Untie(each_node=True).apply(detached(model), context).model
    assert body(after.proto) == [
        *("a = MatMul (x, w)", "b = MatMul (w_2, a)", "c = Add (w_3, w_3)", "d = Add (b, c)", "y = MatMul (d, w_4)"),
    ]
    assert not Untie(each_node=True).apply(after, context).changed
    assert passes.optimize(model, [{"untie": {"each_node": True}}], context=context).rows[0].changed
    with pytest.raises(PolicyError, match="'untie': each_node is 'yes'; expected true or false"):
        passes.optimize(model, [{"untie": {"each_node": "yes"}}], context=context)


def test_scalars_shapes_inputs_and_what_a_body_reads_stay(context: PassContext) -> None:
    text = """g (bool c, float[8, 2] x, float[2] fed) => (float[8, 2] y) {
        p = Mul (x, scale) q = Mul (p, scale)
        r = Reshape (q, shape) s = Reshape (r, shape)
        t = Add (s, fed) u = Add (t, fed)
        v = If (c) <then_branch = a () => (float[8, 2] e) { e = Add (u, bias) },
                    else_branch = b () => (float[8, 2] f) { f = Identity (u) }>
        y = Add (v, bias)
    }"""
    weights = {"scale": np.ones(1, np.float32), "shape": np.array([8, 2]), "fed": np.ones(2, np.float32)}
    model = model_of(text, bias=matrix(1, 2, 1)[0], **weights)
    after = untie(model, context)
    assert [name for name in body(after.proto) if "_2" in name] == ["y = Add (v, bias_2)"]
    assert body(after.proto)[:-1] == body(model)[:-1]


def test_a_run_proves_it_and_knows_where_the_copy_comes_from(context: PassContext) -> None:
    model = model_of(TIED, table=matrix(64, 32, 0))
    result = passes.optimize(model, ["untie"], context=context)
    [row] = result.rows
    assert (row.status.value, row.changed, row.reason) == ("ran", True, "1 copy of tied weights")
    copy = next(tensor for tensor in result.model.proto.graph.initializer if tensor.name == "table_2")
    assert annotations_of(copy).replaced == ("table",)
    again = passes.optimize(model, ["untie", "eliminate_duplicate_initializer"], context=context)
    before = AnalyzedModel(detached(model)).canonical.digest
    assert AnalyzedModel(again.model).canonical.digest == before, "a later pass may tie them again, as the docs say"


def test_a_matrix_that_is_stored_twice_also_transposed_is_stored_once(context: PassContext) -> None:
    text = """g (int64[2] tokens, bool c) => (float[2, 8] y) {
        x = Gather (table, tokens) a = MatMul (x, square) b = MatMul (a, square_2)
        d = If (c) <then_branch = p () => (float[2, 8] e) { e = MatMul (b, square_2) },
                    else_branch = q () => (float[2, 8] f) { f = Mul (b, scale_2) }>
        g = MatMul (d, head) h = MatMul (g, zeros) i = MatMul (h, zeros_2) y = Mul (i, scale)
    }"""
    table, square = matrix(6, 8, 0), matrix(8, 8, 1)
    zeros, scale = np.zeros((6, 8), np.float32), np.ones(8, np.float32)
    model = model_of(
        text,
        **{"table": table, "head": table.T.copy(), "square": square, "square_2": square},
        **{"zeros": zeros, "zeros_2": np.zeros((8, 8), np.float32), "scale": scale, "scale_2": scale},
    )
    result = passes.optimize(model, ["tie"], context=context)
    assert (result.rows[0].reason, result.rows[0].changed) == ("2 copies of weights tied", True)
    proto = result.model.proto
    assert [line for line in body(proto) if "head" in line or "MatMul" in line] == [
        *("head = Transpose (table)", "a = MatMul (x, square)", "b = MatMul (a, square)"),
        *("g = MatMul (d, head)", "h = MatMul (g, zeros)", "i = MatMul (h, zeros_2)"),
    ]
    branch = next(node for node in proto.graph.node if node.op_type == "If").attribute[0].g
    assert list(branch.node[0].input) == ["b", "square"]
    stored = {tensor.name for tensor in proto.graph.initializer}
    assert stored == {"table", "square", "zeros", "zeros_2", "scale", "scale_2"}
    assert not Tie().apply(result.model, context).changed


def test_tying_undoes_untying(context: PassContext) -> None:
    model = model_of(TIED, table=matrix(64, 32, 0))
    result = passes.optimize(model, ["untie", "tie"], context=context)
    assert [row.changed for row in result.rows] == [True, True]
    assert body(result.model.proto) == body(model)
