"""Loads and calls functions that the user named (a factory, a loader of inputs), and finds the line that raised.

Needs no torch.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from passes.suggest import nearest
from passes.user_files import OURS, STDLIB, is_installed, is_user_code, own_names, run_file
from passes.worker.own_names import describe_clash
from pipeline.config import split_factory
from pipeline.errors import OnnxlineError, SourceError, UsageError

if TYPE_CHECKING:
    from torch import nn


def innermost_line(error: BaseException, own: str = "") -> str:
    """`file:line: code` of the innermost frame of the user's code.

    The user's code is below the folder `own`; else any that is not installed; else that of a library, torch last. Empty
    where no frame qualifies, as for the import of a missing module.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    frames = [frame for frame in frames if not frame.filename.startswith((*OURS, "<"))]
    kinds: tuple[Callable[[str], bool], ...] = (
        lambda file: bool(own) and file.startswith(own) and not is_installed(file.removeprefix(own)),
        is_user_code,
        lambda file: not file.startswith(STDLIB) or (is_installed(file) and "-packages/torch/" not in file),
        lambda file: not file.startswith(STDLIB) or is_installed(file),
    )
    for is_own in kinds:
        for frame in reversed(frames):
            if is_own(frame.filename):
                return f"{frame.filename}:{frame.lineno}" + (f": {frame.line}" if frame.line else "")
    return ""


def module_frame(error: BaseException, module: nn.Module) -> tuple[str, str] | None:
    """The path of the innermost of the submodules whose own code raised, and the innermost line of the user's code.

    torch's own layers count, since `self.proj` with the wrong width is best named by its path; its line is that of
    the call.
    """
    paths = {id(child): path for path, child in module.named_modules()}
    raised_in = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if id(owner) in paths and frame.f_code.co_name not in DISPATCH:
            raised_in = paths[id(owner)] or type(module).__name__
    return None if raised_in is None else (raised_in, innermost_line(error))


def where_raised(error: BaseException, module: nn.Module) -> str:
    """` in module 'layers.0' (file:line: code)`; empty where no submodule raised."""
    frame = module_frame(error, module)
    return f" in module {frame[0]!r} ({frame[1]})" if frame else ""


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message: `KeyError: 'x'`."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def advice_on_trace(error: BaseException) -> str | None:
    """Advice for what torch.export cannot trace, if `error` says which: a write that it does not see, a tensor from
    elsewhere, or a class that it cannot flatten; None otherwise.

    We do not register the class ourselves: the process shares the table, and a second entry by the user would fail.
    """
    match = UNKNOWN.search(str(error))
    if match is None:
        return next((advice for said, advice in ON_TENSORS if said.search(str(error))), None)
    name = match["name"].rpartition(".")[2]
    return (
        f"{match['name']} is no type that torch can take apart: where it is a dataclass, call "
        f"torch.export.register_dataclass({name}) once before; of another class, give its tensors in tuples, lists "
        "and dicts, or enter it by torch.utils._pytree.register_pytree_node"
    )


UNKNOWN = re.compile(r"(?:Found|Unsupported input type) <class '(?P<name>[^']+)'>")
"""The wording of torch.export for results and for arguments (torch 2.11 to 2.13)."""

ON_TENSORS = (
    (
        re.compile(
            "fake tensor in the exported program constant|is mutated in the forward method|set_ on a graph input"
        ),
        "forward writes to a tensor where torch.export does not see it: through `.data` or `set_`, or to a tensor of a "
        "closure or a global name; make it a buffer of the module (self.register_buffer) and write in place, as in "
        "self.state.copy_(value)",
    ),
    (
        re.compile("at least two devices, (cpu and meta|meta and cpu)"),
        "forward computes with a tensor that lies on the CPU, while the module or its inputs are on meta: one of a "
        "closure or a global name, or one that forward makes there; make it a parameter or a buffer of the module, or "
        "make it on x.device",
    ),
)
"""What torch says of a tensor (torch 2.13), and what to do."""

# Frames of nn.Module around forward, in every call.
DISPATCH = {"_call_impl", "_wrapped_call_impl"}

T = TypeVar("T")

BINDERS: Final = {"__dict__", "__getattr__", "exec", "globals", "locals", "setattr", "vars"}
"""Names in a file that may bind others when it runs."""


def check_function(text: str, key: str, title: str) -> None:
    """Refuse what is wrong for sure with a function that the user named, without running its file, which often imports
    torch.

    Args:
        text: `path/to/file.py:name` or `package.module:name`; of a module, only its presence is checked.
        key: the key of the configuration that holds it.
        title: how messages begin: `the factory net.py:make`.

    Raises:
        SourceError: the file is no Python, or nothing in it can bind the name; or there is no such module.
    """
    place, name = split_factory(text, key)
    if not place.endswith(".py"):
        _check_module(place, title)
        return
    tree = call_user_code(lambda: ast.parse(Path(place).read_bytes(), place), _loading(title), f"{place}:")
    nodes = list(ast.walk(tree))
    # Fields that hold names: of variables, attributes, definitions, imports, handlers and patterns.
    found = {getattr(node, field, None) for node in nodes for field in ("id", "attr", "name", "asname", "rest")}
    found.update(*(node.names for node in nodes if isinstance(node, ast.Global)))
    if name in found or "*" in found or found & BINDERS:
        return
    functions = [statement.name for statement in tree.body if isinstance(statement, ast.FunctionDef | ast.ClassDef)]
    raise _absence_error(title, name, [function for function in functions if not function.startswith("_")])


