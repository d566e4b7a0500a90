"""Functions that users register for single types of op."""

from torch_ir.ops.registry import (
    get_conversion_fn,
    get_execution_fn,
    list_registered_ops,
    register_executor,
    register_op,
)

__all__ = ["get_conversion_fn", "get_execution_fn", "list_registered_ops", "register_executor", "register_op"]
