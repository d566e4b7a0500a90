"""Passes of the user's own, in a file or from an installed package: a class, or a function ModelProto → ModelProto.

They are loaded because the user named them: here to see what they are, and in the worker, where they run. A crash, an
endless loop or an error costs that step. The one exception is a class that is a full Step, whose `apply` takes a
context: it runs here and uses the context's worker as it likes.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final, Literal, TypeVar

import onnx
from google.protobuf.message import DecodeError

from passes.context import PassContext
from passes.errors import PassError, PolicyError, StepFailed
from passes.external.through_files import through_files, write
from passes.graph.traversal import sort_nodes
from passes.step import PassResult, Step
from passes.suggest import nearest
from passes.weights.detached import DetachedModel
from passes.worker.own_names import describe_clash

__all__ = [
    "GROUP",
    "AdoptedStep",
    "UserPass",
    "call_user_code",
    "code_digest",
    "installed_passes",
    "is_reference",
    "load",
    "run_on_file",
    "run_on_structure",
    "user_step",
]

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

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        what = {"reference": self.reference, "options": dict(self.options)}
        if self.reads == "values":
            return PassResult(through_files(model, context, run_on_file, what))
        result = context.worker.call(run_on_structure, model=model.proto.SerializeToString(), **what)
        proto = onnx.load_from_string(result)
        sort_nodes(proto.graph)
        return PassResult(model.with_proto(proto))


class AdoptedStep(Step):
    """A full step of the user's: what it lacks of a step has the defaults, and it may return a model alone.

    Args:
        step: an object with `name`, `source` and `apply(model, context)`, which returns a PassResult, or a
            DetachedModel: the one that it was given for no change.
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
            returned = self._apply(model, context)
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


def user_step(reference: str, options: Mapping[str, Any]) -> Step:
    """The step that `reference` names, made with `options`.

    Raises:
        PolicyError: there is nothing there (naming the nearest), loading it raises, it is no pass, or it does not
            take these options.
    """
    loaded = _load_pass(reference, options)
    if loaded.takes_context:
        return AdoptedStep(loaded.owner)
    entry = None if is_reference(reference) else installed_passes()[reference]
    name = loaded.name if entry is None else reference
    source = entry.dist.name if entry is not None and entry.dist is not None else "user"
    return UserPass(reference, name, loaded.reads, dict(options), source)


def run_on_file(source: str, target: str, options: dict[str, Any]) -> None:
    """In the worker: run a pass of the user's on the whole model in the file `source`."""
    write(_run(options["reference"], options["options"], onnx.load(source)), target)


def run_on_structure(model: bytes, reference: str, options: dict[str, Any]) -> bytes:
    """In the worker: run a pass of the user's on a model with stand-ins."""
    return _run(reference, options, onnx.load_from_string(model)).SerializeToString()


def _run(reference: str, options: dict[str, Any], model: onnx.ModelProto) -> onnx.ModelProto:
    loaded = _load_pass(reference, options)
    try:
        result = loaded.function(model)
    except (ImportError, AttributeError) as error:
        clash = _clash_beside(reference)
        if not clash:
            raise
        raise ImportError(f"{error}; {clash}") from error
    if not isinstance(result, onnx.ModelProto):
        raise TypeError(f"the pass {reference} returned {type(result).__name__}; expected an onnx.ModelProto")
    return result


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

Result = TypeVar("Result")


def is_reference(name: str) -> bool:
    """Whether a recipe's item is `file.py:Name` or `module:Name`, and not the name of a pass."""
    return ":" in name


def installed_passes() -> Mapping[str, metadata.EntryPoint]:
    """The passes that installed packages bring, by name; nothing is loaded."""
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


def load(reference: str) -> Any:
    """The object that `path/to/file.py:Name`, `package.module:Name` or the name of an entry point refers to.

    A file is run again each time, as a module of its own; its folder is importable meanwhile, as for a script.

    Raises:
        PolicyError: there is no such file, module, name or entry point, with the nearest; or loading it raises.
    """
    if not is_reference(reference):
        entry = installed_passes()[reference]
        return call_user_code(entry.load, f"loading the pass {reference!r} raises")
    place, _, name = reference.rpartition(":")
    module = _module(place, reference)
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = nearest(name, known) or f"; it has: {', '.join(known[:8]) or 'nothing to call'}"
        raise PolicyError(f"the pass {reference}: no {name!r} there{hint}")
    return getattr(module, name)


def code_digest(names: Iterable[str]) -> str:
    """A digest of the code behind the user's passes among `names`: their files with what these imported from beside
    them, and the releases of their packages. Names of other passes do not count.

    Raises:
        PolicyError: as for `load`.
    """
    digest = hashlib.blake2b(digest_size=16)
    entries = installed_passes()
    for name in names:
        entry = None if is_reference(name) else entries.get(name)
        if entry is not None and entry.dist is not None:
            digest.update(f"{entry.dist.name} {entry.dist.version}".encode())
        if entry is None and not is_reference(name):
            continue
        load(name)
        for file in sorted(_beside(entry.module if entry is not None else name.rpartition(":")[0])):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _clash_beside(reference: str) -> str:
    """The sentence about a file beside the user's that has the name of a package of ours; empty where none has."""
    place = reference.rpartition(":")[0]
    clash = describe_clash(str(Path(place).resolve().parent)) if place.endswith(".py") else ""
    return f"{clash}; rename it" if clash else ""


def call_user_code(make: Callable[[], Result], title: str, reference: str = "") -> Result:
    """Call `make`, which runs the user's code; any error becomes a PolicyError with its place.

    Raises:
        PolicyError: `title`, the error, and the line that raised it.
    """
    try:
        return make()
    except PassError:
        raise
    except (Exception, SystemExit) as error:
        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")
        ]
        place = f"\n  at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        said = str(error).strip().splitlines() or [""]
        clash = _clash_beside(reference)
        advice = f"\n  {clash}" if clash else ""
        raise PolicyError(f"{title} {type(error).__name__}: {said[0]}{place}{advice}") from error


def _module(place: str, reference: str) -> ModuleType:
    if not place.endswith(".py"):
        return call_user_code(lambda: importlib.import_module(place), f"the pass {reference}: importing {place} raises")
    path = Path(place)
    if not path.is_file():
        beside = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise PolicyError(
            f"the pass {reference}: no file {place!r}{nearest(path.name, beside)}; in a configuration, relative paths "
            "are relative to its folder"
        )
    return call_user_code(
        lambda: _run_file(path.resolve()), f"the pass {reference}: loading its file raises", reference
    )


def _run_file(path: Path) -> ModuleType:
    name = f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look a class's module up here
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def _beside(place: str) -> set[Path]:
    """The file of a loaded module, and the loaded files of the same folder or below, less what pip installed there."""
    own = place if place.endswith(".py") else getattr(sys.modules[place], "__file__", None)
    if own is None:
        return set()
    folder = Path(own).resolve().parent
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    files = {Path(own).resolve(), *(Path(file).resolve() for file in loaded if file)}
    near = (file for file in files if file.is_relative_to(folder) and file.is_file())
    return {file for file in near if "site-packages" not in file.relative_to(folder).parts}
