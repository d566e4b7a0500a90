"""Q, K and V in unusual spellings: found with the right weights in the right roles, and judged so."""

from __future__ import annotations

import pytest

from passes.structures import STRUCTURES
from tests.passes.models import detached
from tests.passes.structures.tricky_attention import MERGED_PARTLY, TRICKY

QKV = STRUCTURES["qkv"]


@pytest.mark.parametrize("name", TRICKY)
def test_finds_the_projections_with_their_roles(name: str) -> None:
    tricky = TRICKY[name]()
    found = QKV.find(detached(tricky.model))
    assert [tuple(weight.name for weight in one.weights) for one in found.instances] == [tricky.weights], found.instead
    (instance,) = found.instances
    assert [weight.role for weight in instance.weights] == ["Q", "K", "V"]
    assert [pin.name for pin in instance.pins] == list(tricky.products or ())
    assert QKV.lost(found.instances, detached(tricky.model)) == {}
