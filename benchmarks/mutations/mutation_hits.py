"""A plugin of pytest for a tree in which the mutations sleep, and `hit`, which their places ask.

While it records, it says which test reaches which mutation's place, and what each test costs. The process of pytest
writes the number of its test into a file that the processes which its tests start map, too: a worker that serves many
tests knows for which of them it works. A place writes a line for each test that reaches it.

While it judges, it forks for each mutation after the tests are collected, and runs tests up to the first that fails.
The mutation is awake in the fork and, by a variable of the environment, in all processes that the fork starts.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import shutil
import signal
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

FOLDER, NUMBER_FILE = "MUTATION_FOLDER", "MUTATION_NUMBER_FILE"
"""Variables of the environment: where the lines go, and the file with the number of the test."""
AWAKE, PLAN, RESULTS = "MUTATION_AWAKE", "MUTATION_PLAN", "MUTATION_RESULTS"
"""The number of the mutation that is awake; the file that says which tests judge which, and that of answers."""
SLOW = ("families", "tutorials", "ray", "browser", "slow")
"""Marks of tests that are recorded last: a part of a recording serves, too."""


def hits_of(folder: Path, numbers: Path) -> Callable[[int], bool]:
    """What writes a line for each test that reaches a place in this process, and leaves all mutations asleep."""
    with numbers.open("rb") as file:
        number = mmap.mmap(file.fileno(), 4, prot=mmap.PROT_READ)
    hits = os.open(folder / "hits.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    last: dict[int, bytes] = {}

    def hit(mutation: int) -> bool:
        test = number[:4]
        if last.get(mutation) != test:
            last[mutation] = test
            os.write(hits, b"%d %d\n" % (mutation, struct.unpack("<i", test)[0]))
        return False

    return hit


def wake(number: int) -> Callable[[int], bool]:
    """What says of a mutation whether it is number `number`."""
    return lambda mutation: mutation == number


if FOLDER in os.environ and NUMBER_FILE not in os.environ:  # no test runs yet, but conftest.py is imported
    os.environ[NUMBER_FILE] = str(Path(os.environ[FOLDER], "number_main"))
    Path(os.environ[NUMBER_FILE]).write_bytes(struct.pack("<i", -1))
hit = (
    hits_of(Path(os.environ[FOLDER]), Path(os.environ[NUMBER_FILE]))
    if NUMBER_FILE in os.environ
    else wake(int(os.environ.get(AWAKE, -1)))
)


class Recorder:
    """Numbers the tests of one process of pytest, and writes what each has cost and whether it has failed."""

    def __init__(self, folder: Path) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        numbers = folder / f"number_{worker}"
        numbers.write_bytes(struct.pack("<i", -1))
        os.environ[NUMBER_FILE] = str(numbers)
        with numbers.open("r+b") as file:
            self._number = mmap.mmap(file.fileno(), 4)
        global hit
        hit = hits_of(folder, numbers)  # no place has taken the earlier one: each asks this module
        self._folder, self._chosen = folder, frozenset(json.loads((folder / "chosen.json").read_text(encoding="utf-8")))
        self._costs = (folder / f"costs_{worker}.txt").open("w", encoding="utf-8")
        self._tests: dict[str, int] = {}
        self._failed = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._chosen]
        items[:] = sorted(chosen, key=lambda item: any(mark.name in SLOW for mark in item.iter_markers()))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._tests = {item.nodeid: number for number, item in enumerate(session.items)}
        (self._folder / "tests.json").write_text(json.dumps(list(self._tests)), encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        number = self._tests[item.nodeid]
        self._number[:4], self._failed = struct.pack("<i", number), False
        before = seconds_of(os.getpid())
        yield
        self._costs.write(f"{number} {seconds_of(os.getpid()) - before:.2f} {int(self._failed)}\n")
        self._costs.flush()


class Judge:
    """Runs no test of its own process, but for each line of the plan those that judge a mutation, in a fork."""

    def __init__(self, plan: Path, results: Path) -> None:
        self._plan, self._results, self._failed = plan, results, ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._failed:
            text = str(report.longrepr).splitlines() or [""]
            self._failed = f"{report.nodeid}\t{next((line for line in text if line.startswith('E ')), text[-1])[:100]}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        gc.collect()
        gc.freeze()
        for line in self._plan.read_text(encoding="utf-8").splitlines():
            number, tests = json.loads(line)
            said = self._judge(number, [(items[name], seconds) for name, seconds in tests if name in items])
            with self._results.open("a", encoding="utf-8") as file:
                file.write(f"{number}\t{said}\n")
        return True

    def _judge(self, number: int, tests: list[tuple[pytest.Item, float]]) -> str:
        """The test that fails, or dies, or does not end, and what it says; nothing if all pass."""
        folder, words = Path(tempfile.mkdtemp(prefix="mutation_")), self._plan.with_name("words.txt")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads that a fork does not have
            process = os.fork()
        if process == 0:
            self._run(number, tests, words, folder)
        _, status = os.waitpid(process, 0)
        with suppress(ProcessLookupError):  # no test has left a process
            os.killpg(process, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        said = words.read_text(encoding="utf-8")
        return said if status == 0 else f"{said}\t{'does not end' if status == signal.SIGALRM else 'dies'}"

    def _run(self, number: int, tests: list[tuple[pytest.Item, float]], words: Path, folder: Path) -> None:
        """In the fork."""
        os.setsid()
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
        os.environ[AWAKE] = str(number)
        global hit
        hit = wake(number)
        try:
            for place, (item, seconds) in enumerate(tests):
                words.write_text(item.nodeid, encoding="utf-8")
                signal.alarm(60 + 10 * int(seconds))
                following = tests[place + 1][0] if place + 1 < len(tests) else None
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self._failed:
                    break
            words.write_text(self._failed, encoding="utf-8")
        finally:
            os._exit(int(sys.exc_info()[0] is not None))


def pytest_configure(config: Any) -> None:
    runs_tests = "PYTEST_XDIST_WORKER" in os.environ or not getattr(config.option, "numprocesses", None)
    if PLAN in os.environ:
        config.pluginmanager.register(Judge(Path(os.environ[PLAN]), Path(os.environ[RESULTS])))
    elif FOLDER in os.environ and runs_tests:
        config.pluginmanager.register(Recorder(Path(os.environ[FOLDER])))


def seconds_of(process: int) -> float:
    """Of the processor, by a process, by those that it has waited for, and by what it has started and still runs."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            children.setdefault(int(fields[1]), []).append(int(path.name))
            ticks[int(path.name)] = sum(map(int, fields[11:15]))
    total, left = 0, [process]
    while left:
        found = left.pop()
        total += ticks.get(found, 0)
        left += children.get(found, [])
    return total / os.sysconf("SC_CLK_TCK")
