"""What of a family breaks a bound, and how the table says it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.families.detect import Detection
from benchmarks.families.measure import Outcome, Side
from benchmarks.families.record import Record
from benchmarks.families.report import breaches, markdown
from benchmarks.families.table import Family

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
