"""pytorch-ir's view of a Graph: nodes and tensors as frozen dataclasses, which are the parts of the JSON too.

    model_name, pytorch_version, graph_inputs, graph_outputs, weights, weight_name_mapping, nodes, constants
    a tensor  {name, shape, dtype[, producer_node, producer_output_idx]}     ours: device, strides
    a node    {name, op_type, inputs, outputs, attrs}                        ours: module_path, line, call, bodies
    a body    {name, inputs, outputs, nodes[, constants]}

The keys mean what they mean in pytorch-ir; ours are added, and left out where they say nothing. A result of a node with
several is used directly, as (producer_node, producer_output_idx): there are no `getitem` nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self, TypeAlias, overload

from pydantic import BeforeValidator, ConfigDict, Field, StrictInt, StrictStr

from pipeline.importers.from_torch.tensors import TensorPayload
from pipeline.ir import Graph, Op, Role, Value
from pipeline.ir.tagged import write_attr
from pipeline.torch_ir.calls import as_torch, format_attrs, needs_exact_call, to_plain
from pipeline.torch_ir.constants import write_constant
from pipeline.torch_ir.errors import explain_as, parse, report_unexpected

LIMIT = 2**63
"""Sizes are below this: torch's integers have 64 bits."""

Size: TypeAlias = Annotated[StrictInt, Field(ge=0, lt=LIMIT)] | StrictStr
Sizes: TypeAlias = Annotated[
    tuple[Size, ...], explain_as("a list of sizes, each an integer of 0 or more, or an expression of named dims")
]

OR_NULL = BeforeValidator(lambda item: {} if item is None else item)
"""An empty object may be null in a file of pytorch-ir."""


def _refuse(self: Any, *_: Any, **__: Any) -> Any:
    raise TypeError(self.advice)


class ArgumentView(dict[str, Any]):
    """The arguments of a node by name; they cannot be changed."""

    advice: ClassVar[str] = (
        "a node is a view of its graph and cannot be changed; make another one, as in "
        "dataclasses.replace(node, attrs={**node.attrs, 'alpha': 2}), and an IR of it: dataclasses.replace(ir, nodes=…)"
    )
    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = _refuse

    def __reduce__(self) -> tuple[type[ArgumentView], tuple[dict[str, Any]]]:
        return type(self), (dict(self),)


class ConstantView(ArgumentView):
    """The constants of an IR by name; they cannot be changed."""

    advice = (
        "the constants of an IR cannot be changed; give an executor others, as in constants={'mask': tensor}, or make "
        "another IR: dataclasses.replace(ir, constants={**ir.constants, 'mask': tensor})"
    )


class TensorView(list["TensorMeta"]):
    """The operands or the results of a node; they cannot be changed."""

    advice: ClassVar[str] = ArgumentView.advice
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = remove = pop = clear = sort = reverse = _refuse

    def __reduce__(self) -> tuple[type[TensorView], tuple[list[TensorMeta]]]:
        return TensorView, (list(self),)


class _DocumentPart:
    """A frozen dataclass that is a part of the JSON."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(revalidate_instances="always")
    """Validate instances too: a part that a user made by its constructor has not been validated."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The part that `to_dict` wrote. Names of torch's constants stay names.

        Raises:
            SerializationError: the data is no such part; the message says where.
        """
        with report_unexpected():
            return parse(cls, data)


@dataclass(frozen=True)
class TensorMeta(_DocumentPart):
    """One tensor: its `name`, `shape` (sizes, or expressions of named dims) and `dtype` (`float32`).

    producer_node: the node that makes the tensor (an input is its own producer, a weight has none).
    producer_output_idx: which of that node's results the tensor is.
    device: as torch writes it.
    strides: in elements; None where the tensor was contiguous.
    """

    name: StrictStr
    shape: Sizes
    dtype: StrictStr
    producer_node: StrictStr | None = None
    producer_output_idx: StrictInt = 0
    device: StrictStr = "cpu"
    strides: Sizes | None = None

    def to_dict(self) -> dict[str, Any]:
        """The tensor as the JSON has it."""
        found: dict[str, Any] = {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}
        if self.producer_node is not None:
            found |= {"producer_node": self.producer_node, "producer_output_idx": self.producer_output_idx}
        if self.device != "cpu":
            found["device"] = self.device
        if self.strides is not None:
            found["strides"] = list(self.strides)
        return found


@dataclass(frozen=True)
class OpNode(_DocumentPart):
    """One operation. `inputs` are its tensors in the order of the call; `attrs` everything else, by argument name.

    For lists of tensors `attrs` has `_tensor_list_sizes`, the number of tensors in each, and where some are None
    `_tensor_list_none_masks`, true where there is none.

    call: the exact arguments, as `pipeline.ir.json` writes them, where `inputs` and `attrs` do not determine them.
    module_path, line: where the model calls the operator.
    """

    name: StrictStr
    """The name, unique in the IR; the node's results have it as `producer_node`."""
    op_type: StrictStr
    """The operator with its overload, such as `aten.add.Tensor`."""
    inputs: list[TensorMeta] = field(default_factory=list)
    outputs: list[TensorMeta] = field(default_factory=list)
    """The results of the call, in order."""
    attrs: Annotated[Mapping[str, Any], OR_NULL] = field(default_factory=dict)
    module_path: StrictStr = field(default="", compare=False)
    line: StrictStr = field(default="", compare=False)
    call: Mapping[str, Any] | None = field(default=None, compare=False)
    bodies: tuple[NodeBody, ...] = ()
    """The branches or the loop's parts of a higher-order operator; none for the others."""

    def __post_init__(self) -> None:
        for name, kind in VIEWS.items():
            # A value of another type is wrong; `IR.graph` reports it.
            if isinstance(value := getattr(self, name), dict | list | tuple):
                object.__setattr__(self, name, kind(value))

    def to_dict(self) -> dict[str, Any]:
        """The node as the JSON has it; torch's constants by name."""
        ours = {
            "module_path": self.module_path,
            "line": self.line,
            "call": self.call,
            "bodies": [body.to_dict() for body in self.bodies],
        }
        return {
            "name": self.name,
            "op_type": self.op_type,
            "inputs": [meta.to_dict() for meta in self.inputs],
            "outputs": [meta.to_dict() for meta in self.outputs],
            "attrs": {name: to_plain(item) for name, item in self.attrs.items()},
            **{key: item for key, item in ours.items() if item},
        }


