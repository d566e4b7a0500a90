"""What must not happen: passes to skip, structures to keep. Says of every skip where it was asked for.

Passes are known by their names: their groups, for `skip:`, and the structures that they destroy. A group is a set of
globs, so it holds for releases yet to come. The group `unsafe` is no set of globs: it holds the names that an audit
of the installed releases has found.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Literal

from passes.advisories.known import QUARANTINE, check_quarantine, is_quarantine, quarantined_passes
from passes.errors import PolicyError
from passes.external.installed import known_tables, read_groups
from passes.structures import SELECTORS, STRUCTURES, structure_of
from passes.suggest import describe_argument, nearest


def in_group(group: str, pass_name: str) -> bool:
    """Whether a pass belongs to a group.

    Args:
        group: the name of a group. A glob of the group with a `/` matches the passes inside one step; one without
            matches the pass of that name anywhere. Case does not count, since some libraries write `FusionConvBN`.
            `unsafe` holds whole names, as the catalogue has them.
        pass_name: `fuse_qkv` or `onnxsim/fuse_qkv`.

    Returns:
        True for a pass of the group; False where there is no such group.
    """
    if pass_name in quarantined_passes(group):
        return True
    name = pass_name.lower()
    bare = name.rpartition("/")[2]
    return any(fnmatchcase(name if "/" in glob else bare, glob) for glob in GROUPS.get(group, ()))


def groups_of(pass_name: str) -> tuple[str, ...]:
    """Every group that a pass belongs to.

    Args:
        pass_name: `fuse_qkv` or `onnxsim/fuse_qkv`.

    Returns:
        The names of the groups.
    """
    return tuple(group for group in ALL_GROUPS if in_group(group, pass_name))


GROUPS: Final[Mapping[str, tuple[str, ...]]] = read_groups(Path(__file__).with_name("groups.txt"))
"""Group → globs over names of passes, in lower case. A pass may be in several groups, or in none."""

ALL_GROUPS: Final = (*GROUPS, QUARANTINE)


def merging(kinds: Collection[str]) -> frozenset[str]:
    """The passes that destroy structures of some kinds wherever they find them.

    Args:
        kinds: kinds of structures, such as `qkv`.

    Returns:
        Names of passes, without the name of their library.
    """
    return frozenset(name for name, broken in DESTROYS.items() if not set(broken).isdisjoint(kinds)) - OF_EQUALS


OF_EQUALS: Final = frozenset(name for table in known_tables() for name in table.destroys_equals)
"""Passes that destroy a structure only where it has two equal parts, and are useful everywhere else."""

_KNOWN: Final = {name: kinds for table in known_tables() for name, kinds in table.destroys.items()}

DESTROYS: Final[Mapping[str, tuple[str, ...]]] = {
    name: _KNOWN[name] for name in sorted(_KNOWN, key=lambda name: name in OF_EQUALS)
}
"""Pass → kinds, as the table of each library knows them. Skipping one of them watches the structure, whatever
destroys it under another name; and these are suspected first, in this order, when a composite step has broken one."""


def check_lists(**arguments: object) -> None:
    """Refuse a single value where a list is expected: the letters of a text would count as its entries. What is kept
    or skipped has to be a name.

    Raises:
        PolicyError: naming the argument, and the value as a list.
    """
    for name, value in arguments.items():
        if value is None or not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
            shown = json.dumps(value) if isinstance(value, str) else repr(value)
            instead = "[]" if value is None else f"[{shown}]"
            raise PolicyError(f"{name} is {shown}, expected a list: {name}={instead}")
        if name in ("keep", "skip") and isinstance(value, Collection):
            odd = [entry for entry in value if not isinstance(entry, str)]
            if odd:
                raise PolicyError(f"{name} holds {describe_argument(odd[0])}, expected names")


@dataclass(frozen=True, slots=True)
class Skip:
    """Why a pass does not run."""

    reason: str


@dataclass(frozen=True, slots=True)
class Policy:
    """The user's wishes, as written.

    `skip` holds pass names, groups and globs; `keep` kinds of structures, or selectors such as `op:Softmax`; a
    trailing `?` says that the structure may be absent. With `watch`, the skip of a pass that destroys a structure also
    watches that structure. A kept structure is pinned and proven; a watched structure is proven; in both cases a step
    that breaks the structure is reverted. Where `contrib` is `refuse`, a step that brings in operators that ONNX does
    not have is reverted too.
    """

    skip: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    watch: bool = True
    contrib: Literal["keep", "refuse"] = "keep"

    def skips(self, name: str) -> Skip | None:
        """Whether a pass is to be skipped.

        Args:
            name: the pass; an inner pass is called `onnxsim/fuse_qkv`. An entry of `skip` without a library means the
                pass of that name anywhere.

        Returns:
            The reason, which names the entry; None for a pass that runs.
        """
        bare = name.rpartition("/")[2]
        for entry in self.skip:
            if in_group(entry, name) or fnmatch.fnmatchcase(name, entry) or fnmatch.fnmatchcase(bare, entry):
                return Skip(f"skip: {entry}" if entry in (name, bare) else f"skip: {entry} names {name}")
        return None

    def kept_kinds(self) -> dict[str, bool]:
        """Kinds to keep → whether at least one instance is required."""
        return {entry.removesuffix("?"): not entry.endswith("?") for entry in self.keep}

    def watched_kinds(self, names: Sequence[str]) -> tuple[str, ...]:
        """Kinds that are watched because a pass that destroys them is skipped.

        Args:
            names: all passes that the policy's skips may mean.

        Returns:
            Kinds of structures, each once.
        """
        if not self.watch:
            return ()
        skipped = [name for name in names if self.skips(name)]
        return tuple(dict.fromkeys(kind for name in skipped for kind in DESTROYS.get(name.rpartition("/")[2], ())))

    def check(self, names: Sequence[str], used: Sequence[str]) -> None:
        """Refuse what cannot be honoured.

        Args:
            names: all pass names that this installation has.
            used: names of the passes that run, such as each step of a recipe; `unsafe` has to know them.

        Raises:
            PolicyError: an unknown pass or structure, with the nearest name; or `unsafe` without an audit of the
                installed releases.
        """
        for entry in self.skip:
            if is_quarantine(entry):
                check_quarantine(entry, used)
                continue
            if entry in GROUPS or any(Policy((entry,)).skips(name) for name in names):
                continue
            known = (*ALL_GROUPS, *names, *(name.rpartition("/")[2] for name in names))
            raise PolicyError(
                f"skip: no pass named {entry!r}{nearest(entry, known)} "
                "(`onnxline passes` lists what this installation has)"
            )
        for kind in self.kept_kinds():
            if structure_of(kind) is None:
                raise PolicyError(f"keep: {unknown_structure(kind)}")


def unknown_structure(kind: str) -> str:
    """What is wrong with an entry of `keep` that means nothing."""
    prefix, colon, _ = kind.partition(":")
    if not colon:
        known = f"{', '.join(STRUCTURES)}; or {', '.join(f'{selector}:GLOB' for selector in SELECTORS)}"
        return f"no structure named {kind!r}{nearest(kind, STRUCTURES)}; known: {known}"
    if prefix in SELECTORS:
        return f"{kind!r} names nothing; write {EXAMPLES[prefix]!r}, say"
    return f"nothing can be chosen by {prefix!r}{nearest(prefix, SELECTORS)}; known: {', '.join(EXAMPLES.values())}"


EXAMPLES: Final = {"op": "op:Softmax", "node": "node:*attn*", "module": "module:encoder.layer.3.*"}
