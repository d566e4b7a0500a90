"""The other side of `passes.worker.client`: receive a call, make it, send the result.

Run as `python own_names.py passes.worker.server FD LIFELINE_FD MEMORY_BYTES MODULE…`; the modules are imported before
the first call.
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
from collections.abc import Generator
from multiprocessing.connection import Connection
from typing import Any

from passes.errors import PassError
from passes.worker.client import STOP
from passes.worker.platforms import connection_of, end_with, flush_native, limit_memory

__all__ = ["serve"]


def serve(pipe: Connection) -> None:
    """Answer calls until the other side closes the pipe.

    A function with a parameter `desk` is given a dict in which it may leave things for the next call. What a generator
    yields is sent as it comes, but for None: there it can be stopped, and has nothing to say.
    """
    desk: dict[str, Any] = {}
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        if call == STOP:  # it had come to its end
            continue
        _forget_output()
        try:
            function, arguments = pickle.loads(call)
            if "desk" in inspect.signature(function).parameters:
                arguments["desk"] = desk
            result: Any = function(**arguments)
            if isinstance(result, Generator):
                result = _stream(result, pipe)
        except MemoryError as error:
            traceback.print_exc()
            pipe.send(("no memory", f"{type(error).__name__}: {error}"))
        except PassError as error:
            pipe.send(("raised", str(error)))
        except Exception as error:
            traceback.print_exc()
            pipe.send(("raised", f"{type(error).__name__}: {error}"))
        else:
            pipe.send(("done", result))


def _stream(items: Generator[Any, None, Any], pipe: Connection) -> Any:
    """Send the items, until the other side sends anything; returns what the generator returns."""
    while not pipe.poll():
        try:
            item = next(items)
        except StopIteration as end:
            return end.value
        if item is not None:
            pipe.send(("item", item))
        _forget_output()
    items.close()
    return None


def _forget_output() -> None:
    """Empty the file that our output goes to.

    That is done before each call, and before each round of a generator, which may be a pass of its own: a crash report
    quotes what is in the file, and that has to be from the pass that crashed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    flush_native()
    with contextlib.suppress(OSError):  # not a file: started by hand
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    limit_memory(int(sys.argv[3]))
    for name in sys.argv[4:]:
        importlib.import_module(name)
    gc.freeze()  # what was imported stays; the collector need not look through it again
    serve(connection_of(int(sys.argv[1])))
