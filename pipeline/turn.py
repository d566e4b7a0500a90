"""One thread at a time calls and traces modules.

Torch's tracers, the streams, loggers and warnings of Python, and the functions of libraries that are replaced during a
trace belong to the process: two traces at once fail with assertions of torch's, and leave the streams taken away.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

TURN: Final = threading.RLock()


def takes_turns(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A function that waits until no other thread calls or traces a module."""

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with TURN:
            return function(*args, **kwargs)

    return call
