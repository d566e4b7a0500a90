"""Whether a model and its inputs are on the meta device: then no weight can have been loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pipeline.export.tree import leaves_with_path, not_dense
from pipeline.importers.from_torch.modules import every_tensor
from pipeline.torch_ir.errors import ExportError

__all__ = ["is_meta_module", "is_meta_tensor", "validate_inputs_dense", "validate_inputs_meta", "validate_meta_device"]


def is_meta_tensor(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_meta


def is_meta_module(module: nn.Module) -> bool:
    """Whether all parameters and buffers are on meta."""
    return all(tensor.is_meta for tensor in every_tensor(module))


def validate_meta_device(model: nn.Module) -> None:
    """
    Raises:
        ExportError: a parameter or buffer is on another device.
    """
    if is_meta_module(model):
        return
    named = (*model.named_parameters(), *model.named_buffers())
    elsewhere = [(name, tensor) for name, tensor in named if not tensor.is_meta]
    name, tensor = elsewhere[0]
    raise ExportError(
        "Model must be on meta device for weight-free IR extraction: "
        f"{len(elsewhere)} tensor(s) are not, first {name} on {tensor.device}; {ON_META}"
    )


def validate_inputs_meta(inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> None:
    """
    Raises:
        ExportError: a tensor among `inputs` and `kwargs`, however nested, is on another device.
    """
    named = leaves_with_path((inputs, dict(kwargs or {})))
    elsewhere = [(path, leaf) for path, leaf in named if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
    if elsewhere:
        (half, *path), tensor = elsewhere[0]
        place = f"at index {'.'.join(path)}" if half == "0" else repr(".".join(path))
        raise ExportError(
            f"Input tensor {place} must be on meta device: {len(elsewhere)} tensor(s) of the inputs are not, "
            f"this one is on {tensor.device}; {ON_META}"
        )


def validate_inputs_dense(inputs: Any) -> None:
    """
    Raises:
        ExportError: a tensor among `inputs`, however nested, is sparse, nested or quantized.
    """
    leaves = ((_place(path), leaf) for path, leaf in leaves_with_path(inputs))
    found = [(place, not_dense(leaf)) for place, leaf in leaves if isinstance(leaf, torch.Tensor)]
    if said := [f"{place} is {other}" for place, other in found if other]:
        raise ExportError(f"an IR takes dense tensors; {'; '.join(said)}")


def _place(path: Sequence[str]) -> str:
    """A call is (args, kwargs): `argument 0`, `argument 1.x`, `argument 'scale'`."""
    half, first, *rest = path
    return ".".join([f"argument {first if half == '0' else repr(first)}", *rest])


ON_META = 'make it under torch.device("meta") or by .to("meta"), or pass strict=False to extract from real tensors'
