"""Which test comes by which mutation's place, and what each test costs: a plugin of pytest, and `hit` for the places.

The process of pytest writes the number of its test into a file that the processes which its tests start map, too: a
worker that serves many tests knows for which of them it works. A place writes a line for each test that comes by.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER, NUMBER_FILE = "MUTATION_FOLDER", "MUTATION_NUMBER_FILE"
"""Variables of the environment: where the lines go, and the file with the number of the test."""


class Hits:
    """The places that this process has come by, each with the last test that did."""

    def __init__(self) -> None:
        with Path(os.environ[NUMBER_FILE]).open("rb") as file:
            self._number = mmap.mmap(file.fileno(), 4, prot=mmap.PROT_READ)
        self._file = os.open(Path(os.environ[FOLDER]) / "hits.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._last: dict[int, bytes] = {}

    def hit(self, mutation: int) -> None:
        test = self._number[:4]
        if self._last.get(mutation) != test:
            self._last[mutation] = test
            os.write(self._file, b"%d %d\n" % (mutation, struct.unpack("<i", test)[0]))


hit = Hits().hit if NUMBER_FILE in os.environ else lambda mutation: None


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
        hit = Hits().hit  # no place has taken the earlier one: each asks this module
        self._folder, self._chosen = folder, frozenset(json.loads((folder / "chosen.json").read_text(encoding="utf-8")))
        self._costs = (folder / f"costs_{worker}.txt").open("w", encoding="utf-8")
        self._tests: dict[str, int] = {}
        self._failed = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._chosen]

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


def pytest_configure(config: Any) -> None:
    runs_tests = "PYTEST_XDIST_WORKER" in os.environ or not getattr(config.option, "numprocesses", None)
    if FOLDER in os.environ and runs_tests:
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
