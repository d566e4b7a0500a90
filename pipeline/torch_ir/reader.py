"""A document, ours or pytorch-ir's, → a Graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch

from pipeline.errors import InternalError
from pipeline.importers.from_torch.tensors import TensorPayload
from pipeline.ir import Attr, Dim, Graph, Op, Payload, Role, SymExpr, TensorSpec, check
from pipeline.ir.builder import GraphFacts, ValueDecl, assemble
from pipeline.ir.graph import parts
from pipeline.runtime.tensors import dtype_name
from pipeline.torch_ir.calls import as_attr, as_torch, check_call, format_attrs, read_call, to_plain, torch_const
from pipeline.torch_ir.constants import read_constant, with_values
from pipeline.torch_ir.document import IRDocument, check_guards, names_of
from pipeline.torch_ir.errors import Unexpected, describe_mistake
from pipeline.torch_ir.nodes import NodeBody, OpNode, TensorMeta

T = TypeVar("T", TensorMeta, OpNode, NodeBody)


def read_graph(document: IRDocument, constants: Mapping[str, torch.Tensor]) -> Graph:
    """The Graph of an IR; `constants` are its values by checkpoint name.

    The calls of a traced model, which has a signature, are whole; nodes that were built by hand may lack arguments,
    since they may only be meant as a picture.

    Raises:
        Unexpected: the document names a tensor that nothing makes, or breaks a rule of the Graph.
    """
    check_guards(document)
    reader = _DocumentReader(bool(document.signature), _dims_of(document))
    with reader.locate_errors():
        reader.weights(document)
        inputs = [reader.declare(meta, Role.INPUT) for meta in reader.each("graph_inputs", document.graph_inputs)]
        reader.nodes(document.nodes)
        outputs = [reader.resolve(meta) for meta in reader.each("graph_outputs", document.graph_outputs)]
        payloads: dict[str, Payload] = {
            reader.decls[vid].name: TensorPayload(with_values(keys[0], constants[keys[0]]))
            for vid, keys in reader.sources.items()
            if keys[0] in constants
        }
        reader.where = "updates"
        updates = {reader.vid(name): reader.vid(after) for name, after in document.updates.items()}
        facts = GraphFacts(updates, reader.sources, document.ranges, document.guards)
        graph = assemble(document.model_name, reader.decls, reader.ops, inputs, outputs, payloads, facts=facts)
    try:
        check(graph)
    except InternalError as error:
        raise Unexpected(f"found a graph that is not sound ({error}), expected one that keeps the rules") from error
    return graph


def _dims_of(document: IRDocument) -> frozenset[str]:
    """The dims that a shape may name: those with a range, and those in the shape of an input, which give a size."""
    named = [
        names_of(dim, f"graph_inputs[{index}]: shape")
        for index, meta in enumerate(document.graph_inputs)
        for dim in meta.shape
        if isinstance(dim, str)
    ]
    return frozenset(document.dims).union(*named)


class _DocumentReader:
    """Collects values and ops; `where` is the position in the document, for messages."""

    def __init__(self, whole: bool, dims: frozenset[str]) -> None:
        self.whole = whole
        self.where = "the top level"
        self.dims = dims
        self.decls: list[ValueDecl] = []
        self.ops: list[Op] = []
        self.sources: dict[int, tuple[str, ...]] = {}
        self._vids: dict[str, int] = {}
        self._nodes: set[str] = set()
        """Names of the nodes so far, which have to be unique: messages refer to nodes by name."""
        self._keys: Mapping[str, str] = {}
        """{name of a placeholder: name of its weight}"""
        self._result_index: dict[str, int] = {}
        """{name of a value: its index among the results}, for ops with several results."""
        self._specs: dict[tuple[tuple[Dim, ...], str, str], TensorSpec] = {}
        """A cache: a model has many tensors and few different specs."""

    @contextmanager
    def locate_errors(self) -> Iterator[None]:
        """Turn errors inside into Unexpected, with the position in the document."""
        try:
            yield
        except Unexpected as error:
            raise Unexpected(f"{self.where}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
            raise Unexpected(f"{self.where}: {what}; expected what IR.save writes") from error

    def each(self, key: str, items: Iterable[T]) -> Iterator[T]:
        """The items, with `where` at each."""
        for index, item in enumerate(items):
            self.where = f"{key}[{index}]"
            yield item

    def weights(self, document: IRDocument) -> None:
        """Declare the weights. Nodes use them by the names of their placeholders; without a mapping, by their own."""
        self._keys = document.weight_name_mapping
        names = {key: name for name, key in self._keys.items()}
        for weight in self.each("weights", document.weights):
            name = names.get(weight.name, weight.name)
            param = name.startswith("p_") or not self._keys
            role = Role.STATE if name in document.updates else Role.PARAM if param else Role.CONST
            vid = self.declare(weight, role, name)
            self.sources[vid] = (weight.name, *document.tied.get(weight.name, ()))

    def declare(self, meta: TensorMeta, role: Role, name: str = "") -> int:
        name = name or meta.name
        if name in self._vids:
            raise Unexpected(f"{name!r} is declared twice")
        look = (meta.shape, meta.dtype.removeprefix("torch."), meta.device)
        spec = self._specs.get(look)
        if spec is None:
            self._check_dims("shape", meta.shape)
            torch_const("device", meta.device)
            spec = self._specs[look] = TensorSpec(*look)
        if meta.strides is not None:
            if len(meta.strides) != len(meta.shape):
                raise Unexpected(
                    f"strides: {describe_mistake(list(meta.strides), f'a list of {len(meta.shape)}, as many as dims')}"
                )
            self._check_dims("strides", meta.strides)
        self.decls.append(ValueDecl(name, spec, role, meta.strides))
        self._vids[name] = vid = len(self.decls) - 1
        return vid

    def _check_dims(self, where: str, sizes: Iterable[Dim]) -> None:
        """
        Raises:
            Unexpected: a size names an unknown dim, or is no expression.
        """
        for size in sizes:
            if isinstance(size, str) and (unknown := names_of(size, where) - self.dims):
                known = f"one of {', '.join(sorted(self.dims))}" if self.dims else "only integers, as there are no dims"
                raise Unexpected(f"{where}: found {size!r} of the dim {min(unknown)!r}, expected {known}")

    def vid(self, name: str) -> int:
        if name not in self._vids:
            key = self._keys.get(name)
            where = f": weight_name_mapping has it as {key!r}, which weights has not" if key else ""
            raise Unexpected(f"the tensor {name!r} is used, and nothing makes it{where}")
        return self._vids[name]

    def resolve(self, meta: TensorMeta) -> int:
        """The vid of a tensor that is read, found by its name.

        Raises:
            Unexpected: nothing makes the tensor, or it is made with another shape, dtype or index among the results.
        """
        vid = self.vid(meta.name)
        index = self._result_index.get(meta.name, 0)
        if meta.producer_node is not None and meta.producer_output_idx != index:
            raise Unexpected(
                f"{meta.name!r}: producer_output_idx: {describe_mistake(meta.producer_output_idx, str(index))}"
            )
        spec = self.decls[vid].spec
        if meta.shape != spec.shape or meta.dtype.removeprefix("torch.") != spec.dtype:
            said = f"found {meta.dtype}{list(meta.shape)}, expected {spec.dtype}{list(spec.shape)}, as it is made"
            raise Unexpected(f"{meta.name!r}: {said}")
        return vid

    def nodes(self, nodes: Iterable[OpNode]) -> None:
        for node in self.each("nodes", nodes):
            if node.op_type == GETITEM:
                self._vids[node.outputs[0].name] = self.vid(node.inputs[node.attrs["index"]].name)
            else:
                self._node(node)

    def _node(self, node: OpNode) -> None:
        if node.name in self._nodes:
            raise Unexpected(f"name: found {node.name!r}, which an earlier node has, expected one of its own")
        self._nodes.add(node.name)
        inputs = tuple(map(self.resolve, node.inputs))
        outputs = tuple(self.declare(meta, Role.TMP) for meta in node.outputs)
        if len(outputs) > 1:
            self._result_index |= {self.decls[vid].name: index for index, vid in enumerate(outputs)}
        self.ops.append(
            Op(
                len(self.ops),
                node.op_type,
                inputs,
                outputs,
                self._call(node, len(inputs)),
                name=node.name,
                origin=node.module_path,
                line=node.line,
                bodies=self._bodies(node),
            )
        )

    def _call(self, node: OpNode, inputs: int) -> dict[str, Attr]:
        kind, given = node.op_type, {name: as_attr(item) for name, item in node.attrs.items()}
        call = read_call(kind, inputs, given, node.call)
        if node.call is not None:
            for name, item in call.items():
                self._check_dims(name, (part.expression for part in parts(item) if type(part) is SymExpr))
        check_call(kind, inputs, call, given if node.call is None else call, self.whole)
        if node.call is not None:
            _refuse_two_calls(node, call)
        return call

    def _bodies(self, node: OpNode) -> tuple[Graph, ...]:
        made: list[Graph] = []
        at = self.where
        for index, body in enumerate(node.bodies):
            self.where = f"{at}.bodies[{index}]"
            reader = _DocumentReader(self.whole, self.dims)
            with reader.locate_errors():
                made.append(reader.body(body))
                if node.op_type == COND and len(body.outputs) != len(node.outputs):
                    raise Unexpected(f"found {len(body.outputs)}, expected {len(node.outputs)}, as its node has")
        self.where = at
        return tuple(made)

    def body(self, body: NodeBody) -> Graph:
        payloads: dict[str, Payload] = {}
        inputs = [self.declare(meta, Role.INPUT) for meta in self.each("inputs", body.inputs)]
        for name, constant in body.constants.items():
            tensor = read_constant(name, constant, {})
            self.declare(TensorMeta(name, tuple(tensor.shape), dtype_name(tensor.dtype)), Role.CONST)
            payloads[name] = TensorPayload(tensor)
        self.nodes(body.nodes)
        self.where = "outputs"
        outputs = [self.vid(name) for name in body.outputs]
        return assemble(body.name, self.decls, self.ops, inputs, outputs, payloads)


def _refuse_two_calls(node: OpNode, call: Mapping[str, Attr]) -> None:
    """
    Raises:
        Unexpected: the exact call of a node has other arguments than its attributes.
    """
    op = Op(0, node.op_type, (), (), call)
    exact = {name: to_plain(item) for name, item in format_attrs(op, as_torch)}
    shown = {name: to_plain(item) for name, item in node.attrs.items()}
    if wrong := [name for name in {**shown, **exact} if repr(shown.get(name)) != repr(exact.get(name))]:
        name = wrong[0]
        said = describe_mistake(shown.get(name), f"{exact.get(name)!r}, as `call` has it")
        raise Unexpected(f"{node.op_type}: {name}: {said}")


GETITEM = "<built-in function getitem>"
COND = "higher_order.cond"
