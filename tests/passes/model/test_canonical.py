"""Digests see what is computed, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from passes.model.canonical import canonical_digest, value_digests
from passes.weights.detached import DetachedModel
from tests.support.onnx_models import attention, detached, matrix, model_of

Change = Callable[[onnx.ModelProto], None]


def change_attention(change: Change) -> DetachedModel:
    model = attention()
    change(model)
    return detached(model)


def rename(model: onnx.ModelProto) -> None:
    fixed = {"x", "y", *(tensor.name for tensor in model.graph.initializer)}
    for node in model.graph.node:
        node.name = f"n_{node.name}_{node.output[0]}"
        node.doc_string = "words"
        for names in (node.input, node.output):
            names[:] = [name if name in fixed else f"v_{name}" for name in names]
    for index, tensor in enumerate(model.graph.initializer):
        for node in model.graph.node:
            node.input[:] = [f"w{index}" if name == tensor.name else name for name in node.input]
        tensor.name = f"w{index}"


def swap_constants(model: onnx.ModelProto) -> None:
    nodes = list(model.graph.node)
    constants = [node for node in nodes if node.op_type == "Constant"]
    others = [node for node in nodes if node.op_type != "Constant"]
    del model.graph.node[:]
    model.graph.node.extend(reversed(constants))
    model.graph.node.extend(others)


def test_names_in_a_branch_or_a_loop_say_nothing() -> None:
    text = """
    g (int64 trips, bool c, float[2] x) => (float[2] y) {{
        z = If (c) <then_branch = t () => (float[2] {a}) {{ {a} = Neg (x) }},
                    else_branch = e () => (float[2] b) {{ b = Identity (x) }}>
        y = Loop (trips, c, z) <body = l (int64 i, bool more, float[2] {v}) => (bool {go}, float[2] {w}) {{
            {go} = Identity (more)
            {w} = Abs ({v})
        }}>
    }}
    """
    first = detached(model_of(text.format(a="a", v="v", go="go", w="w")))
    other = detached(model_of(text.format(a="p", v="q", go="r", w="s")))
    assert canonical_digest(first) == canonical_digest(other)
    assert value_digests(first).whole == value_digests(other).whole


@pytest.mark.parametrize("change", [rename, swap_constants], ids=["renamed", "reordered"])
def test_what_computes_the_same_digests_the_same(change: Change) -> None:
    assert canonical_digest(change_attention(change)) == canonical_digest(detached(attention()))


def test_an_optional_input_at_the_end_may_be_written_as_empty() -> None:
    """`onnxline diff` found a change, which it could not name, in what onnxsim writes for Keras's LSTM."""
    written, left_out = (model_of("g (float[2] x) => (float[2] y) { y = Clip (x) }") for _ in range(2))
    written.graph.node[0].input.extend(["", ""])
    assert canonical_digest(detached(written)) == canonical_digest(detached(left_out))
    written.graph.node[0].input[2] = "x"
    assert canonical_digest(detached(written)) != canonical_digest(detached(left_out))


def other_attribute(model: onnx.ModelProto) -> None:
    next(node for node in model.graph.node if node.op_type == "Softmax").attribute[0].i = 1


def other_weight(model: onnx.ModelProto) -> None:
    array = numpy_helper.to_array(model.graph.initializer[0]).copy()
    array[0, 0] += 1e-6
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(array, model.graph.initializer[0].name))


def other_edge(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if list(node.output) == ["v"])
    node.input[1] = "wk"


def other_op(model: onnx.ModelProto) -> None:
    next(node for node in model.graph.node if node.op_type == "Relu").op_type = "Tanh"


@pytest.mark.parametrize("change", [other_attribute, other_weight, other_edge, other_op])
def test_what_computes_another_thing_digests_differently(change: Change) -> None:
    assert canonical_digest(change_attention(change)) != canonical_digest(detached(attention()))
    assert value_digests(change_attention(change)).whole != value_digests(detached(attention())).whole


PLAIN = "g (float[2] x) => (float[2] y) { y = Add (x, c) }"
DEAD = "g (float[2] x) => (float[2] y) { dead = Neg (x) y = Add (x, c) }"
IDENTITY = "g (float[2] x) => (float[2] y) { same = Identity (c) y = Add (x, same) }"


@pytest.mark.parametrize("text", [DEAD, IDENTITY])
def test_live_digest_looks_through_what_does_not_matter(text: str) -> None:
    c = matrix(1, 2, 0).ravel()
    plain, other = detached(model_of(PLAIN, c=c)), detached(model_of(text, c=c))
    assert canonical_digest(plain) != canonical_digest(other)
    assert value_digests(plain).whole == value_digests(other).whole


