"""torch.export of a module, and checks that the module and its inputs are on meta."""

from torch import nn

from pipeline.torch_ir import ExportError, export_model
from pipeline.torch_ir.extract import is_meta_module, is_meta_tensor, validate_inputs_meta, validate_meta_device

__all__ = [
    "ExportError",
    "export_model",
    "get_model_name",
    "is_meta_module",
    "is_meta_tensor",
    "validate_inputs_meta",
    "validate_meta_device",
]


def get_model_name(model: nn.Module) -> str:
    """The name of its class."""
    return type(model).__name__
