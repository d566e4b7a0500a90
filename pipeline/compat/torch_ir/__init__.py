"""onnxline under the names of pytorch-ir 0.2.3: put `pipeline/compat` on PYTHONPATH and `import torch_ir` means us.

Thin, and imported by nothing of ours. It is less strict than `pipeline.torch_ir` in one thing: inputs may have other
sizes than those that were traced, as there, and the plain reference runs then.
"""

from typing import TYPE_CHECKING

from passes.doors import public_names
from pipeline.torch_ir import IR as IR
from pipeline.torch_ir import ConversionError as ConversionError
from pipeline.torch_ir import ExecutionError as ExecutionError
from pipeline.torch_ir import ExportError as ExportError
from pipeline.torch_ir import OpNode as OpNode
from pipeline.torch_ir import SerializationError as SerializationError
from pipeline.torch_ir import TensorMeta as TensorMeta
from pipeline.torch_ir import VerificationReport as VerificationReport
from pipeline.torch_ir import WeightLoadError as WeightLoadError
from pipeline.torch_ir import convert_exported_program as convert_exported_program
from pipeline.torch_ir import deserialize_ir as deserialize_ir
from pipeline.torch_ir import export_model as export_model
from pipeline.torch_ir import extract_ir as extract_ir
from pipeline.torch_ir import generate_op_distribution_pie as generate_op_distribution_pie
from pipeline.torch_ir import ir_to_mermaid as ir_to_mermaid
from pipeline.torch_ir import list_registered_ops as list_registered_ops
from pipeline.torch_ir import load_ir as load_ir
from pipeline.torch_ir import load_weights as load_weights
from pipeline.torch_ir import load_weights_pt as load_weights_pt
from pipeline.torch_ir import load_weights_safetensors as load_weights_safetensors
from pipeline.torch_ir import register_executor as register_executor
from pipeline.torch_ir import register_op as register_op
from pipeline.torch_ir import save_ir as save_ir
from pipeline.torch_ir import serialize_ir as serialize_ir
from pipeline.torch_ir import validate_ir as validate_ir
from torch_ir.aliases import VERSION, add_modules
from torch_ir.aliases import get_model_name as get_model_name
from torch_ir.executor import IRExecutor as IRExecutor
from torch_ir.executor import execute_ir as execute_ir
from torch_ir.verifier import verify_ir as verify_ir
from torch_ir.verifier import verify_ir_with_state_dict as verify_ir_with_state_dict

__version__ = VERSION
add_modules()

if not TYPE_CHECKING:
    __all__ = ["__version__", *public_names(__file__)]
