"""The face of the IR for users of pytorch-ir: change `from torch_ir import …` to `from pipeline.torch_ir import …`."""

from pipeline.torch_ir.errors import (
    ConversionError,
    ExecutionError,
    ExportError,
    SerializationError,
    WeightLoadError,
)
from pipeline.torch_ir.extract import convert_exported_program, export_model, extract_ir
from pipeline.torch_ir.ir import IR
from pipeline.torch_ir.nodes import OpNode, TensorMeta
from pipeline.torch_ir.serialize import deserialize_ir, load_ir, save_ir, serialize_ir, validate_ir

__all__ = [
    "IR",
    "ConversionError",
    "ExecutionError",
    "ExportError",
    "OpNode",
    "SerializationError",
    "TensorMeta",
    "WeightLoadError",
    "convert_exported_program",
    "deserialize_ir",
    "export_model",
    "extract_ir",
    "load_ir",
    "save_ir",
    "serialize_ir",
    "validate_ir",
]
