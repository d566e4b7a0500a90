"""Functions for the worker that misbehave, as native passes do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import numpy as np


def die() -> None:
    os.abort()


def leave() -> None:
    os._exit(7)


def loop() -> None:
    time.sleep(60)


def fork_and_loop(file: str) -> None:
    """Loop in a fork too, whose id is written to `file`."""
    child = os.fork()
    if child:
        Path(file).write_text(str(child))
    time.sleep(60)


def complain(words: str) -> None:
    raise ValueError(words)


def double(number: int) -> int:
    return 2 * number


def cores() -> tuple[set[int], str]:
    return os.sched_getaffinity(0), os.environ["OMP_NUM_THREADS"]


def shout() -> str:
    print("a native library writes to standard output")
    return "done"


def allocate(bytes_wanted: int) -> int:
    return len(bytearray(bytes_wanted))


def map_file(path: str) -> int:
    return np.memmap(path, np.uint8, "r").size


def count(to: int, size: int = 0, silent: bool = False) -> Generator[tuple[int, bytes] | None, None, str]:
    """Yield numbers below `to`, each with `size` bytes; between them, if `silent`, nothing."""
    for number in range(to):
        yield None if silent else (number, bytes(size))
        time.sleep(0.001)
    return "counted"


def count_and_die(to: int) -> Iterator[int]:
    yield from range(to)
    os.abort()


def count_and_complain(to: int) -> Iterator[int]:
    yield from range(to)
    raise ValueError("no more numbers")


def count_and_loop(to: int) -> Iterator[int]:
    yield from range(to)
    time.sleep(60)


def length(data: bytes) -> int:
    return len(data)


def say_and_die(words: str) -> None:
    os.write(2, words.encode())
    os.abort()


def say(words: str) -> None:
    os.write(2, words.encode())


def say_in_turn(words: Sequence[str]) -> Iterator[str]:
    """A generator that writes to standard error before each item, and dies after the last one."""
    for one in words:
        os.write(2, one.encode())
        yield one
    os.write(2, b"the last one")
    os.abort()


def be_killed(counter: str, times: int) -> int:
    """Be killed from outside as long as `counter` has fewer than `times` lines; then how many there are."""
    with Path(counter).open("a+") as file:
        file.seek(0)
        lines = len(file.readlines())
        if lines < times:
            file.write("killed\n")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    return lines


class Unreadable:
    """What can be sent, and not received."""

    def __reduce__(self) -> tuple[object, ...]:
        return _divide, ()


def _divide() -> None:
    raise ZeroDivisionError("one by nothing")


CALLS: list[int] = []


def count_calls() -> int:
    CALLS.append(1)
    return len(CALLS)


def leave_processes() -> list[int]:
    """Start a process, and another one in a session of its own whose parent has ended; both go on."""
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        orphan = os.fork()
        if orphan == 0:
            time.sleep(600)
        os.write(here, str(orphan).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return [int(os.read(there, 32)), subprocess.Popen(["sleep", "600"]).pid]


def write_to_every_descriptor(garbage: bytes) -> None:
    for descriptor in range(3, 256):
        with contextlib.suppress(OSError):
            os.write(descriptor, garbage)


def fork_and_double(number: int) -> int:
    os.fork()
    return 2 * number


def open_descriptors() -> list[str]:
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(descriptor.readlink()))
    return found
