"""Run native code in a worker process, so that a crash or an endless loop costs one step and not the run.

The worker is persistent, since importing onnxsim takes seconds; it is replaced when it dies or is killed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import IO, Any, Final, Self, TypeVar
from weakref import WeakSet

from passes.errors import StepCrashed, StepFailed, StepTimedOut
from passes.worker.own_names import FILE as OWN_NAMES
from passes.worker.platforms import kill, run_on, start_process, was_killed

__all__ = ["STOP", "Worker", "ask_again"]

STOP: Final = b""
"""Sent in place of a call to end the one that is under way, whose result nobody needs."""

Answer = TypeVar("Answer")

WORKER: Final = f"{__package__}.server"
"""What the process runs: under the name that this package has here, since objects of its classes come and go."""

LAST_WORDS = 400
"""Characters of the worker's standard error that a crash report quotes."""

TRIES: Final = 3
"""Processes that a question is put to before it is given up; see `ask_again`."""


def ask_again(ask: Callable[[], Answer]) -> Answer:
    """Call `ask`, and again where its process was killed from outside, `TRIES` times in all; return its result.

    The system kills a process when memory is short, for example. That must not cost the run. Any other crash would
    happen again.
    """
    for _ in range(TRIES - 1):
        try:
            return ask()
        except StepCrashed as crash:
            if not crash.was_killed:
                raise
    return ask()


