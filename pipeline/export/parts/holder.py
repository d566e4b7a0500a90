"""A module around a model that adds nothing to the names of its parameters; and what each part of a task has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from passes.proof.draws import GivenDraw
from pipeline.config import InputConfig, VerifyConfig
from pipeline.export.source import Example


class ModelHolder(nn.Module):
    """Holds a model's children and parameters as its own, so that no name gets a prefix."""

    wrapped: list[Any]

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "wrapped", [model])  # in a list, where torch does not look for modules
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name not in model._non_persistent_buffers_set)
        self.training = False  # as the model; .eval() would visit each of a large model's modules


class TaskPart(ModelHolder):
    """The module of one part of a task. `sizes` are those of the named dims in its trace."""

    folder: Path | None = None
    """That the model was loaded from, if any."""

    @property
    def held_model(self) -> Any:
        return self.wrapped[0]

    @property
    def device(self) -> torch.device:
        return next(self.held_model.parameters()).device

    @property
    def sizes(self) -> dict[str, int]:
        return {}

    def declarations(self) -> dict[str, InputConfig]:
        """Name of each input → its open axes, and the values that it takes."""
        raise NotImplementedError

    def example(self) -> Example | None:
        """A call for a trace; None where any values will do."""
        raise NotImplementedError

    def draw(self, verify: VerifyConfig) -> Sequence[GivenDraw]:
        """Calls of an application, with values by `verify.seed`."""
        raise NotImplementedError


def with_parameters(compute: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """`compute(**tensors)` as a forward with these parameters: a trace opens no axis of a `**` parameter."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return compute(**signature.bind(*args, **kwargs).arguments)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward
