"""Functions that users register for single types of op: how to convert them, and how to run them.

This is the only global table of the package: `@register_executor("mylib.op")` at the head of a user's file applies to
all later calls, as in pytorch-ir. To avoid it, give an executor a `Registry` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from pipeline.errors import UsageError
from pipeline.ir import Graph, Op
from pipeline.runtime.eager import Own
from pipeline.torch_ir.calls import format_attrs
from pipeline.torch_ir.document.nodes import OpNode, TensorMeta
from pipeline.torch_ir.errors import ExecutionError
from pipeline.torch_ir.spelling import as_torch
from pipeline.torch_ir.validation import mistaken

Execute = Callable[[list[torch.Tensor], dict[str, Any]], Sequence[torch.Tensor]]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class NodeInfo:
    """The argument of a function of `register_op`: one call, before it is converted."""

    name: str
    target: Any
    input_metas: list[TensorMeta] = field(default_factory=list)
    output_metas: list[TensorMeta] = field(default_factory=list)
    attrs: dict[str, Any] = field(default_factory=dict)


Convert = Callable[[NodeInfo], OpNode]


@dataclass(frozen=True, slots=True)
class Registry:
    """Functions by op type, with its overload or without: `aten.relu.default`, `mylib.op`."""

    executors: dict[str, Execute] = field(default_factory=dict)
    conversions: dict[str, Convert] = field(default_factory=dict)

    def executors_for(self, graph: Graph) -> Own:
        """The executors for ops of `graph` and of their bodies."""
        found = {kind: look_up(self.executors, kind) for kind in kinds_of(graph)} if self.executors else {}
        return {kind: _wrap_executor(execute) for kind, execute in found.items() if execute is not None}


REGISTERED = Registry()


def register_executor(op_pattern: str) -> Callable[[F], F]:
    """Run ops of the type `op_pattern` by the decorated function, not by torch: `fn(inputs, attrs) -> [outputs]`."""
    return _register_in(REGISTERED.executors, op_pattern)


def register_op(op_pattern: str) -> Callable[[F], F]:
    """Convert ops of the type `op_pattern` by the decorated function, in bodies too: `fn(NodeInfo) -> OpNode`.

    Taken from the returned node are `name`, `op_type` and `attrs`; the shapes and dtypes of `outputs`, whose names must
    not change, since other nodes read them; and which tensors the `inputs` are, among those that the node may read.
    Producers follow from the graph. A call of torch's is checked against its schema. Anything else that does not fit
    is a ConversionError.
    """
    return _register_in(REGISTERED.conversions, op_pattern)


def list_registered_ops() -> dict[str, list[str]]:
    """The op types that have a function of the user's: {"execution": […], "conversion": […]}."""
    return {"execution": sorted(REGISTERED.executors), "conversion": sorted(REGISTERED.conversions)}


T = TypeVar("T")


def look_up(table: Mapping[str, T], kind: str) -> T | None:
    """The entry of `kind`, or the one of its name without the overload."""
    return table.get(kind, table.get(kind.rpartition(".")[0]))


def _register_in(table: dict[str, Any], name: str) -> Callable[[F], F]:
    if not isinstance(name, str):
        raise mistaken("the type of an op", name, 'text, as in "mylib.op"', UsageError)

    def enter(function: F) -> F:
        if not callable(function):
            raise mistaken(name, function, "a function", UsageError)
        table[name] = function
        return function

    return enter


def _wrap_executor(execute: Execute) -> Callable[[Op, Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
    def call(op: Op, ins: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        made = execute(list(ins), dict(format_attrs(op, as_torch)))
        if not isinstance(made, list | tuple) or len(made) != len(op.outputs):
            said = f"{len(made)} outputs" if isinstance(made, list | tuple) else f"a {type(made).__name__}"
            raise ExecutionError(
                f"node {op.name!r}: the registered executor of {op.kind} gave {said}; "
                f"expected a list of {len(op.outputs)}"
            )
        return made

    return call


def kinds_of(graph: Graph) -> set[str]:
    """The kinds of all ops, those in bodies included."""
    return {op.kind for op in graph.ops}.union(*(kinds_of(body) for op in graph.ops for body in op.bodies))
