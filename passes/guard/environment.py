"""The environment by which child processes are guarded: one variable that says what, and a folder on PYTHONPATH."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Final

from passes.guard.settings import Settings, from_text, to_text
from passes.guard.startup.sitecustomize import FOLDER, VARIABLE

__all__ = ["Borrowed", "guards_in", "with_guards"]

PATH: Final = "PYTHONPATH"


class Borrowed:
    """An environment that asks children to be guarded, for a while."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self._environment = environment
        self._before = {name: environment.get(name) for name in (VARIABLE, PATH)}
        self._put: dict[str, str] = {}

    def put(self, guards: Sequence[Settings]) -> None:
        """Children begin with exactly these guards."""
        self._put = _variables(self._environment, guards)
        self._environment.update(self._put)

    def give_back(self) -> None:
        """As it was before. Should somebody else have changed PYTHONPATH, only our folder is taken out of it."""
        for name, put in self._put.items():
            before, now = self._before[name], self._environment.get(name)
            if now == put or name == VARIABLE:
                rest = before
            else:
                rest = now and os.pathsep.join(entry for entry in now.split(os.pathsep) if entry != FOLDER)
            if rest is None:
                self._environment.pop(name, None)
            else:
                self._environment[name] = rest


def with_guards(environment: Mapping[str, str], guards: Sequence[Settings]) -> dict[str, str]:
    """A copy of an environment that somebody made for a child, with the guards in it."""
    return {**environment, **_variables(environment, guards)}


def guards_in(environment: Mapping[str, str]) -> tuple[Settings, ...]:
    return from_text(environment[VARIABLE]) if VARIABLE in environment else ()


def _variables(environment: Mapping[str, str], guards: Sequence[Settings]) -> dict[str, str]:
    path = environment.get(PATH)
    entries = [entry for entry in path.split(os.pathsep) if entry != FOLDER] if path else []
    return {VARIABLE: to_text(guards), PATH: os.pathsep.join([FOLDER, *entries])}
