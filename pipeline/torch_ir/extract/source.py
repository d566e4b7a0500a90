"""The IR of a model as the configuration, or a factory, gives it: with its example, and names for its dynamic dims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.export import ExportedProgram

from pipeline.errors import UsageError
from pipeline.export.inputs import InputSpec
from pipeline.export.source import TorchSource
from pipeline.export.trace import capture
from pipeline.torch_ir.extract.convert import convert_exported_program
from pipeline.torch_ir.extract.dims import inputs_of
from pipeline.torch_ir.extract.tied import tied_names
from pipeline.torch_ir.ir import IR

__all__ = ["extract_source"]


def extract_source(source: TorchSource, name: str, *, functionalize: bool = True) -> IR:
    """The IR of `source`, under its own names of dynamic dims.

    Raises:
        SourceError: torch.export cannot trace the module.
        ConversionError: the program holds something that the IR cannot.
        UsageError: a dim that was asked to be dynamic came out as a number.
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
