"""A stored tensor that a pass made of a weight is named after it, and says what was done."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, numpy_helper

import passes
from passes.context import PassContext
from passes.model.canonical import canonical_digest
from passes.provenance import annotations_of, carry, form_of, name_weights
from tests.support.onnx_models import detached, matrix, model_of, vector

LINEAR = (
    "g (float[2, 8] x) => (float[2, 12] y) { [t] wt = Transpose <perm = [1, 0]> (l__weight) [p] y = MatMul (x, wt) }"
)


def with_dots(model: ModelProto) -> ModelProto:
    """`model` with names as torch gives them: a dot for each `__`, which ONNX's text takes."""
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.replace("__", ".")
    for node in model.graph.node:
        node.input[:] = [name.replace("__", ".") for name in node.input]
    return model


def name_after_pass(before: ModelProto, after: ModelProto) -> ModelProto:
    """What stands in the end, when `some_pass` has made `after` of `before`; what it computes is not touched."""
    source = detached(with_dots(before))
    carried = carry(source, detached(with_dots(after)), "some_pass")
    result = name_weights(source, carried)
    assert canonical_digest(result) == canonical_digest(carried)
    onnx.checker.check_model(result.proto, full_check=True)
    return result.proto


def weight_forms(model: ModelProto) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Initializer → its form, and the weights that it was made of."""
    return {tensor.name: (form_of(tensor), annotations_of(tensor).replaced) for tensor in model.graph.initializer}


def test_a_transpose_that_is_folded(context: PassContext) -> None:
    model = with_dots(model_of(LINEAR, l__weight=matrix(12, 8, 0)))
    run = passes.optimize(model, ["fold_constants"], context=context)
    (tensor,) = run.model.proto.graph.initializer
    assert weight_forms(run.model.proto) == {"l.weight_transposed": ("transposed", ("l.weight",))}
    assert annotations_of(tensor).author == "fold_constants"
    assert list(run.model.proto.graph.node[0].input) == ["x", "l.weight_transposed"]
    (weight,) = passes.why_weights(run.model, "l.weight_transposed")
    assert (weight.sources, weight.form, weight.made_by) == (("l.weight",), "transposed", "fold_constants")
    assert weight.readers == ("MatMul p",)


def test_two_readers_with_layers_of_equal_weights_have_names_of_their_own() -> None:
    """And a name that is taken gets a number."""
    text = """g (float[2, 8] x) => (float[2, 8] y) {{
        {}
        h = MatMul (x, {})
        l__weight_transposed = Relu (h)
        y = MatMul (l__weight_transposed, {})
    }}"""
    turns = "t1 = Transpose <perm = [1, 0]> (l__weight) t2 = Transpose <perm = [1, 0]> (m__weight)"
    first, other = matrix(8, 8, 0), matrix(8, 8, 1)
    before = model_of(text.format(turns, "t1", "t2"), l__weight=first, m__weight=other)
    after = model_of(text.format("", "v_1", "v_2"), v_1=first.T.copy(), v_2=other.T.copy())
    for model in (before, after):
        model.graph.node[-2].output[0] = "l.weight_transposed"
        model.graph.node[-1].input[0] = "l.weight_transposed"
        del model.graph.value_info[:]
    assert list(weight_forms(name_after_pass(before, after))) == ["l.weight_transposed_2", "m.weight_transposed"]


MERGED = """
g (float[2, 8] x) => (float[2, 8] q, float[2, W] k, float[2, W] v) {
    sizes = Constant <value_ints = [8, W, W]> ()
    all = MatMul (x, val_27)
    q, k, v = Split <axis = 1> (all, sizes)
}
"""
APART = """
g (float[2, 8] x) => (float[2, 8] q, float[2, W] k, float[2, W] v) {
    q = MatMul (x, a__0__query__weight)
    k = MatMul (x, a__0__key__weight)
    v = MatMul (x, a__0__value__weight)
}
"""


@pytest.mark.parametrize("width", [8, 2])
def test_three_projections_that_become_one(width: int) -> None:
    names = [f"a.0.{name}.weight" for name in ("query", "key", "value")]
    weights = {
        name.replace(".", "__"): matrix(8, 8, seed)[:, : 8 if not seed else width] for seed, name in enumerate(names)
    }
    before = model_of(APART.replace("W", str(width)), **weights)
    after = model_of(MERGED.replace("W", str(width)), val_27=np.concatenate(list(weights.values()), axis=1))
    assert weight_forms(name_after_pass(before, after)) == {"a.0.weight_merged": ("merged", tuple(names))}


NORMED = """
g (float[1, 4, 6, 6] x) => (float[1, 4, 4, 4] y) {
    c = Conv (x, conv__weight)
    y = BatchNormalization (c, bn__weight, bn__bias, bn__mean, bn__var)
}
"""


def test_a_norm_that_goes_into_the_convolution() -> None:
    weight = np.random.default_rng(0).standard_normal((4, 4, 3, 3)).astype(np.float32)
    norm = {f"bn__{name}": vector(4, seed) ** 2 for seed, name in enumerate(("weight", "bias", "mean", "var"))}
    after = model_of(
        "g (float[1, 4, 6, 6] x) => (float[1, 4, 4, 4] y) { y = Conv (x, v_1, v_2) }", v_1=weight * 2, v_2=vector(4, 9)
    )
    result = weight_forms(name_after_pass(model_of(NORMED, conv__weight=weight, **norm), after))
    assert result["conv.weight_folded"][1] == ("conv.weight", "bn.weight", "bn.bias", "bn.mean", "bn.var")
    assert result["bn.bias_folded"][0] == "folded"


def test_what_a_pass_makes_up_is_no_weight(context: PassContext) -> None:
    """onnxoptimizer begins the bias of the convolution with zeros of its own."""
    weight = np.random.default_rng(0).standard_normal((4, 4, 3, 3)).astype(np.float32)
    norm = {f"bn__{name}": vector(4, seed) ** 2 for seed, name in enumerate(("weight", "bias", "mean", "var"))}
    model = with_dots(model_of(NORMED, conv__weight=weight, **norm))
    run = passes.optimize(model, ["fuse_bn_into_conv", "fold_constants"], context=context)
    assert list(weight_forms(run.model.proto)) == ["conv.weight_folded", "bn.bias_folded"]
    made_up = passes.optimize(model, ["fuse_bn_into_conv"], context=context).model.proto
    assert not any(form_of(tensor) for tensor in made_up.graph.initializer)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda w: w, {"l.weight": ("", ("l.weight",))}, id="called otherwise"),
        pytest.param(
            lambda w: w.T.copy(), {"l.weight_transposed": ("transposed", ("l.weight",))}, id="no node says so"
        ),
        pytest.param(lambda w: w + 1, {"l.weight_folded": ("folded", ("l.weight",))}, id="other numbers"),
        pytest.param(
            lambda w: w.astype(np.float16).astype(np.float32),
            {"l.weight_folded": ("folded", ("l.weight",))},
            id="rounded",
        ),
    ],
)
def test_what_a_tool_did_by_itself(change: Callable[[np.ndarray], np.ndarray], expected: object) -> None:
    text = "g (float[2, 8] x) => (float[2, 8] y) {{ [p] y = MatMul (x, {}) }}"
    weight = matrix(8, 8, 0)
    before = model_of(text.format("l__weight"), l__weight=weight)
    after = model_of(text.format("fresh"), fresh=np.ascontiguousarray(change(weight)))
    assert weight_forms(name_after_pass(before, after)) == expected


def test_marks_that_a_tool_drops_come_back_and_names_that_say_enough_stay() -> None:
    source = detached(with_dots(model_of(LINEAR, l__weight=matrix(12, 8, 0))))
    first = carry(
        source,
        detached(
            model_of("g (float[2, 8] x) => (float[2, 12] y) { y = MatMul (x, wt) }", wt=matrix(12, 8, 0).T.copy())
        ),
        "some_pass",
    )
    dropped = onnx.ModelProto()
    dropped.CopyFrom(first.proto)
    del dropped.graph.initializer[0].metadata_props[:]
    again = carry(first, first.with_proto(dropped), "another_pass")
    assert annotations_of(again.proto.graph.initializer[0]).author == "some_pass"
    whole = name_weights(source, again)
    assert list(weight_forms(whole.proto)) == ["l.weight_transposed"]
    assert name_weights(whole, whole) is whole
    assert name_weights(again, again) is again, "a name that the source has is the user's"

    text = "g (float[2, 8] x) => (float[2, 8] y) { y = MatMul (x, l__weight) }"
    same_name = name_after_pass(model_of(text, l__weight=matrix(8, 8, 0)), model_of(text, l__weight=matrix(8, 8, 1)))
    assert weight_forms(same_name) == {"l.weight": ("folded", ("l.weight",))}


BRANCHES = """
g (bool c, float[2, 8] x) => (float[2, 8] y) {{
    {}
    y = If (c) <
        then_branch = t () => (float[2, 8] a) {{ a = MatMul (x, {}) }},
        else_branch = e () => (float[2, 8] b) {{ b = Neg (x) }}
    >
}}
"""


def test_a_weight_that_is_read_in_a_branch() -> None:
    before = model_of(BRANCHES.format("t1 = Transpose <perm = [1, 0]> (w)", "t1"), w=matrix(8, 8, 0))
    after = model_of(BRANCHES.format("", "val_1"), val_1=matrix(8, 8, 0).T.copy())
    result = name_after_pass(before, after)
    assert weight_forms(result) == {"w_transposed": ("transposed", ("w",))}
    assert result.graph.node[0].attribute[0].g.node[0].input[1] == "w_transposed"


def test_inputs_and_small_constants_keep_their_names() -> None:
    text = "g (float[2, 8] x, float[8, 8] fresh) => (float[2, 8] y) {{ h = MatMul (x, {}) y = Mul (h, {}) }}"
    before = model_of(text.format("l", "s"), l=matrix(8, 8, 0), s=np.float32([2]))
    after = model_of(text.format("fresh", "val_3"), fresh=matrix(8, 8, 0).T.copy(), val_3=np.float32([3]))
    source = detached(before)
    result = name_weights(source, carry(source, detached(after), "some_pass"))
    assert [tensor.name for tensor in result.proto.graph.initializer] == ["fresh", "val_3"]


def test_a_quantization_annotation_follows() -> None:
    model = with_dots(model_of(LINEAR, l__weight=matrix(12, 8, 0)))
    annotation = model.graph.quantization_annotation.add(tensor_name="wt")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="scale")
    model.graph.initializer.append(numpy_helper.from_array(np.float32(1), "scale"))
    before, after = detached(model), detached(model)
    del after.proto.graph.node[0], after.proto.graph.initializer[0]
    after.proto.graph.initializer.append(numpy_helper.from_array(matrix(12, 8, 0).T.copy(), "wt"))
    result = name_weights(before, carry(before, after, "some_pass")).proto
    assert [annotation.tensor_name for annotation in result.graph.quantization_annotation] == ["l.weight_transposed"]
    assert all(isinstance(tensor, TensorProto) for tensor in result.graph.initializer)
