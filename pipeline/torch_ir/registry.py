"""Functions that users register for a type of op: one that converts its nodes, or one that runs them.

`REGISTERED` is the only global table of the package: `@register_executor("mylib.op")` in a user's file applies to all
later calls, as in pytorch-ir. An executor that gets a `Registry` of its own ignores `REGISTERED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from passes.suggest import describe_argument
from pipeline.errors import InternalError, UsageError
from pipeline.ir import Graph, Op, TensorSpec, check
from pipeline.ir.builder import declarations, rebuild
from pipeline.ir.graph import Attr, InputRef, parts
from pipeline.runtime.eager import Own
from pipeline.torch_ir.calls import as_attr, as_torch, check_call, find_known_operator, format_attrs, read_call
from pipeline.torch_ir.errors import ConversionError, ExecutionError, Unexpected, mistaken
from pipeline.torch_ir.nodes import NodeSequence, OpNode, TensorMeta

Execute = Callable[[list[torch.Tensor], dict[str, Any]], Sequence[torch.Tensor]]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class NodeInfo:
    """The argument of a function of `register_op`: the node to convert."""

    name: str
    target: Any
    input_metas: list[TensorMeta] = field(default_factory=list)
    output_metas: list[TensorMeta] = field(default_factory=list)
    attrs: dict[str, Any] = field(default_factory=dict)


Convert = Callable[[NodeInfo], OpNode]


@dataclass(frozen=True, slots=True)
class Registry:
    """Functions by op type; a key may leave the overload out: `aten.relu.default`, `mylib.op`."""

    executors: dict[str, Execute] = field(default_factory=dict)
    conversions: dict[str, Convert] = field(default_factory=dict)

    def executors_for(self, graph: Graph) -> Own:
        """The executors for ops of `graph` and of their bodies."""
        found = {kind: look_up(self.executors, kind) for kind in kinds_of(graph)} if self.executors else {}
        return {kind: _wrap_executor(execute) for kind, execute in found.items() if execute is not None}


REGISTERED = Registry()


def register_executor(op_pattern: str) -> Callable[[F], F]:
    """Run ops of the type `op_pattern` by the decorated function, not by torch: `fn(inputs, attrs) -> [outputs]`.

    Args:
        op_pattern: the op type, such as `aten.relu.default`, or `mylib.op` for all overloads.

    Raises:
        UsageError: `op_pattern` is no string, or what is decorated cannot be called.
    """
    return _register_in(REGISTERED.executors, op_pattern)


def register_op(op_pattern: str) -> Callable[[F], F]:
    """Convert ops of the type `op_pattern` by the decorated function, in bodies too: `fn(NodeInfo) -> OpNode`.

    Taken from the returned node are `name`, `op_type` and `attrs`; the shapes and dtypes of `outputs`, whose names must
    not change, since other nodes read them; and which tensors the `inputs` are, among those that the node may read.
    Producers follow from the graph. A call of torch's is checked against its schema. Any other mismatch is a
    ConversionError.

    Raises:
        UsageError: `op_pattern` is no string, or what is decorated cannot be called.
    """
    return _register_in(REGISTERED.conversions, op_pattern)


def list_registered_ops() -> dict[str, list[str]]:
    """The op types with a registered function: {"execution": […], "conversion": […]}."""
    return {"execution": sorted(REGISTERED.executors), "conversion": sorted(REGISTERED.conversions)}


T = TypeVar("T")


def look_up(table: Mapping[str, T], kind: str) -> T | None:
    """The entry of `kind`, or of its name without the overload."""
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
            said = f"{len(made)} outputs" if isinstance(made, list | tuple) else describe_argument(made)
            raise ExecutionError(
                f"node {op.name!r}: the registered executor of {op.kind} gave {said}; "
                f"expected a list of {len(op.outputs)}"
            )
        return made

    return call


def kinds_of(graph: Graph) -> set[str]:
    """The kinds of all ops, those in bodies included."""
    return {op.kind for op in graph.ops}.union(*(kinds_of(body) for op in graph.ops for body in op.bodies))


def apply_conversions(graph: Graph, registry: Registry) -> Graph:
    """Replace each op for which `registry` has a conversion by the converted op, in bodies too.

    Raises:
        ConversionError: a conversion fails, or returns a node with unknown inputs or with other names of outputs.
    """
    if not any(look_up(registry.conversions, kind) for kind in kinds_of(graph)):
        return graph
    made = _convert_graph(graph, registry)
    try:
        check(made)
    except InternalError as error:
        raise ConversionError(f"the registered conversions leave a graph that is not sound: {error}") from error
    return made


def _convert_graph(graph: Graph, registry: Registry) -> Graph:
    vids = {value.name: value.vid for value in graph.values}
    specs = [value.spec for value in graph.values]
    ops: list[Op] = []
    for op, node in zip(graph.ops, NodeSequence(graph), strict=True):
        bodies = tuple(_convert_graph(body, registry) for body in op.bodies)
        op = replace(op, bodies=bodies) if bodies else op
        ops.append(_convert_op(op, node, vids, specs, registry))
    _refuse_duplicates(ops)
    stubs = [
        replace(decl, spec=spec, strides=decl.strides if spec.shape == decl.spec.shape else None)
        for decl, spec in zip(declarations(graph), specs, strict=True)
    ]
    return rebuild(graph, stubs, ops)


def _convert_op(op: Op, node: OpNode, vids: Mapping[str, int], specs: list[TensorSpec], registry: Registry) -> Op:
    """Convert one op, and put the specs of its new outputs into `specs`."""
    convert = look_up(registry.conversions, op.kind)
    if convert is None:
        return op
    info = NodeInfo(
        node.name, find_known_operator(op.kind) or op.kind, list(node.inputs), list(node.outputs), dict(node.attrs)
    )
    whose = f"node {op.name!r}: the registered conversion of {op.kind}"
    try:
        made = convert(info)
    except Exception as error:  # the user's own code
        raise ConversionError(f"{whose} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, OpNode) or _names(made.outputs) != _names(node.outputs):
        raise ConversionError(
            f"{whose} gave {made!r:.200}; expected an OpNode with the outputs {', '.join(_names(node.outputs))}"
        )
    if unknown := [name for name in _names(made.inputs) if name not in vids]:
        raise ConversionError(f"{whose} reads {unknown[0]!r}; no such tensor")
    inputs = tuple(vids[name] for name in _names(made.inputs))
    for vid, meta in zip(inputs, made.inputs, strict=True):
        if (found := _spec(whose, meta, specs[vid])) != specs[vid]:
            raise ConversionError(
                f"{whose} reads {meta.name!r} as {_look(found)}; expected {_look(specs[vid])}, as it is made elsewhere"
            )
    for vid, meta in zip(op.outputs, made.outputs, strict=True):
        specs[vid] = _spec(whose, meta, specs[vid])
    same = made.op_type == op.kind and inputs == op.inputs and made.attrs == dict(format_attrs(op, as_torch))
    attrs = op.attrs if same else _attrs(whose, op, made, inputs)
    return replace(op, kind=made.op_type, inputs=inputs, attrs=attrs, name=made.name)


def _spec(whose: str, meta: TensorMeta, known: TensorSpec) -> TensorSpec:
    try:
        return TensorSpec(tuple(meta.shape), str(meta.dtype).removeprefix("torch."), known.device)
    except (TypeError, ValueError) as error:
        raise ConversionError(f"{whose} gave {meta!r}: {error}") from error


def _attrs(whose: str, op: Op, made: OpNode, inputs: tuple[int, ...]) -> dict[str, Attr]:
    """The attributes of a converted op. Unchanged inputs keep their arguments; else torch's schema assigns them."""
    if find_known_operator(made.op_type) is not None and (made.op_type, inputs) != (op.kind, op.inputs):
        call = read_call(made.op_type, len(inputs), made.attrs)
        try:
            check_call(made.op_type, len(inputs), call, made.attrs, whole=True)
        except Unexpected as error:
            raise ConversionError(f"{whose}: {error}") from error
        return call
    tensors = {name: item for name, item in op.attrs.items() if any(type(part) is InputRef for part in parts(item))}
    own = {name: as_attr(item) for name, item in made.attrs.items() if not name.startswith("_tensor_list_")}
    return {**(tensors if inputs == op.inputs else {}), **own}


def _refuse_duplicates(ops: list[Op]) -> None:
    names: set[str] = set()
    for op in ops:
        if op.name in names:
            raise ConversionError(f"node {op.name!r}: two nodes have this name, one from a registered conversion")
        names.add(op.name)


def _look(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _names(metas: Sequence[TensorMeta]) -> list[str]:
    return [meta.name for meta in metas]