def _check_module(name: str, title: str) -> None:
    """Refuse a module that no import can find: one of no installed package, or not in the folder of its package.

    A package whose `__init__.py` names `sys` or `__path__` may have modules without files, which are not looked for.

    Raises:
        SourceError: there is no such module.
    """
    package, _, rest = name.partition(".")
    if name in sys.modules:
        return
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that a program made, without a spec
        return
    while spec is not None and rest:
        if spec.submodule_search_locations is None or (spec.origin and _may_add_modules(Path(spec.origin))):
            return
        part, _, rest = rest.partition(".")
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    if spec is None:
        raise SourceError(
            f"{title}: there is no module {name!r}; expected one that Python can import, or path/to/file.py:function"
        )


def _may_add_modules(init: Path) -> bool:
    """Whether a package may have modules without files; one whose source cannot be read (in a zip, say) may."""
    return init.suffix != ".py" or not init.is_file() or re.search(rb"\bsys\b|__path__", init.read_bytes()) is not None


def load_function(text: str, key: str, title: str) -> Callable[..., Any]:
    """Load the callable that `path/to/file.py:name` or `package.module:name` names; classes are callable too.

    Args:
        key: the key of the configuration that holds it.
        title: how messages begin: `the factory net.py:make`.

    Raises:
        SourceError: there is no such file, module or function, or its code raises.
    """
    place, name = split_factory(text, key)
    module = _import(place, title)
    value = getattr(module, name, None)
    if callable(value):
        return value
    known = own_names(module)
    if value is not None:
        raise SourceError(f"{title}: {name!r} is {type(value).__name__}, expected a function{_hint(name, known)}")
    raise _absence_error(title, name, known)


def _absence_error(title: str, name: str, known: Sequence[str]) -> SourceError:
    return SourceError(f"{title}: no function {name!r} there{_hint(name, known)}")


def _hint(name: str, known: Sequence[str]) -> str:
    return nearest(name, known) or f"; it has: {', '.join(known[:8]) or 'no functions'}"


@contextmanager
def kept_surroundings() -> Iterator[None]:
    """Put back what the user's code may change around us: the working directory, to which the paths of a run are
    relative, and numpy's handling of floating-point errors, with which our own comparisons would raise. A child that
    the user's code forks ends here: the run would go on in both, on the same files."""
    process = os.getpid()
    try:
        folder = Path.cwd()
    except FileNotFoundError:  # it was removed
        folder = None
    try:
        with np.errstate():
            yield
    finally:
        if os.getpid() != process:
            os._exit(UsageError.exit_code)
        if folder is not None:
            os.chdir(folder)


def call_user_code(call: Callable[[], T], title: str, own: str) -> T:
    """Call the user's code; any error becomes a SourceError that names the innermost line of that code.

    Args:
        title: how the message begins, with its verb: `the factory net.py:make raises`.
        own: the reference by which the user named the code.
    """
    try:
        with kept_surroundings():
            value = call()
        if inspect.iscoroutine(value):  # the caller refuses it; Python would warn that it was never awaited
            value.close()
        return value
    except OnnxlineError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        folder = _folder_of(own)
        line = innermost_line(error, folder)
        place = f"\n  at {line}" if line else ""
        clash = describe_clash(folder)
        advice = f"\n  {clash}; rename it, or run onnxline in its folder" if clash else ""
        raise SourceError(f"{title} {first_line(error)}{place}{advice}") from error


def _folder_of(text: str) -> str:
    """The folder of a file, or of the package of a module; empty where it has none."""
    place = text.rpartition(":")[0] or text
    if place.endswith(".py"):
        return str(Path(place).parent)
    package = sys.modules.get(place.partition(".")[0])
    file = getattr(package, "__file__", None)
    return str(Path(file).parent if Path(file).stem == "__init__" else file) if file else ""


def _import(place: str, title: str) -> ModuleType:
    if not place.endswith(".py"):
        return call_user_code(lambda: importlib.import_module(place), f"{title}: importing {place} raises", f"{place}:")
    path = Path(place)
    if not path.is_file():
        raise SourceError(f"{title}: no file {place!r}; paths are relative to the configuration file")
    return call_user_code(lambda: run_file(path), _loading(title), f"{place}:")


def _loading(title: str) -> str:
    return f"{title}: loading its file raises"
