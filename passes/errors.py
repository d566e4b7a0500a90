"""What can go wrong in a pass run, and whose turn it is.

    OnnxlineError
    ├── PassError
    │   ├── PolicyError      exit code 2: a name, an option or a `keep` that cannot be honoured as written
    │   ├── ModelError       exit code 2: the ONNX model cannot be read
    │   └── StepFailed       never leaves the runner: the step is recorded and its model thrown away
    │       ├── InvalidResult    what came out is not valid ONNX
    │       ├── WrongReference   the reference of a custom operator contradicts its inference
    │       ├── InferenceStopped a ModelError too: shape inference ran past its limits
    │       ├── StepCrashed      the worker process died
    │       └── StepTimedOut     the worker was killed at its time limit
    ├── UsageError       exit code 2: an argument, the configuration, the source or a path is wrong
    │   ├── ConfigError      a YAML key or value (carries file and line; pipeline.errors, as the rest)
    │   ├── SourceError      the model cannot be made or read
    │   ├── Unsupported      an operator, dtype or feature that this release does not have
    │   ├── MissingExtra     an optional package, such as torch, is not installed; a ModuleNotFoundError too
    │   ├── DataError        the elements of a feed do not suit an op, such as an index out of range
    │   └── …                those of an IR of torch: pipeline.torch_ir.errors
    ├── CheckFailed      exit code 1: everything ran, and the result is not right
    └── InternalError    exit code 3: a bug of ours

Every message says what was found, what was expected and what to do.
"""

from __future__ import annotations

from typing import ClassVar, TypeGuard

from passes.suggest import describe_argument


class OnnxlineError(Exception):
    """Root of the errors that onnxline raises on purpose."""

    exit_code: ClassVar[int] = 3
    """The exit code of the command line after this error: 1 a failed check, 2 wrong usage, 3 a bug of ours."""


class UsageError(OnnxlineError):
    """Something the user gave is wrong."""

    exit_code = 2


def check_type(value: object, kinds: type | tuple[type, ...], what: str, expected: str) -> None:
    """Refuse an argument of another type.

    Raises:
        UsageError: `what` names the argument, and `expected` says what it may be.
    """
    if not isinstance(value, kinds):
        raise UsageError(f"{what}: found {type(value).__name__}, expected {expected}")


def check_arguments(*arguments: tuple[str, object, bool, str]) -> None:
    """Refuse the first argument that is not right.

    Args:
        arguments: for each argument its name, its value, whether the value is right, and what was expected.

    Raises:
        UsageError: naming the argument, what was found, and what was expected.
    """
    for name, found, is_right, expected in arguments:
        if not is_right:
            raise UsageError(f"{name} is {describe_argument(found)}, expected {expected}")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is an int or a float; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


class PassError(OnnxlineError):
    """Root of the errors that `passes` raises."""


class PolicyError(PassError):
    """The user asked for a pass, an option or a structure that is not there."""

    exit_code = 2


class ModelError(PassError):
    """The ONNX file is missing, broken, or points outside its folder."""

    exit_code = 2


class StepFailed(PassError):
    """A pass raised, or returned something that is not a model."""

    status: ClassVar[str] = "failed"


class InvalidResult(StepFailed):
    """A pass made a model that breaks ONNX's rules; nothing else is asked of such a model."""

    status = "reverted"


class WrongReference(StepFailed):
    """A custom operator computes something else than it declares: no other size of the inputs mends that."""


class InferenceStopped(StepFailed, ModelError):
    """ONNX's shape inference ran past its limits: that fails a step whose result it is, and ends all else."""

    status = "timed_out"


class StepCrashed(StepFailed):
    """The worker process died under a pass.

    `was_killed`: by SIGKILL or SIGTERM, which come from outside; the system kills a process for want of memory.
    """

    status = "crashed"

    def __init__(self, message: str, *, was_killed: bool = False) -> None:
        super().__init__(message)
        self.was_killed = was_killed


class StepTimedOut(StepFailed):
    """A pass ran past its time limit, and its worker was killed."""

    status = "timed_out"
