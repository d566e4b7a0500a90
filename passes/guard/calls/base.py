"""The interface of an intercepted call, and what the optimizers' adapters share.

The adapters read arguments and models as callers pass them, make steps of a call, and write models as callers expect
them.
"""

from __future__ import annotations

import importlib
import inspect
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx

from passes.context import PassContext
from passes.errors import ModelError, StepFailed
from passes.policy.policy import Skip
from passes.step import CompositeStep, PassResult, Repeat, Step
from passes.suggest import nearest
from passes.weights import detached
from passes.weights.detached import PROTOBUF_LIMIT, DetachedModel, attach, read_model
from passes.weights.files import save

Skips = Callable[[str], Skip | None]
"""Whether the policy skips the pass of a name such as `fuse_qkv` or `onnxsim/fuse_qkv`."""


class PassThrough(Exception):  # not an error: the optimizer handles the call
    """The call holds no model to which a policy applies, or a mistake that the optimizer itself should report.

    If the optimizer raises nothing, the caller gets the result of `instead`, if given: a result cannot be checked if
    the model could not be read.
    """

    def __init__(self, reason: str, instead: Callable[[], Any] | None = None) -> None:
        super().__init__(reason)
        self.instead = instead


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The steps that do what the call asks for, without skipped passes; `skipped` maps pass → reason."""

    steps: tuple[Step | Repeat, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InterceptedCall(ABC):
    """One call of an optimizer, with its arguments parsed.

    `model` is the optimizer's input model, and the reference for its result; `source` is its path, empty for a model in
    memory. `feeds` are input arrays that the caller gave for comparing, `shapes` the shapes that it gave for inputs.
    """

    model: DetachedModel
    source: str = ""
    feeds: Sequence[Mapping[str, np.ndarray]] = ()
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @abstractmethod
    def plan(self, skips: Skips, context: PassContext) -> CallPlan:
        """The steps to run in the worker."""

    def plan_here(self, skips: Skips, context: PassContext) -> CallPlan | None:
        """The steps to run in this process, if the call uses what the worker lacks (an operator that the script
        registered); None if the call cannot run here."""
        return None

    @abstractmethod
    def run_unguarded(self, context: PassContext) -> DetachedModel:
        """The result of the call without a guard.

        Raises:
            StepFailed: it raised, crashed or ran out of time.
        """

    @abstractmethod
    def deliver(self, model: DetachedModel, *, proven: bool) -> Any:
        """Return `model` in the form that the caller expects, and write the files that it asked for."""


Reader = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], InterceptedCall]


@dataclass(frozen=True, slots=True)
class Target:
    """A function to intercept: `attribute` of `module` in `package`. `key` is its name in the log."""

    key: str
    package: str
    module: str
    attribute: str
    read: Reader
    required: bool = True
    """Whether every known release has the function in Python. Other functions are intercepted if they exist."""

    def resolve(self) -> Callable[..., Any] | None:
        """The function, if the installed release has it."""
        try:
            return reduce(getattr, self.attribute.split("."), importlib.import_module(self.module))  # type: ignore[return-value]
        except (ImportError, AttributeError):
            return None


def bind_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name → value of the arguments that were given.

    Raises:
        PassThrough: the function does not take them.
    """
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise PassThrough(str(error)) from error


def without_defaults(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that differ from the function's defaults: a command line passes every argument."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    return {
        name: value
        for name, value in arguments.items()
        if not _same(value, defaults.get(name, inspect.Parameter.empty))
    }


def known_only(
    options: Mapping[str, Any], key: str, known: Collection[str], library: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Drop names from the list `key` that the library does not have and silently ignores; return a note for each."""
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


def open_model(model: onnx.ModelProto | str, instead: Callable[[], Any] | None = None) -> DetachedModel:
    """A detached copy of a model in memory, which is not changed, or the model in a file.

    Raises:
        PassThrough: the model is broken, cannot be read, or its external data is not in memory.
    """
    try:
        return detached.open_model(model)
    except ModelError as mistake:
        raise PassThrough(str(mistake), instead) from mistake


def parse_model(data: bytes) -> onnx.ModelProto:
    """Parse the bytes of a model.

    Raises:
        PassThrough: they are not a model.
    """
    try:
        return onnx.load_from_string(data)
    except Exception as error:  # its type depends on the protobuf release
        raise PassThrough(f"the bytes are not a model: {error}") from error


def with_weights(model: DetachedModel) -> onnx.ModelProto:
    """The model with its weights inline. In memory a message may exceed the size limit of files."""
    return attach(model, limit=None)


def write(model: DetachedModel, path: str, external_from: int) -> None:
    """Write to `path`; above `external_from` bytes the weights go to `<name>.data` next to it, as in the optimizers."""
    proto, data = with_weights(model), Path(f"{path}.data")
    if model.nbytes() <= min(external_from, PROTOBUF_LIMIT):
        onnx.save(proto, path)
        return
    data.unlink(missing_ok=True)  # onnx appends to an existing file
    onnx.save(proto, path, save_as_external_data=True, all_tensors_to_one_file=True, location=data.name)


def is_valid(model: DetachedModel) -> bool:
    """Whether ONNX's checker accepts the model; a model too large for the checker counts as valid."""
    if model.nbytes() > PROTOBUF_LIMIT:
        return True
    try:
        onnx.checker.check_model(with_weights(model))
    except onnx.checker.ValidationError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class InProcessStep(CompositeStep):
    """`run(source, target, left_out)` optimizes `source` into `target` without the inner passes `left_out`."""

    name: str
    names: tuple[str, ...]
    """The inner passes of `run`."""
    run: Callable[[str, str, Sequence[str]], None]
    narrows: bool = False
    """Whether the caller gave input shapes that differ from the model's declared shapes."""
    left_out: tuple[str, ...] = ()
    suspects: ClassVar[tuple[str, ...]] = ("constant_folding", "shape_inference")
    annotates: ClassVar[bool] = True  # the caller gets the shapes that it infers, also where no node changes

    @property
    def source(self) -> str:  # type: ignore[override]
        return self.name

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        folder = Path(tempfile.mkdtemp(dir=context.folder, prefix="here-"))  # the weights stay in it, mapped
        source, target = folder / "before.onnx", folder / "after.onnx"
        save(model, source, external_from=PROTOBUF_LIMIT)
        try:
            self.run(str(source), str(target), self.left_out)
        except Exception as error:  # whatever an optimizer raises
            raise StepFailed(f"{type(error).__name__}: {error}") from error
        return PassResult(read_model(target, known=model.weights))

    def inner(self, context: PassContext) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.left_out)


def plan_without(step: Step, inner: Sequence[str], skips: Skips, notes: tuple[str, ...]) -> CallPlan:
    """The plan of one composite step, without the skipped passes among `inner`."""
    skipped = {
        name: skip.reason for name in (f"{step.name}/{inner_name}" for inner_name in inner) if (skip := skips(name))
    }
    left_out = [name.partition("/")[2] for name in skipped]
    return CallPlan((step.without(left_out),), skipped, notes)
