"""What operating systems have in different forms: locks, limits of memory, cores, and a worker's ties to its owner.

Linux has all of these forms, and is tested. Other systems leave out what they lack, and `missing_here` lists it in a
line.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any, Final, TypeGuard

from passes.errors import UsageError
from passes.suggest import describe_argument

try:
    import fcntl
    import resource
except ImportError:  # Windows
    fcntl = resource = None

UNKNOWN_MEMORY: Final = 8 * 2**30
"""Bytes that a machine is taken to have where it does not say."""

KILLED: Final = (-9, -15)
"""What `poll` gives for SIGKILL and SIGTERM, which come from outside. Windows has no such codes."""

CAN_FORK: Final = sys.platform == "linux"
"""Elsewhere a worker whose calls are to be alone is replaced after each call."""


def missing_here() -> str:
    """One line on what this system lacks; empty for nothing."""
    if sys.platform == "linux":
        return ""
    locks = "" if fcntl else ", locks of files"
    return f"onnxline is not tested on {platform.system()}: workers run there without limits of memory{locks}"


def lock(handle: int | None, *, shared: bool = False, wait: bool = True) -> None:
    """Lock an open file or folder until it is closed; with other holders, wait, or raise BlockingIOError."""
    if fcntl is not None and handle is not None:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


@contextlib.contextmanager
def open_folder(folder: Path) -> Iterator[int | None]:
    """A handle to lock; None where folders have none."""
    if fcntl is None:
        yield None
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def crowding() -> float:
    """How many processes want each core, by the load of the last minute, and 1 at least: what a limit of time is
    multiplied by, so that it means the same on a machine that is busy with something else."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1.0, load / (os.cpu_count() or 1))


def memory_limit(system: Path = Path("/")) -> int:
    """Bytes of the machine's memory, or what this process, or its container, may have where that is less."""
    machine = UNKNOWN_MEMORY
    if hasattr(os, "sysconf"):
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if resource is None:
        return machine
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    own = (limit for limit in limits if limit != resource.RLIM_INFINITY)
    return min(machine, *own, *_group_limits(system), machine)


def _group_limits(system: Path) -> Iterator[int]:
    """Limits of the control groups of this process and of the enclosing groups. Without a limit the file says `max`, or
    in version 1 a number that no machine has."""
    for line in _read_text(system / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        inside = Path(group.lstrip("/"))
        for path in (inside, *inside.parents):  # a container sees its own group as the outermost one
            limit = _read_text(system / "sys/fs/cgroup" / folder / path / name).strip()
            if limit.isdigit():
                yield int(limit)


def _read_text(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


LEAST_GIB: Final = 0.25
"""What a worker has allocated when it has loaded onnx, onnxruntime and an optimizer."""


def check_limits(timeout_s: object, memory_gib: object) -> None:
    """Refuse limits that are not numeric, or that nothing can keep.

    Raises:
        UsageError: naming the limit, what was found, and what was expected.
    """
    if not _is_number(timeout_s) or not timeout_s > 0:
        raise UsageError(f"timeout_s is {describe_argument(timeout_s)}, expected seconds, more than 0")
    if memory_gib is not None:
        if not _is_number(memory_gib) or not memory_gib >= 0:
            raise UsageError(f"memory_gib is {describe_argument(memory_gib)}, expected a number, 0 or more")
        if 0 < memory_gib < LEAST_GIB:
            raise UsageError(
                f"memory_gib is {memory_gib!r}, expected {LEAST_GIB} or more, or 0 for no limit: a worker takes so "
                "much before it has a model"
            )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def limit_memory(limit: int) -> None:
    """Refuse to allocate more than `limit` bytes in this process; 0: no limit. Files that are mapped do not count."""
    if limit and resource is not None and sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def available_cores() -> list[int]:
    """The indices of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def run_on(process: int, cores: Sequence[int]) -> None:
    if cores and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(ProcessLookupError):  # the first call will tell
            os.sched_setaffinity(process, cores)


def start_process(
    command: Sequence[str], handles: Sequence[int], environment: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a process that inherits `handles`. Ctrl-C is for the run, which then ends the process."""
    special: dict[str, Any] = {"pass_fds": handles, "start_new_session": True}
    if sys.platform == "win32":
        for handle in handles:
            os.set_handle_inheritable(handle, True)
        startup = subprocess.STARTUPINFO(lpAttributeList={"handle_list": list(handles)})
        special = {"startupinfo": startup, "creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
    return subprocess.Popen[bytes](command, env=environment, text=False, **streams, **special)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process of `start_process`, with all that it has started where it leads a session."""
    if sys.platform == "win32":
        process.kill()
        return
    left_session = list(_descendants(process.pid))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _kill(left_session)


def _descendants(process: int) -> Iterator[int]:
    """The descendants of `process`; Linux only, empty elsewhere."""
    for file in Path("/proc", str(process), "task").glob("*/children"):
        for child in map(int, _read_text(file).split()):
            yield child
            yield from _descendants(child)


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


SET_CHILD_SUBREAPER: Final = 36
"""PR_SET_CHILD_SUBREAPER of <linux/prctl.h>."""


def adopt_orphans() -> None:
    """From now on a process whose parent ends becomes a child of this one, where it descends from it."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """End all that this process has started, with what that has started, whatever session it is in."""
    while left := list(_descendants(os.getpid())):
        _kill(left)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def was_killed(process: subprocess.Popen[bytes]) -> bool:
    """Whether somebody else has ended the process."""
    return process.poll() in KILLED


def connection_of(handle: int) -> connection.Connection:
    """The pipe that was inherited as `handle`."""
    return getattr(connection, "PipeConnection", connection.Connection)(handle)


def end_with(lifeline: int) -> None:
    """End this process when the other end of `lifeline` closes, as it does however its holder dies.

    A thread that waits for it would not come to run while native code holds the interpreter's lock. And the kernel's
    own signal at a parent's death comes when the thread ends that started us, which may be long before its process.
    """
    if fcntl is None or sys.platform != "linux":
        threading.Thread(target=_end_when_closed, args=(connection_of(lifeline),), daemon=True).start()
        return
    signal.signal(signal.SIGIO, signal.SIG_DFL)  # ends the process
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())  # and what this process has forked
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it closed before we asked for the signal
        sys.exit(1)


def _end_when_closed(lifeline: connection.Connection) -> None:
    with contextlib.suppress(OSError):
        lifeline.poll(None)
    os._exit(1)


def flush_native() -> None:
    """Write out what native code has printed and not yet written."""
    if sys.platform != "win32":
        ctypes.CDLL(None).fflush(None)
