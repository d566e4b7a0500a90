"""A module → ExportedProgram → IR. Nothing of the caller's module is changed, and no weight is read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from passes.collector import collector_paused
from pipeline.errors import Unsupported
from pipeline.export.caches import register_caches
from pipeline.importers.from_torch import from_torch, functional
from pipeline.importers.from_torch.payload import TensorPayload
from pipeline.ir import Graph
from pipeline.torch_ir.buffers import recomputed
from pipeline.torch_ir.errors import ConversionError, ExportError
from pipeline.torch_ir.ir import IR, Signature
from pipeline.torch_ir.meta import is_meta_tensor, validate_inputs_meta, validate_meta_device
from pipeline.torch_ir.names import dim_names, tied_names
from pipeline.torch_ir.tree import Leaf, tree_of

__all__ = ["convert_exported_program", "export_model", "extract_ir"]


def extract_ir(
    model: nn.Module,
    example_inputs: Sequence[Any],
    *,
    model_name: str | None = None,
    strict: bool = True,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    functionalize: bool = True,
) -> IR:
    """The IR of `model`, traced with `example_inputs` and `kwargs` (of which only shapes, dtypes and devices count).

    `strict` asks for a model and inputs on the meta device, so that no weight can have been loaded. `dynamic_shapes` is
    torch.export's: dims that have names. Ops that write become values, unless `functionalize` is False.

    Raises:
        ExportError: torch.export does not take the model, or something is not on meta as `strict` asks.
        ConversionError: the program holds something that the IR cannot; the message names the node and its line.
    """
    with collector_paused():
        program = export_model(model, example_inputs, kwargs=kwargs, dynamic_shapes=dynamic_shapes, strict=strict)
        return convert_exported_program(
            program,
            model_name=model_name or type(model).__name__,
            functionalize=functionalize,
            dims=dim_names(program, dynamic_shapes),
            tied=tied_names(model),
            constants=recomputed(model),
        )


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
    if strict:
        validate_meta_device(model)
        validate_inputs_meta((tuple(example_inputs), dict(kwargs or {})))
    register_caches(model)
    try:
        return torch.export.export(
            model, tuple(example_inputs), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
        )
    except Exception as error:
        raise ExportError(
            f"Failed to export model: {type(error).__name__}: {error}\n"
            "torch.export has to trace the whole forward; the line above says where it could not"
        ) from error


def convert_exported_program(
    exported: ExportedProgram,
    model_name: str = "",
    strict: bool = True,
    *,
    functionalize: bool = True,
    dims: Mapping[str, str] | None = None,
    tied: Mapping[str, Sequence[str]] | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
) -> IR:
    """The IR of a program of torch.export.

    `dims` names its symbols {"s77": "batch"}, `tied` further names of weights, `constants` what it lacks on meta.

    Raises:
        ConversionError: the program holds something that the IR cannot; the message names the node and its line.
    """
    del strict  # kept for its users: there is one way to convert, and it leaves nothing out
    try:
        program = functional(exported) if functionalize else exported
        graph = from_torch(program, model_name, dims=dims, tied=tied, constants=constants)
    except Unsupported as error:
        raise ConversionError(str(error)) from error
    _warn_of_meta(program)
    return IR.of(graph, _constants(graph), _signature(program))


def _constants(graph: Graph) -> dict[str, torch.Tensor]:
    return {
        graph.sources[vid][0]: payload.tensor
        for vid, payload in graph.payloads.items()
        if isinstance(payload, TensorPayload) and vid in graph.sources
    }


def _warn_of_meta(program: ExportedProgram) -> None:
    names = [
        spec.target
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR and is_meta_tensor(program.constants.get(spec.target or ""))
    ]
    if names:
        warnings.warn(
            f"Skipping {len(names)} meta-device constant(s) (shape/dtype already in weights): {names}", stacklevel=4
        )


def _signature(program: ExportedProgram) -> Signature:
    call = program.call_spec
    signature = program.graph_signature
    inputs = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    outputs = [spec for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    return Signature(
        None if call.in_spec is None else tree_of(call.in_spec, _ends(inputs)),
        None if call.out_spec is None else tree_of(call.out_spec, _ends(outputs)),
    )


def _ends(specs: Sequence[Any]) -> list[Leaf]:
    """Tensors are numbered as the graph numbers its inputs and outputs; the rest are constants of the program."""
    ends: list[Leaf] = []
    count = 0
    for spec in specs:
        if isinstance(spec.arg, TensorArgument):
            ends.append(Leaf(count))
            count += 1
        else:
            ends.append(Leaf(None, getattr(spec.arg, "value", None)))
    return ends
