"""Q, K and V in unusual spellings: found with the right weights in the right roles, and judged so."""

from __future__ import annotations

import pytest

from passes.policy.policy import Policy
from passes.run.tracked import find_structures
from passes.structures import STRUCTURES
from tests.passes.structures.tricky_attention import TRICKY
from tests.passes.structures.tricky_places import merged_partly
from tests.support.onnx_models import detached

QKV = STRUCTURES["qkv"]


@pytest.mark.parametrize("name", TRICKY)
def test_finds_the_projections_with_their_roles(name: str) -> None:
    tricky = TRICKY[name]()
    found = QKV.find(detached(tricky.model))
    assert [tuple(weight.name for weight in one.weights) for one in found.instances] == [tricky.weights], found.instead
    (instance,) = found.instances
    assert [weight.role for weight in instance.weights] == ["Q", "K", "V"]
    assert [site.tight.name for site in instance.pins] == list(tricky.products or ())
    assert QKV.find_lost(found.instances, detached(tricky.model)) == {}


def test_says_what_is_apart_and_what_is_merged() -> None:
    model = detached(merged_partly())
    found = QKV.find(model)
    assert find_structures(model, Policy((), ("qkv",)), ()).partly == {"qkv": f"{found.instead}; {found.remedy}"}
    assert [one.name for one in found.instances] == ["attention 0", "attention 1"]
    assert found.instead == (
        "2 attention blocks with separate Q, K and V (attention 0, attention 1), and 2 attention blocks whose "
        "Q, K and V are one matrix in the source already: w0 (32×96), w2 (32×96)"
    )
