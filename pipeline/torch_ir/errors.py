"""The errors of the IR of torch, under pytorch-ir's names, and the checks that raise them.

All are user mistakes (exit code 2):

UsageError
├── ExportError          torch.export does not take the model, or it is not on the meta device as `strict` asks
├── ConversionError      the exported program holds something that the IR cannot
├── ExecutionError       inputs, weights or constants do not fit the IR
│   └── NoWeights            neither weights nor a path to them were given (a ValueError too)
├── SerializationError   a file is no IR, or cannot be written
│   └── NoIRFile             there is no such file (a FileNotFoundError too)
└── WeightLoadError      a file of weights cannot be read
    └── NoWeightFile         there is no such file (a FileNotFoundError too)

Arguments are checked at the public functions, before Python fails deep inside. `parse` makes dataclasses of plain data
by pydantic; a mistake is one sentence that says where, what was found and what was expected. `warn` points to the line
of the user's code, however deep in our code the warning arises.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from numbers import Real
from pathlib import Path
from types import FrameType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError
from torch import nn
from torch.nn.parameter import is_lazy

from passes.suggest import with_article
from pipeline.errors import UsageError
from pipeline.importers.from_torch.modules import every_tensor


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


def by_name(what: str, given: Any, error: type[UsageError]) -> Mapping[str, Any]:
    """Check that tensors, or arguments, are given by name; their own types are not checked here.

    Raises:
        UsageError: (as `error`) it is no mapping, or not by name.
    """
    if isinstance(given, Mapping):
        if other := [key for key in given if not isinstance(key, str)]:
            raise error(
                f"{what}: found the key {other[0]!r}, {a_type(other[0])}, expected names, as in {{'x': tensor}}"
            )
        return given
    hints: dict[Any, str] = {nn.Module: "give what its state_dict() returns"}
    if what == "weights":
        hints[str | os.PathLike] = "load_weights reads a file"
    raise mistaken(what, given, "a mapping by name, as in {'x': tensor}", error, hints)


def path_of(what: str, given: Any, error: type[UsageError]) -> Path:
    """`given` as a Path, if a file system can name it; `what` is the argument's name in messages.

    Raises:
        UsageError: (as `error`) it is no path.
    """
    if isinstance(given, str | os.PathLike) and isinstance(os.fspath(given), str):
        try:
            os.fsencode(given)
        except UnicodeEncodeError as wrong:
            raise error(f"{what}: found the path {os.fspath(given)!r:.80}, which no file system can name") from wrong
        if "\0" in os.fspath(given):
            raise error(f"{what}: found the path {os.fspath(given)!r:.80} with a zero byte, expected one without")
        return Path(given)
    hints = {Mapping: "tensors by name are given as weights="} if what == "weights" else {}
    raise mistaken(what, given, "a path, as text or a pathlib.Path", error, hints)


def arguments(what: str, given: Any, error: type[UsageError]) -> tuple[Any, ...]:
    """Positional arguments as a tuple; a single tensor is the only argument.

    Raises:
        UsageError: (as `error`) it is no sequence of arguments.
    """
    if isinstance(given, torch.Tensor):
        return (given,)
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        return tuple(given)
    hints = {Mapping: "give arguments by name as kwargs=", type(None): "() where all arguments come as kwargs="}
    raise mistaken(what, given, "a tuple of the positional arguments", error, hints)


def a_module(given: Any, error: type[UsageError]) -> nn.Module:
    """`given`, if it is a module whose parameters all have shapes.

    Raises:
        UsageError: (as `error`) it is no module, or one whose parameters are still to be made.
    """
    if isinstance(given, nn.Module):
        if any(map(is_lazy, every_tensor(given))):
            raise _lazy(given, error)
        return given
    hints = {
        type: "make one of this class",
        FunctionType | MethodType: "a module's forward can call it",
        Mapping: "weights do not say what is computed",
    }
    raise mistaken("model", given, "a torch.nn.Module", error, hints)


def _lazy(model: nn.Module, error: type[UsageError]) -> UsageError:
    named = (*model.named_parameters(), *model.named_buffers())
    name = next(name for name, tensor in named if is_lazy(tensor))
    return error(
        f"model: found {name!r}, which is lazy and has no shape yet, expected tensors with shapes; "
        "run the model once, which makes them"
    )


def a_number(what: str, given: Any, expected: str, error: type[UsageError], below: float = math.inf) -> None:
    """Refuse what is not in [0, `below`); `expected` says in the message what is.

    Raises:
        UsageError: (as `error`) it is no real number, negative, or not less than `below`.
    """
    if not isinstance(given, Real) or isinstance(given, bool) or not 0 <= float(given) < below:
        raise error(f"{what}: found {given!r:.60}, expected {expected}")


def mistaken(
    what: str, given: Any, expected: str, error: type[UsageError], hints: Mapping[Any, str] | None = None
) -> UsageError:
    """An `error` to raise. `hints` say what to do, by the type of what was given; the first that fits is taken."""
    hint = next((f"; {hint}" for kind, hint in (hints or {}).items() if isinstance(given, kind)), "")
    found = f"the class {given.__name__}" if isinstance(given, type) else a_type(given)
    return error(f"{what}: found {found}, expected {expected}{hint}")


def a_type(given: Any) -> str:
    """`an int`, `a DynamicCache`, `None`."""
    return "None" if given is None else with_article(type(given).__name__)


T = TypeVar("T")

TEXT = "IR JSON"
"""The subject of messages about an IR that was read from no file."""


@contextmanager
def report_unexpected(what: str = TEXT, advice: str = "save the IR again") -> Iterator[None]:
    """Turn an Unexpected that is raised inside into a SerializationError about `what`."""
    try:
        yield
    except Unexpected as error:
        raise SerializationError(f"{what}: {error}; {advice}") from error


def parse(cls: type[T], data: Any, where: Sequence[str | int] = ()) -> T:
    """`data`, which lies at `where` in its document, as a dataclass.

    Raises:
        Unexpected: a key is missing, or an item is of another type than its field.
    """
    try:
        return _adapter(cls).validate_python(data)
    except ValidationError as error:
        raise Unexpected(_explain(error, where)) from error


def explain_as(what: str) -> WrapValidator:
    """A pydantic validator for a field: any mistake inside of the field is reported as `found …, expected <what>`."""
    return WrapValidator(partial(_check, what))


def describe_mistake(item: Any, what: str) -> str:
    """`found 5, expected a string`."""
    return f"found {'null' if item is None else repr(item)[:60]}, expected {what}"


def write_path(path: Sequence[str | int]) -> str:
    """`nodes[0].inputs[1].shape`; "the top level" of nothing."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:] or "the top level"


@cache
def _adapter(cls: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(cls)


def _check(what: str, item: Any, check: Any) -> Any:
    try:
        return check(item)
    except ValidationError as error:
        raise PydanticCustomError("expected", "{what}", {"what": what}) from error


def _explain(error: ValidationError, where: Sequence[str | int]) -> str:
    first = error.errors(include_url=False)[0]
    path = (*where, *first["loc"])
    if first["type"] == "missing":
        return f"{write_path(path[:-1])}: the key {path[-1]!r} is missing; expected what IR.save writes"
    return f"{write_path(path)}: {describe_mistake(first['input'], EXPECTED.get(first['type'], first['msg']))}"


EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "tuple_type": "a list",
    "mapping_type": "an object",
    "dict_type": "an object",
    "dataclass_type": "an object",
}
"""Pydantic 2's type of an error → what was expected."""
