"""The API of pytorch-ir on our IR: change `from torch_ir import …` to `from pipeline.torch_ir import …`."""

from pipeline.torch_ir.errors import (
    ConversionError,
    ExecutionError,
    ExportError,
    SerializationError,
    WeightLoadError,
)
from pipeline.torch_ir.executor import IRExecutor, execute_ir
from pipeline.torch_ir.extract import convert_exported_program, export_model, extract_ir
from pipeline.torch_ir.ir import IR, deserialize_ir, load_ir, save_ir, serialize_ir, validate_ir
from pipeline.torch_ir.nodes import OpNode, TensorMeta
from pipeline.torch_ir.picture import generate_op_distribution_pie, ir_to_mermaid
from pipeline.torch_ir.registry import list_registered_ops, register_executor, register_op
from pipeline.torch_ir.svg import ir_to_svg
from pipeline.torch_ir.verify import IRVerifier, VerificationReport, verify_ir, verify_ir_with_state_dict
from pipeline.torch_ir.weights import (
    load_weights,
    load_weights_pt,
    load_weights_safetensors,
    validate_weights_against_ir,
)

__all__ = [
    "IR",
    "ConversionError",
    "ExecutionError",
    "ExportError",
    "IRExecutor",
    "IRVerifier",
    "OpNode",
    "SerializationError",
    "TensorMeta",
    "VerificationReport",
    "WeightLoadError",
    "convert_exported_program",
    "deserialize_ir",
    "execute_ir",
    "export_model",
    "extract_ir",
    "generate_op_distribution_pie",
    "ir_to_mermaid",
    "ir_to_svg",
    "list_registered_ops",
    "load_ir",
    "load_weights",
    "load_weights_pt",
    "load_weights_safetensors",
    "register_executor",
    "register_op",
    "save_ir",
    "serialize_ir",
    "validate_ir",
    "validate_weights_against_ir",
    "verify_ir",
    "verify_ir_with_state_dict",
]
