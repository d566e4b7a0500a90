"""The code of the user's passes: it is loaded, described and run here, in a process of its own.

`passes/recipe/user_passes.py` has the steps, which call what stands here in a worker whose calls are alone. Of a full
step, whose `apply` takes a context, all methods are called here, each on an object that is made afresh.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from passes.context import PassContext, open_local_context
from passes.errors import PassError, PolicyError, StepFailed
from passes.external.through_files import write
from passes.step import PassResult, Step
from passes.suggest import nearest
from passes.user_files import call_user_code, clash_next_to, files_next_to, is_reference, load_object
from passes.weights.detached import DetachedModel
from passes.weights.sharing import MappedModel, WeightFile, portable

Reads = Literal["values", "structure"]
READS: Final = ("values", "structure")

Result = TypeVar("Result")

Draws = Sequence[Mapping[str, np.ndarray]]
"""The inputs on which the run compares models."""


class AdoptedStep(Step):
    """A full step of the user's: what it lacks of a step has the defaults, and it may return a model alone.

    Args:
        step: an object with `name`, `source` and `apply(model, context)`, which returns a PassResult, or a
            DetachedModel: its argument `model` for no change.
    """

    def __init__(self, step: Any) -> None:
        own = [name for name in dir(Step) if not name.startswith("_") and hasattr(step, name)]
        vars(self).update({name: getattr(step, name) for name in ("name", "source", *own) if name != "apply"})
        if "inner" in own and "without" in own:
            is_composite = getattr(step, "is_composite", True)
            vars(self).update(is_composite=is_composite, without=lambda names: AdoptedStep(step.without(names)))
        self._apply = step.apply

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        try:
            returned = _call_once(lambda: self._apply(model, context))
        except (PassError, DecodeError):
            raise
        except Exception as error:
            raise StepFailed(f"{type(error).__name__}: {error}") from error
        result = returned if isinstance(returned, PassResult) else PassResult(returned, changed=returned is not model)
        after: object = result.model
        if not isinstance(after, DetachedModel) or not isinstance(after.proto, onnx.ModelProto):
            kind = type(after.proto if isinstance(after, DetachedModel) else after).__name__
            raise StepFailed(f"returned {kind}; expected a DetachedModel, which holds an onnx.ModelProto")
        return result


@dataclass(frozen=True, slots=True)
class PassFacts:
    """What a pass is, as far as other processes have to know.

    Args:
        fields: what a full step says of itself, such as `makes_structures`; plain data.
        composite: whether it is a full step with passes inside.
    """

    name: str
    source: str
    reads: Reads
    takes_context: bool
    fields: Mapping[str, Any]
    composite: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """The message of a PolicyError, for the process that has asked."""

    message: str


@dataclass(frozen=True, slots=True)
class StepReference:
    """A full step of the user's: the reference to load, the options of its class, and the inner passes to leave out."""

    reference: str
    options: Mapping[str, Any]
    left_out: tuple[str, ...] = ()

    def make(self) -> Step:
        step = AdoptedStep(_load_pass(self.reference, self.options).owner)
        return step.without(self.left_out) if self.left_out else step


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a full step has returned; no model where it changed nothing."""

    model: MappedModel | None
    why: str | None


def describe(reference: str, options: Mapping[str, Any]) -> PassFacts | Refusal:
    """Load the pass and return its facts, or the reason why it is not a pass."""
    try:
        loaded = _load_pass(reference, options)
        step = AdoptedStep(loaded.owner) if loaded.takes_context else None
    except PolicyError as error:
        return Refusal(str(error))
    entry = None if is_reference(reference) else installed_passes()[reference]
    name = loaded.name if entry is None else reference
    source = entry.dist.name if entry is not None and entry.dist is not None else "user"
    if step is None:
        return PassFacts(name, source, loaded.reads, False, {}, False)
    fields = {field: value for field in FIELDS if (value := getattr(step, field)) != getattr(Step, field)}
    return PassFacts(step.name, step.source, loaded.reads, True, fields, step.is_composite)


FIELDS: Final = (
    *("annotates", "suspects", "never_run", "joins_weights", "writes_contrib", "makes_structures", "destroys"),
    *("destroys_equals", "description", "describes", "narrows"),
)
"""What other steps and the runner ask of a step without calling it."""


def files_of(reference: str) -> tuple[Path, ...] | Refusal:
    """The file of a pass, and the files in the same folder that it has imported."""
    try:
        load(reference)
    except PolicyError as error:
        return Refusal(str(error))
    location = reference.rpartition(":")[0] if is_reference(reference) else installed_passes()[reference].module
    return tuple(sorted(files_next_to(location)))


def run_step(step: StepReference, model: MappedModel, folder: str, draws: Draws) -> StepOutput:
    """Apply a full step; large new weights go to a file in `folder`."""
    source = model.to_detached()
    with open_local_context() as context, context.drawing(lambda: draws):
        result = step.make().apply(source, context)
        if not result.changed:
            return StepOutput(None, result.why)
        return StepOutput(portable(result.model, WeightFile(Path(folder))), result.why)


def inner_passes(step: StepReference) -> tuple[str, ...]:
    """In the user's worker: the inner passes that a step of the user's would run."""
    with open_local_context() as context:
        return tuple(step.make().inner(context))


def check_options(step: StepReference) -> Refusal | None:
    """In the user's worker: the refusal of a step's options; None if it takes them."""
    try:
        with open_local_context() as context:
            step.make().check(context)
    except PolicyError as error:
        return Refusal(str(error))
    return None


def run_on_file(source: str, target: str, options: dict[str, Any]) -> None:
    """In the worker: run a pass of the user's on the whole model in the file `source`."""
    write(_run(options["reference"], options["options"], onnx.load(source)), target)


