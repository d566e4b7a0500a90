"""The finder against torch's module tree, on real model classes; `benchmarks/keep_families.py` has all the families."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.families.detect import Detection, detect, export_family
from benchmarks.families.measure import Outcome, Side
from benchmarks.families.record import Record
from benchmarks.families.report import breaches, markdown
from benchmarks.families.table import Family, families

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


# What of a family breaks a bound, and how the table says it.

FAMILY = Family("tiny", "TinyModel", "MHA", {}, {})
FUSED = replace(FAMILY, without="fused in the source")
FOUND = Detection(expected=2, found=2, missed=(), invented=(), lost=(), instead="")
NOTHING = Detection(0, 0, (), (), (), "no attention")
HELD = Outcome(instances=2, freely=Side(2, 50), kept=Side(0, 54), by_name=Side(0, 50), trouble=())
MEASURED = Record("key", 1.0, "", FOUND, {"onnxsim": HELD})


def outcome(**changed: Side) -> Record:
    return replace(MEASURED, outcomes={"onnxsim": replace(HELD, **changed)})


def test_a_family_that_is_as_it_should_be_breaks_nothing() -> None:
    without = Record("key", detection=NOTHING)
    stuck = Record("key", why_not="it raises")
    assert breaches([(FAMILY, MEASURED), (FUSED, without), (replace(FAMILY, exports=False), stuck)]) == []


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (Record("key"), "not measured"),
        (Record("key", why_not="it raises"), "does not export: it raises"),
        (replace(MEASURED, detection=replace(FOUND, missed=("layer.0.q",))), "missed layer.0.q"),
        (replace(MEASURED, detection=replace(FOUND, invented=("mlp: w",))), "found what torch has not: mlp: w"),
        (replace(MEASURED, detection=replace(FOUND, lost=("a",))), "the checker misses a in the model as exported"),
        (replace(MEASURED, detection=NOTHING), "torch ran 0 triples; the row says there are some"),
        (outcome(kept=Side(1, 54)), "onnxsim loses 1 that were kept"),
        (outcome(kept=Side(0, 55)), "onnxsim: keeping costs 2.5 nodes per instance, expected 2 at most"),
        (
            outcome(by_name=Side(1, 54)),
            "onnxsim: skipping by name loses 1, so there is nothing to compare with",
        ),
    ],
)
def test_each_bound_has_its_words(record: Record, words: str) -> None:
    assert breaches([(FAMILY, record)]) == [f"tiny: {words}"]


def test_the_table_tells_what_would_have_been_lost() -> None:
    rows = [(FAMILY, MEASURED), (replace(FUSED, name="merged"), Record("key", detection=NOTHING))]
    lines = markdown(rows, ["onnxsim"], "command").splitlines()
    assert "| tiny | TinyModel | MHA | 2 | 2 | 2 → 0, +2.0 |  |" in lines
    assert "| merged | TinyModel | MHA | 0 | 0 |  | fused in the source |" in lines
    assert "| 1 with triples, of 2 that export |  |  | 2 | 2 | 2 → 0, at most +2.0 |  |" in lines
