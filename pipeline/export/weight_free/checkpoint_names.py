"""Maps the names of a module's tensors to those of a checkpoint.

A checkpoint may store a tied tensor under another of its names, may add a prefix to all names or drop one, and may
hold in pieces a tensor that the module has as one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pipeline.errors import SourceError

if TYPE_CHECKING:
    from torch import nn

DEEPEST: Final = 3
"""Most components of a prefix."""

Names = Mapping[str, Sequence[str]]
"""The name of an initializer → all names of that tensor in the module, itself first."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A change of prefix from the module's names to the checkpoint's: without `drop`, then with `add` in front."""

    drop: str = ""
    add: str = ""

    def __call__(self, name: str) -> str:
        return self.add + name.removeprefix(self.drop)

    def __str__(self) -> str:
        parts = [f"without {self.drop!r}"] * bool(self.drop) + [f"with {self.add!r} before"] * bool(self.add)
        return " and ".join(parts)

    def key(self, names: Sequence[str], stored: Collection[str]) -> str | None:
        """The checkpoint's name of a tensor: the first of `names` that is stored, after this change of prefix."""
        return next((self(name) for name in names if self(name) in stored), None)


def best_rule(wanted: Names, stored: Collection[str]) -> Rule:
    """The rule under which the fewest names are missing; no change of prefix wins a tie."""
    drops, adds = list(_prefixes(wanted)), list(_prefixes(stored))
    rules = [Rule(), *(Rule(drop=prefix) for prefix in drops), *(Rule(add=prefix) for prefix in adds)]
    rules += [Rule(drop, add) for drop in drops for add in adds]
    return min(rules, key=lambda rule: sum(rule.key(names, stored) is None for names in wanted.values()))


def _prefixes(names: Iterable[str]) -> Iterator[str]:
    """Prefixes of more than half of `names`, in whole components; the shortest first."""
    every = [name.split(".") for name in names]
    for depth in range(1, DEEPEST + 1):
        counts = Counter(".".join(parts[:depth]) + "." for parts in every if len(parts) > depth)
        yield from (prefix for prefix, count in counts.items() if 2 * count > len(every))


def names_of(module: nn.Module) -> Names:
    """All names of each parameter and of each persistent buffer."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in [*module.named_parameters(remove_duplicate=False), *_persistent_buffers(module)]:
        by_tensor.setdefault(id(tensor), []).append(name)
    return {
        name: (name, *(other for other in names if other != name)) for names in by_tensor.values() for name in names
    }


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, object]]:
    for path, inner in module.named_modules(remove_duplicate=False):
        for name, buffer in inner.named_buffers(recurse=False):
            if name not in inner._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name), buffer


def pieces_of(name: str, count: int, pieces: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The names of the pieces of a tensor, a list for each of the `count` places along its first axis, in which the
    pieces follow each other along the second; empty if the tensor is whole.

    Args:
        pieces: pattern → patterns; `*` is any text, the same on both sides, and `#` counts along the
            first axis. `{"*.experts.up": ["*.experts.#.up.weight"]}`.
    """
    for pattern, parts in pieces.items():
        match = re.fullmatch(re.escape(pattern).replace(r"\*", r"(.+?)"), name)
        if match is not None:
            return [[_fill_pattern(part, match.groups(), place) for part in parts] for place in range(count)]
    return []


def _fill_pattern(pattern: str, stars: Sequence[str], place: int) -> str:
    if pattern.count("*") != len(stars):
        raise SourceError(f"export.pieces: {pattern!r} has {pattern.count('*')} stars, expected {len(stars)}")
    filled = iter(stars)
    return re.sub(r"[*#]", lambda sign: str(place) if sign[0] == "#" else next(filled), pattern)
