"""onnxline under the names of pytorch-ir 0.2.3: put `pipeline/compat` on PYTHONPATH and `import torch_ir` means us.

Thin, and imported by nothing of ours. It is less strict than `pipeline.torch_ir` in one thing: inputs may have other
sizes than those that were traced, as there, and the plain reference runs then.
"""

from pipeline.torch_ir import (
    IR,
    ConversionError,
    ExecutionError,
    ExportError,
    OpNode,
    SerializationError,
    TensorMeta,
    VerificationReport,
    WeightLoadError,
    convert_exported_program,
    deserialize_ir,
    export_model,
    extract_ir,
    generate_op_distribution_pie,
    ir_to_mermaid,
    list_registered_ops,
    load_ir,
    load_weights,
    load_weights_pt,
    load_weights_safetensors,
    register_executor,
    register_op,
    save_ir,
    serialize_ir,
    validate_ir,
)
from torch_ir.aliases import VERSION, add_modules, get_model_name
from torch_ir.executor import IRExecutor, execute_ir
from torch_ir.verifier import verify_ir, verify_ir_with_state_dict

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

__version__ = VERSION
add_modules()
