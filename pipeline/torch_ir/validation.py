"""Check the types of what callers give, before Python fails on it deep inside."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from numbers import Real
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from passes.suggest import with_article
from pipeline.errors import UsageError
from pipeline.importers.from_torch.modules import every_tensor


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
    """
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
        UsageError: (as `error`) it is no row of arguments.
    """
    if isinstance(given, torch.Tensor):
        return (given,)
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        return tuple(given)
    hints = {Mapping: "give arguments by name as kwargs=", type(None): "() where all arguments come as kwargs="}
    raise mistaken(what, given, "a tuple of the positional arguments", error, hints)


def a_module(given: Any, error: type[UsageError]) -> nn.Module:
    """
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
    """
    Raises:
        UsageError: (as `error`) it is no number of 0 or more, and less than `below`.
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
