"""Parameters and buffers: the numbers that a module holds."""

from __future__ import annotations

import torch

from pipeline.argument_checks import a, expects


class ModuleTensor:
    """Numbers with an identity: two modules that hold the same object share it."""

    @expects(data=a(torch.Tensor, "a tensor"))
    def __init__(self, data: torch.Tensor) -> None:
        self.data = data.detach()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.data.dtype}{list(self.data.shape)})"


class Parameter(ModuleTensor):
    """What an optimizer trains."""


class Buffer(ModuleTensor):
    """What belongs to the state of a module and is not trained, such as running statistics or a mask."""
