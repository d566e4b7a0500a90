"""The type of a node, as text."""

from typing import Any

__all__ = ["get_op_type"]


def get_op_type(target: Any) -> str:
    """`aten.linear.default` of torch.ops.aten.linear.default."""
    return str(target)
