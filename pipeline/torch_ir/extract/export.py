"""Module → ExportedProgram."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from pipeline.export.apart import apart
from pipeline.export.blame import advice_on_type
from pipeline.export.caches import register_caches
from pipeline.importers.from_torch.module_state import preserve_module_state
from pipeline.importers.from_torch.modules import every_module, every_path
from pipeline.torch_ir.errors import ExportError
from pipeline.torch_ir.extract.meta import validate_inputs_dense, validate_inputs_meta, validate_meta_device
from pipeline.torch_ir.validation import a_module, arguments, by_name, mistaken

__all__ = ["arguments_of", "export_model", "exported"]


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
    return exported(model, args, named, dynamic_shapes)


def exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any = None
) -> ExportedProgram:
    """The program of a call whose arguments are as `arguments_of` makes them; `model` is as before afterwards.

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
    """(args, kwargs) as the tracer may have them: dense tensors, each of its own. A tensor is an only argument.

    With `strict` they and the model have to be on meta.

    Raises:
        ExportError: they are no arguments, or not dense, or not on meta; or the model is no module of Python.
    """
    _refuse_scripted(a_module(model, ExportError))
    register_caches(model)
    args = arguments("example_inputs", example_inputs, ExportError)
    given = (args, {} if kwargs is None else dict(by_name("kwargs", kwargs, ExportError)))
    validate_inputs_dense(given)
    if strict:
        validate_meta_device(model)
        validate_inputs_meta(*given)
    return apart(model, given)


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
