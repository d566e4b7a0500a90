"""`op:…` and `node:…`: what they choose, and what a choice of nothing says."""

from __future__ import annotations

import pytest

import passes
from passes import PolicyError
from passes.context import PassContext
from passes.structures import structure_of
from tests.support.onnx_models import detached
from tests.support.structure_models import drawn, found, names

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


def test_nodes_without_names_cannot_be_chosen_by_name() -> None:
    structure = structure_of("node:*")
    assert structure is not None
    assert structure.find(detached(model(named=False))).instead == "nodes without names"


def test_an_optional_choice_may_match_nothing(context: PassContext) -> None:
    run = passes.optimize(model(), recipe=["nop"], keep=["op:Conv?", "node:conv*?"], context=context)
    assert [verdict for verdict in run.structures if verdict.kind.startswith(("op:", "node:"))] == []
