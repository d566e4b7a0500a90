"""The IR of a model as the configuration, or a factory, gives it: with its example, and names for its dynamic dims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from pipeline.errors import UserMistake
from pipeline.export.capture import capture
from pipeline.export.inputs import InputSpec
from pipeline.export.source import TorchSource
from pipeline.torch_ir.extract.convert import convert_exported_program
from pipeline.torch_ir.extract.names import tied_names
from pipeline.torch_ir.ir import IR

__all__ = ["extract_source"]


def extract_source(source: TorchSource, name: str, *, functionalize: bool = True) -> IR:
    """The IR of `source`, under its own names of dynamic dims.

    Raises:
        SourceMistake: torch.export cannot trace the module.
        ConversionError: the program holds something that the IR cannot.
        UserMistake: a dim that was asked to be dynamic came out as a number.
    """
    program = capture(source)
    return convert_exported_program(
        program,
        name,
        functionalize=functionalize,
        dims=dict(_dims(program, source.inputs)),
        tied=tied_names(source.module),
    )


def _dims(program: ExportedProgram, inputs: Iterable[InputSpec]) -> Iterator[tuple[str, str]]:
    """(torch's symbol, the declared name) of every named dim."""
    for tensor, spec in zip(_tensors(program), inputs, strict=True):
        for axis, declared in enumerate(spec.shape):
            if not isinstance(declared, str):
                continue
            symbol = str(tensor.shape[axis])
            if symbol.isdecimal():
                raise UserMistake(
                    f"input {spec.name!r}, axis {axis}: the dim {declared!r} was asked to be dynamic and came out as "
                    f"the constant {symbol}: the model's code fixes it (a comparison, int(x.shape[{axis}]), a literal "
                    f"in reshape); change that, or declare {symbol}"
                )
            if symbol.isidentifier():
                yield symbol, declared


def _tensors(program: ExportedProgram) -> Iterator[torch.Tensor]:
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if kinds.get(node.name) is InputKind.USER_INPUT and isinstance(value, torch.Tensor):
            yield value
