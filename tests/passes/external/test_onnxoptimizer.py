"""A pass in the worker makes what the library makes, and goes on from what the one before has made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx
import onnxoptimizer
import pytest

from passes.catalog.example_model import example_of, read_example
from passes.external.call_names import number_nodes
from passes.external.onnxoptimizer import PassOutput, optimize
from tests.support.onnx_models import attention, model_of

DEFAULT = onnxoptimizer.get_fuse_and_elimination_passes()

BRANCHES = """
g (bool really, float[2] a_rather_long_name) => (float[2] y) {
    a_value_outside = Neg (a_rather_long_name)
    y = If (really) <
        then_branch = then () => (float[2] one_result) { one_result = Abs (a_value_outside) },
        else_branch = else () => (float[2] one_result) { one_result = Identity (a_rather_long_name) }
    >
}
"""

ROUNDABOUT = """
g (float[2, 8] x) => (float[2, 8] y) {
    a = Transpose <perm = [1, 0]> (x)
    b = Transpose <perm = [1, 0]> (a)
    c = Add (b, zero)
    same = Add (b, zero)
    d = Mul (c, same)
    e = Identity (d)
    y = Relu (e)
}
"""


def roundabout() -> onnx.ModelProto:
    return model_of(ROUNDABOUT, zero=np.ones(8, np.float32))


def pictures() -> Iterator[onnx.ModelProto]:
    yield from (attention(), model_of(BRANCHES), roundabout())
    yield from (read_example(picture).model for name in DEFAULT if (picture := example_of(name)))


def number_copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    number_nodes(copy)
    return copy


def changes(model: onnx.ModelProto, names: Sequence[str]) -> dict[int, PassOutput]:
    """By place in `names`, what the passes that change something make, each of what the one before has made."""
    desk: dict = {}
    stands, outputs = number_copy(model).SerializeToString(), {}
    for place, name in enumerate(names):
        changed = optimize(desk, stands, [name])
        if changed is not None:
            outputs[place], stands = changed, changed.model
    return outputs


@pytest.mark.parametrize("name", DEFAULT)
def test_one_pass_does_what_the_library_does(name: str) -> None:
    for model in pictures():
        source = number_copy(model)
        expected, nothing = (onnxoptimizer.optimize(source, [pass_name]) for pass_name in (name, "nop"))
        change = optimize({}, source.SerializeToString(), [name])
        assert (change is not None) == (expected != nothing)
        assert change is None or onnx.load_from_string(change.model) == number_copy(expected)


@pytest.mark.parametrize("model", list(pictures()), ids=lambda model: model.graph.node[0].op_type)
def test_one_goes_on_from_what_the_other_made(model: onnx.ModelProto) -> None:
    names = [name for name in DEFAULT if name != "fuse_qkv"]  # which aborts on an input that three products read
    changed_models = {place: onnx.load_from_string(change.model) for place, change in changes(model, names).items()}
    stands = number_copy(model)
    for place, name in enumerate(names):
        after, nothing = (onnxoptimizer.optimize(stands, [pass_name]) for pass_name in (name, "nop"))
        if place in changed_models:
            assert changed_models[place] == number_copy(after)
            stands = changed_models[place]
        else:
            assert after == nothing


def test_nodes_are_known_again() -> None:
    """One that stays is called by its number in the model that the pass was given, which is not that of the model that
    the first pass was given."""
    model = roundabout()
    names = ["fuse_consecutive_transposes", "eliminate_nop_transpose", "eliminate_deadend", "eliminate_identity"]
    stands = number_copy(model)
    for change in changes(model, names).values():
        changed = onnx.load_from_string(change.model)
        was = {f"onnxline.node/{place}": node for place, node in enumerate(stands.graph.node)}
        for node, name in zip(changed.graph.node, change.names, strict=True):
            assert name not in was or was[name].op_type == node.op_type
        assert [node.name for node in changed.graph.node] == [
            f"onnxline.node/{place}" for place in range(len(changed.graph.node))
        ]
        stands = changed
    assert len(stands.graph.node) < len(model.graph.node) - 1
