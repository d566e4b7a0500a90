"""Find the faults of an earlier commit in today's tree, and the tests that may catch them again."""

from __future__ import annotations

import ast
import io
import subprocess
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Final

from benchmarks.mutations.draw import PACKAGES, Mutation, every_mutation
from benchmarks.mutations.judge import places_near

TELLING: Final = 25
"""The least length of a line that is known again in a function of another name."""


@dataclass(frozen=True, slots=True)
class Place:
    """The file and the innermost function of a fault, the text of its lines, and what reads as it does before it."""

    file: str
    function: str
    lines: str
    rank: int


def extract_commit(root: Path, commit: str, folder: Path) -> Path:
    """The product as it was at `commit`, in `folder`."""
    command = ["git", "-C", str(root), "archive", commit, *PACKAGES]
    with tarfile.open(fileobj=io.BytesIO(subprocess.run(command, capture_output=True, check=True).stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def find_again(before: Path, after: Path, mutations: Iterable[Mutation]) -> dict[Mutation, Mutation]:
    """Mutation of the tree `before` → the same fault in the same lines of the tree `after`.

    The same function of the same file wins, then the same function, then a file of the same name. A mutation whose
    lines have changed has no entry.
    """
    places = _places_of(before, mutations)
    texts = {(mutation.found, mutation.instead) for mutation in places}
    candidates = [mutation for mutation in every_mutation(after) if (mutation.found, mutation.instead) in texts]
    alike: dict[tuple[str, str, str], dict[Mutation, Place]] = {}
    for mutation, place in _places_of(after, candidates).items():
        alike.setdefault((mutation.found, mutation.instead, place.lines), {})[mutation] = place
    found = {}
    for mutation, place in places.items():
        there = alike.get((mutation.found, mutation.instead, place.lines), {})
        likeness = {again: _likeness(place, other) for again, other in there.items()}
        again = max(likeness, key=lambda name: likeness[name], default=None)
        if again is not None and (place.function == there[again].function or len(place.lines) >= TELLING):
            found[mutation] = again
    return found


def choose_tests(caught: Mapping[Mutation, str], tests: Collection[str]) -> frozenset[str]:
    """The test that caught each mutation before; where it is gone, those of its name, of its file, or of the code's."""
    chosen: set[str] = set()
    for mutation, test in caught.items():
        near = ({known for known in tests if is_near(known)} for is_near in _nearness(test, mutation.file))
        chosen |= next(filter(None, near), set())
    return frozenset(chosen)


def _nearness(test: str, file: str) -> Iterator[Callable[[str], bool]]:
    path, _, name = test.partition("::")
    function = name.partition("[")[0]
    yield lambda known: known == test
    yield lambda known: known.partition("::")[2].partition("[")[0] == function
    yield lambda known: known.startswith(f"{path}::")
    yield lambda known: known.startswith(places_near(file)[0])


def _likeness(place: Place, other: Place) -> tuple[bool, ...]:
    same_name = PurePosixPath(place.file).name == PurePosixPath(other.file).name
    return place.function == other.function, place.file == other.file, same_name, place.rank == other.rank


def _places_of(root: Path, mutations: Iterable[Mutation]) -> dict[Mutation, Place]:
    places = {}
    for file, group in groupby(mutations, lambda mutation: mutation.file):
        text = (root / file).read_text(encoding="utf-8")
        lines = text.encode().splitlines(keepends=True)
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        for mutation in group:
            around = [node for node in functions if node.lineno - 1 <= mutation.start[0] < (node.end_lineno or 0)]
            function = max(around, key=lambda node: node.lineno).name
            inside = b"".join(lines[mutation.start[0] : mutation.end[0] + 1]).decode()
            rank = lines[mutation.start[0]][: mutation.start[1]].decode().count(mutation.found)
            places[mutation] = Place(file, function, " ".join(inside.split()), rank)
    return places
