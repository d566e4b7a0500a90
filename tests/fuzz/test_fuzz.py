"""3,000 broken files, made from a fixed seed, at the doors: a result or one message, and never anything else.

`python -m benchmarks.fuzz` brings more of them to more doors, in processes that may hang or die.
"""

from __future__ import annotations

import faulthandler
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from benchmarks.fuzz.doors import Doors
from benchmarks.fuzz.mutations import BrokenFile, broken_files
from benchmarks.fuzz.seeds import seed_models

SEED, COUNT, SHARES = 2026, 3000, 12
HANG_S = 120.0
SOME = {"optimize": 10, "diff": 60, "why": 50, "bisect": 300, "run": 75, "right": 60}
"""Door → of how many files it gets one; `load`, `from_onnx` and the diff of structures get them all."""


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    with Doors.open() as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A door that hangs ends the process, with a traceback of where: nothing else could end native code."""
    faulthandler.dump_traceback_later(HANG_S * 3, exit=True, file=sys.__stderr__ or 2)
    yield
    faulthandler.cancel_dump_traceback_later()


def test_every_seed_model_is_accepted(doors: Doors) -> None:
    for name, model in seed_models().items():
        for door in ("load", "why", "diff_structure"):
            assert doors.knock(door, model.SerializeToString(), name) == "ok", (door, name)


@pytest.mark.parametrize("share", range(SHARES))
def test_broken_files_end_in_a_result_or_in_one_message(doors: Doors, share: int) -> None:
    count = COUNT // SHARES
    endings: Counter[str] = Counter()
    for file in broken_files(count, SEED, first=share * count):
        for door in ("load", "from_onnx", "diff_structure", *_some_doors(file)):
            endings[f"{door} {doors.knock(door, file.content, file.seed_model).partition(':')[0]}"] += 1
    for door in ("load", "from_onnx"):  # a door that took all of them, or none, would show nothing
        assert endings[f"{door} ok"] > count / 20, endings
        assert endings[f"{door} refused"] > count / 4, endings


def test_files_are_the_same_each_time() -> None:
    first, second = ([file.content for file in broken_files(30, SEED)] for _ in range(2))
    assert first == second
    assert len(set(first)) > 25


def _some_doors(file: BrokenFile) -> list[str]:
    return [door for door, one_of in SOME.items() if (file.index * 7) % one_of == 0]
