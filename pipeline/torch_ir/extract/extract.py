"""Module → IR: the entry points for a caller's module and for a model of the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from passes.run.gc_pause import pause_collector
from pipeline.errors import UsageError
from pipeline.export.inputs import InputSpec
from pipeline.export.source import TorchSource
from pipeline.export.trace import trace_module
from pipeline.importers.from_torch.layer_dedup import TracedWhole, deduplicate_layers
from pipeline.ir import Graph
from pipeline.torch_ir.errors import ExportError, warn
from pipeline.torch_ir.extract.convert import convert_exported_program, graph_of, ir_of
from pipeline.torch_ir.extract.export import arguments_of, export_program
from pipeline.torch_ir.extract.signature import dim_names, inputs_of, signature_of_ends
from pipeline.torch_ir.extract.stored import find_unsaved_buffers, recompute_buffers, tied_names
from pipeline.torch_ir.ir import IR
from pipeline.torch_ir.validation import mistaken

__all__ = ["extract_ir", "extract_source"]


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
    args, named = arguments_of(model, example_inputs, kwargs, strict)
    if model_name is not None and not isinstance(model_name, str):
        raise mistaken("model_name", model_name, "a str", ExportError)
    name = model_name or type(model).__name__
    with pause_collector():
        known = {"tied": tied_names(model), "constants": recompute_buffers(model)}
        if stamp and dynamic_shapes is not None:
            warn(f"{name} is traced whole: layers are stamped where every size is a number.")
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

    found = deduplicate_layers(model, args, kwargs, trace, **known)
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
    program = trace_module(source)
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