def run_on_structure(model: bytes, reference: str, options: dict[str, Any]) -> bytes:
    """In the worker: run a pass of the user's on a model with stand-ins."""
    return _run(reference, options, onnx.load_from_string(model)).SerializeToString()


def _run(reference: str, options: dict[str, Any], model: onnx.ModelProto) -> onnx.ModelProto:
    loaded = _load_pass(reference, options)
    try:
        result = _call_once(lambda: loaded.function(model))
    except (ImportError, AttributeError) as error:
        clash = clash_next_to(reference)
        if not clash:
            raise
        raise ImportError(f"{error}; {clash}") from error
    if not isinstance(result, onnx.ModelProto):
        raise TypeError(f"the pass {reference} returned {type(result).__name__}; expected an onnx.ModelProto")
    return result


def _call_once(call: Callable[[], Result]) -> Result:
    """What `call` returns, in this process: a fork in which it comes back as well ends there."""
    process = os.getpid()
    try:
        return call()
    finally:
        if os.getpid() != process:
            os._exit(0)


@dataclass(frozen=True, slots=True)
class _LoadedPass:
    """A pass that is ready to run; `owner` is its object, or the function itself."""

    owner: Any
    function: Callable[[onnx.ModelProto], Any]
    name: str
    reads: Reads
    takes_context: bool


def _load_pass(reference: str, options: Mapping[str, Any]) -> _LoadedPass:
    target = load(reference)
    owner, left = target, dict(options)
    if inspect.isclass(target) or _is_factory(target):
        _refuse_options(target, (), options, reference)
        owner, left = call_user_code(lambda: target(**options), f"the pass {reference} cannot be made:", reference), {}
    apply = getattr(owner, "apply", owner)
    if not callable(apply):
        raise PolicyError(
            f"{reference} is of type {type(owner).__name__}; expected a function ModelProto → ModelProto, or a class "
            "with apply(model) that returns one"
        )
    reads = getattr(owner, "reads", "values")
    if reads not in READS:
        raise PolicyError(f"the pass {reference} has reads = {reads!r}; expected one of {', '.join(READS)}")
    takes_context = owner is not apply and _positional(apply) == 2
    if not takes_context:
        _refuse_options(apply, (None,), left, reference)
    elif left or not all(isinstance(getattr(owner, field, None), str) for field in ("name", "source")):
        raise PolicyError(f"{reference} is a step, as its apply takes a context; expected a class with name and source")
    name = getattr(owner, "name", None)
    name = name if isinstance(name, str) and name else reference.rpartition(":")[2]
    return _LoadedPass(owner, lambda model: apply(model, **left), name, reads, takes_context)


def _is_factory(target: Any) -> bool:
    """A function that can be called without a model makes the pass; any other function is the pass."""
    return inspect.isfunction(target) and _positional(target) == 0


def _positional(function: Callable[..., Any]) -> int:
    """How many arguments have to be given by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(parameter.kind in kinds and parameter.default is parameter.empty for parameter in parameters)


def _refuse_options(function: Any, positional: tuple[Any, ...], options: Mapping[str, Any], reference: str) -> None:
    """Raises PolicyError when `function` cannot be called with `positional` and `options`."""
    signature = inspect.signature(function)
    try:
        signature.bind(*positional, **options)
    except TypeError as error:
        takes = [*signature.parameters][len(positional) :]
        unknown = next((name for name in options if name not in takes), "")
        hint = nearest(unknown, takes) or f"; its options are: {', '.join(takes) or 'none'}"
        raise PolicyError(f"the pass {reference} does not take these options: {error}{hint}") from error


GROUP: Final = "onnxline.passes"
"""The entry points that packages announce their passes by."""


def installed_passes() -> Mapping[str, metadata.EntryPoint]:
    """The passes that installed packages bring, by name; nothing is loaded."""
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


def load(reference: str) -> Any:
    """The object that `path/to/file.py:Name`, `package.module:Name` or the name of an entry point refers to.

    Raises:
        PolicyError: there is no such file, module, name or entry point, with the nearest; or loading it raises.
    """
    if not is_reference(reference):
        entry = installed_passes()[reference]
        return call_user_code(entry.load, f"loading the pass {reference!r} raises")
    return load_object(reference, f"the pass {reference}")
