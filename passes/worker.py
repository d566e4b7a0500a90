"""The other side of `passes.isolate`: receive a call, make it, send the result.

Run as `python -m passes.worker FD MEMORY_BYTES MODULE…`; the modules are imported before the first call.
"""

from __future__ import annotations

import importlib
import inspect
import resource
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from passes.errors import PassError

__all__ = ["serve"]


def serve(pipe: Connection) -> None:
    """Answer calls until the other side closes the pipe.

    A function with a parameter `desk` is given a dict in which it may leave things for the next call.
    """
    desk: dict[str, Any] = {}
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            function = _function(name)
            given = {"desk": desk} if "desk" in inspect.signature(function).parameters else {}
            result = function(**given, **arguments)
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


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def limit_memory(limit: int) -> None:
    """Refuse to allocate more than `limit` bytes in this process; files that are mapped do not count."""
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    limit_memory(int(sys.argv[2]))
    for name in sys.argv[3:]:
        importlib.import_module(name)
    serve(Connection(int(sys.argv[1])))
