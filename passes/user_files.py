"""The user's own files of Python: loaded by path or by the name of their module, with errors that say where."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final, TypeVar

from passes.errors import PassError, PolicyError
from passes.suggest import nearest
from passes.worker.own_names import describe_clash

Result = TypeVar("Result")


def from_home(text: str | Path) -> Path:
    """The path of a text that may begin with `~`; as it is written where that is nobody's home."""
    path = Path(text)
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def is_reference(name: str) -> bool:
    """Whether a text is `file.py:Name` or `module:Name`, and not a name or a file alone."""
    return ":" in name


def load_object(reference: str, title: str) -> Any:
    """The object that `path/to/file.py:Name` or `package.module:Name` refers to.

    A file is run again each time, as a module of its own; its folder is importable meanwhile, as for a script.

    Args:
        reference: the file or module, a colon, and the name in it.
        title: what messages call it, such as `the pass passes.py:Fuse`.

    Raises:
        PolicyError: there is no such file, module or name, with the nearest; or loading it raises.
    """
    location, _, name = reference.rpartition(":")
    module = _module(location, title)
    if not hasattr(module, name):
        known = own_names(module)
        hint = nearest(name, known) or f"; it has: {', '.join(known[:8]) or 'nothing to call'}"
        raise PolicyError(f"{title}: no {name!r} there{hint}")
    return getattr(module, name)


def own_names(module: ModuleType) -> list[str]:
    """The public names of what can be called in a module or its package, without functions and classes that it imports
    from elsewhere."""
    package = module.__name__.partition(".")[0]
    known = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
    definitions = {name for name, value in known.items() if isinstance(value, type) or inspect.isroutine(value)}
    own = {name for name in definitions if str(known[name].__module__).partition(".")[0] == package}
    return [name for name in known if name in own or name not in definitions]


def clash_next_to(reference: str) -> str:
    """The sentence about a file next to the user's with the name of a package of ours; empty without such a file."""
    location = reference.rpartition(":")[0]
    clash = describe_clash(str(Path(location).resolve().parent)) if location.endswith(".py") else ""
    return f"{clash}; rename it" if clash else ""


def call_user_code(make: Callable[[], Result], title: str, reference: str = "") -> Result:
    """Call `make`, which runs the user's code; any error becomes a PolicyError with its line.

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
        place = (frames[-1].filename, frames[-1].lineno) if frames else ("", None)
        if isinstance(error, SyntaxError) and error.filename:
            place = error.filename, error.lineno
        line = f"\n  at {place[0]}:{place[1]}" if place[0] else ""
        said = str(error).strip().splitlines() or [""]
        clash = clash_next_to(reference)
        advice = f"\n  {clash}" if clash else ""
        raise PolicyError(f"{title} {type(error).__name__}: {said[0]}{line}{advice}") from error


def _module(location: str, title: str) -> ModuleType:
    if not location.endswith(".py"):
        return call_user_code(lambda: importlib.import_module(location), f"{title}: importing {location} raises")
    return load_file(Path(location), title)


def load_file(path: Path, title: str) -> ModuleType:
    """Run a file of the user's as a module of its own.

    Raises:
        PolicyError: there is no such file, with the nearest; or running it raises.
    """
    if not path.is_file():
        others = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise PolicyError(
            f"{title}: no file {str(path)!r}{nearest(path.name, others)}; in a configuration, relative "
            "paths are relative to its folder"
        )
    return call_user_code(lambda: run_file(path.resolve()), f"{title}: loading its file raises", f"{path}:")


class UncachedLoader(SourceFileLoader):
    """Compiles the file each time: Python knows its bytecode by size and second, so a file that is written again within
    a second may not be seen."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def run_file(path: Path) -> ModuleType:
    """Run a file as a module of its own; its folder is importable while it runs, as for a script.

    Raises:
        ImportError: it is no file of Python; and whatever the file raises.
    """
    name = f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path, loader=UncachedLoader(name, str(path)))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    _forget_namesakes(path.parent)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def _forget_namesakes(folder: Path) -> None:
    """Let an import from `folder` find its own file where a file of another folder has left a module of that name.

    Such a module cannot be imported any more: its folder was importable only while that file was loaded.
    """
    names = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    stale = {name for name in names if _is_of_elsewhere(sys.modules.get(name), folder)}
    for name in [name for name in sys.modules if name.partition(".")[0] in stale]:
        del sys.modules[name]


def _is_of_elsewhere(module: ModuleType | None, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    if file is None or file.startswith(OURS):
        return False
    above = Path(file).parents[1 if Path(file).stem == "__init__" else 0]
    return above != folder and str(above) not in sys.path


OURS: Final = tuple(f"{Path(__file__).parents[1] / name}/" for name in ("passes", "pipeline"))
"""The beginnings of the paths of our own files."""

STDLIB: Final = tuple(f"{path}/" for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name)))


def is_user_code(file: str) -> bool:
    """Whether a file belongs neither to an installed library, nor to Python, nor to onnxline."""
    return not is_installed(file) and not file.startswith((*STDLIB, *OURS))


def is_installed(file: str) -> bool:
    """Whether a file belongs to an installed library."""
    return "site-packages" in file or "dist-packages" in file


def files_next_to(location: str) -> set[Path]:
    """The file of a loaded module, and the loaded files of the same folder or below, less what pip installed there."""
    own = location if location.endswith(".py") else getattr(sys.modules[location], "__file__", None)
    if own is None:
        return set()
    folder = Path(own).resolve().parent
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    files = {Path(own).resolve(), *(Path(file).resolve() for file in loaded if file)}
    near = (file for file in files if file.is_relative_to(folder) and file.is_file())
    return {file for file in near if "site-packages" not in file.relative_to(folder).parts}
