"""ExportedProgram → IR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.export import ExportedProgram

from pipeline.errors import InternalError, Unsupported
from pipeline.importers.from_torch import from_torch
from pipeline.importers.from_torch.functionalize import functionalize_program
from pipeline.importers.from_torch.refusals import refuse_lost_writes, refuse_unfaithful
from pipeline.importers.from_torch.tensors import TensorPayload, holds_values
from pipeline.ir import Graph, Role, check
from pipeline.torch_ir.errors import ConversionError, warn
from pipeline.torch_ir.extract.conversions import apply_conversions
from pipeline.torch_ir.extract.signature import signature_of
from pipeline.torch_ir.extract.stored import merge_tied, tied_in
from pipeline.torch_ir.ir import IR
from pipeline.torch_ir.nodes import key_of, stored_values
from pipeline.torch_ir.registry import REGISTERED
from pipeline.torch_ir.tree import CallSignature
from pipeline.torch_ir.validation import mistaken

__all__ = ["convert_exported_program", "graph_of", "ir_of"]


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
    """The IR of a traced graph, with tied weights merged and registered conversions applied.

    `unsaved` are names of buffers that no checkpoint has.
    """
    _warn_of_meta(graph)
    graph = merge_tied(graph)
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
