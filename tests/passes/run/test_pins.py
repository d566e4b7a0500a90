"""Pins: visible across a pass, and gone without a trace."""

from __future__ import annotations

import onnx
import onnxoptimizer

from passes.run.tracked import pin, unpin
from passes.structures import STRUCTURES
from tests.support.onnx_models import attention, detached, model_of


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
