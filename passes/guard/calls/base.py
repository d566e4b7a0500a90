"""A call that was intercepted, as every optimizer's adapter presents it.

And what the adapters share: they read arguments and models as callers hand them over, and write models as callers
want them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx

from passes.context import PassContext
from passes.errors import ModelError
from passes.graph.traversal import sort_nodes
from passes.load import check_model
from passes.policy.policy import Skip
from passes.step import Repeat, Step
from passes.suggest import nearest
from passes.weights.detached import PROTOBUF_LIMIT, DetachedModel, attach, detach, read_model

__all__ = [
    "CallPlan",
    "InterceptedCall",
    "PassThrough",
    "Skips",
    "Target",
    "bind_arguments",
    "copy_model",
    "is_valid",
    "known_only",
    "open_model",
    "parse_model",
    "without_defaults",
    "write",
]


Skips = Callable[[str], Skip | None]
"""Whether the policy skips the pass of a name such as `fuse_qkv` or `onnxsim/fuse_qkv`."""


class PassThrough(Exception):  # not an error: the optimizer has the word
    """The call holds no model that a policy could speak of, or a mistake that the optimizer itself should complain of.

    Should it not complain, the caller gets what `instead` makes, if given: of a model that could not be read nobody can
    say what became of it.
    """

    def __init__(self, reason: str, instead: Callable[[], Any] | None = None) -> None:
        super().__init__(reason)
        self.instead = instead


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The steps that do what the call asks for, less what is skipped: pass → the reason."""

    steps: tuple[Step | Repeat, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class InterceptedCall(Protocol):
    """One call of an optimizer, with its arguments understood."""

    @property
    def model(self) -> DetachedModel:
        """What the optimizer is given, and the reference for what it makes."""
        ...

    @property
    def source(self) -> str:
        """The model's path; empty for one in memory."""
        ...

    @property
    def feeds(self) -> Sequence[Mapping[str, np.ndarray]]:
        """Inputs that the caller gave to compare on."""
        ...

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Shapes that the caller gave to inputs."""
        ...

    def plan(self, skips: Skips, bench: PassContext) -> CallPlan:
        """The steps to run in the worker."""
        ...

    def plan_here(self, skips: Skips, bench: PassContext) -> CallPlan | None:
        """The steps to run in this process, for what the worker does not know (an operator that the script registered);
        None where that cannot be."""
        ...

    def run_unguarded(self, bench: PassContext) -> DetachedModel:
        """What the call makes without a guard.

        Raises:
            StepFailed: it raised, crashed or ran out of time.
        """
        ...

    def deliver(self, model: DetachedModel, *, proven: bool) -> Any:
        """What the caller expects back for `model`; files that it asked for are written."""
        ...


Reader = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], InterceptedCall]


@dataclass(frozen=True, slots=True)
class Target:
    """`key` is how the log calls the function, which is `attribute` of `module` in `package`."""

    key: str
    package: str
    module: str
    attribute: str
    read: Reader
    required: bool = True
    """Every release that we know has it, as a Python function. The others are intercepted where there is one."""

    def resolve(self) -> Callable[..., Any] | None:
        """The function, if the installed release has it."""
        try:
            return reduce(getattr, self.attribute.split("."), importlib.import_module(self.module))  # type: ignore[return-value]
        except (ImportError, AttributeError):
            return None


def bind_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name → value of the arguments that were given.

    Raises:
        LetThrough: the function does not take them.
    """
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise PassThrough(str(error)) from error


def without_defaults(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not what the function would take anyway: a command line passes every one."""
    defaults = {name: one.default for name, one in inspect.signature(function).parameters.items()}
    return {
        name: value for name, value in given.items() if not _same(value, defaults.get(name, inspect.Parameter.empty))
    }


def known_only(
    options: Mapping[str, Any], key: str, known: Collection[str], library: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Without names in the list `key` that the library does not have and ignores in silence; and a note for each."""
    names = options.get(key)
    if not isinstance(names, list | tuple):
        return dict(options), ()
    notes = tuple(
        f"{key} names {name!r}, which this {library} does not have{nearest(str(name), known)}"
        for name in names
        if name not in known
    )
    return {**options, key: [name for name in names if name in known]}, notes


def _same(value: object, default: object) -> bool:
    plain = isinstance(value, str | int | float | bool) and type(value) is type(default)
    return value is default or (plain and value == default)


def copy_model(model: onnx.ModelProto, instead: Callable[[], Any]) -> DetachedModel:
    """A model in memory, detached; the caller's stays as it is.

    Raises:
        LetThrough: it is broken, or its external data is not in it.
    """
    copy = onnx.ModelProto()
    try:
        check_model(model)
        copy.CopyFrom(model)
        sort_nodes(copy.graph)
        return detach(copy, checked=True)
    except ModelError as mistake:
        raise PassThrough(str(mistake), instead) from mistake


def parse_model(data: bytes) -> onnx.ModelProto:
    """A model in bytes.

    Raises:
        LetThrough: they are none of a model.
    """
    try:
        return onnx.load_from_string(data)
    except Exception as error:  # of the protobuf library, by release
        raise PassThrough(f"the bytes are not a model: {error}") from error


def open_model(path: str) -> DetachedModel:
    """A model in a file.

    Raises:
        LetThrough: it cannot be read.
    """
    try:
        return read_model(Path(path))
    except ModelError as mistake:
        raise PassThrough(str(mistake)) from mistake


def with_weights(model: DetachedModel) -> onnx.ModelProto:
    """With its data inline. In memory a message may be larger than any file."""
    return attach(model, limit=None)


def write(model: DetachedModel, path: str, external_from: int) -> None:
    """Write to `path`; above `external_from` bytes the weights go to `<name>.data` beside it, as optimizers do it."""
    proto, data = with_weights(model), Path(f"{path}.data")
    if model.nbytes() <= min(external_from, PROTOBUF_LIMIT):
        onnx.save(proto, path)
        return
    data.unlink(missing_ok=True)  # onnx appends to what is there
    onnx.save(proto, path, save_as_external_data=True, all_tensors_to_one_file=True, location=data.name)


def is_valid(model: DetachedModel) -> bool:
    """What ONNX's own checker says; of a model that is too large for it, yes."""
    if model.nbytes() > PROTOBUF_LIMIT:
        return True
    try:
        onnx.checker.check_model(with_weights(model))
    except onnx.checker.ValidationError:
        return False
    return True
