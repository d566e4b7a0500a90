"""The finder against torch's module tree, on real model classes; `benchmarks/keep_families.py` has all the families."""

from __future__ import annotations

import pytest

from benchmarks.families.detect import detect, export_family
from benchmarks.families.table import families

FAMILIES = families()

TRIPLES = {
    "albert": 2,  # one layer, called twice
    "bert_decoder": 4,  # over oneself, and across
    "conditional_detr": 4,  # content and position, projected each; the decoder begins with constants
    "deberta_v2": 2,  # positions are projected too
    "gemma3n": 2,  # four layers, of which the last two use K and V of others
    "mixtral_grouped": 2,  # a router takes a softmax too, and each expert is a product of its own
    "llama4_text": 2,  # rope of complex numbers
    "qwen3": 2,  # grouped heads, norms of Q and K
    "reformer": 2,  # a softmax spelled with Exp
    "segformer": 2,  # K and V over fewer places
    "squeezebert": 2,  # by 1×1 Conv
    "t5": 6,
    "xlnet": 2,  # by Einsum with a matrix per head, relative keys
    "deepseek_v3": 0,  # K and V from one latent matrix
}
"""Family → triples in its table row, counted by hand."""


@pytest.mark.parametrize("name", TRIPLES)
def test_finds_the_triples_that_torch_ran(name: str) -> None:
    detection = detect(export_family(FAMILIES[name]))
    assert detection.right, detection
    assert (detection.expected, detection.found) == (TRIPLES[name], TRIPLES[name])


def test_every_row_can_be_read() -> None:
    for family in FAMILIES.values():
        assert family.section().transformers is not None
