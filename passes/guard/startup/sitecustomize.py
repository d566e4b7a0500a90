"""The first code that a Python child of a guard runs: hook into what it starts, and wait until it imports an optimizer.

Python imports a module of this name at its start. Only the standard library is used, and little of it, so the cost for
a child that never imports an optimizer is some milliseconds. A `sitecustomize` that this one hides is run as well."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False  # not typing's, which is slow to load
if TYPE_CHECKING:
    from types import ModuleType

FOLDER = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120 - pathlib is slow to load
PASSES = os.path.dirname(os.path.dirname(FOLDER))  # noqa: PTH120

HOOKS = "_onnxline.passes.guard.startup.hooks"
"""The name under which the rest of our code imports hooks.py; so it is loaded only once."""

REGISTRY = "_onnxline.passes.guard.registry"
"""The module whose `inherit()` activates the guards in the environment."""


def begin() -> None:
    """Set up the hooks, then run the hidden `sitecustomize`: if that fails, the guard is in place."""
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != FOLDER]
    hooks = _load(HOOKS, f"{FOLDER}/hooks.py")
    if hooks.VARIABLE in os.environ:
        _wait(hooks)
    hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if hidden is not None and hidden.loader is not None:
        module = importlib.util.module_from_spec(hidden)
        sys.modules["sitecustomize"] = module
        hidden.loader.exec_module(module)


def _wait(hooks: ModuleType) -> None:
    own_names = _load("_onnxline.passes.worker.own_names", f"{PASSES}/worker/own_names.py")
    # Taken now: a script may clear its environment before it imports an optimizer.
    variables = {hooks.VARIABLE: os.environ[hooks.VARIABLE]}
    own_names.add_private_names()
    hooks.LAUNCHES.open(variables)
    sys.meta_path.insert(0, hooks.AfterImport(hooks.LIBRARIES, _guard))


def _load(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _guard(name: str) -> None:
    if "." in name:  # a part of a library that is still being imported
        return
    try:
        importlib.import_module(REGISTRY).inherit()
    except ImportError as error:
        raise ImportError(
            f"onnxline guard: {sys.executable} imports {name}, and onnxline, which would guard it, does not work there "
            f"({error}); install what onnxline needs there, such as onnx and onnxruntime"
        ) from error


if __name__ == "sitecustomize":
    begin()
