"""The other side of `passes.worker.client`: receive a request, make its call, send the answer.

Run as `python own_names.py passes.worker.server FD LIFELINE_FD MEMORY_BYTES ALONE MODULE…`; the modules are imported
before the first call. `ALONE` is 1 where each call has a process of its own (`forks.py`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Generator
from typing import Any

from passes.errors import PassError
from passes.worker.forks import answer_in_fork
from passes.worker.messages import REFUSALS, REFUSED, STOP, CallAnswer, CallOutcome, Channel
from passes.worker.platforms import adopt_orphans, connection_of, end_with, flush_native, limit_memory


def serve(channel: Channel, *, lifeline: int = -1, alone: bool = False) -> None:
    """Answer requests until the other side closes the pipe.

    A function with a parameter `desk` is given a dict in which it may leave things for the next call. What a generator
    yields is sent as it comes, but for None: there it can be stopped, and has nothing to say.

    Args:
        lifeline: the file descriptor that a fork closes, as well as the pipe.
        alone: make each call in a fork of this process.
    """
    desk: dict[str, Any] = {}
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
            reply = make_call(content, desk, lambda items: _stream(items, channel, number))  # noqa: B023
        if os.getpid() != process:  # the call forked, and came back in the fork as well
            os._exit(0)
        channel.send(number, reply)


def make_call(
    content: bytes, desk: dict[str, Any], drain: Callable[[Generator[Any, None, Any]], Any] | None = None
) -> bytes:
    """Make the call of a pickled request; returns the pickled answer.

    Args:
        drain: returns what a generator returns, after its items have been sent; None where no call is a generator.
    """
    try:
        request = pickle.loads(content)
        arguments = dict(request.arguments)
        if "desk" in inspect.signature(request.function).parameters:
            arguments["desk"] = desk
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


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    limit_memory(int(sys.argv[3]))
    for name in sys.argv[5:]:
        importlib.import_module(name)
    gc.freeze()  # what was imported stays; the collector need not look through it again
    forks = sys.argv[4] == "1"
    if forks:
        adopt_orphans()
    serve(Channel(connection_of(int(sys.argv[1]))), lifeline=int(sys.argv[2]), alone=forks)
