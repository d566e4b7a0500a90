"""Wishes as they are written, and what is wrong with those that mean nothing."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import passes
from passes.catalog.listing import GALLERY, read_example
from passes.context import PassContext
from passes.errors import PolicyError, UsageError
from passes.policy.policy import Policy
from passes.portability import describe_brought_in, describe_left, find_contrib
from pipeline.config import RunConfig
from pipeline.quantsim.preparation import prepare_config
from tests.support.onnx_models import model_of, square, vector
from tests.support.onnx_text import merged_model

NAMES = ("fuse_qkv", "fuse_bn_into_conv", "nop", "onnxsim", "onnxsim/fuse_gelu", "onnxsim/fuse_attention")


def test_a_question_mark_makes_an_entry_optional() -> None:
    policy = Policy(keep=("qkv", "gelu?", "op:Softmax", "module:encoder.*?"))
    assert policy.kept_kinds() == {"qkv": True, "gelu": False, "op:Softmax": True, "module:encoder.*": False}
    policy.check(NAMES, NAMES)


@pytest.mark.parametrize(
    ("skip", "kinds"),
    [
        (["fuse_bn_into_conv"], ("batchnorm",)),
        (["onnxsim/fuse_gelu"], ("gelu",)),
        (["fuse_attention", "fuse_qkv"], ("qkv", "attention")),
        (["nop"], ()),
    ],
)
def test_the_skip_of_a_pass_watches_what_it_destroys(skip: list[str], kinds: tuple[str, ...]) -> None:
    assert Policy(tuple(skip)).watched_kinds(NAMES) == kinds
    assert Policy(tuple(skip), watch=False).watched_kinds(NAMES) == ()


def test_a_group_may_name_no_pass_of_this_installation() -> None:
    assert not any(Policy(("quantizing",)).skips(name) for name in NAMES)
    Policy(("quantizing",)).check(NAMES, NAMES)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (
            "batchnrom",
            r"no structure named 'batchnrom'; did you mean 'batchnorm'\?; known: qkv, attention, .*; or op:GLOB",
        ),
        (
            "ops:Softmax",
            r"nothing can be chosen by 'ops'; did you mean 'op'\?; known: op:Softmax, node:\*attn\*, module:",
        ),
        ("op:", r"'op:' names nothing; write 'op:Softmax', say"),
        ("module:?", r"'module:' names nothing; write 'module:encoder.layer.3.\*', say"),
    ],
)
def test_a_keep_that_means_nothing(entry: str, words: str) -> None:
    with pytest.raises(PolicyError, match=f"keep: {words}"):
        Policy(keep=(entry,)).check(NAMES, NAMES)


# Operators that ONNX does not have: steps that bring them in are narrowed or reverted, and what is left is named.


def block() -> onnx.ModelProto:
    """A gated sublayer with a norm after it: each of the optimizers here has a fusion for a part of it."""
    text = """g (float[2, 8, 32] x) => (float[2, 8, 32] y) {
        a = MatMul (x, up)
        biased = Add (a, bias)
        d = Div (biased, root)
        e = Erf (d)
        f = Add (e, one)
        m = Mul (biased, f)
        curved = Mul (m, half)
        c = MatMul (curved, down)
        s = Add (c, x)
        y = LayerNormalization <axis = -1> (s, scale, shift)
    }"""
    numbers = {"root": 2**0.5, "one": 1.0, "half": 0.5}
    scalars = {name: np.array(number, np.float32) for name, number in numbers.items()}
    vectors = {name: vector(32, seed) for seed, name in enumerate(("bias", "scale", "shift"))}
    return model_of(text, **square("up", "down"), **vectors, **scalars)


def contrib_of(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in find_contrib(model)}


STEPS = {
    "onnxruntime": ("onnxruntime", {"SkipLayerNormalization"}),
    "onnxruntime_fusions": ("onnxruntime_fusions", {"BiasGelu", "SkipLayerNormalization"}),
}


@pytest.mark.parametrize("case", STEPS)
def test_of_a_step_only_what_brings_them_in_is_left_out(case: str, context: PassContext) -> None:
    step, expected = STEPS[case]
    kept = passes.optimize(block(), [step], context=context)
    assert contrib_of(kept.to_proto()) == expected
    refused = passes.optimize(block(), [step], contrib="refuse", context=context)
    assert contrib_of(refused.to_proto()) == set()
    *taken_out, row = refused.rows
    assert row.status.value == "ran"
    assert row.reason.startswith("without ")
    assert {one.name.partition("/")[0] for one in taken_out} == {step}
    for one in taken_out:
        assert one.status.value == "reverted"
        assert one.reason.startswith("brings in com.microsoft::")
        assert one.reason.endswith("which ONNX does not have; passes.contrib: keep lets it in")


@pytest.mark.parametrize("name", ["fuse_attention", "fuse_gqa"])
def test_onnxsim_leaves_its_two_out_and_does_all_else(name: str, context: PassContext) -> None:
    model = read_example(GALLERY / f"{name}.onnxtxt").model
    assert contrib_of(passes.optimize(model, ["onnxsim"], context=context).to_proto())
    refused = passes.optimize(model, ["onnxsim"], contrib="refuse", context=context)
    assert not contrib_of(refused.to_proto())
    [row] = refused.rows
    assert (row.status.value, row.reason) == ("ran", "without fuse_attention, fuse_gqa")


PACKED = """g (float[2, 8, 32] x) => (float[2, 8, 32] y) <float[32, 96] w, float[96] b> {
    y = com.microsoft.Attention <num_heads = 4> (x, w, b)
}"""


def test_one_may_take_the_place_of_another(context: PassContext) -> None:
    result = passes.optimize(merged_model(PACKED), ["split-qkv"], contrib="refuse", context=context)
    assert contrib_of(result.to_proto()) == {"MultiHeadAttention"}
    assert [row.status.value for row in result.rows] == ["ran"]
    (left,) = describe_left(result.to_proto())
    assert left == (
        "passes.contrib: com.microsoft::MultiHeadAttention 'y' is left of the source; "
        "put decompose-attention into the recipe"
    )


def test_what_has_no_step_is_named_all_the_same() -> None:
    text = """<ir_version: 9, opset_import: ["": 20, "own": 1, "com.microsoft": 1]>
    g (float[2, 8] x) => (float[2, 8] y) {
        a = com.microsoft.Gelu (x)
        b = com.microsoft.Gelu (a)
        c = own.Thing (b)
        y = Relu (c)
    }"""
    assert describe_left(onnx.parser.parse_model(text)) == (
        "passes.contrib: com.microsoft::Gelu 'a' (and 1 more) is left of the source; "
        "no step of onnxline rewrites it, so export the model without it",
        "passes.contrib: own::Thing 'c' is left of the source; "
        "no step of onnxline rewrites it, so export the model without it",
    )


def test_functions_of_the_model_count_by_what_is_in_them_and_onnxruntimes_own_count() -> None:
    text = """<ir_version: 9, opset_import: ["": 20, "local": 1, "com.microsoft": 1]>
    g (float[2, 8] x) => (float[2, 8] y) {
        a = local.double (x)
        scale = Constant <value = float[8] {1, 1, 1, 1, 1, 1, 1, 1}> ()
        y = SimplifiedLayerNormalization (a, scale)
    }
    <domain: "local", opset_import: ["": 20, "com.microsoft": 1]>
    double (p) => (q) { q = com.microsoft.Gelu (p) }"""
    model = onnx.parser.parse_model(text)
    assert [node.op_type for node in find_contrib(model)] == ["SimplifiedLayerNormalization", "Gelu"]
    assert describe_brought_in(model, model) == ""
    bare = merged_model("g (float[2, 8] x) => (float[2, 8] y) { y = Relu (x) }")
    assert describe_brought_in(bare, model).startswith("brings in SimplifiedLayerNormalization 'y' (and 1 more)")


def test_another_word_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="contrib is 'drop', expected 'keep' or 'refuse'"):
        passes.optimize(block(), [], contrib="drop")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("written", "expected"), [({}, "refuse"), ({"contrib": "keep"}, "keep")])
def test_quantsim_refuses_them_where_nothing_else_is_said(written: dict[str, str], expected: str) -> None:
    config = RunConfig.model_validate({"name": "m", "model": {"onnx": "m.onnx"}, "passes": written})
    assert prepare_config(config).passes.contrib == expected
    assert config.passes.contrib == written.get("contrib")
