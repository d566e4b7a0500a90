"""Jobs that end in each way that there is. Those that are to go wrong only at first leave a mark in a file."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from pipeline.errors import UsageError


def double(number: int) -> int:
    return 2 * number


def count_calls(folder: str, name: str, seconds: float = 0.0) -> str:
    """Leave a mark of each call in `folder`, last of all: a call that was cut short leaves none."""
    time.sleep(seconds)
    with Path(folder, name).open("a") as file:
        file.write("x")
    return name


def process(seconds: float = 0.0) -> int:
    time.sleep(seconds)
    return os.getpid()


def cores(seconds: float = 0.0) -> list[int]:
    time.sleep(seconds)
    return sorted(os.sched_getaffinity(0))


def die_at_first(file: str, times: int = 1) -> str:
    """As the kernel ends a process that has too much memory: without a word."""
    deaths = len(Path(file).read_text()) if Path(file).exists() else 0
    if deaths < times:
        Path(file).write_text("x" * (deaths + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def abort() -> None:
    os.abort()


def mistake() -> None:
    raise UsageError("this is wrong; do that")


def bug() -> None:
    raise ZeroDivisionError("one by nothing")


def unspeakable() -> object:
    return object()


def name_the_node(folder: str, name: str, seconds: float) -> str:
    """On Ray: leave the node's id in `folder` at the beginning, and return it after some time."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    Path(folder, f"{name}.{os.getpid()}").write_text(node)
    time.sleep(seconds)
    return node
