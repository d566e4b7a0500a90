"""pytorch-ir's view of an IR: nodes and tensors as plain dataclasses, made from the Graph on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeline.ir import Attr, Graph, Role, SymExpr, TorchConst, Value
from pipeline.torch_ir.calls import KINDS, format_attrs


@dataclass
class TensorMeta:
    """One tensor: its name, shape (sizes, or names of dynamic dims) and dtype (`float32`).

    `producer_node` is the node that makes it (an input is its own producer, a weight has none), `producer_output_idx`
    which of that node's results it is.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    producer_node: str | None = None
    producer_output_idx: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As the JSON has it."""
        found: dict[str, Any] = {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}
        if self.producer_node is None:
            return found
        return found | {"producer_node": self.producer_node, "producer_output_idx": self.producer_output_idx}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorMeta:
        """What `to_dict` wrote."""
        producer = data.get("producer_node"), data.get("producer_output_idx", 0)
        return cls(data["name"], tuple(data["shape"]), data["dtype"], *producer)


@dataclass
class OpNode:
    """One operation. `inputs` are its tensors in the order of the call; `attrs` everything else, by argument name.

    For lists of tensors `attrs` has `_tensor_list_sizes`, the number of tensors in each, and where some are None
    `_tensor_list_none_masks`, true where there is none.
    """

    name: str
    op_type: str
    inputs: list[TensorMeta] = field(default_factory=list)
    outputs: list[TensorMeta] = field(default_factory=list)
    attrs: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As the JSON has it; torch's own constants by name."""
        return {
            "name": self.name,
            "op_type": self.op_type,
            "inputs": [one.to_dict() for one in self.inputs],
            "outputs": [one.to_dict() for one in self.outputs],
            "attrs": {name: _name_constants(item) for name, item in self.attrs.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OpNode:
        """What `to_dict` wrote. Names of torch's constants stay names."""
        inputs, outputs = ([TensorMeta.from_dict(one) for one in data[side]] for side in ("inputs", "outputs"))
        return cls(data["name"], data["op_type"], inputs, outputs, dict(data.get("attrs") or {}))


@dataclass(frozen=True, slots=True)
class Parts:
    """What an IR consists of."""

    nodes: list[OpNode]
    graph_inputs: list[TensorMeta]
    graph_outputs: list[TensorMeta]
    weights: list[TensorMeta]
    weight_name_mapping: dict[str, str]


def parts_of(graph: Graph) -> Parts:
    """`graph` as nodes and tensors."""
    values = graph.values
    weights = list(stored_values(graph))
    used = [_used(graph, value) for value in values]
    return Parts(
        [
            OpNode(
                op.name,
                op.kind,
                [used[vid] for vid in op.inputs],
                [_bare(values[vid], values[vid].name) for vid in op.outputs],
                dict(format_attrs(op, as_torch)),
            )
            for op in graph.ops
        ],
        [_bare(values[vid], values[vid].name) for vid in graph.inputs],
        [used[vid] for vid in graph.outputs],
        [_bare(value, key_of(graph, value)) for value in weights],
        {value.name: key_of(graph, value) for value in weights},
    )


def stored_values(graph: Graph) -> Iterator[Value]:
    """Params, states and constants, in order."""
    return (value for value in graph.values if value.role in (Role.PARAM, Role.STATE, Role.CONST))


def key_of(graph: Graph, value: Value) -> str:
    """The name of a stored value in a checkpoint."""
    return graph.sources[value.vid][0] if value.vid in graph.sources else value.name


def _bare(value: Value, name: str) -> TensorMeta:
    return TensorMeta(name, value.spec.shape, value.spec.dtype)


def _used(graph: Graph, value: Value) -> TensorMeta:
    return TensorMeta(value.name, value.spec.shape, value.spec.dtype, *producer_of(graph, value))


def producer_of(graph: Graph, value: Value) -> tuple[str | None, int]:
    """(the name of the node that makes `value`, which of its results it is)."""
    if value.producer is not None:
        op = graph.ops[value.producer]
        return op.name, op.outputs.index(value.vid)
    return (value.name, 0) if value.role is Role.INPUT else (None, 0)


def as_torch(item: Attr) -> Any:
    """An attribute as torch takes it: torch.float32, a torch.device, lists; a named size is its expression."""
    match item:
        case tuple():
            return [as_torch(part) for part in item]
        case TorchConst("device", name):
            return torch.device(name)
        case TorchConst(
            kind, name
        ):  # an operator, as `auto_functionalized` has one, stays a name: it may not be imported
            return getattr(torch, name) if kind in KINDS else name
        case SymExpr(expression):
            return expression
        case _:
            return item


def as_attr(item: Any) -> Attr:
    """The inverse of `as_torch`, which also takes what a user has assigned."""
    if isinstance(item, list | tuple):
        return tuple(as_attr(part) for part in item)
    for kind, cls in KINDS.items():
        if isinstance(item, cls):
            return TorchConst(kind, str(item).removeprefix("torch."))
    return item


def _name_constants(item: Any) -> Any:
    if isinstance(item, list | tuple):
        return [_name_constants(part) for part in item]
    return str(item) if isinstance(item, torch.dtype | torch.device | torch.layout | torch.memory_format) else item
