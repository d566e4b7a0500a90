"""Pins: visible across a pass, and gone without a trace."""

from __future__ import annotations

import onnx
import onnxoptimizer

from passes.run.tracked import build_pin_probe, pin, unpin
from passes.structures import STRUCTURES
from tests.support.onnx_models import attention, detached, matrix, model_of


def test_a_pin_holds_a_value_against_a_fusion() -> None:
    model = detached(attention())
    (instance,) = STRUCTURES["qkv"].find(model).instances
    pinned = pin(model, [site.tight for site in instance.pins])
    assert [output.name for output in pinned.proto.graph.output] == ["y", "q", "k", "v"]
    assert [output.name for output in model.proto.graph.output] == ["y"], "the model itself is left as it is"

    merged = onnxoptimizer.optimize(model.proto, ["fuse_qkv"])
    held = unpin(model.with_proto(onnxoptimizer.optimize(pinned.proto, ["fuse_qkv"])), ["y"])

    assert sum(node.op_type == "Split" for node in merged.graph.node) == 1
    assert sum(node.op_type == "Split" for node in held.proto.graph.node) == 0
    assert [output.name for output in held.proto.graph.output] == ["y"]


def test_a_pin_of_a_value_that_is_gone_is_left_out() -> None:
    model = detached(model_of("g (float[2] x) => (float[2] y) { y = Neg (x) }"))
    gone = onnx.helper.make_tensor_value_info("gone", 1, [2])
    assert [output.name for output in pin(model, [gone]).proto.graph.output] == ["y"]


def test_what_lived_for_a_pin_goes_with_it_and_other_dead_code_stays() -> None:
    text = "g (float[2] x) => (float[2] y) { y = Neg (x) a = Abs (x) held = Relu (a) dead = Tanh (x) }"
    model = detached(model_of(text))
    held = onnx.helper.make_tensor_value_info("held", 1, [2])
    after = unpin(pin(model, [held]), ["y"])
    assert [node.output[0] for node in after.proto.graph.node] == ["y", "dead"]


TYPED = """
g (float[2] x) => (float[2] y) <float[2] held, float[2] other> {
    held = Neg (x)
    other = Abs (held)
    y = Relu (other)
}
"""


def test_a_pinned_value_has_one_type() -> None:
    """With one among the inner values too, a model comes out of a pass other than it went in."""
    pinned = pin(detached(model_of(TYPED)), [onnx.helper.make_tensor_value_info("held", 1, [2])])
    assert [info.name for info in pinned.proto.graph.value_info] == ["other"]
    after = unpin(pinned, ["y"])
    assert sorted(info.name for info in after.proto.graph.value_info) == ["held", "other"]


def test_a_probe_has_what_makes_the_pins_and_nothing_else() -> None:
    text = """
    g (float[2, 4] x) => (float[2, 4] y) {
        h = Relu (x)
        wt = Transpose <perm = [1, 0]> (w)
        q0 = MatMul (h, wt)
        q = Add (q0, b)
        y = Tanh (q)
    }
    """
    model = detached(model_of(text, w=matrix(4, 4, 0), b=matrix(1, 4, 1)))
    types = {info.name: info for info in (*model.proto.graph.input, *model.proto.graph.value_info)}
    probe = build_pin_probe(model, [types["q0"]], [types["q"], types["x"]])
    assert probe is not None
    graph = probe.proto.graph
    assert [(node.op_type, node.output[0]) for node in graph.node[1:]] == [
        ("Transpose", "wt"),
        ("MatMul", "q0"),
        ("Add", "q"),
    ], "behind what leads h in"
    assert [entry.name for entry in graph.initializer] == ["w", "b"]
    assert [info.name for info in graph.output] == ["q"], "x is made by no node, so it needs no pin"


def test_there_is_no_probe_where_a_type_is_unknown() -> None:
    model = detached(model_of("g (float[2] x) => (float[2] y) { h = Relu (x) q = Neg (h) y = Tanh (q) }"))
    pinned = onnx.helper.make_tensor_value_info("q", 1, [2])
    assert build_pin_probe(model, [pinned], [pinned]) is not None
    proto = model.copy_proto()
    del proto.graph.value_info[:]
    assert build_pin_probe(model.with_proto(proto), [pinned], [pinned]) is None
