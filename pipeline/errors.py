"""What can go wrong, and whose turn it is.

    OnnxlineError
    ├── UserMistake      exit code 2: the configuration, the model or a path is wrong; the user acts
    │   ├── ConfigMistake    a YAML key or value (carries file and line)
    │   ├── SourceMistake    the model cannot be made or read
    │   └── Unsupported      an operator, dtype or feature that this release does not have
    ├── CheckFailed      exit code 1: everything ran, and the result is not right
    └── InternalError    exit code 3: a bug of ours

`passes.errors` has the same attribute `exit_code` on its own small tree, since `passes` may not import `pipeline`.
Every message says what was found, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

__all__ = [
    "CheckFailed",
    "ConfigMistake",
    "InternalError",
    "OnnxlineError",
    "SourceMistake",
    "Unsupported",
    "UserMistake",
    "told",
]


class OnnxlineError(Exception):
    """Root of the errors that onnxline raises on purpose."""

    exit_code: ClassVar[int] = 3


class UserMistake(OnnxlineError):
    """Something the user gave is wrong."""

    exit_code = 2


class ConfigMistake(UserMistake):
    """A key or a value of a configuration is wrong."""


class SourceMistake(UserMistake):
    """The model, its checkpoint or its inputs cannot be made or read."""


class Unsupported(UserMistake):
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


def told(error: BaseException) -> str:
    """What `error` says, and below it its notes, which help where the message is held to the words of others."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
