"""ONNX translations of torch operators that a declared custom operator names as its `torch_op`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from onnxscript import values

from passes.custom_ops import CustomOp, declared_ops
from pipeline.errors import UsageError


def custom_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Operator of torch → the function that adds the custom operator's node to torch's graph, for the operators that
    are registered in this process.

    Raises:
        UsageError: an argument of the torch operator is neither a tensor nor an attribute that is declared.
    """
    rows = ((_find_operator(op.torch_op), op) for op in declared_ops().values() if op.torch_op)
    return {operator: _make_translation(op, operator) for operator, op in rows if operator is not None}


def _find_operator(name: str) -> Any:
    """`acme::swish`, or `acme::swish.out`, of `torch.ops`; None where no operator is registered under the name."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)


def _make_translation(op: CustomOp, operator: Any) -> Callable[..., Any]:
    arguments = operator._schema.arguments
    tensors = [argument.name for argument in arguments if str(argument.type) in ("Tensor", "Optional[Tensor]")]
    strange = [argument.name for argument in arguments if argument.name not in (*tensors, *op.attributes)]
    if strange:
        raise UsageError(
            f"{op.torch_op} has the argument {strange[0]!r}, which is no tensor, and {op.key} declares no attribute of "
            f"that name; add it to `attributes` (found {', '.join(op.attributes) or 'none'})"
        )
    make_node: Any = values.Op(values.Opset(op.domain, op.version), op.name, op.schema())

    def translate(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        inputs = [given.get(name) for name in tensors]
        attributes = {name: given[name] for name in op.attributes if given.get(name) is not None}
        return make_node(*inputs, **attributes)

    translate.__signature__ = inspect.Signature([_parameter(argument) for argument in arguments])  # type: ignore[attr-defined] # torch reads it
    return translate


def _parameter(argument: Any) -> inspect.Parameter:
    default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
    return inspect.Parameter(argument.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
