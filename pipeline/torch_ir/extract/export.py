"""Module → ExportedProgram. With `strict`, model and inputs have to be on meta, so that no weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from pipeline.export.caches import register_caches
from pipeline.export.error_location import advice_on_type
from pipeline.export.trace import separate_memory
from pipeline.export.tree import leaves_with_path, not_dense
from pipeline.importers.from_torch.modules import every_module, every_path, every_tensor, preserve_module_state
from pipeline.torch_ir.errors import ExportError
from pipeline.torch_ir.validation import a_module, arguments, by_name, mistaken


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


def export_model(
    model: nn.Module,
    example_inputs: Sequence[Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    strict: bool = True,
) -> ExportedProgram:
    """torch.export's program of `model`, with the conditions of `extract_ir`.

    Raises:
        ExportError: torch.export does not take the model, or something is not on meta as `strict` asks.
    """
    args, named = arguments_of(model, example_inputs, kwargs, strict)
    return export_program(model, args, named, dynamic_shapes)


def export_program(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any = None
) -> ExportedProgram:
    """Export a call with the arguments that `arguments_of` returns; `model` is not changed.

    Raises:
        ExportError: torch.export does not take the model.
    """
    try:
        with preserve_module_state(model):
            return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:
        if advice := advice_on_type(error):
            raise ExportError(f"Failed to export model: {advice}") from error
        raise ExportError(
            f"Failed to export model: {type(error).__name__}: {error}\n"
            "torch.export has to trace the whole forward; the line above says where it could not"
        ) from error


def arguments_of(
    model: nn.Module, example_inputs: Sequence[Any], kwargs: Mapping[str, Any] | None, strict: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) for the tracer: dense tensors, all distinct. A single tensor is taken as the only argument.

    With `strict` they and the model have to be on meta.

    Raises:
        ExportError: they are no arguments, or not dense, or not on meta; the model is no module of Python; or autocast
            is on around the call.
    """
    _refuse_autocast()
    _refuse_scripted(a_module(model, ExportError))
    register_caches(model)
    args = arguments("example_inputs", example_inputs, ExportError)
    given = (args, {} if kwargs is None else dict(by_name("kwargs", kwargs, ExportError)))
    validate_inputs_dense(given)
    if strict:
        validate_meta_device(model)
        validate_inputs_meta(*given)
    return separate_memory(model, given)


def _refuse_autocast() -> None:
    """
    Raises:
        ExportError: autocast is on around the caller; a trace has none of its casts.
    """
    if torch.is_autocast_enabled("cpu"):
        raise ExportError(
            "autocast is on around the extraction, and a graph has only what the model itself does: "
            "put `with torch.autocast(...)` into the model's forward, or extract outside of it"
        )


def _refuse_scripted(model: nn.Module) -> None:
    """
    Raises:
        ExportError: `model`, or a module in it, is one of TorchScript, which torch.export does not read.
    """
    scripted = next((one for one in every_module(model) if isinstance(one, torch.jit.ScriptModule)), None)
    if scripted is None:
        return
    path = next(path for path, one in every_path(model) if one is scripted)
    hints = {torch.jit.ScriptModule: "give the module that it was scripted or traced from"}
    what = f"model, in {path!r}" if path else "model"
    raise mistaken(what, scripted, "modules of Python, which torch.export can trace", ExportError, hints)
