"""The other side of `passes.worker.client`: receive a request, make its call, send the answer.

Run as `python own_names.py passes.worker.server FD LIFELINE_FD MEMORY_BYTES ALONE MODULE…`; the modules are imported
before the first call. `ALONE` is 1 where each call has a process of its own: a fork of this worker, which then does
nothing else, has one thread, and stays as it is.

Whatever the call does to its process (another folder, patched libraries, closed files, threads, limits, an exit) ends
with it. The fork has no pipe: its answer is a file, which only the process that was forked writes, and which is read
when that process has ended; then all that it has started is ended as well. A call takes 10 ms of a core, where a new
process that imports onnx takes 300.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, Never

from passes.errors import PassError
from passes.worker.messages import REFUSALS, REFUSED, STOP, CallAnswer, CallOutcome, Channel
from passes.worker.platforms import (
    adopt_orphans,
    connection_of,
    end_descendants,
    end_fork,
    end_with,
    flush_native,
    limit_memory,
)


def serve(channel: Channel, *, lifeline: int = -1, alone: bool = False) -> None:
    """Answer requests until the other side closes the pipe.

    A function with a parameter `worker_state` is given a dict in which it may leave things for the next call. What
    a generator yields is sent as it comes, but for None: there it can be stopped, and has nothing to say.

    Args:
        channel: the pipe to the other side.
        lifeline: the file descriptor that a fork closes, as well as the pipe.
        alone: make each call in a fork of this process.
    """
    worker_state: dict[str, Any] = {}
    process = os.getpid()
    while True:
        try:
            number, content = channel.receive()
        except EOFError:
            return
        if number == STOP:  # the call had come to its end
            continue
        _forget_output()
        if alone:
            reply = answer_in_fork(lambda: make_call(content, {}), (channel.fileno(), lifeline))  # noqa: B023 - called at once
        else:
            reply = make_call(content, worker_state, lambda items: _stream(items, channel, number))  # noqa: B023
        if os.getpid() != process:  # the call forked, and came back in the fork as well
            os._exit(0)
        channel.send(number, reply)


def make_call(
    content: bytes, worker_state: dict[str, Any], drain: Callable[[Generator[Any, None, Any]], Any] | None = None
) -> bytes:
    """Make the call of a pickled request; returns the pickled answer.

    Args:
        content: the pickled request.
        worker_state: what calls leave for later calls.
        drain: returns what a generator returns, after its items have been sent; None where no call is a generator.
    """
    try:
        request = pickle.loads(content)
        arguments = dict(request.arguments)
        if "worker_state" in inspect.signature(request.function).parameters:
            arguments["worker_state"] = worker_state
        result: Any = request.function(**arguments)
        if drain is not None and isinstance(result, Generator):
            result = drain(result)
        return pickle.dumps(CallAnswer(CallOutcome.DONE, result))
    except MemoryError as error:
        _print_traceback()
        answer = CallAnswer(CallOutcome.NO_MEMORY, f"{type(error).__name__}: {error}")
    except PassError as error:
        answer = CallAnswer(CallOutcome.RAISED, str(error))
    except Exception as error:
        _print_traceback()
        is_refused = isinstance(error, OSError) and error.errno in REFUSALS
        answer = CallAnswer(CallOutcome.RAISED, f"{REFUSED if is_refused else type(error).__name__}: {error}")
    return pickle.dumps(answer)


def _print_traceback() -> None:
    with contextlib.suppress(OSError):  # what the call met may be a full disk
        traceback.print_exc()


def _stream(items: Generator[Any, None, Any], channel: Channel, number: int) -> Any:
    """Send the items, until the other side sends anything; returns what the generator returns."""
    while not channel.poll():
        try:
            item = next(items)
        except StopIteration as end:
            return end.value
        if item is not None:
            channel.send(number, pickle.dumps(CallAnswer(CallOutcome.ITEM, item)))
        _forget_output()
    items.close()
    return None


def _forget_output() -> None:
    """Empty the file that our output goes to.

    The file is emptied before each call, and before each round of a generator, which may be a pass of its own: a crash
    report quotes the file, so its content must come from the pass that crashed.
    """
    with contextlib.suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
        flush_native()
    with contextlib.suppress(OSError):  # not a file: started by hand
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)


def answer_in_fork(make_answer: Callable[[], bytes], handles: Iterable[int]) -> bytes:
    """Call `make_answer` in a fork, and return what it returns; an answer that says how it died if it does not return.

    Args:
        make_answer: makes the pickled answer.
        handles: the file descriptors that the fork must not have.
    """
    Path(tempfile.gettempdir()).mkdir(parents=True, exist_ok=True)  # a pass may have deleted it
    with tempfile.TemporaryDirectory(prefix="call-", ignore_cleanup_errors=True) as folder:
        path = Path(folder, "answer")
        child = os.fork()
        if child == 0:
            _answer(make_answer, handles, path)
        _, status = os.waitpid(child, 0)
        end_descendants()
        try:
            return path.read_bytes()
        except OSError:
            return pickle.dumps(CallAnswer(CallOutcome.DIED, os.waitstatus_to_exitcode(status)))


def _answer(make_answer: Callable[[], bytes], handles: Iterable[int], path: Path) -> Never:
    """In the fork: write the answer to `path`, and end."""
    process, code = os.getpid(), 1
    try:
        for handle in handles:
            os.close(handle)
        # A pass that clears away its temporary files must not meet ours.
        own = path.with_name("temporary")
        own.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(own)
        answer = make_answer()
        if os.getpid() == process:  # it may have forked, and come back in the fork as well
            _write(answer, path)
            code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        end_fork(code)


def _write(answer: bytes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name("unfinished")
    unfinished.write_bytes(answer)
    unfinished.replace(path)


def run_server(handle: int, lifeline: int, memory_bytes: int, modules: Iterable[str], *, forks: bool = False) -> None:
    """Be a worker process until its owner ends.

    Args:
        handle: the file descriptor of the pipe with the requests.
        lifeline: that of the pipe that closes with its owner.
        memory_bytes: what this process may allocate; 0 for no limit.
        modules: what to import before the first call.
        forks: whether each call is made in a fork of this process.
    """
    end_with(lifeline)
    limit_memory(memory_bytes)
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # what was imported stays; the collector need not look through it again
    if forks:
        adopt_orphans()
    serve(Channel(connection_of(handle)), lifeline=lifeline, alone=forks)


if __name__ == "__main__":
    pipe, line, limit, alone = map(int, sys.argv[1:5])
    run_server(pipe, line, limit, sys.argv[5:], forks=alone == 1)
