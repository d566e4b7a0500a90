"""Read one graph of the traced program, node by node: the top level, or the body of a higher-order op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, getitem
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pipeline.errors import Unsupported
from pipeline.importers.from_torch.operators import Names, Operator, describe_operator, line_of, module_of
from pipeline.importers.from_torch.tensors import TensorPayload, Tensors, holds_values, is_contiguous
from pipeline.ir import Attr, BodyRef, Graph, InputRef, Op, Payload, Role, TensorSpec, TorchConst
from pipeline.ir.builder import GraphFacts, ValueDecl, assemble
from pipeline.ir.graph import parts


@dataclass(frozen=True, slots=True)
class Several:
    """The results of a call that has several, in order; None for a result that is no tensor."""

    vids: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Number:
    """A number, or None."""

    item: Attr


NodeResult: TypeAlias = int | Several | Graph | Number
"""What a node of the traced graph evaluates to: a vid, several, the body of an op, or a number."""


class Arguments:
    """The inputs and bodies of one op, collected while its arguments are read."""

    def __init__(self, result_of: Callable[[Any], NodeResult]) -> None:
        """`result_of`: of a node, or of a tensor where a call is read that no graph of torch has."""
        self.inputs: list[int] = []
        self.bodies: list[Graph] = []
        self._result_of = result_of

    def read(self, node: Any, operator: Operator) -> dict[str, Attr]:
        """The arguments of `node` by name, in the order of the schema; an argument that is None by default and None
        here is left out.

        Raises:
            Unsupported: an argument that the IR cannot hold.
        """
        names, optional = operator.arguments, operator.optional
        given = dict(zip(names, node.args, strict=False))
        for index, operand in enumerate(node.args[len(names) :]):
            given[f"operand_{index}"] = operand
        if node.kwargs:
            given |= {name: node.kwargs[name] for name in (*names, *node.kwargs) if name in node.kwargs}
        return {name: self._item(item) for name, item in given.items() if item is not None or name not in optional}

    def _item(self, item: Any) -> Attr:
        kind = type(item)
        if kind is Node or isinstance(item, torch.Tensor):
            return self._attr_of(self._result_of(item))
        if kind in AS_THEY_ARE:
            return item
        if isinstance(item, list | tuple):
            return tuple(map(self._item, item))
        if isinstance(item, dict):
            return tuple((key, self._item(part)) for key, part in item.items())
        for types, word in WORDS:
            if isinstance(item, types):
                return TorchConst(word, str(item).removeprefix("torch."))
        raise Unsupported(f"an argument of type {kind.__name__} ({item!r}); the IR holds tensors, numbers and names")

    def _attr_of(self, result: NodeResult) -> Attr:
        if type(result) is int:
            self.inputs.append(result)
            return InputRef(len(self.inputs) - 1)
        if isinstance(result, Graph):
            self.bodies.append(result)
            return BodyRef(len(self.bodies) - 1)
        if isinstance(result, Several):
            return tuple(None if vid is None else self._attr_of(vid) for vid in result.vids)
        return result.item if isinstance(result, Number) else None


AS_THEY_ARE = frozenset({bool, int, float, complex, str, type(None)})

WORDS = (
    (torch.dtype, "dtype"),
    (torch.device, "device"),
    (torch.layout, "layout"),
    (torch.memory_format, "memory_format"),
    (OpOverload, "operator"),
)


class Region:
    """Collects the values and ops of one graph; the caller declares the placeholders before it calls `read`.

    Placeholders keep torch's names. Those of a body are named `arg0`, `arg1`, … because torch names them after the
    values outside.
    """

    def __init__(self, module: GraphModule, tensors: Tensors, *, is_body: bool = False) -> None:
        self._module = module
        self._tensors = tensors
        placeholders = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        self._given = {name: f"arg{index}" if is_body else name for index, name in enumerate(placeholders)}
        self._names = Names(self._given.values())
        self._decls: list[ValueDecl] = []
        self._ops: list[Op] = []
        self._payloads: dict[str, Payload] = {}
        self._node_results: dict[Node, NodeResult] = {}

    def declare(self, node: Node, role: Role, payload: Payload | None = None) -> int:
        """Declare the placeholder `node` as a tensor of this role. Returns its vid."""
        name = self._given[node.name]
        if payload is not None:
            self._payloads[name] = payload
        vid = self._node_results[node] = self._add_value(name, node.meta["val"], role)
        return vid

    def declare_number(self, node: Node) -> None:
        """Declare the placeholder `node` as a number."""
        self._node_results[node] = self._number(node.meta.get("val"))

    def read(self) -> None:
        """Read all calls and attributes.

        Raises:
            Unsupported: something that the IR cannot hold; the message names the node, its module and its line.
        """
        for node in self._module.graph.nodes:
            if node.op in ("call_function", "get_attr"):
                try:
                    self._node_results[node] = self._call(node) if node.op == "call_function" else self._attribute(node)
                except Unsupported as error:
                    place = " · ".join(filter(None, (module_of(node), line_of(node))))
                    raise Unsupported(f"{node.target} {node.name!r} ({place or 'no place known'}): {error}") from error

    def result_of(self, node: Any) -> NodeResult:
        """The result of `node`, or that of a plain Python number."""
        return self._node_results[node] if isinstance(node, Node) else Number(node)

    def graph(self, name: str, inputs: Sequence[int], outputs: Sequence[int], facts: GraphFacts | None = None) -> Graph:
        return assemble(name, self._decls, self._ops, inputs, outputs, self._payloads, facts=facts)

    def _call(self, node: Node) -> NodeResult:
        target: Any = node.target
        value = node.meta.get("val")
        if target is getitem and isinstance(source := self._node_results[node.args[0]], Several):  # type: ignore[index]
            vid = source.vids[node.args[1]]  # type: ignore[index]
            return Number(None) if vid is None else vid
        if isinstance(value, NUMBERS):
            return self._number(value)
        operator = describe_operator(target)
        if operator.nothing:
            return Number(None)
        if operator.same:
            return self.result_of(node.args[0])
        if any(name.endswith("_storage_offset") for name in node.kwargs):
            _refuse_other_orders(node)
        arguments = Arguments(self.result_of)
        attrs = {**arguments.read(node, operator), **_default_dtype(node, operator)}
        name = self._names.new(operator.base)
        outputs, result = self._results(name, value)
        self._ops.append(
            Op(
                oid=len(self._ops),
                kind=operator.kind,
                inputs=tuple(arguments.inputs),
                outputs=outputs,
                attrs=attrs,
                name=name,
                origin=module_of(node),
                line=line_of(node),
                bodies=tuple(_name_bodies(arguments.bodies, attrs)),
            )
        )
        return result

    def spec(self, vid: int) -> TensorSpec:
        """Shape and dtype of a value."""
        return self._decls[vid].spec

    def _results(self, name: str, value: Any) -> tuple[tuple[int, ...], NodeResult]:
        if isinstance(value, torch.Tensor):
            vid = self._add_value(name, value, Role.TMP)
            return (vid,), vid
        if value is None:
            return (), Number(None)
        vids = [
            self._add_value(self._names.new(f"{name}_{index}"), part, Role.TMP)
            if isinstance(part, torch.Tensor)
            else None
            for index, part in enumerate(value)
        ]
        return tuple(vid for vid in vids if vid is not None), Several(tuple(vids))

    def _attribute(self, node: Node) -> NodeResult:
        """Read a body, or a tensor that torch keeps outside of the graph."""
        held = attrgetter(str(node.target))(self._module)
        if isinstance(held, GraphModule):
            return self._body(held, str(node.target))
        if not isinstance(held, torch.Tensor):
            raise Unsupported(f"an attribute of type {type(held).__name__}; the IR holds tensors, numbers and names")
        if holds_values(held):
            self._payloads[node.name] = TensorPayload(held)
        return self._add_value(node.name, held, Role.CONST)

    def _body(self, module: GraphModule, name: str) -> Graph:
        region = Region(module, self._tensors, is_body=True)
        inputs = []
        for node in module.graph.nodes:
            if node.op == "placeholder":
                if not isinstance(node.meta.get("val"), torch.Tensor):
                    raise Unsupported(
                        f"the body {name!r} takes the number {node.name!r}, and a body takes tensors: "
                        "start with torch.tensor(0) in place of 0"
                    )
                inputs.append(region.declare(node, Role.INPUT))
        region.read()
        output = module.graph.output_node().args[0]
        leaving = output if isinstance(output, list | tuple) else (output,)
        vids = [result for item in leaving if type(result := region.result_of(item)) is int]
        if len(vids) != len(leaving):
            raise Unsupported(f"the body {name!r} gives back something that is no tensor")
        return region.graph(name, inputs, vids)

    def _number(self, value: Any) -> Number:
        return Number(self._tensors.size(value) if isinstance(value, SYMBOLIC) else value)

    def _add_value(self, name: str, tensor: torch.Tensor, role: Role) -> int:
        self._decls.append(self._tensors.declare(name, tensor, role))
        return len(self._decls) - 1


def _default_dtype(node: Node, operator: Operator) -> dict[str, Attr]:
    """The dtype of a floating result of no floating operand, which is torch's default dtype in the trace.

    Where that is not float32, the call says it: a run knows no default dtype but float32.

    Raises:
        Unsupported: the operator cannot say it.
    """
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor) or not result.is_floating_point() or result.dtype is torch.float32:
        return {}
    operands = [operand.meta.get("val") for operand in node.all_input_nodes]
    says = node.kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in node.args)
    if says or not operator.kind.startswith("aten.") or any(map(_is_inexact, operands)):
        return {}
    if "dtype" in operator.arguments:
        return {"dtype": TorchConst("dtype", str(result.dtype).removeprefix("torch."))}
    raise Unsupported(
        f"its result is {result.dtype} because that was torch's default dtype in the trace, and a graph is run with "
        "float32 as default: give the operands or the operator a dtype"
    )


def _is_inexact(value: object) -> bool:
    """Whether a value, or one in a list of results, is floating point or complex."""
    parts = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(part, torch.Tensor) and (part.is_floating_point() or part.is_complex()) for part in parts)


def _refuse_other_orders(node: Node) -> None:
    """Refuse views that `auto_functionalized_v2` describes by their storage offset, unless their base is contiguous."""
    for base in node.kwargs["_all_bases"]:  # type: ignore[union-attr]
        value = base.meta["val"]  # type: ignore[union-attr]
        if not is_contiguous(value) or value.storage_offset() != 0:
            raise Unsupported(
                f"it writes to a part of {base}, which does not lie row after row from the beginning of its memory; "
                "call contiguous() or clone() on it before"
            )


def _name_bodies(bodies: Sequence[Graph], attrs: Mapping[str, Attr]) -> Iterator[Graph]:
    """Name each body after its argument (`true_fn`), since torch numbers bodies over the whole program."""
    for index, body in enumerate(bodies):
        yield replace(body, name=next(name for name, item in attrs.items() if BodyRef(index) in parts(item)))


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

NUMBERS = (*SYMBOLIC, int, float, bool)
