"""Errors from outside of a pass, each with its exit code. `passes.errors` draws the whole tree."""

from __future__ import annotations

from collections.abc import Sequence

from passes.errors import OnnxlineError, UsageError

__all__ = [
    "CheckFailed",
    "ConfigError",
    "DataError",
    "InternalError",
    "OnnxlineError",
    "SourceError",
    "Unsupported",
    "UsageError",
    "message_with_notes",
]


class ConfigError(UsageError):
    """A key or a value of a configuration is wrong."""


class SourceError(UsageError):
    """The model, its checkpoint or its inputs cannot be made or read."""


class Unsupported(UsageError):
    """The model needs something that this release lacks; `operators` lists missing operators, if that is the reason."""

    def __init__(self, message: str, operators: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.operators = tuple(operators)


class DataError(UsageError):
    """The numbers of a feed do not suit an op, such as an index that is out of range."""


class CheckFailed(OnnxlineError):
    """Everything ran, and a result is wrong."""

    exit_code = 1


class InternalError(OnnxlineError):
    """A bug of ours."""

    exit_code = 3


def message_with_notes(error: BaseException) -> str:
    """The message of `error`, and its notes below: they hold advice where the message itself must not change."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
