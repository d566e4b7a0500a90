"""`keep` through the optimizer that destroys each kind: nothing is lost, other work stands, and it costs little."""

from __future__ import annotations

import onnx
import pytest

import passes
from passes import PolicyError
from passes.bisect.faults import Loss
from passes.catalog.listing import GALLERY, read_example
from passes.context import PassContext
from passes.graph.traversal import live_nodes
from passes.run.result import PassRun, Status
from passes.structures import structure_of
from tests.support.onnx_models import detached
from tests.support.structure_models import BATCH_NORM, drawn, found, names, run

CHUNKS = """
g (int64[2, 6] ids) => (float[2, 6, 4] y) <float[2, 4] table> {
    a, b = Split <axis = 1, num_outputs = 2> (ids)
    c = Gather (table, a)
    d = Gather (table, b)
    y = Concat <axis = 1> (c, d)
}"""

BLOCK = """
g (float[4, 8] x) => (float[4, 8] y) <float[8, 8] w, float[8, 8] v, float[8] b> {
    h0 = MatMul (x, w)
    h1 = Add (h0, b)
    h = Relu (h1)
    f = MatMul (h, v)
    a = Add (f, x)
    y = Relu (a)
}"""


def gallery(name: str) -> onnx.ModelProto:
    return read_example(GALLERY / f"{name}.onnxtxt").model


CASES = {
    "attention": ("attention", gallery("fuse_attention"), ["fuse_attention", "fuse_qkv"]),
    "batchnorm": ("batchnorm", drawn(BATCH_NORM), ["fuse_bn_into_conv"]),
    "embedding": ("embedding", drawn(CHUNKS), ["fuse_split_gather_concat"]),
    "gelu": ("gelu", gallery("fuse_gelu"), ["fuse_gelu"]),
    "layernorm": ("layernorm", gallery("fuse_layer_norm"), ["fuse_layer_norm"]),
    "residual": ("residual", drawn(BLOCK), ["fuse_matmul_add_bias_into_gemm"]),
    "rmsnorm": ("rmsnorm", gallery("fuse_rms_norm"), ["fuse_rms_norm"]),
    "rope": ("rope", gallery("fuse_rope"), ["fuse_rope"]),
    "op": ("op:MatMul", drawn(BLOCK), ["fuse_matmul_add_bias_into_gemm"]),
}


UNSTOPPED = {"embedding", "gelu", "layernorm"}
"""Whose fusions in onnxsim do not care who else reads what they replace: no pin stops them, so they are reverted."""


def size(result: PassRun) -> int:
    return len(live_nodes(result.model.proto.graph))


@pytest.mark.parametrize("case", CASES)
def test_keeps_what_is_lost_without(case: str, context: PassContext) -> None:
    kind, model, merging = CASES[case]
    instances = found(kind, model)
    free = run(model, context, ["onnxsim"])
    structure = structure_of(kind)
    assert structure is not None and structure.find_lost(instances, free.model)
    kept = run(model, context, ["onnxsim"], keep=[kind])
    verdicts = [verdict for verdict in kept.structures if verdict.kind == kind]
    assert [verdict.kept for verdict in verdicts] == [True] * len(instances)
    reverted = [row.name.removeprefix("onnxsim/") for row in kept.rows if row.status is Status.REVERTED]
    assert reverted == ([] if case not in UNSTOPPED else merging)
    by_name = run(model, context, ["onnxsim"], watch=False, skip=merging)
    assert size(kept) <= size(by_name) + 2 * len(instances)


DEAD = """
g (float[2, 6, 8] x) => (float[2, 6, 8] y) <float[8] w, float[8, 8] q, float[8, 8] k, float[8, 8] v> {
    n = LayerNormalization (x, w)
    m = LayerNormalization (n, w)
    qx = MatMul (m, q) kx = MatMul (m, k) vx = MatMul (m, v) kt = Transpose <perm = [0, 2, 1]> (kx)
    s = MatMul (qx, kt) p = Softmax (s) a = MatMul (p, vx)
    z = Constant <value_float = 0.0> ()
    y = Relu (n)
}"""


