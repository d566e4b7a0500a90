"""The settings of a guard: a frozen object, and text in an environment variable for child processes."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass

from passes.catalog import catalog
from passes.context import open_context
from passes.errors import PolicyError
from passes.guard.startup.hooks import FOLDER, LIBRARIES, PATH, VARIABLE, add_guard
from passes.policy.policy import DESTROYS, Policy, Skip
from passes.recipe.recipe import OWN_STEPS


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of one guard. Every process appends its calls to the file `journal`."""

    keep: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    watch: bool = True
    compare: bool = True
    timeout_s: float = 600.0
    memory_gib: float | None = None
    quiet: bool = False
    journal: str = ""

    def check(self) -> None:
        """Refuse names that nothing has, before anything runs.

        Libraries take seconds to list their inner passes, so they are asked only if an entry of `skip` names no other
        pass.

        Raises:
            PolicyError: an unknown structure or pass.
        """
        Policy((), self.keep).check((), ())
        if any(not _is_known(entry, _names(())) for entry in self.skip):
            _check(self.skip, _names(None))

    def skips(self, name: str) -> Skip | None:
        return Policy(self.skip).skips(name)

    def kinds(self) -> tuple[str, ...]:
        """The kinds of structures that this guard enforces: the kept ones, and those that a skip watches."""
        suspects = [
            name
            for inner_name in DESTROYS
            for name in (inner_name, *(f"{library}/{inner_name}" for library in LIBRARIES))
        ]
        watched = Policy(self.skip, (), self.watch).watched_kinds(suspects)
        return tuple(dict.fromkeys((*Policy((), self.keep).kept_kinds(), *watched)))


@dataclass(frozen=True, slots=True)
class CombinedPolicy:
    """The combined policy of nested guards."""

    guards: tuple[Settings, ...]

    def skips(self, name: str) -> Skip | None:
        return next((skip for settings in self.guards if (skip := settings.skips(name))), None)

    def skips_any(self) -> bool:
        return any(settings.skip for settings in self.guards)

    def merge(self) -> Policy:
        """The policy to enforce on one model. Each kind may be absent, since not every model of a script has it.

        The policy has no skips: skipped passes are removed from the steps beforehand, since the same name may belong to
        a library that is not called. The kinds that skips watch are enforced like kept ones.
        """
        kinds = dict.fromkeys(kind for settings in self.guards for kind in settings.kinds())
        return Policy((), tuple(f"{kind}?" for kind in kinds), watch=False)

    def keep(self) -> tuple[str, ...]:
        """The kinds that were asked for by name."""
        return tuple(dict.fromkeys(kind for settings in self.guards for kind in Policy((), settings.keep).kept_kinds()))

    @property
    def compare(self) -> bool:
        return any(settings.compare for settings in self.guards)

    @property
    def timeout_s(self) -> float:
        return self.guards[-1].timeout_s  # of the innermost guard

    @property
    def memory_gib(self) -> float | None:
        return self.guards[-1].memory_gib


def _is_known(entry: str, names: Sequence[str]) -> bool:
    try:
        _check((entry,), names)
    except PolicyError:
        return False
    return True


def _check(skip: tuple[str, ...], names: Sequence[str]) -> None:
    """Check `skip` against `names`. A script may call any step, so all names but a recipe's own count."""
    Policy(skip).check(names, [name for name in names if name not in OWN_STEPS])


def _names(steps: Collection[str] | None) -> tuple[str, ...]:
    """The names of all passes, with the inner passes of `steps`, or of every step if None."""
    with open_context() as context:
        return tuple(row.name for row in catalog(context, steps=steps))


class BorrowedEnvironment:
    """Sets the variables that make children guarded, and restores them."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self._environment = environment
        self._before = {name: environment.get(name) for name in (VARIABLE, PATH)}
        self._written: dict[str, str] = {}

    def set_guards(self, guards: Sequence[Settings]) -> None:
        """Make children start with exactly the given guards."""
        guarded = add_guard(self._environment, variables_of(guards))
        self._written = {name: guarded[name] for name in self._before}
        self._environment.update(self._written)

    def restore(self) -> None:
        """Restore the variables. If the script has changed PYTHONPATH, only our folder is removed from it."""
        for name, written in self._written.items():
            before, now = self._before[name], self._environment.get(name)
            if now == written or name != PATH:
                rest = before
            else:
                rest = now and os.pathsep.join(entry for entry in now.split(os.pathsep) if entry != FOLDER)
            if rest is None:
                self._environment.pop(name, None)
            else:
                self._environment[name] = rest


def variables_of(guards: Sequence[Settings]) -> dict[str, str]:
    """The variables that hand `guards` to a child, as JSON."""
    return {VARIABLE: json.dumps([asdict(settings) for settings in guards])}


def guards_in(environment: Mapping[str, str]) -> tuple[Settings, ...]:
    """The guards that the environment of a process names."""
    written = json.loads(environment.get(VARIABLE, "[]"))
    return tuple(Settings(**{**data, "keep": tuple(data["keep"]), "skip": tuple(data["skip"])}) for data in written)
