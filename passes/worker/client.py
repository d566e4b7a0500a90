"""Run native code in a worker process, so that a crash or an endless loop costs one step and not the run.

The worker is persistent, since importing onnxsim takes seconds; it is replaced when it dies or is killed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import IO, Any, Final, Self, TypeVar

from passes.errors import StepCrashed, StepFailed, StepTimedOut
from passes.visible import open_standard_handles
from passes.worker.messages import STOP, CallAnswer, CallOutcome, CallRequest, Channel, Garbage, read_answer
from passes.worker.own_names import FILE as OWN_NAMES
from passes.worker.own_names import PREFIX
from passes.worker.platforms import (
    CAN_FORK,
    KILLED,
    Process,
    data_bytes,
    fork_process,
    has_one_thread,
    kill,
    run_on,
    start_process,
)
from passes.worker.server import run_server

Result = TypeVar("Result")

WORKER: Final = f"{__package__}.server"
"""The module that the process runs. It has the name of this package in our process, so that objects of its classes can
be pickled both ways."""

SETTINGS: Final = "ONNXLINE_"
"""How the environment variables begin that a process reads: the files of custom operators, say."""

LAST_WORDS = 400
"""Characters of the worker's standard error that a crash report quotes."""

TRIES: Final = 3
"""The most processes that are asked one question; see `ask_again`."""


