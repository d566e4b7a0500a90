"""The SOURCE of `onnxline ir extract` and `verify`: a factory, or the model of a configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import ModelConfig, RunConfig, split_factory
from pipeline.errors import UsageError
from pipeline.export.inputs import with_dynamic_shapes
from pipeline.export.load import load_source
from pipeline.export.source import Source, TorchSource

__all__ = ["open_model", "read_source", "told_mode"]


def open_model(
    text: str, overrides: Sequence[str], dynamic: Sequence[str], meta: bool, train: bool = False
) -> TorchSource:
    """Make the module, in eval mode or, with `train`, in the mode in which it is made, and call it once on its example.

    Raises:
        UsageError: there is no such model, or it is an ONNX file; or `dynamic` is not as in `x.0=batch`.
    """
    config = read_source(text, overrides)
    axes = _axes(dynamic)
    if axes:
        both = {name: {**config.export.dynamic_shapes.get(name, {}), **own} for name, own in axes.items()}
        shapes = {**config.export.dynamic_shapes, **both}
        config = config.model_copy(update={"export": config.export.model_copy(update={"dynamic_shapes": shapes})})
    import torch  # seconds: not for a source that is not there

    with torch.device("meta") if meta else contextlib.nullcontext():
        source = _loaded(text, with_dynamic_shapes(config.model, config.export), train)
    if not isinstance(source, TorchSource):
        raise UsageError(f"{text} names an ONNX file; an IR is extracted from a torch module")
    return source


def told_mode(source: TorchSource) -> str:
    """A line that says what eval mode has changed, where it has; empty otherwise."""
    if not source.put_to_eval:
        return ""
    first, *others = source.put_to_eval
    more = f" and {len(others)} more" if others else ""
    return (
        f"the model came in train mode and was put into eval mode, which changes {first}{more}; --train keeps its mode"
    )


def _loaded(text: str, model: ModelConfig, train: bool) -> Source:
    from pipeline.export.build_source import NoInputs

    try:
        return load_source(model, keep_mode=train)
    except NoInputs as error:
        if text.endswith(CONFIGURATIONS):
            raise
        raise UsageError(
            f"{text} gives a module and no example; expected (module, args tuple) or (module, args tuple, kwargs dict) "
            f"as what the factory returns; {error.takes}"
        ) from error


def read_source(text: str, overrides: Sequence[str]) -> RunConfig:
    """The configuration that SOURCE names, or the one of a factory by itself.

    Raises:
        UsageError: there is no such file, or it is neither.
    """
    if text.endswith(CONFIGURATIONS):
        return RunConfig.from_yaml(text, tuple(overrides))
    if overrides:
        raise UsageError("--set is for configurations; a factory has no settings: name a .yaml")
    if ":" not in text:
        raise UsageError(f"found {text!r}, expected file.py:make, package.module:make, or a configuration (.yaml)")
    file, _ = split_factory(text)
    if file.endswith(".py") and not Path(file).is_file():
        raise UsageError(f"the factory {text}: no file {file!r}; its path is relative to the folder that you are in")
    return RunConfig.from_mapping({"name": "model", "model": {"factory": text}})


def _axes(dynamic: Sequence[str]) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = {}
    for item in dynamic:
        place, _, dim = item.partition("=")
        name, _, axis = place.rpartition(".")
        if not name or not axis.lstrip("-").isdecimal() or not dim.isidentifier():
            raise UsageError(f"--dynamic {item}: expected INPUT.AXIS=DIM, as in x.0=batch")
        found.setdefault(name, {})[int(axis)] = dim
    return found


CONFIGURATIONS = (".yaml", ".yml")
