"""The other side of `passes.isolate`: receive a call, make it, send the result. Run as `python -m passes.worker FD`."""

from __future__ import annotations

import importlib
import sys
import traceback
from multiprocessing.connection import Connection

__all__ = ["serve"]


def serve(pipe: Connection) -> None:
    """Answer calls until the other side closes the pipe."""
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        module, _, name = function.partition(":")
        try:
            result = getattr(importlib.import_module(module), name)(**arguments)
        except Exception as error:
            traceback.print_exc()
            pipe.send((False, f"{type(error).__name__}: {error}"))
        else:
            pipe.send((True, result))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
