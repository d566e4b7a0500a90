"""Module → IR: the way in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from passes.run.gc_pause import collector_paused
from pipeline.importers.from_torch.stamp import TracedWhole, stamped
from pipeline.ir import Graph
from pipeline.torch_ir.errors import ExportError, warn
from pipeline.torch_ir.extract.buffers import recomputed, unsaved
from pipeline.torch_ir.extract.convert import convert_exported_program, graph_of, ir_of
from pipeline.torch_ir.extract.dims import dim_names
from pipeline.torch_ir.extract.export import arguments_of, exported
from pipeline.torch_ir.extract.signature import signature_of_ends
from pipeline.torch_ir.extract.tied import tied_names
from pipeline.torch_ir.ir import IR
from pipeline.torch_ir.validation import mistaken

__all__ = ["extract_ir"]


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
    with collector_paused():
        known = {"tied": tied_names(model), "constants": recomputed(model)}
        if stamp and dynamic_shapes is not None:
            warn(f"{name} is traced whole: layers are stamped where every size is a number.")
        elif stamp and (ir := _stamped(model, args, named, name, functionalize, known)):
            return ir
        program = exported(model, args, named, dynamic_shapes)
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
        return graph_of(exported(module, args, kwargs), name, functionalize, {}, **known)

    found = stamped(model, args, kwargs, trace, **known)
    if isinstance(found, TracedWhole):
        if found.run is not None:
            warn(found.reason)
        return None
    for reason in found.left:
        warn(f"Some layers of {type(model).__name__} are traced one by one: {reason}.")
    return ir_of(found.graph, signature_of_ends(found.inputs, found.outputs), unsaved(model))
