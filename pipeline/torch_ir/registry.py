"""Functions of the user's for single kinds of op: how they are written down, and how they are run.

The one table of the process that this package has: `@register_executor("mylib.op")` at the head of a user's file has
to reach every later call, as in pytorch-ir. Whoever wants none of it gives an executor a `Registry` of its own.
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
from pipeline.torch_ir.errors import ExecutionError
from pipeline.torch_ir.nodes import OpNode, TensorMeta, as_torch
from pipeline.torch_ir.validation import mistaken

__all__ = [
    "REGISTERED",
    "NodeInfo",
    "Registry",
    "kinds_of",
    "list_registered_ops",
    "look_up",
    "register_executor",
    "register_op",
]

Execute = Callable[[list[torch.Tensor], dict[str, Any]], Sequence[torch.Tensor]]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class NodeInfo:
    """What a function of `register_op` is given: one call, before it is written down."""

    name: str
    target: Any
    input_metas: list[TensorMeta] = field(default_factory=list)
    output_metas: list[TensorMeta] = field(default_factory=list)
    attrs: dict[str, Any] = field(default_factory=dict)


Convert = Callable[[NodeInfo], OpNode]


@dataclass(frozen=True, slots=True)
class Registry:
    """By op type, with its overload or without: `aten.relu.default`, `mylib.op`."""

    executors: dict[str, Execute] = field(default_factory=dict)
    conversions: dict[str, Convert] = field(default_factory=dict)

    def executors_for(self, graph: Graph) -> Own:
        """The executors that ops of `graph`, or of their bodies, ask for."""
        found = {kind: look_up(self.executors, kind) for kind in kinds_of(graph)} if self.executors else {}
        return {kind: _wrap_executor(execute) for kind, execute in found.items() if execute is not None}


REGISTERED = Registry()


def register_executor(op_pattern: str) -> Callable[[F], F]:
    """Run ops of the type `op_pattern` by the function below, in place of torch's: `fn(inputs, attrs) -> [outputs]`."""
    return _register_in(REGISTERED.executors, op_pattern)


def register_op(op_pattern: str) -> Callable[[F], F]:
    """Write ops of the type `op_pattern` down as the function below says, in bodies too: `fn(NodeInfo) -> OpNode`.

    Of what it returns `name`, `op_type` and `attrs` are taken; of `outputs` shapes and dtypes, their names have to
    stay, since other nodes read them; of `inputs` which tensors they are, of those that the node may read. Producers
    follow from the graph. An operator of torch is held against its schema. What cannot be taken is a ConversionError.
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
    """Of all ops, those in bodies among them."""
    return {op.kind for op in graph.ops}.union(*(kinds_of(body) for op in graph.ops for body in op.bodies))
