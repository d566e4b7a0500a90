"""The SOURCE of `onnxline ir extract` and `verify`: a factory, or the model of a configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from pipeline.config import RunConfig
from pipeline.errors import UserMistake
from pipeline.export.dynamic_shapes import with_dynamic_shapes
from pipeline.export.load import load_source
from pipeline.export.source import TorchSource

__all__ = ["open_model"]


def open_model(text: str, overrides: Sequence[str], dynamic: Sequence[str], meta: bool) -> TorchSource:
    """Make the module, and call it once on its example.

    Raises:
        UserMistake: there is no such model, or it is an ONNX file; or `dynamic` is not as in `x.0=batch`.
    """
    config = _config(text, overrides)
    axes = _axes(dynamic)
    if axes:
        both = {name: {**config.export.dynamic_shapes.get(name, {}), **own} for name, own in axes.items()}
        shapes = {**config.export.dynamic_shapes, **both}
        config = config.model_copy(update={"export": config.export.model_copy(update={"dynamic_shapes": shapes})})
    with torch.device("meta") if meta else contextlib.nullcontext():
        source = load_source(with_dynamic_shapes(config.model, config.export))
    if not isinstance(source, TorchSource):
        raise UserMistake(f"{text} names an ONNX file; an IR is extracted from a torch module")
    return source


def _config(text: str, overrides: Sequence[str]) -> RunConfig:
    if text.endswith((".yaml", ".yml")):
        return RunConfig.from_yaml(text, tuple(overrides))
    if overrides:
        raise UserMistake("--set is for configurations; a factory has no settings: name a .yaml")
    if ":" not in text:
        raise UserMistake(f"found {text!r}, expected file.py:make, package.module:make, or a configuration (.yaml)")
    return RunConfig.from_mapping({"name": "model", "model": {"factory": text}})


def _axes(dynamic: Sequence[str]) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = {}
    for item in dynamic:
        place, _, dim = item.partition("=")
        name, _, axis = place.rpartition(".")
        if not name or not axis.lstrip("-").isdecimal() or not dim.isidentifier():
            raise UserMistake(f"--dynamic {item}: expected INPUT.AXIS=DIM, as in x.0=batch")
        found.setdefault(name, {})[int(axis)] = dim
    return found
