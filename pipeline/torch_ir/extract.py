"""A module of torch → IR: for a caller's module, a program, or a model of the configuration.

Nothing of the caller's module is changed, and no weight is read. With `strict`, model and inputs have to be on meta, so
that no weight can have been loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from passes.graph.traversal import pause_collector
from pipeline.errors import InternalError, Unsupported, UsageError
from pipeline.export.source import InputSpec, TorchSource
from pipeline.export.trace import separate_memory, trace_module
from pipeline.export.tree import leaves_with_path, not_dense, register_caches
from pipeline.export.user_code import advice_on_trace
from pipeline.importers.from_torch import from_torch
from pipeline.importers.from_torch.functionalize import functionalize_program, merge_names
from pipeline.importers.from_torch.layer_dedup import TracedWhole, deduplicate_layers
from pipeline.importers.from_torch.modules import every_module, every_path, every_tensor, preserve_module_state
from pipeline.importers.from_torch.refusals import refuse_lost_writes, refuse_unfaithful
from pipeline.importers.from_torch.tensors import TensorPayload, holds_values
from pipeline.ir import Graph, Role, check
from pipeline.torch_ir.arguments import Arguments
from pipeline.torch_ir.errors import ConversionError, ExportError, a_module, arguments, by_name, mistaken, warn
from pipeline.torch_ir.ir import IR
from pipeline.torch_ir.nodes import key_of, stored_values
from pipeline.torch_ir.registry import REGISTERED, apply_conversions
from pipeline.torch_ir.tree import CallSignature, dim_names, inputs_of, signature_of, signature_of_ends
from pipeline.torch_ir.weights import find_unsaved_buffers, recompute_buffers, tied_in, tied_names
from pipeline.turn import takes_turns


def is_meta_tensor(tensor: Any) -> bool:
    """Whether a value is a tensor on meta."""
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
        where = f"at index {'.'.join(path)}" if half == "0" else repr(".".join(path))
        raise ExportError(
            f"Input tensor {where} must be on meta device: {len(elsewhere)} tensor(s) of the inputs are not, "
            f"this one is on {tensor.device}; {ON_META}"
        )


def validate_inputs_dense(inputs: Any) -> None:
    """
    Raises:
        ExportError: a tensor among `inputs`, however nested, is sparse, nested or quantized.
    """
    leaves = ((_argument_at(path), leaf) for path, leaf in leaves_with_path(inputs))
    found = [(path, not_dense(leaf)) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    if said := [f"{path} is {reason}" for path, reason in found if reason]:
        raise ExportError(f"an IR takes dense tensors; {'; '.join(said)}")


def _argument_at(path: Sequence[str]) -> str:
    """A call is (args, kwargs): `argument 0`, `argument 1.x`, `argument 'scale'`."""
    half, first, *rest = path
    return ".".join([f"argument {first if half == '0' else repr(first)}", *rest])


ON_META = 'make it under torch.device("meta") or by .to("meta"), or pass strict=False to extract from real tensors'


def export_model(
    model: nn.Module,
    example_inputs: Arguments,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    strict: bool = True,
) -> ExportedProgram:
    """torch.export's program of `model`, with the conditions of `extract_ir`.

    Args:
        model: as in `extract_ir`.
        example_inputs: as in `extract_ir`.
        kwargs: as in `extract_ir`.
        dynamic_shapes: as in `extract_ir`.
        strict: as in `extract_ir`.

    Raises:
        ExportError: torch.export does not take the model, or something is not on meta as `strict` asks.
    """
    args, named = arguments_of(model, example_inputs, kwargs, strict)
    return export_program(model, args, named, dynamic_shapes)


@takes_turns
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
        if advice := advice_on_trace(error):
            raise ExportError(f"Failed to export model: {advice}") from error
        raise ExportError(
            f"Failed to export model: {type(error).__name__}: {error}\n"
            "torch.export has to trace the whole forward; the line above says where it could not"
        ) from error


def arguments_of(
    model: nn.Module, example_inputs: Arguments, kwargs: Mapping[str, Any] | None, strict: bool
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
    scripted = next((module for module in every_module(model) if isinstance(module, torch.jit.ScriptModule)), None)
    if scripted is None:
        return
    path = next(path for path, module in every_path(model) if module is scripted)
    hints = {torch.jit.ScriptModule: "give the module that it was scripted or traced from"}
    what = f"model, in {path!r}" if path else "model"
    raise mistaken(what, scripted, "modules of Python, which torch.export can trace", ExportError, hints)


@takes_turns
def extract_ir(
    model: nn.Module,
    example_inputs: Arguments,
    *,
    model_name: str | None = None,
    strict: bool = True,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    functionalize: bool = True,
    stamp: bool = False,
) -> IR:
    """The IR of `model`, traced with `example_inputs` and `kwargs` (of which only shapes, dtypes and devices count).

    Args:
        model: a module, which is left as it was.
        example_inputs: positional arguments of its forward; only shapes, dtypes and devices count.
        model_name: the name of the graph; by default that of the class.
        strict: ask for a model and inputs on the meta device, so that no weight can have been loaded.
        kwargs: keyword arguments of its forward.
        dynamic_shapes: dims that have names, as torch.export takes them.
        functionalize: make values of ops that write.
        stamp: trace only the first two of each run of equal layers, which gives the same graph; layers that look equal
            and of which that cannot be proven are traced, and a warning says why.

    Returns:
        An IR: nodes and weights as names, shapes and dtypes; `ir.graph` is the Graph.

    Raises:
        ExportError: torch.export does not take the model, or something is not on meta as `strict` asks.
        ConversionError: the program holds something that the IR cannot; the message names the node and its line.

    Example:
        >>> import onnxline, torch
        >>> with torch.device("meta"):
        ...     ir = onnxline.extract_ir(torch.nn.Linear(4, 2), (torch.empty(1, 4),))
        >>> [node.op_type for node in ir.nodes]
        ['aten.linear.default']
    """
    args, named = arguments_of(model, example_inputs, kwargs, strict)
    if model_name is not None and not isinstance(model_name, str):
        raise mistaken("model_name", model_name, "a str", ExportError)
    name = model_name or type(model).__name__
    with pause_collector():
        known = {"tied": tied_names(model), "constants": recompute_buffers(model)}
        if stamp and dynamic_shapes is not None:
            warn(f"{name} is traced whole: equal layers are traced once where every size is a number.")
        elif stamp and (ir := _extract_deduplicated(model, args, named, name, functionalize, known)):
            return ir
        program = export_program(model, args, named, dynamic_shapes)
        dims = dim_names(program, dynamic_shapes)
        return convert_exported_program(program, name, functionalize=functionalize, dims=dims, **known)


def _extract_deduplicated(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    functionalize: bool,
    known: Mapping[str, Any],
) -> IR | None:
    """The IR with each distinct layer traced once; None, with a warning that says why, where that is not possible."""

    def trace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        return graph_of(export_program(module, args, kwargs), name, functionalize, {}, **known)

    try:
        found = deduplicate_layers(model, args, kwargs, trace, **known)
    except Unsupported as error:
        raise ConversionError(str(error)) from error
    if isinstance(found, TracedWhole):
        if found.run is not None:
            warn(found.reason)
        return None
    for reason in found.left:
        warn(f"Some layers of {type(model).__name__} are traced one by one: {reason}.")
    return ir_of(found.graph, signature_of_ends(found.inputs, found.outputs), find_unsaved_buffers(model))


def extract_source(source: TorchSource, name: str, *, functionalize: bool = True) -> IR:
    """The IR of `source`, under its own names of dynamic dims.

    Raises:
        SourceError: torch.export cannot trace the module.
        ConversionError: the program holds something that the IR cannot.
        UsageError: a dim that was asked to be dynamic came out as a number.
    """
    program, _ = trace_module(source)
    return convert_exported_program(
        program,
        name,
        functionalize=functionalize,
        dims=dict(_dims(program, source.inputs)),
        tied=tied_names(source.module),
    )


def _dims(program: ExportedProgram, inputs: Iterable[InputSpec]) -> Iterator[tuple[str, str]]:
    """(torch's symbol, the declared name) of every named dim."""
    for (_, tensor), spec in zip(inputs_of(program), inputs, strict=True):
        for axis, declared in enumerate(spec.shape):
            if not isinstance(declared, str):
                continue
            symbol = str(tensor.shape[axis])
            if symbol.isdecimal():
                raise UsageError(
                    f"input {spec.name!r}, axis {axis}: the dim {declared!r} was asked to be dynamic and came out as "
                    f"the constant {symbol}: the model's code fixes it (a comparison, int(x.shape[{axis}]), a literal "
                    f"in reshape); change that, or declare {symbol}"
                )
            if symbol.isidentifier():
                yield symbol, declared


@takes_turns
def convert_exported_program(
    exported: ExportedProgram,
    model_name: str = "",
    strict: bool = False,
    *,
    functionalize: bool = True,
    dims: Mapping[str, str] | None = None,
    tied: Mapping[str, Sequence[str]] | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
) -> IR:
    """The IR of a program of torch.export.

    Args:
        exported: the program.
        model_name: the name of the IR.
        strict: ignored; there is one way to convert, which leaves nothing out.
        functionalize: as in `extract_ir`.
        dims: torch's symbol → the name of the dim, as {"s77": "batch"}.
        tied: name of a weight → its further names; by default, those that the program knows to be one tensor.
        constants: name → tensor, of constants that the program has on the device meta.

    Raises:
        ConversionError: the program holds something that the IR cannot; the message names the node and its line.
    """
    del strict  # kept for its users: there is one way to convert, and it leaves nothing out
    if not isinstance(exported, ExportedProgram):
        hints = {nn.Module: "export_model makes one of a module, extract_ir both at once"}
        raise mistaken("exported", exported, "a torch.export.ExportedProgram", ConversionError, hints)
    tied = tied_in(exported) if tied is None else tied
    graph = graph_of(exported, model_name or "", functionalize, dims or {}, tied, constants)
    return ir_of(graph, signature_of(exported), frozenset(exported.graph_signature.non_persistent_buffers))


def graph_of(
    program: ExportedProgram,
    name: str,
    functionalize: bool,
    dims: Mapping[str, str],
    tied: Mapping[str, Sequence[str]] | None,
    constants: Mapping[str, torch.Tensor] | None,
) -> Graph:
    """The Graph of a program; see `convert_exported_program`.

    Raises:
        ConversionError: it holds something that the IR cannot.
    """
    try:
        refuse_unfaithful(program)
        if functionalize:
            refuse_lost_writes(program)
            program = _functionalize(program)
        else:
            program = merge_names(program)
        return from_torch(program, name, dims=dims, tied=tied, constants=constants)
    except Unsupported as error:
        raise ConversionError(str(error)) from error


def _functionalize(program: ExportedProgram) -> ExportedProgram:
    try:
        return functionalize_program(program)
    except Unsupported:
        raise
    except Exception as error:
        raise ConversionError(
            f"torch cannot functionalize the program: {type(error).__name__}: {error}\n"
            "an attribute that is no buffer may be written to: register_buffer makes it one; or functionalize=False"
        ) from error


def ir_of(graph: Graph, signature: CallSignature, unsaved: frozenset[str]) -> IR:
    """The IR of a traced graph, with registered conversions applied.

    `unsaved` are names of buffers that no checkpoint has.
    """
    _warn_of_meta(graph)
    check(graph)
    known = {key_of(graph, value) for value in stored_values(graph)}
    return IR.of(apply_conversions(graph, REGISTERED), _constants(graph), signature, unsaved=unsaved & known)


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
        warn(f"Skipping {len(names)} meta-device constant(s) (shape/dtype already in weights): {names}")