def ask_again(ask: Callable[[], Result]) -> Result:
    """Call `ask`, and call it again if its process was killed from outside, at most `TRIES` times; return its result.

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
        cores: indices of the cores that it and its children run on, one thread each; none: any core, and one thread.
        alone: each call has a process of its own, and nothing of it is left for the next call; for code of the user's.
            Such a call is no generator, and keeps no worker state.
        folder: where its temporary files go, which a process that is killed cannot remove; where those of our process
            go by default, or for `alone` a folder of its own.
    """

    def __init__(
        self,
        timeout_s: float = 600.0,
        memory_bytes: int = 0,
        preload: Sequence[str] = (),
        cores: Collection[int] = (),
        *,
        alone: bool = False,
        folder: str = "",
    ) -> None:
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self.preload = tuple(preload)
        self.cores = frozenset(cores)
        self.alone = alone
        self._process: Process | None = None
        self._channel: Channel | None = None
        self._lifeline: Connection | None = None
        """Open as long as our process lives; the worker process ends when the lifeline closes, even inside native
        code."""
        self._stderr: IO[bytes] | None = None
        self._files = folder
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.generation = 0
        """The number of processes started so far; a new process has nothing that was sent to an earlier one."""
        self._settings: Mapping[str, str] = {}
        """What the process was started with of `SETTINGS`; a process for other settings takes its place."""
        self.was_killed = False
        """Whether the last process that ended was killed from outside, and not by us."""
        self._is_ending = False
        """Whether the process was killed by `end`, and may still be there."""
        self._posted = 0
        self._handle = -1
        """The file descriptor of the pipe in the process."""
        self._waits_since: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def call(self, function: Callable[..., Result], /, *, within_s: float | None = None, **arguments: Any) -> Result:
        """Call a function of a module with picklable arguments and return its picklable result.

        `within_s`: the time limit of this call, in place of `timeout_s`.

        Raises:
            StepFailed: the function raised; the message is the worker's.
            StepCrashed: the process died, or was refused memory; the message names the signal and quotes the last
                lines of its standard error.
            StepTimedOut: the call ran past its time limit.
        """
        return self.collect(self.post(function, **arguments), within_s=within_s)

    def ask(self, function: Callable[..., Result], /, *, within_s: float | None = None, **arguments: Any) -> Result:
        """`call` for a question that is not a step's own work: if something kills the process, a new process is asked.

        Raises:
            StepFailed: as in `call`; StepCrashed for a killed process only after `TRIES` processes were killed.
        """
        return ask_again(lambda: self.call(function, within_s=within_s, **arguments))

    def begin(self, function: Callable[..., Result], /, **arguments: Any) -> Callable[[], Result]:
        """Begin to `ask`; the returned function waits for the answer. It asks again if another call came in between.

        Raises:
            PicklingError: as in `post`. The returned function raises as `ask`.
        """
        try:
            ticket = self.post(function, **arguments)
        except StepCrashed:
            return lambda: self.ask(function, **arguments)

        def answer() -> Result:
            return self.collect(ticket) if self.awaits(ticket) else self.call(function, **arguments)

        return partial(ask_again, answer)

    def post(self, function: Callable[..., Any], /, **arguments: Any) -> int:
        """Begin a call; returns the ticket for `collect`. An earlier ticket that was not collected becomes void.

        A generator computes its next item without being asked; the next call stops it.

        Raises:
            StepCrashed: the process died.
            PicklingError: the process cannot find the function by its name: it is a lambda, say.
        """
        content = pickle.dumps(CallRequest(function, arguments))
        self._end()
        channel = self._ensure_started()
        self._posted += 1
        try:
            channel.send(self._posted, content)
        except OSError as error:
            raise self._crash() from error
        except BaseException:
            self._stop()
            raise
        self._waits_since = time.monotonic()
        return self._posted

    def awaits(self, ticket: int) -> bool:
        """Whether `ticket` can still be collected."""
        return self._waits_since is not None and ticket == self._posted

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait`: ready when the answer to the last `post` can be collected, or the
        process died.

        Raises:
            ValueError: the process does not run; `post` and `start` start it.
        """
        if self._channel is None:
            raise ValueError("the worker does not run")
        return self._channel.fileno()

    def collect(self, ticket: int, *, within_s: float | None = None) -> Any:
        """Wait for the result of a posted call; the time limit counts from `post`. Raises as `call` does.

        The results of a generator are its items, one for each `collect`, and in the end what it returns: then `awaits`
        is false.
        """
        limit = self.timeout_s if within_s is None else within_s
        if self._channel is None or self._waits_since is None or ticket != self._posted:
            raise ValueError(f"ticket {ticket} is void; look with `awaits`")
        since, self._waits_since = self._waits_since, None
        try:
            answer = self._receive(self._channel, since + limit)
        except (EOFError, OSError) as error:  # it may have died in the middle of a message
            raise self._crash() from error
        except BaseException:
            self._stop()
            raise
        if answer is None:
            self._stop()
            raise StepTimedOut(f"ran past {round(limit, 1):g} s and was stopped (timeout_s)")
        if answer.outcome is CallOutcome.ITEM:
            self._waits_since = time.monotonic()
        elif answer.outcome is CallOutcome.DIED:
            raise self._death(answer.value)
        elif self.alone and not CAN_FORK:
            self._stop()
        if answer.outcome is CallOutcome.NO_MEMORY:
            self._stop()
            raise StepCrashed(f"asked for more memory than {self._limit()}: {answer.value}")
        if answer.outcome is CallOutcome.RAISED:
            raise StepFailed(answer.value)
        return answer.value

    def _receive(self, channel: Channel, deadline: float) -> CallAnswer | None:
        """The next answer to the last request; None if no answer comes by `deadline`.

        Raises:
            StepFailed: something that is no answer came through the pipe.
            EOFError, OSError: the process died.
        """
        try:
            while channel.poll(max(0.0, deadline - time.monotonic())):
                number, content = channel.receive()
                if number == self._posted:
                    return read_answer(content)
                if number > self._posted:
                    raise Garbage
        except Garbage:
            where = f"file descriptor {self._handle}, the pipe on which its process answers"
            raise StepFailed(
                f"the pass wrote bytes of its own to {'the file of its answer' if self.alone else where}; expected it "
                "to write to files that it has opened, or to stdout"
            ) from None
        return None

    def start(self) -> None:
        """Start the process now, so that it is ready when it is called."""
        self._ensure_started()

    def end(self) -> None:
        """Kill the process, if it runs, without waiting until it has given its memory back: `close` does."""
        if self._process is not None and not self._is_ending:
            self.was_killed = self._process.poll() in KILLED
            kill(self._process)
            self._is_ending = True

    def close(self) -> None:
        """End the process, if it runs."""
        self._stop()

    def _end(self) -> None:
        """End the current call, if there is one, and drop its result."""
        if self._channel is None or self._waits_since is None:
            return
        with contextlib.suppress(OSError):
            self._channel.send(STOP, b"")
        with contextlib.suppress(StepFailed):
            while self._waits_since is not None:  # a worker that waits to send does not receive the next call
                self.collect(self._posted)

    def _ensure_started(self) -> Channel:
        settings = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
        runs = self._channel is not None and self._process is not None and self._process.poll() is None
        if self._channel is not None and runs and settings == self._settings:
            return self._channel
        self._stop()
        self._settings = settings
        self.generation += 1
        open_standard_handles()  # a script under a guard may have closed them
        ours, theirs = Pipe()
        end, self._lifeline = Pipe(duplex=False)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        handles = (theirs.fileno(), end.fileno())
        numbers = (*handles, self.memory_bytes, int(self.alone and CAN_FORK))
        command = [sys.executable, OWN_NAMES, WORKER, *map(str, numbers), *self.preload]
        environment = _environment(os.environ, max(1, len(self.cores)))
        if self.alone:  # the files of its forks
            self._folder = tempfile.TemporaryDirectory(prefix="onnxline-forks-", ignore_cleanup_errors=True)
        if files := self._folder.name if self._folder else self._files:
            environment["TMPDIR"] = files
        if starts_by_fork() and not (self.alone or self.cores):
            limit = self.memory_bytes and self.memory_bytes + data_bytes()
            work = partial(run_server, *handles, limit, self.preload)
            self._process = fork_process(work, handles, environment, self._stderr)
        else:
            self._process = start_process(command, handles, environment, self._stderr)
        run_on(self._process.pid, sorted(self.cores))
        theirs.close()
        end.close()
        self._handle, self._channel = handles[0], Channel(ours)
        return self._channel

    def _stop(self) -> None:
        self.end()
        if self._process is not None:
            self._process.wait()
        for handle in (self._channel, self._lifeline, self._stderr):
            if handle is not None:
                handle.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = self._channel = self._lifeline = self._stderr = self._waits_since = None
        self._is_ending = False

    def _crash(self) -> StepCrashed:
        """The error that says how the process died."""
        assert self._process is not None
        death = self._death(self._process.wait())
        self._stop()
        return death

    def _death(self, code: int) -> StepCrashed:
        """The error that says how the process, or the fork for one call, died, with the last lines of its standard
        error."""
        assert self._stderr is not None
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace").strip()
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        who = "the pass ended its process" if self.alone and code >= 0 else "the worker process died"
        if "bad_alloc" in words or "MemoryError" in words:
            cause += f", out of memory at {self._limit()}"
        if words.startswith("Traceback"):
            words = words.splitlines()[-1]
        message = f"{who} ({cause})" + (f": {words[-LAST_WORDS:]}" if words else "")
        return StepCrashed(message, was_killed=code in KILLED)

    def _limit(self) -> str:
        if not self.memory_bytes:
            return "there is"
        return f"the limit of {self.memory_bytes / 2**30:.3g} GiB (memory_gib)"


def starts_by_fork() -> bool:
    """Whether a worker for all cores that starts now is a fork of this process: it takes 5 ms, and has all that we have
    imported."""
    return _is_command() and has_one_thread()


def _is_command() -> bool:
    """Whether this process is the command `onnxline`, under its public names. A fork of it is ours alone: one of a
    script has the script's modules, and libraries that a guard has patched."""
    specs = (getattr(sys.modules.get(name), "__spec__", None) for name in ("__main__", COMMAND))
    return any(spec is not None and spec.name == COMMAND for spec in specs) and not WORKER.startswith(f"{PREFIX}.")


COMMAND: Final = "onnxline.__main__"


def _environment(own: Mapping[str, str], count: int) -> dict[str, str]:
    """The environment in which the worker finds the same modules as our process, and none from its current folder.

    Numpy gets `count` threads: more would spin while onnxruntime's threads work.
    """
    path = os.pathsep.join(path for path in sys.path if path)
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), str(count))
    return {**MALLOC, **own, **threads, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


MALLOC: Final = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20)}
"""For glibc: size in bytes of the smallest value whose memory is given back to the system as soon as it is dropped, and
how many free bytes may remain at the end of the heap. The defaults are so small that most operators of a model fault in
all of their output afresh."""
