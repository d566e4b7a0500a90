"""The API of pytorch-ir on our IR: change `from torch_ir import …` to `from pipeline.torch_ir import …`."""

from passes.doors import list_names
from pipeline.torch_ir.errors import ConversionError as ConversionError
from pipeline.torch_ir.errors import ExecutionError as ExecutionError
from pipeline.torch_ir.errors import ExportError as ExportError
from pipeline.torch_ir.errors import SerializationError as SerializationError
from pipeline.torch_ir.errors import WeightLoadError as WeightLoadError
from pipeline.torch_ir.executor import IRExecutor as IRExecutor
from pipeline.torch_ir.executor import execute_ir as execute_ir
from pipeline.torch_ir.extract import convert_exported_program as convert_exported_program
from pipeline.torch_ir.extract import export_model as export_model
from pipeline.torch_ir.extract import extract_ir as extract_ir
from pipeline.torch_ir.ir import IR as IR
from pipeline.torch_ir.ir import deserialize_ir as deserialize_ir
from pipeline.torch_ir.ir import load_ir as load_ir
from pipeline.torch_ir.ir import save_ir as save_ir
from pipeline.torch_ir.ir import serialize_ir as serialize_ir
from pipeline.torch_ir.ir import validate_ir as validate_ir
from pipeline.torch_ir.nodes import OpNode as OpNode
from pipeline.torch_ir.nodes import TensorMeta as TensorMeta
from pipeline.torch_ir.picture import generate_op_distribution_pie as generate_op_distribution_pie
from pipeline.torch_ir.picture import ir_to_mermaid as ir_to_mermaid
from pipeline.torch_ir.registry import list_registered_ops as list_registered_ops
from pipeline.torch_ir.registry import register_executor as register_executor
from pipeline.torch_ir.registry import register_op as register_op
from pipeline.torch_ir.svg import ir_to_svg as ir_to_svg
from pipeline.torch_ir.verify import IRVerifier as IRVerifier
from pipeline.torch_ir.verify import VerificationReport as VerificationReport
from pipeline.torch_ir.verify import verify_ir as verify_ir
from pipeline.torch_ir.verify import verify_ir_with_state_dict as verify_ir_with_state_dict
from pipeline.torch_ir.weights import load_weights as load_weights
from pipeline.torch_ir.weights import load_weights_pt as load_weights_pt
from pipeline.torch_ir.weights import load_weights_safetensors as load_weights_safetensors
from pipeline.torch_ir.weights import validate_weights_against_ir as validate_weights_against_ir

list_names(__name__)
