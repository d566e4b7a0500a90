"""Types, names and metadata that a step is there to write, although no operator changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxoptimizer
import pytest

import passes
from passes import Status
from passes.catalog.listing import example_of, read_example
from passes.context import PassContext
from passes.errors import PolicyError
from passes.policy.policy import Policy
from passes.run.tracked import find_structures
from tests.support.onnx_models import attention, biased_attention, detached, model_of
from tests.support.structure_models import drawn

BARE = """<ir_version: 8, opset_import: ["": 18]>
g (float[2, 3] x) => (float[2, 3] y) <int64[2] shape = {2, 3}> { r = Relu (x) s = Reshape (r, shape) y = Neg (s) }"""

CODE = """
def sign(model):
    model.metadata_props.add(key="signed", value="by me")
    del model.metadata_props[1:]
    return model

def doubt(model):
    info = model.graph.value_info.add(name="r")
    info.type.tensor_type.elem_type = 7
    return model
"""


def bare() -> onnx.ModelProto:
    return onnx.parser.parse_model(BARE)


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(CODE)
    return f"{tmp_path}/own.py:"


def test_inferred_shapes_are_there_for_the_next_step(context: PassContext) -> None:
    assert not passes.optimize(bare(), recipe=["eliminate_nop_reshape"], context=context).rows[0].changed
    run = passes.optimize(bare(), recipe=["infer_shapes", "infer_shapes", "eliminate_nop_reshape"], context=context)
    assert [row.changed for row in run.rows] == [True, False, True]
    assert [node.op_type for node in run.model.proto.graph.node] == ["Relu", "Neg"]
    assert [info.name for info in run.model.proto.graph.value_info][:1] == ["r"]


def test_metadata_that_a_pass_of_the_users_writes_stays(own: str, context: PassContext) -> None:
    run = passes.optimize(bare(), recipe=[f"{own}sign", f"{own}sign"], context=context)
    assert [(row.status, row.changed) for row in run.rows] == [(Status.RAN, True), (Status.RAN, False)]
    assert [(entry.key, entry.value) for entry in run.model.proto.metadata_props] == [("signed", "by me")]


def test_a_wrong_type_is_reverted(own: str, context: PassContext) -> None:
    run = passes.optimize(bare(), recipe=[f"{own}doubt"], context=context)
    assert run.rows[0].status is Status.REVERTED
    assert not run.model.proto.graph.value_info


def test_names_that_a_native_optimizer_writes_are_no_change(context: PassContext) -> None:
    run = passes.optimize(bare(), recipe=["set_unique_name_for_nodes"], context=context)
    assert not run.rows[0].changed
    assert {node.name for node in run.model.proto.graph.node} == {""}


# Which structures a run looks at, what it holds visible for them, and what it says when there are none.

NORMS = """
g (float[2, 8] x) => (float[2, 8] y) <float[8] w, float[8, 8] m> {
    n = LayerNormalization (x, w)
    f = MatMul (n, m)
    y = Add (f, x)
}"""


def test_kinds_that_nobody_asked_for_are_not_looked_for() -> None:
    watched = find_structures(detached(attention()), Policy(), ["nop"])
    assert {kind: len(instances) for kind, instances in watched.instances.items()} == {"qkv": 1}
    assert watched.enforced == watched.pinned == frozenset()
    assert watched.tight_pins(detached(attention()).index.live_values) == []


def test_what_is_watched_is_enforced_and_not_pinned() -> None:
    watched = find_structures(detached(attention()), Policy(("fuse_attention",)), ["fuse_attention"])
    assert watched.enforced == {"qkv", "attention"}
    assert watched.pinned == frozenset()
    assert [len(instances) for instances in watched.instances.values()] == [1, 1]


def test_kept_values_are_pinned() -> None:
    model = detached(drawn(NORMS))
    watched = find_structures(model, Policy(keep=("layernorm", "residual", "op:MatMul")), [])
    assert sorted(pin.name for pin in watched.tight_pins(model.index.live_values)) == ["f", "f", "n", "n", "y"]
    assert watched.wide_pins(model.index.live_values) == []


def test_wide_pins_lie_downstream_of_tight_pins() -> None:
    """The products, and their sums with a bias as heads; of values that are gone the next one is pinned."""
    model = detached(biased_attention())
    watched = find_structures(model, Policy(keep=("qkv",)), [])
    assert [pin.name for pin in watched.tight_pins(model.index.live_values)] == ["q0", "k0", "v0"]
    assert [pin.name for pin in watched.wide_pins(model.index.live_values)] == ["qh", "kh", "vh"]

    later = detached(
        drawn("g (float[2] x) => (float[2] y) { qh = Neg (x) k = Abs (x) vh = Exp (x) y = Sum (qh, k, vh) }")
    )
    assert [pin.name for pin in watched.tight_pins(later.index.live_values)] == ["qh", "k", "vh"]
    assert watched.wide_pins(later.index.live_values) == []


def test_what_is_lost_is_listed_by_kind_and_name() -> None:
    watched = find_structures(detached(drawn(NORMS)), Policy(keep=("layernorm", "residual", "op:MatMul")), [])
    changed = detached(drawn(NORMS.replace("y = Add (f, x)", "y = Add (f, w)")))
    assert list(watched.find_lost(detached(drawn(NORMS)))) == []
    assert list(watched.find_lost(changed)) == [("residual", "residual")]


def test_instances_go_to_the_prover_under_one_name_each() -> None:
    """With weights, a fault has to show at the end; where there are none, nothing has to."""
    watched = find_structures(detached(drawn(NORMS)), Policy(keep=("layernorm", "residual", "op:Add")), [])
    held = {one.name: one for one in watched.must_hold()}
    assert set(held) == {"layernorm", "residual", "y"}
    assert held["layernorm"].weight_results == ("n",)
    assert held["residual"].weight_results == ()
    assert held["residual"].values == ("f", "y")


def test_two_of_one_name_are_distinguished() -> None:
    watched = find_structures(detached(drawn(NORMS)), Policy(keep=("op:Add", "op:A*")), [])
    assert {one.name for one in watched.must_hold()} == {"op:Add y", "op:A* y"}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("batchnorm", "no BatchNormalization, but 1 LayerNormalization"),
        ("gelu", "no GELU, but 1 LayerNormalization, 1 MatMul, 1 Add"),
        ("attention", "no softmax between two products of computed values, but 1 MatMul"),
    ],
)
def test_a_keep_that_matches_nothing_says_what_is_there(kind: str, words: str) -> None:
    with pytest.raises(
        PolicyError, match=f"keep: {kind} matches nothing in this model, which has {words}; write '{kind}"
    ):
        find_structures(detached(drawn(NORMS)), Policy(keep=(kind,)), [])


# With nothing to keep, the runner leaves what the library leaves when its passes are called one after the other.

NAMES = [name for name in onnxoptimizer.get_fuse_and_elimination_passes() if name != "fuse_qkv"]
"""`fuse_qkv` aborts on an input that three products read."""

TWICE = """
g (float[N, 8] x) => (float[N, 8] y) {
    a = Neg (x)
    b = Neg (x)
    c = Add (a, w)
    d = Add (b, w)
    e = Mul (c, d)
    y = Identity (e)
}
"""


def models() -> Iterator[tuple[str, onnx.ModelProto]]:
    yield "attention", attention()
    yield "attention with biases", biased_attention()
    yield "everything twice", model_of(TWICE, w=np.arange(8, dtype=np.float32))
    for name in NAMES:
        picture = example_of(name)
        if picture:
            yield name, read_example(picture).model


@pytest.mark.parametrize("model", [pytest.param(model, id=name) for name, model in models()])
def test_the_runner_leaves_what_the_library_leaves(model: onnx.ModelProto, context: PassContext) -> None:
    expected = model
    for pass_name in NAMES:
        expected = onnxoptimizer.optimize(expected, [pass_name])
    run = passes.optimize(model, recipe=NAMES, watch=False, context=context)
    assert [row.reason for row in run.rows if row.status is not Status.RAN] == []
    ops = Counter(node.op_type for node in run.model.proto.graph.node)
    assert ops == Counter(node.op_type for node in expected.graph.node)


def test_of_equal_operators_one_is_left(context: PassContext) -> None:
    run = passes.optimize(model_of(TWICE, w=np.arange(8, dtype=np.float32)), recipe=NAMES, context=context)
    rows = {row.name: row for row in run.rows if row.changed}
    assert "eliminate_common_subexpression" in rows
    assert rows["eliminate_deadend"].diff == {"Neg": -1, "Add": -1}
