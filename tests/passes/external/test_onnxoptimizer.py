"""A pass in the worker makes what the library makes, and goes on from what the one before has made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx
import onnxoptimizer
import pytest

import passes
from passes.catalog.listing import example_of, read_example
from passes.external.onnxoptimizer import (
    COMPARING,
    LOOKS_FOR,
    UNREAD_NODE,
    UNREAD_TENSOR,
    PassOutput,
    find_links,
    may_change,
    optimize,
)
from passes.external.through_files import number_nodes
from passes.graph.traversal import every_node
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
    worker_state: dict = {}
    stands, outputs = number_copy(model).SerializeToString(), {}
    for place, name in enumerate(names):
        changed = optimize(worker_state, stands, [name])
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
        assert change is None or may_change(name, find_links(model))


@pytest.mark.parametrize("name", LOOKS_FOR)
def test_a_pass_is_not_called_where_there_is_nothing_that_it_looks_for(name: str) -> None:
    assert not may_change(name, find_links(model_of("g (float[2] x) => (float[2] y) { y = Neg (x) }")))
    picture = example_of(name)
    assert name == "nop" or (picture is not None and may_change(name, find_links(read_example(picture).model)))


def test_links_are_those_of_bodies_too_and_of_what_a_body_reads_from_outside() -> None:
    assert find_links(model_of(BRANCHES)) == {"Neg", "If", "Abs", "Identity", "Abs(Neg)", UNREAD_NODE, UNREAD_TENSOR}
    assert may_change("eliminate_identity", find_links(model_of(BRANCHES)))


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


NARROW = """
<ir_version: 10, opset_import: ["": 21]> g (float[4] x) => (float[4] y) {
    a = DequantizeLinear (first, scale)
    b = DequantizeLinear (second, scale)
    c = Add (a, b)
    y = Add (c, x)
}
"""


def narrow(*tensors: onnx.TensorProto) -> onnx.ModelProto:
    """A model that reads two tensors of few bits, as initializers."""
    model = onnx.parser.parse_model(NARROW)
    for name, tensor in zip(("first", "second"), tensors, strict=True):
        model.graph.initializer.add().CopyFrom(tensor)
        model.graph.initializer[-1].name = name
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.5, np.float32), "scale"))
    return model


def packed(data_type: int, content: bytes = b"\x21\x03", dims: Sequence[int] = (4,)) -> onnx.TensorProto:
    return onnx.TensorProto(data_type=data_type, dims=dims, raw_data=content)


def kept_of(model: onnx.ModelProto, names: Sequence[str]) -> list[str] | None:
    """The initializers after passes; None where they change nothing."""
    change = optimize({}, number_copy(model).SerializeToString(), names)
    if change is None:
        return None
    before = {tensor.name: tensor for tensor in model.graph.initializer}
    after = onnx.load_from_string(change.model).graph.initializer
    assert all(tensor == before[tensor.name] for tensor in after)
    return [tensor.name for tensor in after]


INT4, UINT4 = onnx.TensorProto.INT4, onnx.TensorProto.UINT4


def test_equal_tensors_of_few_bits_become_one_though_the_library_cannot_compare_them() -> None:
    model = narrow(packed(INT4), packed(INT4))
    with pytest.raises(RuntimeError, match="no supported data type: 22"):
        onnxoptimizer.optimize(model, ["eliminate_duplicate_initializer"])
    assert kept_of(model, ["eliminate_duplicate_initializer"]) == ["first", "scale"]
    assert kept_of(model, DEFAULT) == ["first", "scale"], "among other passes in one call too"


@pytest.mark.parametrize(
    "name",
    ["INT4", "UINT4", "FLOAT4E2M1", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"],
)
def test_equal_tensors_of_every_such_dtype_become_one(name: str) -> None:
    tensor = packed(onnx.TensorProto.DataType.Value(name), b"1234" if name.startswith("FLOAT8") else b"\x21\x03")
    assert kept_of(narrow(tensor, tensor), ["eliminate_duplicate_initializer"]) == ["first", "scale"]


BRANCH = """
<ir_version: 10, opset_import: ["": 21]> g (bool really, float[4] x) => (float[4] y) {
    y = If (really) <
        then_branch = then () => (float[4] r) {
            a = DequantizeLinear (first, scale) b = DequantizeLinear (second, scale) r = Add (a, b)
        },
        else_branch = else () => (float[4] q) { q = Identity (x) }
    >
}
"""


def test_tensors_that_differ_stay_in_another_form_and_in_bodies() -> None:
    """Numbers in place of bytes, and initializers of a branch."""
    numbers = [onnx.TensorProto(data_type=INT4, dims=[4], int32_data=[0x21, last]) for last in (3, 4)]
    assert kept_of(narrow(*numbers), ["eliminate_duplicate_initializer"]) is None
    model = onnx.parser.parse_model(BRANCH)
    model.graph.node[0].attribute[0].g.initializer.extend(narrow(packed(INT4), packed(UINT4)).graph.initializer)
    assert optimize({}, number_copy(model).SerializeToString(), sorted(COMPARING)) is None


@pytest.mark.parametrize(
    "other",
    [packed(INT4, b"\x21\x13"), packed(UINT4), packed(INT4, dims=(3,)), packed(INT4, dims=(4, 1))],
    ids=["another number", "another dtype", "fewer in as many bytes", "another rank"],
)
def test_tensors_of_few_bits_that_differ_stay(other: onnx.TensorProto) -> None:
    assert kept_of(narrow(packed(INT4), other), ["eliminate_duplicate_initializer"]) is None


CONSTANTS = """
<ir_version: 10, opset_import: ["": 21]> g (bool really, float[4] x) => (float[4] y) {
    p = Constant () q = Constant ()
    a = DequantizeLinear (p, scale) b = DequantizeLinear (q, scale) c = Add (a, b)
    z = If (really) <
        then_branch = then () => (float[4] r) {
            u = Constant () v = Constant ()
            d = DequantizeLinear (u, scale) e = DequantizeLinear (v, scale) r = Add (d, e)
        },
        else_branch = else () => (float[4] r) { r = Identity (x) }
    >
    y = Add (c, z)
}
"""


@pytest.mark.parametrize("tensor", [packed(INT4), packed(onnx.TensorProto.INT8, b"1234")], ids=["int4", "int8"])
def test_constants_of_few_bits_are_compared_as_those_of_8(tensor: onnx.TensorProto) -> None:
    """The library joins equal Constants outside of bodies."""
    model = onnx.parser.parse_model(CONSTANTS)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.5, np.float32), "scale"))
    for node in every_node(model.graph):
        if node.op_type == "Constant":
            node.attribute.append(onnx.helper.make_attribute("value", tensor))
    change = optimize({}, number_copy(model).SerializeToString(), ["eliminate_common_subexpression"])
    assert change is not None
    again = optimize({}, number_copy(onnx.load_from_string(change.model)).SerializeToString(), sorted(COMPARING))
    assert again is None, "and nothing else is changed"
    nodes = list(every_node(onnx.load_from_string(change.model).graph))
    read = [node.input[0] for node in nodes if node.op_type == "DequantizeLinear"]
    assert read == ["p", "p", "u", "v"]
    stored = [node.attribute[0].t for node in nodes if node.op_type == "Constant"]
    assert {(kept.data_type, kept.raw_data) for kept in stored} == {(tensor.data_type, tensor.raw_data)}
    assert optimize({}, change.model, ["eliminate_common_subexpression"]) is None


def test_a_run_on_a_model_of_four_bits_has_no_failed_row() -> None:
    run = passes.optimize(narrow(packed(INT4), packed(INT4)), ["default", "onnxsim"])
    assert not run.reverted
    assert [row.reason for row in run.rows if row.name == "onnxsim"] == [""], "it needs no weights in its memory"
    assert "second" not in {tensor.name for tensor in run.to_proto().graph.initializer}
