"""The first pass that changes a model: always the very one that running them in turn finds."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.external.first_change import first_change


def result_of(search: Generator[None, None, tuple[int, bytes | None]]) -> tuple[int, bytes | None]:
    while True:
        try:
            next(search)
        except StopIteration as end:
            return end.value


@given(st.data())
def test_it_is_the_one_that_trying_them_in_turn_finds(data: st.DataObject) -> None:
    names = [f"p{index}" for index in range(data.draw(st.integers(1, 12)))]
    active = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=3))
    unlikely = data.draw(st.lists(st.sampled_from(names), unique=True))
    first = next((index for index, name in enumerate(names) if name in active), len(names))
    made = names[first].encode() if first < len(names) else None

    def make(chosen: Sequence[str]) -> bytes | None:
        return "+".join(chosen).encode() if set(chosen) & set(active) else None

    assert result_of(first_change(names, make, unlikely)) == (first, made)


def test_what_is_unlikely_costs_one_call() -> None:
    calls: list[Sequence[str]] = []
    search = first_change(["a", "b", "c", "d"], lambda chosen: calls.append(chosen), unlikely=["b", "d"])
    assert result_of(search) == (4, None)
    assert calls == [["a"], ["c"], ["b", "d"]]


def test_what_is_unlikely_is_not_tried_behind_the_change() -> None:
    calls: list[Sequence[str]] = []

    def make(chosen: Sequence[str]) -> bytes | None:
        calls.append(chosen)
        return b"changed" if "c" in chosen else None

    assert result_of(first_change(["a", "b", "c", "d"], make, unlikely=["a", "d"])) == (2, b"changed")
    assert calls == [["b"], ["c"], ["a"]]


def test_it_can_be_stopped_between_calls() -> None:
    calls: list[Sequence[str]] = []
    search = first_change(["a", "b", "c"], lambda chosen: calls.append(chosen))
    next(search)
    search.close()
    assert calls == [["a"]]
    with pytest.raises(StopIteration):
        next(search)