TWICE = "g (float[2] x) => (float[2] y) { a = Neg (x) b = Neg (x) y = Add (a, b) }"
ONCE = "g (float[2] x) => (float[2] y) { a = Neg (x) b = Neg (x) y = Add (a, a) }"


def test_to_read_one_of_two_equal_values_for_the_other_is_a_change() -> None:
    """It leaves the other one dead: what is called common subexpression elimination."""
    assert canonical_digest(detached(model_of(TWICE))) != canonical_digest(detached(model_of(ONCE)))
    assert value_digests(detached(model_of(TWICE))).whole == value_digests(detached(model_of(ONCE))).whole


def test_so_it_is_where_a_branch_reads_it() -> None:
    text = """
    g (bool c, float[2] x) => (float[2] y) {{
        one = Neg (x)
        two = Neg (x)
        z = If (c) <then_branch = t () => (float[2] a) {{ a = Abs ({read}) }},
                    else_branch = e () => (float[2] b) {{ b = Relu (one) }}>
        y = Add (z, one)
    }}
    """
    first, second = (canonical_digest(detached(model_of(text.format(read=read)))) for read in ("one", "two"))
    assert first != second


def test_live_digest_sees_into_subgraphs() -> None:
    text = """
    g (bool c, float[2] x) => (float[2] y) {{
        y = If (c) <then_branch = t () => (float[2] a) {{ a = {op} (x) }},
                    else_branch = e () => (float[2] b) {{ b = Identity (x) }}>
    }}
    """
    first, other = (detached(model_of(text.format(op=op))) for op in ("Neg", "Abs"))
    assert value_digests(first).whole != value_digests(other).whole


def test_the_counters_of_two_loops_one_in_the_other_are_not_one() -> None:
    text = """
    g (int64 trips, bool c, float[2] x) => (float[2] y) {{
        y = Loop (trips, c, x) <body = outer (int64 i, bool go, float[2] s) => (bool going, float[2] t) {{
            going = Identity (go)
            t = Loop (trips, go, s) <body = inner (int64 j, bool on, float[2] v) => (bool staying, float[2] w) {{
                staying = Identity (on)
                step = Cast <to = 1> ({counter})
                w = Mul (v, step)
            }}>
        }}>
    }}
    """
    outer, inner = (detached(model_of(text.format(counter=name))) for name in "ij")
    assert value_digests(outer).whole != value_digests(inner).whole
    assert canonical_digest(outer) != canonical_digest(inner)


@given(st.permutations(["a", "b", "c"]))
def test_independent_nodes_may_come_in_any_order(order: list[str]) -> None:
    ops = {"a": "a = Neg (x)", "b": "b = Abs (x)", "c": "c = Relu (x)"}
    lines = "\n".join(ops[name] for name in order)
    text = f"g (float[2] x) => (float[2] y) {{ {lines}\n y = Sum (a, b, c) }}"
    reference = detached(
        model_of("g (float[2] x) => (float[2] y) { a = Neg (x) b = Abs (x) c = Relu (x) y = Sum (a, b, c) }")
    )
    assert canonical_digest(detached(model_of(text))) == canonical_digest(reference)


DRAW = "RandomNormal <shape = [2]> ()"
BRANCH = "If (c) <then_branch = t () => (u) {{ u = {draw} }}, else_branch = f () => (w) {{ w = {draw} }}>"


@pytest.mark.parametrize("drawn", [DRAW, BRANCH.format(draw=DRAW)], ids=["in the graph", "in a branch"])
def test_two_random_draws_are_not_one(drawn: str) -> None:
    first = f"g (bool c) => (float[2] y) {{ a = {drawn} y = Sub (a, a) }}"
    second = f"g (bool c) => (float[2] y) {{ a = {drawn} b = {drawn} y = Sub (a, b) }}"
    assert value_digests(detached(model_of(first))).whole != value_digests(detached(model_of(second))).whole


def test_sparse_initializers_count() -> None:
    def sparse(value: float) -> onnx.ModelProto:
        model = model_of("g (float[2] x) => (float[2] y) { y = Add (x, s) }")
        values = onnx.helper.make_tensor("s", 1, [1], [value])
        indices = onnx.helper.make_tensor("s_at", 7, [1], [1])
        model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, [2]))
        return model

    assert value_digests(detached(sparse(1.0))).whole != value_digests(detached(sparse(2.0))).whole
    assert canonical_digest(detached(sparse(1.0))) != canonical_digest(detached(sparse(2.0)))
