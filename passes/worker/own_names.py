"""Load our packages under private names or by path: a user's script may have its own modules `passes` and `pipeline`.

Only the standard library is used, since this file is also loaded by path, before anything else of ours:

- as a program, `python own_names.py MODULE …` runs a module of ours, whatever the working directory holds;
- `claim_names()` is for a process that is ours: `passes` and `pipeline` are then our packages;
- `add_private_names()` is for a process that is a script's: `_onnxline.passes` is our package there, and `passes` is
  whatever the script would get without us;
- `choose_prefix()` is for `import onnxline` and the command: private names only where the public names are taken, or a
  file in the command's working directory has them.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False  # not typing's, which is slow to load
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import CodeType, ModuleType
    from typing import Any

PREFIX = "_onnxline"
"""The package, of which there is no file, that holds our packages in a script's process."""

PACKAGES = ("passes", "pipeline")

FILE = os.path.realpath(__file__)
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(FILE)))  # noqa: PTH120 - pathlib is slow to load
"""The folder that holds our packages."""


class OwnNames:
    """A finder for `sys.meta_path`. Where the process is not ours, `passes` is ours only if it is found in our folder:
    then it is the same module as `_onnxline.passes`."""

    is_onnxlines = True
    """This file may be loaded more than once, so the class does not identify the finder."""

    def __init__(self, *, private: bool, claims: bool) -> None:
        self._private = private
        self._claims = claims
        self._asking: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top, _, rest = name.partition(".")
        if top == PREFIX and self._private and rest.partition(".")[0] in PACKAGES:
            return _private_spec(name, path)
        if top not in PACKAGES:
            return None
        if not self._private:
            return importlib.machinery.PathFinder.find_spec(name, path if rest else [ROOT])
        if rest:
            package = sys.modules.get(top)
            is_ours = package is not None and package is sys.modules.get(f"{PREFIX}.{top}")
            is_ours = is_ours and importlib.util.find_spec(f"{PREFIX}.{name}") is not None
        else:
            spec = None if self._claims else self._ask_others(name)
            is_ours = self._claims or _is_at_root(spec)
            if not is_ours:
                return spec
        if not is_ours:
            return None
        return importlib.util.spec_from_loader(name, _AliasLoader(name))  # type: ignore[arg-type]  # no load_module

    def _ask_others(self, name: str) -> importlib.machinery.ModuleSpec | None:
        """What the process would import without this finder."""
        if name in self._asking:
            return None
        self._asking.add(name)
        try:
            others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
            return next((spec for finder in others if (spec := finder.find_spec(name, None)) is not None), None)
        finally:
            self._asking.discard(name)


class _PrivateLoader(importlib.machinery.SourceFileLoader):
    """Executes a file of ours such that its own `import passes.…` imports `_onnxline.passes.…`."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


class _AliasLoader:
    """A loader that makes a public module name an alias of the private one."""

    def __init__(self, name: str) -> None:
        self._private = f"{PREFIX}.{name}"

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None  # a fresh one, which is thrown away

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self._private)

    def is_package(self, name: str) -> bool:
        spec = importlib.util.find_spec(self._private)
        return spec is not None and spec.submodule_search_locations is not None

    def get_code(self, name: str) -> CodeType | None:
        """For `python -m`."""
        spec = importlib.util.find_spec(self._private)
        return spec.loader.get_code(self._private) if spec and isinstance(spec.loader, _PrivateLoader) else None

    def get_filename(self, name: str) -> str:
        spec = importlib.util.find_spec(self._private)
        return (spec.origin if spec else None) or ""


def claim_names() -> None:
    """From now on `passes` and `pipeline` are ours in this process, whatever comes first on `sys.path`."""
    _add(OwnNames(private=False, claims=True))


def add_private_names(*, claims: bool = False) -> None:
    """From now on `_onnxline.passes` is our package; see `OwnNames` for what `passes` is."""
    package = type(sys)(PREFIX, "The packages of onnxline, under names that no script uses.")
    package.__path__ = [ROOT]
    sys.modules.setdefault(PREFIX, package)
    _add(OwnNames(private=True, claims=claims))


def choose_prefix() -> str:
    """Return what our code is imported under in this process: `_onnxline.` or, where our names are free, nothing."""
    is_command = os.path.basename(next(iter(sys.argv), "")) == "onnxline"  # noqa: PTH119
    if PREFIX in sys.modules or taken_names() or (is_command and find_rivals("")):
        add_private_names()
        return f"{PREFIX}."
    for name in PACKAGES:  # they stay ours, whatever a script puts on `sys.path` later
        importlib.import_module(name)
    return ""


def taken_names() -> list[str]:
    """Those of our names that are somebody else's module in this process."""
    return [name for name in PACKAGES if not _is_at_root(_find_spec(name))]


def find_rivals(folder: str) -> list[str]:
    """The files in `folder` that have our names and are not ours; code in that folder imports these files."""
    specs = (importlib.machinery.PathFinder.find_spec(name, [folder]) for name in PACKAGES)
    return [spec.origin for spec in specs if spec is not None and spec.origin and not _is_at_root(spec)]


def describe_clash(folder: str) -> str:
    """Say that a file in `folder` is hidden by a package of ours of the same name; empty where none is."""
    ours = getattr(sys.modules.get("passes"), "__file__", None) or ""
    if not folder or os.path.realpath(ours) != os.path.join(ROOT, "passes", "__init__.py"):  # noqa: PTH118
        return ""
    return next(
        (f"{file} is not found here, since onnxline has a package of that name" for file in find_rivals(folder)), ""
    )


def _find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # a module that a script has put into `sys.modules` by hand has no spec
        return None


def _add(finder: OwnNames) -> None:
    if not any(getattr(finder, "is_onnxlines", False) for finder in sys.meta_path):
        sys.meta_path.insert(0, finder)  # type: ignore[arg-type]


def _private_spec(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is not None and spec.origin is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        spec.loader = _PrivateLoader(name, spec.origin)
    return spec


def _is_at_root(spec: importlib.machinery.ModuleSpec | None) -> bool:
    if spec is None or spec.origin is None:
        return False
    if isinstance(spec.loader, _AliasLoader):
        return True
    return os.path.realpath(spec.origin) == os.path.join(ROOT, spec.name, "__init__.py")  # noqa: PTH118


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """`__import__`, as the modules of ours see it under their private names."""
    top = name.partition(".")[0]
    if level or top not in PACKAGES:
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    module = builtins.__import__(f"{PREFIX}.{name}", globals, locals, fromlist or (), 0)
    return module if fromlist else sys.modules[f"{PREFIX}.{top}"]


def _run() -> None:
    """Run the module that the command line names; under a private name it is private to its caller, too, who then
    sends and receives objects of private classes."""
    import runpy  # slow to load

    del sys.argv[0]
    name = sys.argv[0]
    if name.startswith(f"{PREFIX}."):
        add_private_names(claims=True)
    else:
        claim_names()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run()
