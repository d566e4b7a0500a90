"""What operating systems have in different forms: locks, limits of memory, cores, and a worker's ties to its owner.

Linux has all of these forms, and is tested. Other systems leave out what they lack, and `missing_here` lists it in a
line.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any, Final, NoReturn

from passes.errors import UsageError, check_arguments, is_number

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


def lock(handle: int | None, *, wait: bool = True, shared: bool = False) -> None:
    """Lock an open file or folder until it is closed; with other holders, wait, or raise BlockingIOError.

    Several holders may have a `shared` lock at once.
    """
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
    gib = 0 if memory_gib is None else memory_gib
    check_arguments(
        ("timeout_s", timeout_s, is_number(timeout_s) and timeout_s > 0, "seconds, more than 0"),
        ("memory_gib", memory_gib, is_number(gib) and gib >= 0, "a number, 0 or more"),
    )
    if is_number(memory_gib) and 0 < memory_gib < LEAST_GIB:
        raise UsageError(
            f"memory_gib is {memory_gib!r}, expected {LEAST_GIB} or more, or 0 for no limit: a worker takes so "
            "much before it has a model"
        )


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
    """Let a process run on these cores alone, where the system can do that."""
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


def has_one_thread() -> bool:
    """Whether a fork of this process would be a whole copy: Linux only, and no library has started a thread."""
    try:
        return CAN_FORK and sum(1 for _ in Path("/proc/self/task").iterdir()) == 1
    except OSError:
        return False


def data_bytes() -> int:
    """Bytes of data that this process has, with which a fork of it begins; 0 where that is not known."""
    words = _read_text(Path("/proc/self/status")).partition("VmData:")[2].split()
    return int(words[0]) * 1024 if words else 0


class ForkedProcess:
    """A fork of this process, with what `subprocess.Popen` has of a child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._ask(os.WNOHANG)

    def wait(self) -> int:
        """`poll` at the end of the process."""
        self._ask(0)
        assert self.returncode is not None
        return self.returncode

    def _ask(self, how: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, how)
            except ChildProcessError:  # somebody else has waited for it
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


Process = subprocess.Popen[bytes] | ForkedProcess
"""A child that another program runs in, or a fork."""


def fork_process(
    work: Callable[[], object], handles: Sequence[int], environment: Mapping[str, str], output: IO[bytes]
) -> ForkedProcess:
    """Like `start_process`, with a fork of this process that calls `work`; only where `has_one_thread`.

    The fork has what we have imported, which a new process needs a tenth of a second or more for.
    """
    ready, is_ready = os.pipe()
    stops = (signal.SIGINT, signal.SIGTERM)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # Python ignores what a handler raises during a fork
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(ready)
        os.close(is_ready)
        raise
    if pid:
        os.close(is_ready)
        os.read(ready, 1)  # until the fork leads a session: `kill` ends the session
        os.close(ready)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return ForkedProcess(pid)
    code = 1
    try:
        os.setsid()
        os.close(is_ready)
        gc.freeze()  # what our owner has left is not finalized here
        os.environ.update(environment)
        tempfile.tempdir = None  # it is asked of the environment again
        _set_allocator(environment)
        for number in stops:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", errors="backslashreplace", closefd=False) for stream in (1, 2))
        _close_all_but(handles)
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        end_fork(code)


def _close_all_but(handles: Sequence[int]) -> None:
    """Close the files of our owner: a pipe of another worker that stays open here would keep that worker alive."""
    for handle in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if handle > 2 and handle not in handles:
            with contextlib.suppress(OSError):
                os.close(handle)


ALLOCATOR: Final = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}
"""Variable that glibc reads when a process starts → the parameter of mallopt in <malloc.h>."""


def _set_allocator(environment: Mapping[str, str]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other libraries of C have none
    for name, parameter in ALLOCATOR.items():
        if mallopt is not None and name in environment:
            mallopt(parameter, int(environment[name]))


def return_free_memory() -> None:
    """Give freed memory back to the system. After a buffer of megabytes was freed, glibc takes smaller ones from a heap
    that it keeps: 500 MiB of it, where a model of 61 layers was made."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is not None:  # other libraries of C have none
        malloc_trim(0)


def kill(process: Process) -> None:
    """End a process of `start_process` or `fork_process`, with all that it has started where it leads a session."""
    if isinstance(process, subprocess.Popen) and sys.platform == "win32":
        process.kill()
        return
    left_session = list(_descendants(process.pid))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _kill(left_session)


def children_of(process: int) -> list[int]:
    """The processes that `process` has started; Linux only, none elsewhere."""
    files = Path("/proc", str(process), "task").glob("*/children")
    return [int(child) for file in files for child in _read_text(file).split()]


def _descendants(process: int) -> Iterator[int]:
    for child in children_of(process):
        yield child
        yield from _descendants(child)


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


SET_CHILD_SUBREAPER: Final = 36
"""PR_SET_CHILD_SUBREAPER of <linux/prctl.h>."""


def adopt_orphans() -> None:
    """Make each later orphan among the descendants of this process a child of this process."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """End all descendants of this process, in whatever session they are."""
    while left := list(_descendants(os.getpid())):
        _kill(left)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


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


def end_fork(code: int) -> NoReturn:
    """End a fork, without what its owner would do at its end; what was printed is written out.

    Args:
        code: the exit code, of which the lowest 8 bits count.
    """
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
        flush_native()
    os._exit(code & 0xFF)


def flush_native() -> None:
    """Write out what native code has printed and not yet written."""
    if sys.platform != "win32":
        ctypes.CDLL(None).fflush(None)
