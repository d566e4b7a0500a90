"""The environment by which child processes are guarded: variables that say what, and a folder on PYTHONPATH."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Final

from passes.guard.settings import Settings, from_text, to_text
from passes.guard.startup.launches import FOLDER, PROCESSES, VARIABLE, add_guard

__all__ = ["Borrowed", "guards_in", "variables_of"]

PATH: Final = "PYTHONPATH"


class Borrowed:
    """An environment that asks children to be guarded, for a while."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self._environment = environment
        self._before = {name: environment.get(name) for name in (VARIABLE, PROCESSES, PATH)}
        self._put: dict[str, str] = {}

    def put(self, guards: Sequence[Settings]) -> None:
        """Children begin with exactly these guards."""
        guarded = add_guard(self._environment, variables_of(guards))
        self._put = {name: guarded[name] for name in self._before}
        self._environment.update(self._put)

    def give_back(self) -> None:
        """As it was before. Should somebody else have changed PYTHONPATH, only our folder is taken out of it."""
        for name, put in self._put.items():
            before, now = self._before[name], self._environment.get(name)
            if now == put or name != PATH:
                rest = before
            else:
                rest = now and os.pathsep.join(entry for entry in now.split(os.pathsep) if entry != FOLDER)
            if rest is None:
                self._environment.pop(name, None)
            else:
                self._environment[name] = rest


def variables_of(guards: Sequence[Settings]) -> dict[str, str]:
    """The variables that give `guards` to a child."""
    folders = dict.fromkeys(one.processes for one in guards if one.processes)
    return {VARIABLE: to_text(guards), PROCESSES: os.pathsep.join(folders)}


def guards_in(environment: Mapping[str, str]) -> tuple[Settings, ...]:
    return from_text(environment[VARIABLE]) if VARIABLE in environment else ()
