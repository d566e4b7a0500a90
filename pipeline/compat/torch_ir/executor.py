"""pytorch-ir's executor: runs an IR, also on inputs of other sizes than it was traced with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.torch_ir import IR, ExecutionError, OpNode, load_weights
from pipeline.torch_ir import IRExecutor as StrictExecutor
from pipeline.torch_ir import execute_ir as strict_execute_ir
from torch_ir.aliases import get_execution_fn

__all__ = ["ExecutionError", "IRExecutor", "OpNode", "TensorRegistry", "execute_ir", "get_execution_fn", "load_weights"]

Tensors = Mapping[str, torch.Tensor]


class TensorRegistry:
    """Tensors by name."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def register(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name] = tensor

    def get(self, name: str) -> torch.Tensor | None:
        return self._tensors.get(name)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def clear(self) -> None:
        self._tensors.clear()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        self.register(name, tensor)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors


class AnySizesExecutor(StrictExecutor):
    """The executor of `pipeline.torch_ir` without its check of input sizes: operators refuse what they cannot take."""

    def __init__(self, ir: IR, weights: Tensors | None = None, constants: Tensors | None = None) -> None:
        super().__init__(ir, weights, constants, strict_sizes=False)


IRExecutor = AnySizesExecutor


def execute_ir(
    ir: IR,
    inputs: Sequence[Any],
    weights: Tensors | None = None,
    weights_path: str | Path | None = None,
    constants: Tensors | None = None,
) -> tuple[torch.Tensor, ...]:
    """The outputs of `ir`; see `pipeline.torch_ir.execute_ir`."""
    return strict_execute_ir(ir, inputs, weights, weights_path, constants, strict_sizes=False)
