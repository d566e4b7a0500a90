"""A module around a model that adds nothing to the names of its parameters."""

from __future__ import annotations

from typing import Any

from torch import nn


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
