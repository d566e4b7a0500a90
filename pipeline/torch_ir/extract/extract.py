"""A module → ExportedProgram → IR. Nothing of the caller's module is changed, and no weight is read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

from passes.collector import collector_paused
from pipeline.errors import InternalError, Unsupported
from pipeline.export.apart import apart
from pipeline.export.caches import register_caches
from pipeline.importers.from_torch import from_torch, functional
from pipeline.importers.from_torch.payload import TensorPayload, holds_values
from pipeline.importers.from_torch.stamp import Ends, TracedWhole, stamped
from pipeline.importers.from_torch.untouched import untouched
from pipeline.ir import Graph, Role
from pipeline.torch_ir.errors import ConversionError, ExportError
from pipeline.torch_ir.extract.buffers import recomputed, unsaved
from pipeline.torch_ir.extract.convert import converted
from pipeline.torch_ir.extract.meta import validate_inputs_dense, validate_inputs_meta, validate_meta_device
from pipeline.torch_ir.extract.names import dim_names, tied_in, tied_names
from pipeline.torch_ir.extract.shared import refuse_written_in_two
from pipeline.torch_ir.extract.tied import merged
from pipeline.torch_ir.given import a_module, arguments, by_name, mistaken
from pipeline.torch_ir.ir import IR, Signature
from pipeline.torch_ir.nodes import key_of, stored
from pipeline.torch_ir.registry import REGISTERED
from pipeline.torch_ir.tree import Leaf, Tree, tree_of

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
    stamp: bool = False,
) -> IR:
    """The IR of `model`, traced with `example_inputs` and `kwargs` (of which only shapes, dtypes and devices count).

    `strict` asks for a model and inputs on the meta device, so that no weight can have been loaded. `dynamic_shapes` is
    torch.export's: dims that have names. Ops that write become values, unless `functionalize` is False. With `stamp`
    only the first two of each run of equal layers are traced, and the graph is the same; where layers look equal and
    that cannot be proven, a warning says why, and they are traced.

    Raises:
        ExportError: torch.export does not take the model, or something is not on meta as `strict` asks.
        ConversionError: the program holds something that the IR cannot; the message names the node and its line.
    """
    args, named = _arguments(model, example_inputs, kwargs)
    if model_name is not None and not isinstance(model_name, str):
        raise mistaken("model_name", model_name, "a str", ExportError)
    name = model_name or type(model).__name__
    if strict:
        validate_meta_device(model)
        validate_inputs_meta((args, named))
    with collector_paused():
        known = {"tied": tied_names(model), "constants": recomputed(model)}
        if stamp and dynamic_shapes is not None:
            warnings.warn(f"{name} is traced whole: layers are stamped where every size is a number.", stacklevel=2)
        elif stamp and (ir := _stamped(model, args, named, name, functionalize, known)):
            return ir
        program = _exported(model, args, named, dynamic_shapes)
        dims = dim_names(program, dynamic_shapes)
        return convert_exported_program(program, name, functionalize=functionalize, dims=dims, **known)


def _stamped(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    functionalize: bool,
    known: Mapping[str, Any],
) -> IR | None:
    """The IR of which only a part was traced; None, and a warning that says why, where that cannot be."""

    def trace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        return _graph(_exported(module, args, kwargs), name, functionalize, {}, **known)

    found = stamped(model, args, kwargs, trace, **known)
    if isinstance(found, TracedWhole):
        if found.run is not None:
            warnings.warn(found.reason, stacklevel=3)
        return None
    for reason in found.left:
        warnings.warn(f"Some layers of {type(model).__name__} are traced one by one: {reason}.", stacklevel=3)
    signature = Signature(_tree(found.inputs), _tree(found.outputs))
    return _ir(found.graph, signature, unsaved(model))


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
    args, named = _arguments(model, example_inputs, kwargs)
    if strict:
        validate_meta_device(model)
        validate_inputs_meta((args, named))
    return _exported(model, args, named, dynamic_shapes)


def _exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any = None
) -> ExportedProgram:
    try:
        with untouched(model):
            return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:
        raise ExportError(
            f"Failed to export model: {type(error).__name__}: {error}\n"
            "torch.export has to trace the whole forward; the line above says where it could not"
        ) from error


def _arguments(
    model: nn.Module, example_inputs: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) as the tracer may have them: dense tensors, each of its own. A tensor is an only argument."""
    register_caches(a_module(model, ExportError))
    args = arguments("example_inputs", example_inputs, ExportError)
    given = (args, {} if kwargs is None else dict(by_name("kwargs", kwargs, ExportError)))
    validate_inputs_dense(given)
    return apart(model, given)


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

    `dims` names its symbols {"s77": "batch"}, `tied` further names of weights (default: those that the program knows to
    be one tensor), `constants` what it lacks on meta.

    Raises:
        ConversionError: the program holds something that the IR cannot; the message names the node and its line.
    """
    del strict  # kept for its users: there is one way to convert, and it leaves nothing out
    if not isinstance(exported, ExportedProgram):
        hints = {nn.Module: "export_model makes one of a module, extract_ir both at once"}
        raise mistaken("exported", exported, "a torch.export.ExportedProgram", ConversionError, hints)
    tied = tied_in(exported) if tied is None else tied
    graph = _graph(exported, model_name or "", functionalize, dims or {}, tied, constants)
    return _ir(graph, _signature(exported), frozenset(exported.graph_signature.non_persistent_buffers))


def _graph(
    program: ExportedProgram,
    name: str,
    functionalize: bool,
    dims: Mapping[str, str],
    tied: Mapping[str, Sequence[str]] | None,
    constants: Mapping[str, torch.Tensor] | None,
) -> Graph:
    refuse_written_in_two(program)
    try:
        program = functional(program) if functionalize else program
    except Exception as error:
        raise ConversionError(
            f"torch cannot functionalize the program: {type(error).__name__}: {error}\n"
            "an attribute that is no buffer may be written to: register_buffer makes it one; or functionalize=False"
        ) from error
    try:
        return from_torch(program, name, dims=dims, tied=tied, constants=constants)
    except Unsupported as error:
        raise ConversionError(str(error)) from error


def _ir(graph: Graph, signature: Signature, unsaved: frozenset[str]) -> IR:
    _warn_of_meta(graph)
    graph = merged(graph)
    known = {key_of(graph, value) for value in stored(graph)}
    return IR.of(converted(graph, REGISTERED), _constants(graph), signature, unsaved=unsaved & known)


def _constants(graph: Graph) -> dict[str, torch.Tensor]:
    found = {
        graph.sources[vid][0]: payload.tensor
        for vid, payload in graph.payloads.items()
        if isinstance(payload, TensorPayload) and vid in graph.sources
    }
    if empty := [name for name, tensor in found.items() if not holds_values(tensor)]:
        raise InternalError(f"constants without values came into the IR: {empty}; report this, with the model")
    return found


def _warn_of_meta(graph: Graph) -> None:
    lifted = [value for value in graph.with_role(Role.CONST) if value.name.startswith("c_")]
    names = [graph.sources[value.vid][0] for value in lifted if value.vid not in graph.payloads]
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
        elif isinstance(spec.arg, ConstantArgument):
            ends.append(Leaf(None, spec.arg.value))
        else:
            what = getattr(spec.arg, "class_fqn", "number that differs from run to run")
            raise ConversionError(
                f"{spec.arg.name!r} is a {what}, and a graph takes and gives tensors: "
                "give it as a tensor, leave it out of the result, or fix it in the trace"
            )
    return ends


def _tree(ends: Ends) -> Tree:
    """The same for what stamping tells: tensors without numbers stand for those of the graph."""
    count = iter(range(len(ends.leaves)))
    leaves = [Leaf(next(count)) if isinstance(leaf, torch.Tensor) else Leaf(None, leaf) for leaf in ends.leaves]
    return tree_of(ends.spec, leaves)
