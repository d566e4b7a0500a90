"""Errors from outside of a pass, each with its exit code. `passes.errors` draws the whole tree."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from typing import Final

from passes.errors import OnnxlineError, UsageError

__all__ = [
    "DISK_ERRORS",
    "EXTRAS",
    "CheckFailed",
    "ConfigError",
    "DataError",
    "InternalError",
    "MissingExtra",
    "OnnxlineError",
    "SourceError",
    "Unsupported",
    "UsageError",
    "message_with_notes",
    "refusal_of",
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


EXTRAS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("torch", "transformers", "safetensors", "orjson", "zstandard"), "torch"),
    "diffusers": "diffusion",
    "torchmetrics": "metrics",
    "model_explorer": "explorer",
    "gguf": "gguf",
}
"""Module → the extra that installs it."""


class MissingExtra(UsageError, ModuleNotFoundError):
    """`what` needs `module`, one of `EXTRAS`, which is not installed."""

    def __init__(self, module: str, what: str = "this") -> None:
        super().__init__(
            f"{what} needs {module}, which is not installed; pip install 'onnxline[{EXTRAS[module]}]'", name=module
        )


class DataError(UsageError):
    """The elements of a feed do not suit an op, such as an index that is out of range."""


class CheckFailed(OnnxlineError):
    """Everything ran, and a result is wrong."""

    exit_code = 1


class InternalError(OnnxlineError):
    """A bug of ours."""

    exit_code = 3


DISK_ERRORS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}
    | {errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EIO, errno.ENXIO, errno.ESTALE, errno.EBUSY}
)
"""What only the place can be blamed for. ENOENT is not among them: inside of a run, a file that is missing is a bug."""

REFUSALS: Final[Mapping[tuple[int, ...], str]] = {
    (errno.EMFILE, errno.ENFILE): "raise the limit of open files, as with `ulimit -n 1024`",
    (errno.ENOMEM, errno.EAGAIN): "give the process more memory or more processes, or take a smaller model",
    tuple(DISK_ERRORS): "free space, or choose another folder; TMPDIR names the folder of temporary files",
}
"""Numbers of errors that the system gives → what to do about them."""

SIGNS: Final = {
    **{os.strerror(numbers[0]): advice for numbers, advice in REFUSALS.items()},
    os.strerror(errno.ENOSPC): REFUSALS[tuple(DISK_ERRORS)],
    "No usable temporary directory": REFUSALS[tuple(DISK_ERRORS)],
    **dict.fromkeys(
        ("failed to map segment", "can't allocate memory", "can't start new thread", "bad_alloc", "Unable to allocate"),
        REFUSALS[errno.ENOMEM, errno.EAGAIN],
    ),
}
"""How libraries word such a refusal in errors of their own → what to do about it."""


def refusal_of(error: BaseException) -> UsageError | None:
    """What the system refused, as a sentence: memory, a file, a place on the disk. None for any other error.

    Args:
        error: the error, with its causes.
    """
    advice = next((advice for numbers, advice in REFUSALS.items() if getattr(error, "errno", None) in numbers), None)
    if isinstance(error, MemoryError):
        advice = REFUSALS[errno.ENOMEM, errno.EAGAIN]
    if advice is None and isinstance(error, OSError | RuntimeError | ImportError | SystemError):
        advice = next((advice for sign, advice in SIGNS.items() if sign in str(error)), None)
    if advice is None:
        return None
    what = str(error) or "memory"
    if isinstance(error, OSError) and error.strerror:
        what = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return UsageError(f"the system refused to go on: {what}; {advice}")


def message_with_notes(error: BaseException) -> str:
    """The message of `error`, and its notes below: they hold advice where the message itself must not change."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