class Worker:
    """Calls functions of `passes` in another process, one at a time.

    Args:
        timeout_s: seconds that one call may take before the process is killed.
        memory_bytes: what the process may allocate; 0 for no limit. Weights that are mapped from files do not count.
        preload: modules that the process imports when it starts.
        cores: numbers of the cores that it and its children run on, one thread each; none: any core, and one thread.
    """

    def __init__(
        self,
        timeout_s: float = 600.0,
        memory_bytes: int = 0,
        preload: Sequence[str] = (),
        cores: Collection[int] = (),
    ) -> None:
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self.preload = tuple(preload)
        self.cores = frozenset(cores)
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._lifeline: Connection | None = None
        """Held open for as long as we live; the process ends when it closes, whatever native code it is in."""
        self._stderr: IO[bytes] | None = None
        self.owners: WeakSet[Any] = WeakSet()
        """The objects for which the process holds something, as long as they exist."""
        self.generation = 0
        """Number of processes started so far; a new one has nothing of what an earlier one was sent."""
        self.was_killed = False
        """Whether the last process that ended was killed from outside, and not by us."""
        self._posted = 0
        self._waits_since: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def call(self, function: Callable[..., Answer], /, *, within_s: float | None = None, **arguments: Any) -> Answer:
        """Call a function of a module with picklable arguments and return its picklable result.

        `within_s` is another time limit for this call alone.

        Raises:
            StepFailed: the function raised; the message is the worker's.
            StepCrashed: the process died, or could not have the memory that it asked for; the message names the
                signal and quotes its last words.
            StepTimedOut: it ran past `timeout_s`.
        """
        return self.collect(self.post(function, **arguments), within_s=within_s)

    def ask(self, function: Callable[..., Answer], /, *, within_s: float | None = None, **arguments: Any) -> Answer:
        """`call` for a question that is no step's own work: where somebody kills the process, a new one is asked.

        Raises:
            StepFailed: as `call` does; of a process that was killed, after `TRIES` of them.
        """
        return ask_again(lambda: self.call(function, within_s=within_s, **arguments))

    def post(self, function: Callable[..., Any], /, **arguments: Any) -> int:
        """Begin a call; returns the ticket for `collect`. One that was posted before, and not collected, is void.

        A function that is a generator goes on by itself after each item, and is stopped by the next call.

        Raises:
            StepCrashed: the process died.
            PicklingError: the process cannot find the function by its name: it is a lambda, say.
        """
        content = pickle.dumps((function, arguments))
        self._end()
        pipe = self._ensure_started()
        try:
            pipe.send_bytes(content)
        except OSError as error:
            raise self._crash() from error
        except BaseException:
            self._stop()
            raise
        self._posted += 1
        self._waits_since = time.monotonic()
        return self._posted

    def awaits(self, ticket: int) -> bool:
        """Whether `ticket` can still be collected."""
        return self._waits_since is not None and ticket == self._posted

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait`: ready when what was posted can be collected, or the process died.

        Raises:
            ValueError: the process does not run; it does from `post` or `start` on.
        """
        if self._pipe is None:
            raise ValueError("the worker does not run")
        return self._pipe.fileno()

    def collect(self, ticket: int, *, within_s: float | None = None) -> Any:
        """Wait for the result of a posted call, from when it was posted on. Raises as `call` does.

        Of a generator it is the next item, and what it returns at the end; there `awaits` is false.
        """
        limit = self.timeout_s if within_s is None else within_s
        if self._pipe is None or self._waits_since is None or ticket != self._posted:
            raise ValueError(f"ticket {ticket} is void; look with `awaits`")
        pipe, since, self._waits_since = self._pipe, self._waits_since, None
        try:
            if not pipe.poll(max(0.0, since + limit - time.monotonic())):
                self._stop()
                raise StepTimedOut(f"ran past {limit:g} s and was stopped (timeout_s)")
            outcome, result = pipe.recv()
        except (EOFError, OSError) as error:  # it may have died in the middle of a message
            raise self._crash() from error
        except BaseException:
            self._stop()
            raise
        if outcome == "item":
            self._waits_since = time.monotonic()
        if outcome == "no memory":
            self._stop()
            raise StepCrashed(f"asked for more memory than {self._limit()}: {result}")
        if outcome == "raised":
            raise StepFailed(result)
        return result

    def start(self) -> None:
        """Start the process now, so that it is ready when it is called."""
        self._ensure_started()

    def close(self) -> None:
        """End the process, if it runs."""
        self._stop()

    def _end(self) -> None:
        """End the call that is under way, if one is, and drop its result."""
        if self._pipe is None or self._waits_since is None:
            return
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(STOP)
        with contextlib.suppress(StepFailed):
            while self._waits_since is not None:  # a worker that waits to send does not receive the next call
                self.collect(self._posted)

    def _ensure_started(self) -> Connection:
        if self._pipe is not None and self._process is not None and self._process.poll() is None:
            return self._pipe
        self._stop()
        self.generation += 1
        ours, theirs = Pipe()
        end, self._lifeline = Pipe(duplex=False)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        handles = (theirs.fileno(), end.fileno())
        command = [sys.executable, OWN_NAMES, WORKER, *map(str, (*handles, self.memory_bytes)), *self.preload]
        environment = _environment(os.environ, max(1, len(self.cores)))
        self._process = start_process(command, handles, environment, self._stderr)
        run_on(self._process.pid, sorted(self.cores))
        theirs.close()
        end.close()
        self._pipe = ours
        return ours

    def _stop(self) -> None:
        if self._process is not None:
            self.was_killed = was_killed(self._process)
            kill(self._process)
            self._process.wait()
        for handle in (self._pipe, self._lifeline, self._stderr):
            if handle is not None:
                handle.close()
        self._process = self._pipe = self._lifeline = self._stderr = self._waits_since = None

    def _crash(self) -> StepCrashed:
        """The error that says how the process died, with its last words."""
        assert self._process is not None and self._stderr is not None
        code = self._process.wait()
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace").strip()[-LAST_WORDS:]
        self._stop()  # which sees that it was not we who killed it
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if "bad_alloc" in words or "MemoryError" in words:
            cause, words = f"{cause}, out of memory at {self._limit()}", ""
        message = f"the worker process died ({cause})" + (f": {words}" if words else "")
        return StepCrashed(message, was_killed=self.was_killed)

    def _limit(self) -> str:
        if not self.memory_bytes:
            return "there is"
        return f"the limit of {self.memory_bytes / 2**30:.1f} GiB (memory_gib)"


def _environment(own: Mapping[str, str], count: int) -> dict[str, str]:
    """The worker finds the same modules as we do, and not others in the folder that it is started from.

    More threads of numpy than that would spin beside onnxruntime's.
    """
    path = os.pathsep.join(path for path in sys.path if path)
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), str(count))
    return {**MALLOC, **own, **threads, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


MALLOC: Final = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20)}
"""For glibc: bytes from which on a value is given back to the system as soon as it is dropped, and how many may stay
behind at the end of the heap. By default these are so few that most operators of a model fault in all of their output
afresh."""
