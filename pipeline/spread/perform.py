"""One job, in the process that does it. What it raises becomes data, so that it can travel."""

from __future__ import annotations

import importlib
import json
import os
import socket
import time
import traceback
from collections.abc import Mapping
from typing import Any

from pipeline.errors import InternalError
from pipeline.spread.job import Outcome, State

__all__ = ["here", "perform"]


def perform(key: str, call: str, arguments: Mapping[str, Any], attempts: int = 1) -> Outcome:
    """Call `package.module:function`; an exception is an outcome too, but for those that end the process."""
    begun = time.perf_counter()
    try:
        value, error = _called(call, arguments), None
    except Exception as raised:
        value, error = None, raised
    return Outcome(
        key=key,
        status=State.FAILED if error else State.DONE,
        value=value,
        why=_sentence(error) if error else "",
        trace="".join(traceback.format_exception(error)) if error and not _is_meant(error) else "",
        exit_code=getattr(error, "exit_code", InternalError.exit_code) if error else 0,
        seconds=time.perf_counter() - begun,
        where=here(),
        attempts=attempts,
    )


def here() -> str:
    """This machine and this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _called(call: str, arguments: Mapping[str, Any]) -> Any:
    module, _, name = call.partition(":")
    value = getattr(importlib.import_module(module), name)(**arguments)
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise InternalError(f"{call} returned what JSON cannot hold: {error}") from error


def _is_meant(error: Exception) -> bool:
    """Whether the error was raised on purpose, and its message is a sentence for the user."""
    return hasattr(error, "exit_code")


def _sentence(error: Exception) -> str:
    return str(error) if _is_meant(error) else f"{type(error).__name__}: {error}"