@pytest.mark.parametrize(("kind", "count"), [("layernorm", 1), ("qkv", 0), ("attention", 0), ("op:Softmax", 0)])
def test_what_no_output_depends_on_is_not_held(kind: str, count: int, context: PassContext) -> None:
    assert len(found(kind, drawn(DEAD))) == count
    kept = run(drawn(DEAD), context, ["eliminate_deadend"], keep=[f"{kind}?"])
    assert [node.op_type for node in kept.to_proto().graph.node] == ["LayerNormalization", "Relu"]
    assert len(found(kind, drawn(DEAD.replace("y = Relu (n)", "y = Add (n, a)")))) == count + 1
    assert len(found(kind, drawn(DEAD.replace("y = Relu (n)", "b = Mul (a, z) y = Add (n, b)")))) == count


SHARED = """
g (float[2, 6, 8] x) => (float[2, 6, 8] y) <float[8, 24] w> {
    at = Constant <value_ints = [0]> () cut = Constant <value_ints = [8]> () end = Constant <value_ints = [16]> ()
    last = Constant <value_ints = [-1]> ()
    m = MatMul (x, w) q = Slice (m, at, cut, last) kv = Slice (m, cut, end, last)
    t = Transpose <perm = [0, 2, 1]> (kv) s = MatMul (q, t) p = Softmax <axis = -1> (s) y = MatMul (p, kv)
}"""


def test_a_step_that_could_not_make_the_kind_is_named_with_its_reason(context: PassContext) -> None:
    assert found("qkv", drawn(SHARED)) == ()
    with pytest.raises(
        PolicyError, match=r"one matrix .*; the step split-qkv could not change that; .* or write 'qkv\?'"
    ):
        run(drawn(SHARED), context, ["split-qkv"], keep=["qkv"])


def test_keep_spares_one_kind_and_not_the_other(context: PassContext) -> None:
    """A residual may lose its batch norm to the convolution before it."""
    text = """
    g (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y)
    <float[4, 4, 3, 3] k, float[4] s, float[4] b, float[4] m, float[4] v> {
        c = Conv <pads = [1, 1, 1, 1]> (x, k)
        n = BatchNormalization (c, s, b, m, v)
        a = Add (n, x)
        y = Relu (a)
    }"""
    result = run(drawn(text), context, ["onnxsim"], keep=["residual"])
    assert sorted(node.op_type for node in result.model.proto.graph.node) == ["Add", "Conv", "Relu"]
    assert [verdict.kept for verdict in result.structures] == [True]
    assert [row.status for row in result.rows] == [Status.RAN]


def test_all_kinds_at_once(context: PassContext) -> None:
    kinds = ["qkv?", "attention", "batchnorm?", "gelu?", "swiglu?", "rope?", "op:Softmax", "module:block.*?"]
    result = run(gallery("fuse_attention"), context, ["default", "onnxsim"], keep=kinds)
    assert [verdict.kept for verdict in result.structures if verdict.kind != "qkv"] == [True, True]
    assert all(verdict.kept for verdict in result.structures)


def test_the_skip_of_a_pass_watches_what_it_destroys(context: PassContext) -> None:
    """onnxslim merges the two under another name."""
    result = run(drawn(BATCH_NORM), context, ["fuse_bn_into_conv", "onnxslim"], skip=["fuse_bn_into_conv"])
    (verdict,) = result.structures
    assert (verdict.kind, verdict.kept, verdict.broken_by) == ("batchnorm", True, "onnxslim/FusionConvBN")
    opted_out = run(
        drawn(BATCH_NORM), context, ["fuse_bn_into_conv", "onnxslim"], watch=False, skip=["fuse_bn_into_conv"]
    )
    assert opted_out.structures == ()
    assert [node.op_type for node in opted_out.model.proto.graph.node] == ["Conv"]


@pytest.mark.parametrize("kind", ["batchnorm", "embedding"])
def test_a_fault_in_a_kept_weight_would_show(kind: str, context: PassContext) -> None:
    _, model, _ = CASES[kind]
    power = run(model, context, ["nop"], keep=[kind]).power
    assert power.blind == ()
    assert 1.0 < power.margin < float("inf")


