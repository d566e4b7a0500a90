"""Do tests catch a mutation? The tests that reach its place are run, the nearest first, up to the first that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from benchmarks.mutations.draw import Mutation
from benchmarks.mutations.record import Recording

MOST_SECONDS: Final = 60.0
"""Of the processor, as recorded, for one mutation and each of the two lists of tests; dearer tests are not run."""


def plan_tests(recording: Recording, number: int, mutation: Mutation) -> list[tuple[str, float]]:
    """The tests that judge mutation `number`, with their costs.

    First those that reach its place, file by file, the nearest first, then the cheapest. After them the others of
    these files: a fixture or a cache may have reached it for all of them.
    """
    reached = recording.reached.get(number, frozenset())
    files: dict[str, list[str]] = {}
    for name in recording.costs:
        files.setdefault(name.partition("::")[0], []).append(name)
    files = {file: names for file, names in files.items() if not reached.isdisjoint(names)}
    cost = {file: sum(recording.costs[name] for name in names) for file, names in files.items()}
    near = places_near(mutation.file)
    order = sorted(files, key=lambda file: (*(not f"{file}::".startswith(place) for place in near), cost[file]))
    names = [name for file in order for name in files[file]]
    planned, left = [], MOST_SECONDS
    for name in sorted(names, key=lambda name: name not in reached):
        left -= recording.costs[name]
        if left >= 0 or not planned:
            planned.append((name, recording.costs[name]))
    return planned


def places_near(file: str) -> tuple[str, ...]:
    """What the names of the tests of a module begin with: its file of tests, then the folder that mirrors its own."""
    path = PurePosixPath(file)
    folder = f"tests/{path.parent}/" if path.parts[0] != "onnxline" else "tests/package/"
    return f"{folder}test_{path.stem}.py::", folder


def tests_of_rooms(files: Iterable[str], tests: Collection[str]) -> frozenset[str]:
    """Those of `tests` that mirror the folders of the modules `files`, or the nearest folders above that have tests."""
    chosen: set[str] = set()
    for folder in {PurePosixPath(places_near(file)[1]) for file in files}:
        rooms = ({test for test in tests if test.startswith(f"{room}/")} for room in (folder, *folder.parents))
        chosen |= next(filter(None, rooms), set())
    return frozenset(chosen)


def judge(tree: Path, plan: Mapping[int, list[tuple[str, float]]], results: Path, early: frozenset[int]) -> None:
    """Append to `results` the number of each mutation of `plan` that is not there yet, and what the test that catches
    it says.

    One process of pytest collects the tests and forks for each mutation. Mutations in code that works while modules are
    imported have a process of their own.

    Args:
        tree: in which the mutations sleep; see `record.plant`.
        early: the numbers of those mutations.
    """
    left = {number: tests for number, tests in plan.items() if number not in read_results(results)}
    for number in sorted(early & left.keys()):
        (nearest, _), *_ = left[number]
        if not _run(tree, {number: left.pop(number)}, results, number):
            with results.open("a", encoding="utf-8") as file:
                file.write(f"{number}\t{nearest}\tis not collected\n")
    if left and not _run(tree, left, results):
        raise SystemExit(f"pytest did not judge all; see {results.with_name('judged.log')}, and call again")


def read_results(results: Path) -> dict[int, str]:
    """The number of each mutation that is judged, and the test that catches it, a tab, and what it says; or nothing."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
    return {int(line.partition("\t")[0]): line.partition("\t")[2] for line in lines}


def _run(tree: Path, plan: Mapping[int, list[tuple[str, float]]], results: Path, awake: int = -1) -> bool:
    """Whether pytest comes to the end of the plan."""
    file = results.with_name("plan.txt")
    file.write_text("".join(f"{json.dumps(line)}\n" for line in plan.items()), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "MUTATION_RESULTS": str(results)}
    environment |= {"MUTATION_PLAN": str(file), "MUTATION_AWAKE": str(awake)}
    files = sorted({name.partition("::")[0] for tests in plan.values() for name, _ in tests})
    command = [sys.executable, "-m", "pytest", "-p", "mutation_hits", "-n", "0", "--all", *files]
    with results.with_name("judged.log").open("a", encoding="utf-8") as log:
        subprocess.run(command, cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    return plan.keys() <= read_results(results).keys()
