"""A program of torch.export → IR."""

from __future__ import annotations

from torch.export import ExportedProgram

from pipeline.torch_ir import IR, ConversionError, convert_exported_program

__all__ = ["ConversionError", "IRConverter", "convert_exported_program"]


class IRConverter:
    """`convert_exported_program`, as the documentation has it."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict

    def convert(self, exported: ExportedProgram, model_name: str = "") -> IR:
        return convert_exported_program(exported, model_name, self.strict)
