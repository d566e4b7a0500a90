"""What holds for every test of the guard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import passes
from passes.guard import context
from passes.guard.context import running_pythons
from passes.guard.startup.hooks import OUR_PROGRAM


@pytest.fixture(autouse=True)
def no_children_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard names each Python that runs already when the guard begins. Tests of other rooms leave such a Python: the
    fork server of `tests/support/processes.py` runs until pytest ends. A guard still names what its own test starts."""
    there = set(running_pythons(OUR_PROGRAM))

    def running_pythons_of_the_test(ours: bytes) -> list[str]:
        return [command for command in running_pythons(ours) if command not in there]

    monkeypatch.setattr(context, "running_pythons", running_pythons_of_the_test)


@pytest.fixture(scope="module")
def workers() -> Iterator[None]:
    """Workers live as long as there is a guard; this one asks for nothing."""
    with passes.guard(compare=False, quiet=True):
        yield
