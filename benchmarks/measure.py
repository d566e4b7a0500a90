"""What the benchmarks share: run a command as a child, and take its time or the memory of its whole process tree.

Memory is PSS (RSS where the kernel does not tell PSS), sampled, so a peak shorter than the interval may be missed. To
sample it takes a core from who is measured, and holds up its page faults: where several processes work at once, take
their time in another run.
Linux only: it reads /proc.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.workspace import versions

INTERVAL_S = 0.05
LAST_LINES = 20


@dataclass(frozen=True, slots=True)
class Child:
    """One run: wall time of the process, peak memory of its tree (0 where it was not sampled), its standard output."""

    seconds: float
    peak_bytes: int
    said: str
    samples: tuple[tuple[float, int], ...] = ()
    """Seconds since the epoch, and the memory of the tree then."""
    processor_seconds: float = 0.0
    """User and system time of the process, with its children that have ended; a load by others hardly changes it."""


def run_child(
    arguments: Sequence[str],
    limit_s: float | None = None,
    *,
    memory: bool = True,
    interval_s: float = INTERVAL_S,
    python: str = sys.executable,
) -> Child:
    """Run Python with `arguments`; sample its memory every `interval_s`, or leave it alone.

    Args:
        python: the interpreter; that of another environment imports nothing of this checkout.

    Raises:
        SystemExit: the child failed; with its last words.
    """
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        begun, used = time.perf_counter(), _processor_seconds()
        environment = _environment() if python == sys.executable else {**os.environ, "PYTHONPATH": ""}
        child = subprocess.Popen([python, *arguments], stdout=said, stderr=errors, env=environment)
        samples: list[tuple[float, int]] = []
        try:
            while child.poll() is None:
                if memory:
                    samples.append((time.time(), _tree_bytes(child.pid)))
                if limit_s is not None and time.perf_counter() - begun > limit_s:
                    raise SystemExit(f"{' '.join(arguments)} ran past {limit_s:g} s")
                time.sleep(interval_s)
            seconds = time.perf_counter() - begun
        finally:
            child.kill()
            child.wait()
        said.seek(0)
        errors.seek(0)
        text, progress = said.read(), errors.read()
    if child.returncode != 0:
        last = "\n".join((text + progress).splitlines()[-LAST_LINES:])
        raise SystemExit(f"{' '.join(arguments)} ended with exit code {child.returncode}:\n{last}")
    peak = max((size for _, size in samples), default=0)
    return Child(seconds, peak, text, tuple(samples), _processor_seconds() - used)


def _processor_seconds() -> float:
    """User and system time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _environment() -> dict[str, str]:
    """The children import the same checkout as we do."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _tree_bytes(root: int) -> int:
    """Memory of `root` and everything below it. PSS counts a page that n processes share as 1/n in each."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children[_parent(entry)].append(int(entry.name))
    total, front = 0, [root]
    while front:
        pid = front.pop()
        total += _process_bytes(pid)
        front.extend(children[pid])
    return total


def _parent(process: Path) -> int:
    try:
        # The command's name is in parentheses and may hold anything; the parent is the second word after it.
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):  # it has ended
        return -1


def _process_bytes(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return next(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
    except (OSError, StopIteration):
        pass
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"


def kind_of_memory() -> str:
    return "PSS" if Path("/proc/self/smaps_rollup").exists() else "RSS"


def machine() -> str:
    info = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model or platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB"


def versions_line() -> str:
    return ", ".join(f"{name} {version}" for name, version in versions().items())


def show(text: str, file: Path | None) -> None:
    """Print `text`, and write it to `file` too where one is named."""
    print(text)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
