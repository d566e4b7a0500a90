"""Passes of the user's own, in a file or from an installed package: a class, or a function ModelProto → ModelProto.

They are loaded because the user named them: here to see what they are, and in the worker, where they run. A crash, an
endless loop or an error costs that step. The one exception is a class that is a full Step, whose `apply` takes a bench:
it runs here and uses the bench's worker as it likes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

import onnx

from passes.context import PassContext
from passes.errors import PolicyError
from passes.external.files import through_files
from passes.external.written import write
from passes.model.order import sort_nodes
from passes.model.weights import DetachedModel
from passes.recipe.user_declarations import guarded, installed, is_reference, load
from passes.step import Step
from passes.suggest import nearest

__all__ = ["AdoptedStep", "UserPass", "run_on_file", "run_on_structure", "user_step"]

Reads = Literal["values", "structure"]
READS: Final = ("values", "structure")


@dataclass(frozen=True, slots=True)
class UserPass(Step):
    """A pass that the user wrote.

    Args:
        reference: what to load: `path/to/file.py:Name`, `package.module:Name`, or the name of an entry point.
        reads: `values` gets the whole model; `structure` gets it in milliseconds whatever it weighs, with stand-ins in
            place of the weights, and may move, copy and drop them, but not compute with them.
        options: keyword arguments of the class or the function.
    """

    reference: str
    name: str
    reads: Reads = "values"
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = "user"
    annotates: ClassVar[bool] = True

    def apply(self, model: DetachedModel, bench: PassContext) -> DetachedModel:
        what = {"reference": self.reference, "options": dict(self.options)}
        if self.reads == "values":
            return through_files(model, bench, "passes.recipe.user_passes:run_on_file", what)
        result = bench.worker.call(
            "passes.recipe.user_passes:run_on_structure", model=model.proto.SerializeToString(), **what
        )
        proto = onnx.load_from_string(result)
        sort_nodes(proto.graph)
        return model.with_proto(proto)


class AdoptedStep(Step):
    """A full step whose class does not derive from `Step`: what it lacks of one has the defaults.

    Args:
        step: an object with `name`, `source` and `apply(model, bench)`.
    """

    def __init__(self, step: Any) -> None:
        own = [name for name in dir(Step) if not name.startswith("_") and hasattr(step, name)]
        vars(self).update({name: getattr(step, name) for name in ("name", "source", *own)})
        if "inner" in own and "without" in own:
            vars(self).update(is_composite=True, without=lambda names: AdoptedStep(step.without(names)))


def user_step(reference: str, options: Mapping[str, Any]) -> Step:
    """The step that `reference` names, made with `options`.

    Raises:
        PolicyError: there is nothing there (naming the nearest), loading it raises, it is no pass, or it does not
            take these options.
    """
    made = _made(reference, options)
    if made.takes_bench:
        return made.owner if isinstance(made.owner, Step) else AdoptedStep(made.owner)
    entry = None if is_reference(reference) else installed()[reference]
    name = made.name if entry is None else reference
    source = entry.dist.name if entry is not None and entry.dist is not None else "user"
    return UserPass(reference, name, made.reads, dict(options), source)


def run_on_file(source: str, target: str, options: dict[str, Any]) -> None:
    """In the worker: run a pass of the user's on the whole model in the file `source`."""
    write(_run(options["reference"], options["options"], onnx.load(source)), target)


def run_on_structure(model: bytes, reference: str, options: dict[str, Any]) -> bytes:
    """In the worker: run a pass of the user's on a model with stand-ins."""
    return _run(reference, options, onnx.load_from_string(model)).SerializeToString()


def _run(reference: str, options: dict[str, Any], model: onnx.ModelProto) -> onnx.ModelProto:
    result = _made(reference, options).function(model)
    if not isinstance(result, onnx.ModelProto):
        raise TypeError(f"the pass {reference} returned {type(result).__name__}; expected an onnx.ModelProto")
    return result


@dataclass(frozen=True, slots=True)
class _Made:
    """A pass that is ready to run: `owner` is the object, or the function itself."""

    owner: Any
    function: Callable[[onnx.ModelProto], Any]
    name: str
    reads: Reads
    takes_bench: bool


def _made(reference: str, options: Mapping[str, Any]) -> _Made:
    found = load(reference)
    owner, left = found, dict(options)
    if inspect.isclass(found) or _is_factory(found):
        _refuse_options(found, (), options, reference)
        owner, left = guarded(lambda: found(**options), f"the pass {reference} cannot be made:"), {}
    apply = getattr(owner, "apply", owner)
    if not callable(apply):
        raise PolicyError(
            f"{reference} is of type {type(owner).__name__}; expected a function ModelProto → ModelProto, or a class "
            "with apply(model) that returns one"
        )
    reads = getattr(owner, "reads", "values")
    if reads not in READS:
        raise PolicyError(f"the pass {reference} has reads = {reads!r}; expected one of {', '.join(READS)}")
    takes_bench = owner is not apply and _positional(apply) == 2
    if not takes_bench:
        _refuse_options(apply, (None,), left, reference)
    elif left or not all(isinstance(getattr(owner, field, None), str) for field in ("name", "source")):
        raise PolicyError(f"{reference} is a step, as its apply takes a bench; expected a class with name and source")
    name = getattr(owner, "name", None)
    name = name if isinstance(name, str) and name else reference.rpartition(":")[2]
    return _Made(owner, lambda model: apply(model, **left), name, reads, takes_bench)


def _is_factory(found: Any) -> bool:
    """A function that can be called without a model makes the pass; any other function is the pass."""
    return inspect.isfunction(found) and _positional(found) == 0


def _positional(function: Callable[..., Any]) -> int:
    """How many arguments have to be given by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(one.kind in kinds and one.default is one.empty for one in parameters)


def _refuse_options(function: Any, given: tuple[Any, ...], options: Mapping[str, Any], reference: str) -> None:
    """Raises PolicyError when `function` cannot be called with `given` and `options`."""
    signature = inspect.signature(function)
    try:
        signature.bind(*given, **options)
    except TypeError as error:
        takes = [*signature.parameters][len(given) :]
        unknown = next((name for name in options if name not in takes), "")
        hint = nearest(unknown, takes) or f"; its options are: {', '.join(takes) or 'none'}"
        raise PolicyError(f"the pass {reference} does not take these options: {error}{hint}") from error
