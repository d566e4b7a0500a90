"""What must not happen: passes to skip, structures to keep. Says of every skip where it was asked for."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from passes.audited.quarantine import check_quarantine, is_quarantine
from passes.base import Composite, Early, Step, Workbench
from passes.catalog import pass_names
from passes.destroys import DESTROYS
from passes.errors import PolicyMistake
from passes.external import onnxoptimizer
from passes.groups import ALL_GROUPS, GROUPS, in_group
from passes.names import nearest
from passes.steps import OWN_STEPS
from passes.structures import SELECTORS, STRUCTURES, structure_of

__all__ = ["Policy", "Skip", "check_lists", "check_names", "unknown_structure", "with_skips"]


def check_lists(**arguments: object) -> None:
    """Refuse a single value where a list is expected: the letters of a text would count as its entries. What is kept
    or skipped has to be a name.

    Raises:
        PolicyMistake: naming the argument, and the value as a list.
    """
    for name, value in arguments.items():
        if value is None or isinstance(value, str | bytes | int | float | Mapping):
            shown = json.dumps(value) if isinstance(value, str) else repr(value)
            instead = "[]" if value is None else f"[{shown}]"
            raise PolicyMistake(f"{name} is {shown}, expected a list: {name}={instead}")
        if name in ("keep", "skip") and isinstance(value, Collection):
            odd = [entry for entry in value if not isinstance(entry, str)]
            if odd:
                raise PolicyMistake(f"{name} holds {odd[0]!r}, expected names")


@dataclass(frozen=True, slots=True)
class Skip:
    """Why a pass does not run."""

    reason: str


@dataclass(frozen=True, slots=True)
class Policy:
    """The user's wishes, as written.

    `skip` holds pass names, groups and globs; `keep` kinds of structures, or selectors such as `op:Softmax`, with `?`
    behind one that may be absent. `watch` lets
    the skip of a pass that destroys a structure watch that structure. A kept structure is pinned and proven; a
    watched one is proven; in both cases a step that breaks it is reverted.
    """

    skip: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    watch: bool = True

    def skips(self, name: str) -> Skip | None:
        """Whether the pass called `name` is to be skipped, and by which entry.

        An inner pass is called `onnxsim/fuse_qkv`. An entry without a library means the pass of that name anywhere.
        """
        bare = name.rpartition("/")[2]
        for entry in self.skip:
            if in_group(entry, name) or fnmatch.fnmatchcase(name, entry) or fnmatch.fnmatchcase(bare, entry):
                return Skip(f"skip: {entry}" if entry in (name, bare) else f"skip: {entry} names {name}")
        return None

    def kept(self) -> dict[str, bool]:
        """Kinds to keep → whether at least one instance is required."""
        return {entry.removesuffix("?"): not entry.endswith("?") for entry in self.keep}

    def watched(self, names: Sequence[str]) -> tuple[str, ...]:
        """Kinds that are watched because a pass among `names` that destroys them is skipped."""
        if not self.watch:
            return ()
        skipped = [name for name in names if self.skips(name)]
        return tuple(dict.fromkeys(kind for name in skipped for kind in DESTROYS.get(name.rpartition("/")[2], ())))

    def check(self, names: Sequence[str], used: Sequence[str]) -> None:
        """Refuse what cannot be honoured.

        Args:
            names: all pass names that this installation has.
            used: those that run, each step of a recipe say: `unsafe` has to know them.

        Raises:
            PolicyMistake: an unknown pass or structure, with the nearest name; or `unsafe` without an audit of the
                installed releases.
        """
        for entry in self.skip:
            if is_quarantine(entry):
                check_quarantine(entry, used)
                continue
            if entry in GROUPS or any(Policy((entry,)).skips(name) for name in names):
                continue
            known = (*ALL_GROUPS, *names, *(name.rpartition("/")[2] for name in names))
            raise PolicyMistake(
                f"skip: no pass named {entry!r}{nearest(entry, known)} "
                "(`onnxline passes` lists what this installation has)"
            )
        for kind in self.kept():
            if structure_of(kind) is None:
                raise PolicyMistake(f"keep: {unknown_structure(kind)}")


def check_names(steps: Sequence[Step], policy: Policy, bench: Workbench) -> None:
    """Refuse every name and option that nothing here has, before a model is opened.

    A library is asked only for what onnxline does not know itself, since its import takes a second.

    Raises:
        PolicyMistake: an unknown pass, structure or option, with the nearest; or a value of the wrong type.
    """
    used = [step.name for step in steps]
    Policy(keep=policy.keep).check((), ())
    for step in steps:
        if isinstance(step, Composite):
            step.check(bench)
    try:
        policy.check((*onnxoptimizer.available(), *OWN_STEPS, *used), used)
    except PolicyMistake:
        policy.check(pass_names(steps, bench), used)


def with_skips(step: Step, policy: Policy, bench: Workbench) -> Step:
    """The step with the policy's skips told to it, if it runs other passes than its own.

    Raises:
        PolicyMistake: options that the installed release does not take.
    """
    if isinstance(step, Early):  # what is skipped, since it never ends say, is not tried in advance either
        return step.looking_past([name for name in step.ahead if policy.skips(name)])
    if not isinstance(step, Composite):
        return step
    step.check(bench)
    return step.without([name for name in step.inner(bench) if policy.skips(f"{step.name}/{name}")])


def unknown_structure(kind: str) -> str:
    """What is wrong with an entry of `keep` that means nothing."""
    prefix, colon, _ = kind.partition(":")
    if not colon:
        known = f"{', '.join(STRUCTURES)}; or {', '.join(f'{one}:GLOB' for one in SELECTORS)}"
        return f"no structure named {kind!r}{nearest(kind, STRUCTURES)}; known: {known}"
    if prefix in SELECTORS:
        return f"{kind!r} names nothing; write {EXAMPLES[prefix]!r}, say"
    return f"nothing can be chosen by {prefix!r}{nearest(prefix, SELECTORS)}; known: {', '.join(EXAMPLES.values())}"


EXAMPLES: Final = {"op": "op:Softmax", "node": "node:*attn*", "module": "module:encoder.layer.3.*"}
