"""Which structures a run looks at, what it holds visible for them, and what it says when there are none."""

from __future__ import annotations

import pytest

from passes.errors import PolicyError
from passes.policy.policy import Policy
from passes.run.tracked import find_structures
from tests.support.onnx_models import attention, biased_attention, detached
from tests.support.structure_models import drawn

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
