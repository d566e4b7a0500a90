"""What can go wrong outside of a pass, and whose turn it is. `passes.errors` draws the whole tree."""

from __future__ import annotations

from collections.abc import Sequence

from passes.errors import OnnxlineError

__all__ = [
    "CheckFailed",
    "ConfigError",
    "InternalError",
    "OnnxlineError",
    "SourceError",
    "Unsupported",
    "UsageError",
    "message_with_notes",
]


class UsageError(OnnxlineError):
    """Something the user gave is wrong."""

    exit_code = 2


class ConfigError(UsageError):
    """A key or a value of a configuration is wrong."""


class SourceError(UsageError):
    """The model, its checkpoint or its inputs cannot be made or read."""


class Unsupported(UsageError):
    """The model needs something that this release does not have; `operators` are those that lack, where it is that."""

    def __init__(self, message: str, operators: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.operators = tuple(operators)


class CheckFailed(OnnxlineError):
    """Everything ran, and a result is not what it has to be."""

    exit_code = 1


class InternalError(OnnxlineError):
    """A bug of ours."""

    exit_code = 3


def message_with_notes(error: BaseException) -> str:
    """What `error` says, and below it its notes, which help where the message is held to the words of others."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
