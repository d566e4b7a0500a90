"""What is known of passes by their names: their groups, for `skip:`, and the structures that they destroy.

A group is a set of globs, so it holds for releases yet to come. One is not: `unsafe` holds the names that an audit of
the installed releases has found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from passes.advisories.known import QUARANTINE, quarantined_passes
from passes.external.installed import read_groups
from passes.recipe.steps import STEP_TYPES


def in_group(group: str, pass_name: str) -> bool:
    """Whether the pass called `pass_name` (`fuse_qkv` or `onnxsim/fuse_qkv`) belongs to `group`; False where there
    is no such group.

    A glob with a `/` matches the passes inside one step; one without matches the pass of that name anywhere. Case does
    not count, since some libraries write `FusionConvBN`. `unsafe` holds whole names, as the catalogue has them.
    """
    if pass_name in quarantined_passes(group):
        return True
    name = pass_name.lower()
    bare = name.rpartition("/")[2]
    return any(fnmatchcase(name if "/" in glob else bare, glob) for glob in GROUPS.get(group, ()))


def groups_of(pass_name: str) -> tuple[str, ...]:
    """Every group that `pass_name` belongs to."""
    return tuple(group for group in ALL_GROUPS if in_group(group, pass_name))


GROUPS: Final[Mapping[str, tuple[str, ...]]] = read_groups(Path(__file__).with_name("groups.txt"))
"""Group → globs over names of passes, in lower case. A pass may be in several groups, or in none."""

ALL_GROUPS: Final = (*GROUPS, QUARANTINE)


def merging(kinds: Collection[str]) -> frozenset[str]:
    """The passes that destroy structures of `kinds` wherever they find them."""
    return frozenset(name for name, broken in DESTROYS.items() if not set(broken).isdisjoint(kinds)) - OF_EQUALS


OF_EQUALS: Final = frozenset(name for step_type in STEP_TYPES for name in step_type.destroys_equals)
"""Passes that destroy a structure only where it has two equal parts, and are useful everywhere else."""

_KNOWN: Final = {name: kinds for step_type in STEP_TYPES for name, kinds in step_type.destroys.items()}

DESTROYS: Final[Mapping[str, tuple[str, ...]]] = {
    name: _KNOWN[name] for name in sorted(_KNOWN, key=lambda name: name in OF_EQUALS)
}
"""Pass → kinds, as the adapter of each library knows them. Skipping one of them watches the structure, whatever
destroys it under another name; and these are suspected first, in this order, when a composite step has broken one."""
