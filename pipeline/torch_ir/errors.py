"""The errors of the IR of torch, under pytorch-ir's names. All are user mistakes (exit code 2).

UsageError
├── ExportError          torch.export does not take the model, or it is not on the meta device as `strict` asks
├── ConversionError      the exported program holds something that the IR cannot
├── ExecutionError       inputs, weights or constants do not fit the IR
│   └── NoWeights            neither weights nor a path to them were given (a ValueError too)
├── SerializationError   a file is no IR, or cannot be written
│   └── NoIRFile             there is no such file (a FileNotFoundError too)
└── WeightLoadError      a file of weights cannot be read
    └── NoWeightFile         there is no such file (a FileNotFoundError too)

`warn` points to the user's line that called us, however deep in our code it is called.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from pipeline.errors import UsageError


class ExportError(UsageError):
    """torch.export does not take the model."""


class ConversionError(UsageError):
    """The exported program holds something that the IR cannot."""


class ExecutionError(UsageError):
    """Inputs, weights or constants do not fit the IR."""


class NoWeights(ExecutionError, ValueError):
    """Neither weights nor a path to them were given."""


class SerializationError(UsageError):
    """A file is no IR, or cannot be written."""


class Unexpected(ValueError):
    """A part of an IR's data is wrong; the message says what was found, and what was expected."""


class NoIRFile(SerializationError, FileNotFoundError):
    """There is no such file."""


class WeightLoadError(UsageError):
    """A file of weights cannot be read."""


class NoWeightFile(WeightLoadError, FileNotFoundError):
    """There is no such file."""


OURS = ("onnxline", "_onnxline", "pipeline", "passes", "torch_ir")
"""Packages whose frames `warn` skips; the last is our replacement of pytorch-ir."""


def warn(said: str) -> None:
    """Warn at the user's line, so that Python repeats the warning for each line of the user's that causes it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_ours(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(said, stacklevel=level)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in OURS
