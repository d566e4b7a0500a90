"""`model.factory`: a function of the user's that makes the module. It runs because the user named it."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from pipeline.config import ModelConfig, locate, split_factory
from pipeline.errors import OnnxlineError, SourceMistake
from pipeline.export.assemble import assemble
from pipeline.export.blame import first_line, last_frame
from pipeline.export.checkpoint import read_checkpoint
from pipeline.export.source import Example, TorchSource
from pipeline.export.weightless import without_weights

__all__ = ["make_from_factory"]


def make_from_factory(model: ModelConfig, *, weightless: bool = False, keep_mode: bool = False) -> TorchSource:
    """Call the factory with `model.args`; with weights from `model.checkpoint`, if it names one, or with none at all.

    Raises:
        SourceMistake: it is not there, it raises, or it returns something else than a module, (module, args tuple)
            or (module, args tuple, kwargs dict).
    """
    text = model.factory or ""
    place, name = split_factory(text)
    factory = _function(_import(place, text), name, text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        with without_weights() if weightless else nullcontext():
            made = _guarded(lambda: factory(**model.args), f"the factory {text} raises")
    module, example = _unpacked(made, text)
    if model.checkpoint is not None and not weightless:
        _load_weights(module, model.checkpoint)
    return assemble(module, example, model, keep_mode=keep_mode)


def _load_weights(module: nn.Module, checkpoint: str) -> None:
    state = read_checkpoint(locate(checkpoint))
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise SourceMistake(f"checkpoint {checkpoint} does not fit: {' '.join(str(error).split())}") from error


def _import(place: str, text: str) -> ModuleType:
    if not place.endswith(".py"):
        return _guarded(lambda: importlib.import_module(place), f"the factory {text}: importing {place} raises")
    path = Path(place)
    if not path.is_file():
        raise SourceMistake(f"the factory {text}: no file {place!r}; paths are relative to the configuration file")
    return _guarded(lambda: _import_file(path), f"the factory {text}: loading its file raises")


def _import_file(path: Path) -> ModuleType:
    """Run the file as a module of its own; its folder is importable while it loads, as for a script."""
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{digest}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded as Python")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # dataclasses and pickle look a class's module up here
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[spec.name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return loaded


def _function(module: ModuleType, name: str, text: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if callable(found):
        return found
    known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; it has: {', '.join(known[:8]) or 'no functions'}"
    raise SourceMistake(f"the factory {text}: no function {name!r} there{hint}")


def _guarded(make: Callable[[], Any], title: str) -> Any:
    try:
        return make()
    except OnnxlineError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise SourceMistake(f"{title} {first_line(error)}\n  at {last_frame(error)}") from error


def _unpacked(made: Any, text: str) -> tuple[nn.Module, Example | None]:
    if isinstance(made, nn.Module):
        return made, None
    if isinstance(made, tuple) and 2 <= len(made) <= 3 and isinstance(made[0], nn.Module):
        module, args = made[0], made[1]
        kwargs = made[2] if len(made) == 3 else {}
        if isinstance(args, tuple) and isinstance(kwargs, dict):
            return module, Example(args, dict(kwargs))
    kinds = ", ".join(type(one).__name__ for one in made) if isinstance(made, tuple) else type(made).__name__
    raise SourceMistake(
        f"the factory {text} returns ({kinds}), expected an nn.Module, (module, args tuple) "
        "or (module, args tuple, kwargs dict)"
    )