def test_what_has_no_weights_is_not_blind(context: PassContext) -> None:
    power = run(gallery("fuse_gelu"), context, ["nop"], keep=["gelu"]).power
    assert (power.margin, power.blind) == (float("inf"), ())


# `op:…` and `node:…`: what they choose, and what a choice of nothing says.

TEXT = """
g (float[2, 4] x) => (float[2, 4] y, float[2, 4] d) <float[4, 4] w, float[4] b> {
    one = Constant <value_float = 1.0> ()
    two = Add (one, one)
    a = MatMul (x, w)
    c = Add (a, b)
    d = com.microsoft.Gelu (c)
    e = Softmax (c)
    y = Mul (e, two)
}"""


def model(*, named: bool = True):
    made = drawn(TEXT)
    for node in made.graph.node:
        node.name = f"layer0/{node.op_type}_{node.output[0]}" if named else ""
    return made


@pytest.mark.parametrize(
    ("entry", "values"),
    [
        ("op:Softmax", ["e"]),
        ("op:Add", ["c"]),  # the other one computes a constant
        ("op:M*", ["a", "y"]),
        ("op:com.microsoft.Gelu", ["d"]),
        ("node:layer0/Softmax_e", ["e"]),
        ("node:layer0/M*", ["a", "y"]),
        ("op:Gelu", []),
        ("node:Softmax", []),
        ("node:*", ["a", "c", "d", "e", "y"]),
    ],
)
def test_chooses(entry: str, values: list[str]) -> None:
    assert names(found(entry, model())) == values


@pytest.mark.parametrize("name", ["layer[0]/Softmax", "[a-z]", "what?", "two*", "[!x"])
def test_the_name_of_a_node_means_the_node_whatever_letters_it_has(name: str) -> None:
    made = model()
    next(node for node in made.graph.node if node.op_type == "Softmax").name = name
    assert names(found(f"node:{name}", made)) == ["e"]


def test_both_ends_are_held_and_weights_are_named() -> None:
    (instance,) = found("op:MatMul", model())
    assert [site.tight.name for site in instance.pins] == ["a"]
    assert [weight.name for weight in instance.weights] == ["w"]
    (instance,) = found("op:Softmax", model())
    assert [site.tight.name for site in instance.pins] == ["c", "e"]
    assert instance.name == "layer0/Softmax_e"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("op:Sofmax", r"which has 2 Add, .*Softmax.*; did you mean 'Softmax'\?; write 'op:Sofmax\?'"),
        ("op:Constant", "1 of them, but all compute a constant"),
        ("node:layer0/Softmax", r"which has layer0/.*; did you mean 'layer0/Softmax_e'\?"),
    ],
)
def test_a_choice_of_nothing_says_what_is_there(entry: str, words: str, context: PassContext) -> None:
    with pytest.raises(PolicyError, match=rf"keep: {entry} matches nothing in this model, .*{words}"):
        passes.optimize(model(), recipe=["nop"], keep=[entry], context=context)


def test_names_in_that_message_begin_no_line(context: PassContext) -> None:
    entry = "node:no\n::error::such"
    made = model()
    for node in made.graph.node:
        node.name = f"{node.name}\n::error::name"
    with pytest.raises(PolicyError, match="matches nothing in this model") as error:
        passes.optimize(made, recipe=["nop"], keep=[entry], context=context)
    assert "\n" not in str(error.value)
    with pytest.raises(PolicyError, match="matches nothing in this model") as error:
        Loss.of(entry, detached(made))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("entry", ["opus:Softmax", "op:"])
def test_an_entry_of_another_word_or_of_no_pattern_is_no_choice(entry: str) -> None:
    assert structure_of(entry) is None


def test_nodes_without_names_cannot_be_chosen_by_name() -> None:
    structure = structure_of("node:*")
    assert structure is not None
    assert structure.find(detached(model(named=False))).instead == "nodes without names"


def test_an_optional_choice_may_match_nothing(context: PassContext) -> None:
    run = passes.optimize(model(), recipe=["nop"], keep=["op:Conv?", "node:conv*?"], context=context)
    assert [verdict for verdict in run.structures if verdict.kind.startswith(("op:", "node:"))] == []
