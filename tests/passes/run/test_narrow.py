"""Narrowing finds a smallest guilty set, in few runs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from passes.run.narrow import minimal_culprits, primary_culprit

NAMES = [f"p{i}" for i in range(40)]


@given(st.sets(st.sampled_from(NAMES), min_size=1, max_size=4), st.sets(st.sampled_from(NAMES), max_size=4))
def test_finds_exactly_the_guilty(guilty: set[str], suspects: set[str]) -> None:
    runs: list[tuple[str, ...]] = []

    def is_good(names: tuple[str, ...]) -> bool:
        runs.append(names)
        return guilty <= set(names)

    assert set(minimal_culprits(NAMES, sorted(suspects), is_good) or ()) == guilty
    assert len(runs) <= 2 * len(suspects) * 3 + 4 + 4 * len(guilty) * 7


def test_a_suspect_that_is_guilty_costs_one_run() -> None:
    runs = []
    assert minimal_culprits(NAMES, ["p3"], lambda names: runs.append(names) or "p3" in names) == ("p3",)
    assert runs == [("p3",)]


def test_a_step_that_is_wrong_by_itself_has_no_guilty_part() -> None:
    assert minimal_culprits(NAMES, ["p1"], lambda names: False) is None


def test_a_suspect_that_this_release_lacks_is_not_asked() -> None:
    asked: list[tuple[str, ...]] = []
    assert minimal_culprits(["a", "b"], ["gone"], lambda names: asked.append(names) or "b" in names) == ("b",)
    assert ("gone",) not in asked


def test_of_several_culprits_the_one_that_made_the_change_is_named() -> None:
    """Without the others the result is the same, so they did nothing."""
    assert primary_culprit(("a", "b", "c"), lambda left_out: "b" not in left_out) == "b"
    assert primary_culprit(("a", "b"), lambda left_out: False) == "a", "they need each other"
    assert primary_culprit(("a",), lambda left_out: True) == "a", "there is no other to leave out"
