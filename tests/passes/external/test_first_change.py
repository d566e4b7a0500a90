"""The first pass that changes a model, found two at a time: always the very one that running them in turn finds."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.base import Workbench

HERE = "tests.passes.external.test_first_change"


def search(names: Sequence[str], active: Sequence[str], unlikely: Sequence[str], fatal: str = "") -> tuple:
    """In a worker, which has no threads: the result, and how many calls it took in this process."""
    from passes.external.first_change import first_change

    calls = []

    def make(chosen: Sequence[str]) -> bytes | None:
        calls.append(chosen)
        if fatal in chosen:
            os._exit(3)
        return "+".join(chosen).encode() if set(chosen) & set(active) else None

    return first_change(names, make, unlikely)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_it_is_the_one_that_trying_them_in_turn_finds(bench: Workbench, data: st.DataObject) -> None:
    names = [f"p{index}" for index in range(data.draw(st.integers(1, 12)))]
    active = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=3))
    unlikely = data.draw(st.lists(st.sampled_from(names), unique=True))
    first = next((index for index, name in enumerate(names) if name in active), len(names))
    made = names[first].encode() if first < len(names) else None

    found = bench.worker.call(f"{HERE}:search", names=names, active=active, unlikely=unlikely)

    assert found == (first, made)


def test_a_pass_that_ends_its_process_is_no_pass_that_changes_nothing(bench: Workbench) -> None:
    """In the fork the error is told; in the worker itself it is the worker's end."""
    from passes.errors import StepFailed

    names = [f"p{index}" for index in range(6)]
    for fatal in names:
        with pytest.raises(StepFailed):
            bench.worker.call(f"{HERE}:search", names=names, active=[], unlikely=["p1", "p4"], fatal=fatal)