@dataclass(frozen=True)
class NodeBody(_DocumentPart):
    """A branch or a loop's body; `outputs` are names of tensors."""

    name: StrictStr
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[StrictStr, ...]
    nodes: tuple[OpNode, ...]
    constants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The body as the JSON has it."""
        return {
            "name": self.name,
            "inputs": [meta.to_dict() for meta in self.inputs],
            "outputs": list(self.outputs),
            "nodes": [node.to_dict() for node in self.nodes],
            **({"constants": dict(self.constants)} if self.constants else {}),
        }


VIEWS = {"inputs": TensorView, "outputs": TensorView, "attrs": ArgumentView}
"""Field of an `OpNode` → the read-only type of its value."""


class NodeSequence(Sequence[OpNode]):
    """The nodes of a graph, each made when it is looked at: a graph may have 100,000."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._used = [meta_of(graph, value, with_producer=True) for value in graph.values]

    def __len__(self) -> int:
        return len(self._graph.ops)

    @overload
    def __getitem__(self, index: int) -> OpNode: ...
    @overload
    def __getitem__(self, index: slice) -> list[OpNode]: ...
    def __getitem__(self, index: int | slice) -> OpNode | list[OpNode]:
        found = self._graph.ops[index]
        return [self._node(op) for op in found] if isinstance(found, tuple) else self._node(found)

    def __iter__(self) -> Iterator[OpNode]:
        return map(self._node, self._graph.ops)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def _node(self, op: Op) -> OpNode:
        return OpNode(
            op.name,
            op.kind,
            [self._used[vid] for vid in op.inputs],
            [meta_of(self._graph, self._graph.values[vid]) for vid in op.outputs],
            dict(format_attrs(op, as_torch)),
            op.origin,
            op.line,
            {name: write_attr(item) for name, item in op.attrs.items()} if needs_exact_call(op) else None,
            tuple(map(_body_of, op.bodies)),
        )


def _body_of(graph: Graph) -> NodeBody:
    return NodeBody(
        graph.name,
        tuple(meta_of(graph, graph.values[vid]) for vid in graph.inputs),
        tuple(graph.values[vid].name for vid in graph.outputs),
        tuple(NodeSequence(graph)),
        {
            value.name: write_constant(value.name, payload.tensor)
            for value in graph.with_role(Role.CONST)
            if isinstance(payload := graph.payloads.get(value.vid), TensorPayload)
        },
    )


def meta_of(graph: Graph, value: Value, name: str = "", *, with_producer: bool = False) -> TensorMeta:
    """The `TensorMeta` of `value`.

    Args:
        name: in place of the value's own name.
        with_producer: describe the value as an operand, with its producer and without strides; else as a result, with
            strides and without a producer.
    """
    producer = producer_of(graph, value) if with_producer else (None, 0)
    strides = None if with_producer else value.strides
    return TensorMeta(name or value.name, value.spec.shape, value.spec.dtype, *producer, value.spec.device, strides)


def stored_values(graph: Graph) -> Iterator[Value]:
    """Params, states and constants, in order."""
    return (value for value in graph.values if value.role in (Role.PARAM, Role.STATE, Role.CONST))


def key_of(graph: Graph, value: Value) -> str:
    """The name of a stored value in a checkpoint; that of the value itself if it comes from no checkpoint."""
    return graph.sources[value.vid][0] if value.vid in graph.sources else value.name


def producer_of(graph: Graph, value: Value) -> tuple[str | None, int]:
    """(the name of the node that makes `value`, which of its results it is)."""
    if value.producer is not None:
        op = graph.ops[value.producer]
        return op.name, op.outputs.index(value.vid)
    return (value.name, 0) if value.role is Role.INPUT else (None, 0)
