"""Run tests once, in a copy of the tree that says which of them reach the places of the mutations."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from benchmarks.mutations.draw import Mutation, edit

NOT_PLANTED: Final = ("passes/worker/own_names.py",)
"""It finds modules: a place in it would look for the module that it asks."""
LEFT_OUT: Final = (".venv", ".git", "runs", "__pycache__", "*_cache", ".hypothesis", "*.egg-info")


@dataclass(frozen=True, slots=True)
class Recording:
    """What a recording of the tests says.

    costs: test → its seconds of the processor, in the order of the run.
    reached: number of a mutation → the tests that reach its place.
    early: the numbers of the mutations that are reached while modules are imported.
    """

    costs: dict[str, float]
    reached: dict[int, frozenset[str]]
    early: frozenset[int]


def copy_tree(root: Path, folder: Path) -> Path:
    """A copy of the checkout that has the checkout's environment."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root, folder, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    (folder / ".venv").symlink_to((root / ".venv").resolve())
    return folder


def collect_tests(tree: Path, *options: str) -> frozenset[str]:
    """The names of the tests that pytest runs with `options`."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=--import-mode=importlib"]
    done = subprocess.run([*command, *options], cwd=tree, capture_output=True, text=True, check=False)
    return frozenset(line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line)


def plant(tree: Path, mutations: list[Mutation]) -> None:
    """Put `mutations` into the files of `tree`, each of which sleeps until `mutation_hits.py` wakes it."""
    for file, group in groupby(enumerate(mutations), lambda pair: pair[1].file):
        if file not in NOT_PLANTED:
            edits = [
                (mutation, f'(({mutation.instead}) if __import__("mutation_hits").hit({number}) else (', "))")
                for number, mutation in group
            ]
            (tree / file).write_text(edit((tree / file).read_text(encoding="utf-8"), edits), encoding="utf-8")
    shutil.copy(Path(__file__).with_name("mutation_hits.py"), tree)


def record(tree: Path, folder: Path, tests: Collection[str], words: Sequence[str] = ()) -> None:
    """Write what `read_recording` reads of `tests` into `folder`; `words` are options of pytest."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hits.txt").unlink(missing_ok=True)
    (folder / "chosen.json").write_text(json.dumps(sorted(tests)), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "MUTATION_FOLDER": str(folder)}
    files = sorted({test.partition("::")[0] for test in tests})
    command = [sys.executable, "-m", "pytest", "-p", "mutation_hits", *words, *files]
    with (folder / "record.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)


def read_recording(folder: Path) -> Recording:
    """Without the tests that fail in the copy, which has no mutation yet."""
    tests = json.loads((folder / "tests.json").read_text(encoding="utf-8"))
    costs: dict[str, float] = {}
    for path in folder.glob("costs_*.txt"):
        for line in path.read_text(encoding="utf-8").splitlines():
            number, seconds, failed = line.split()
            if failed == "0":
                costs[tests[int(number)]] = float(seconds)
    reached: dict[int, set[str]] = {}
    early: set[int] = set()
    for words in re.findall(rb"^(\d+) (-?\d+)$", (folder / "hits.txt").read_bytes(), re.MULTILINE):
        mutation, number = map(int, words)  # other lines are of tests whose passes write to every file that is open
        if number < 0:  # no test runs, but a file of tests is imported
            early.add(mutation)
        elif tests[number] in costs:
            reached.setdefault(mutation, set()).add(tests[number])
    return Recording(costs, {key: frozenset(names) for key, names in reached.items()}, frozenset(early))
