"""onnxline under the names of pytorch-ir 0.2.3: put `pipeline/compat` on PYTHONPATH and `import torch_ir` means us.

Thin, and imported by nothing of ours. It is less strict than `pipeline.torch_ir` in one thing: inputs may have other
sizes than those that were traced, as there, and the plain reference runs then.
"""

from pipeline.torch_ir import extract_ir
from torch_ir._version import __version__
from torch_ir.converter import ConversionError, convert_exported_program
from torch_ir.executor import ExecutionError, IRExecutor, execute_ir
from torch_ir.exporter import ExportError, export_model, get_model_name
from torch_ir.ir import IR, OpNode, TensorMeta
from torch_ir.ops import list_registered_ops, register_executor, register_op
from torch_ir.serializer import SerializationError, deserialize_ir, load_ir, save_ir, serialize_ir, validate_ir
from torch_ir.verifier import VerificationReport, verify_ir, verify_ir_with_state_dict
from torch_ir.visualize import generate_op_distribution_pie, ir_to_mermaid
from torch_ir.weight_loader import WeightLoadError, load_weights, load_weights_pt, load_weights_safetensors

__all__ = [
    "IR",
    "ConversionError",
    "ExecutionError",
    "ExportError",
    "IRExecutor",
    "OpNode",
    "SerializationError",
    "TensorMeta",
    "VerificationReport",
    "WeightLoadError",
    "__version__",
    "convert_exported_program",
    "deserialize_ir",
    "execute_ir",
    "export_model",
    "extract_ir",
    "generate_op_distribution_pie",
    "get_model_name",
    "ir_to_mermaid",
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
    "verify_ir",
    "verify_ir_with_state_dict",
]
