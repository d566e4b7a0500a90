"""The executor of `getitem`, which is no operator of torch."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.torch_ir import register_executor

__all__ = ["GETITEM", "execute_getitem", "register_executor"]

GETITEM = "<built-in function getitem>"
"""The type of the nodes that take one result of an operator with several; an IR of ours has none."""


def execute_getitem(inputs: list[torch.Tensor], attrs: dict[str, Any]) -> list[torch.Tensor]:
    return [inputs[attrs["index"]]]
