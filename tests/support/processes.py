"""Whether processes that nobody waits for have ended."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def still_running(processes: Iterable[int], within_s: float = 5.0) -> list[int]:
    """Those that do not end in this time."""
    left = list(processes)
    until = time.monotonic() + within_s
    while (left := [process for process in left if _runs(process)]) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # nobody may be there to bury it
