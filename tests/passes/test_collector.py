"""The garbage collector, paused."""

from __future__ import annotations

import gc

import pytest

from passes.collector import collector_paused


@pytest.mark.parametrize("stays", [False, True])
def test_what_stays_is_old_at_once(stays: bool) -> None:
    with collector_paused(stays=stays):
        assert not gc.isenabled()
        made = [[]]
    old = any(one is made for one in gc.get_objects(generation=2))
    assert (old, gc.isenabled(), gc.get_freeze_count()) == (stays, True, 0)


def test_what_somebody_has_frozen_stays_so() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collector_paused(stays=True):
            pass
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()
