"""Q, K and V: found by shape."""

from __future__ import annotations

import pytest

from passes.structures import STRUCTURES
from tests.passes.structures.attention_with_triple import WITH_TRIPLE
from tests.passes.structures.attention_without_triple import WITHOUT_TRIPLE
from tests.support.onnx_models import attention, detached

QKV = STRUCTURES["qkv"]


@pytest.mark.parametrize("name", WITH_TRIPLE)
def test_finds_each_triple_and_no_other(name: str) -> None:
    found = QKV.find(detached(WITH_TRIPLE[name]))
    assert [tuple(weight.name for weight in one.weights) for one in found.instances] == [("wq", "wk", "wv")]


@pytest.mark.parametrize("name", WITHOUT_TRIPLE)
def test_finds_none_where_there_is_none(name: str) -> None:
    assert QKV.find(detached(WITHOUT_TRIPLE[name])).instances == ()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("merged in the source", "1 attention block whose Q, K and V are one matrix in the source already: w (32×96)"),
        (
            "no attention",
            "no attention in a form that is looked for (weights made from Q and K that multiply V, or a state made "
            "from K and V that Q multiplies; 1 Softmax)",
        ),
    ],
)
def test_says_what_is_there_instead(name: str, words: str) -> None:
    assert QKV.find(detached(WITHOUT_TRIPLE[name])).instead == words


def test_pins_are_the_products_with_their_types() -> None:
    (instance,) = QKV.find(detached(attention())).instances
    assert [site.tight.name for site in instance.pins] == ["q", "k", "v"]
    assert all(len(site.tight.type.tensor_type.shape.dim) == 3 for site in instance.pins)
