"""Find and load what a user named: in a file, in a module, or as an entry point of an installed package."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

from passes.errors import PassError, PolicyError
from passes.suggest import nearest

__all__ = ["GROUP", "code_digest", "guarded", "installed", "is_reference", "load"]

GROUP: Final = "onnxline.passes"
"""The entry points that packages announce their passes by."""

Made = TypeVar("Made")


def is_reference(name: str) -> bool:
    """Whether a recipe's item is `file.py:Name` or `module:Name`, and not the name of a pass."""
    return ":" in name


def installed() -> Mapping[str, metadata.EntryPoint]:
    """The passes that installed packages bring, by name; nothing is loaded."""
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


def load(reference: str) -> Any:
    """What `path/to/file.py:Name`, `package.module:Name` or the name of an entry point stands for.

    A file is run anew each time, as a module of its own; its folder is importable meanwhile, as for a script.

    Raises:
        PolicyError: there is no such file, module, name or entry point, with the nearest; or loading it raises.
    """
    if not is_reference(reference):
        entry = installed()[reference]
        return guarded(entry.load, f"loading the pass {reference!r} raises")
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
    entries = installed()
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


def guarded(make: Callable[[], Made], title: str) -> Made:
    """What `make` returns; whatever the user's code raises becomes a PolicyError with its place.

    Raises:
        PolicyError: `title`, the error, and the line that raised it.
    """
    try:
        return make()
    except PassError:
        raise
    except (Exception, SystemExit) as error:
        frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<frozen")]
        place = f"\n  at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        said = str(error).strip().splitlines() or [""]
        raise PolicyError(f"{title} {type(error).__name__}: {said[0]}{place}") from error


def _module(place: str, reference: str) -> ModuleType:
    if not place.endswith(".py"):
        return guarded(lambda: importlib.import_module(place), f"the pass {reference}: importing {place} raises")
    path = Path(place)
    if not path.is_file():
        beside = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise PolicyError(
            f"the pass {reference}: no file {place!r}{nearest(path.name, beside)}; in a configuration, relative paths "
            "are relative to its folder"
        )
    return guarded(lambda: _run_file(path.resolve()), f"the pass {reference}: loading its file raises")


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
