"""What can go wrong with an IR of torch, under pytorch-ir's names. All are user mistakes (exit code 2).

UsageError
├── ExportError          torch.export does not take the model, or it is not on the meta device as `strict` asks
├── ConversionError      the exported program holds something that the IR cannot
├── ExecutionError       inputs, weights or constants do not fit the IR
│   └── NoWeights            neither weights nor a path to them were given (a ValueError too)
├── SerializationError   a file is no IR, or cannot be written
│   └── NoIRFile             there is no such file (a FileNotFoundError too)
└── WeightLoadError      a file of weights cannot be read
    └── NoWeightFile         there is no such file (a FileNotFoundError too)
"""

from __future__ import annotations

from pipeline.errors import UsageError

__all__ = [
    "ConversionError",
    "ExecutionError",
    "ExportError",
    "NoIRFile",
    "NoWeightFile",
    "NoWeights",
    "SerializationError",
    "WeightLoadError",
]


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


class NoIRFile(SerializationError, FileNotFoundError):
    """There is no such file."""


class WeightLoadError(UsageError):
    """A file of weights cannot be read."""


class NoWeightFile(WeightLoadError, FileNotFoundError):
    """There is no such file."""
