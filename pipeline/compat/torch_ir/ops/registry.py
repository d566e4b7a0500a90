"""Functions that users register for single types of op, and how to look them up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.torch_ir import list_registered_ops, register_executor, register_op
from pipeline.torch_ir.registry import REGISTERED, look_up
from torch_ir.ops.aten_impl import GETITEM, execute_getitem

__all__ = ["get_conversion_fn", "get_execution_fn", "list_registered_ops", "register_executor", "register_op"]


def get_conversion_fn(op_type: str) -> Callable[..., Any] | None:
    return look_up(REGISTERED.conversions, op_type)


def get_execution_fn(op_type: str) -> Callable[..., Any] | None:
    found = look_up(REGISTERED.executors, op_type)
    return execute_getitem if found is None and op_type == GETITEM else found
