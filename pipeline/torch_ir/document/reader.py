"""Read tensors and nodes of an IR's JSON, ours or pytorch-ir's, into a Graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from pipeline.errors import InternalError
from pipeline.importers.from_torch.tensors import TensorPayload
from pipeline.ir import Attr, Dim, Graph, Op, Payload, Role, SymExpr, TensorSpec, check
from pipeline.ir.builder import GraphFacts, ValueDecl, assemble
from pipeline.ir.graph import parts
from pipeline.runtime.tensors import dtype_name
from pipeline.torch_ir.calls import check_call, read_call, torch_const
from pipeline.torch_ir.document.constants import read_constant
from pipeline.torch_ir.document.header import dims_in, read_dims
from pipeline.torch_ir.fields import (
    Unexpected,
    are_names,
    as_expected,
    mapping,
    rows,
    shape_of,
    strides_of,
    text,
)

Data = Mapping[str, Any]


def read_graph(data: Data, constants: Mapping[str, torch.Tensor], whole: bool) -> Graph:
    """The Graph of an IR as `writing.py` writes it; `constants` are its values by checkpoint name.

    The calls of a traced model, which has a signature, are `whole`; nodes that were built by hand may lack arguments,
    since they may only be meant as a picture.

    Raises:
        Unexpected: the data is no IR, names a tensor that nothing makes, or breaks a rule of the Graph.
    """
    reader = DocumentReader(whole)
    with reader.locate_errors():
        reader.meet_dims(data)
        reader.weights(data)
        inputs = [reader.declare(one, Role.INPUT) for one in reader.each(data, "graph_inputs")]
        reader.nodes(data)
        outputs = [reader.resolve(one) for one in reader.each(data, "graph_outputs")]
        payloads: dict[str, Payload] = {
            stub.name: TensorPayload(constants[keys[0]])
            for vid, keys in reader.sources.items()
            if keys[0] in constants and (stub := reader.stubs[vid])
        }
        facts = reader.facts(data)
        graph = assemble(data.get("model_name", ""), reader.stubs, reader.ops, inputs, outputs, payloads, facts=facts)
    try:
        check(graph)
    except InternalError as error:
        raise Unexpected(f"found a graph that is not sound ({error}), expected one that keeps the rules") from error
    return graph


class DocumentReader:
    """Collects values and ops while it reads; `where` is the position in the document, for messages."""

    def __init__(self, whole: bool, dims: frozenset[str] = frozenset()) -> None:
        self.whole = whole
        self.where = "the top level"
        self.dims = dims
        """The dims that a shape may name."""
        self.stubs: list[ValueDecl] = []
        self.ops: list[Op] = []
        self.sources: dict[int, tuple[str, ...]] = {}
        self._vids: dict[str, int] = {}
        self._nodes: set[str] = set()
        """Names of the nodes so far, which have to be unique: messages and edits refer to nodes by name."""
        self._keys: Data = {}
        """{name of a placeholder: name of its weight}"""
        self._places: dict[str, int] = {}
        """{name of a value: its index among the results}, for ops with several results."""
        self._specs: dict[tuple[Any, ...], TensorSpec] = {}
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

    def each(self, data: Data, key: str) -> Iterator[Data]:
        """The objects in the list `data[key]`, with `where` at each."""
        self.where = "the top level"
        for index, one in enumerate(rows(data, key)):
            self.where = f"{key}[{index}]"
            yield one

    def meet_dims(self, data: Data) -> None:
        """Collect the dims: those with a range, and those in the shape of an input, which gives them a size."""
        named = [
            dims_in(dim, "shape")
            for one in self.each(data, "graph_inputs")
            for dim in shape_of(one)
            if isinstance(dim, str)
        ]
        self.dims = frozenset(mapping(data, "dims")).union(*named)

    def weights(self, data: Data) -> None:
        """Declare the weights. Nodes use them by the names of their placeholders; without a mapping, by their own."""
        self.where = "the top level"
        updated, tied, self._keys = (mapping(data, key) for key in ("updates", "tied", "weight_name_mapping"))
        names = {key: name for name, key in self._keys.items()}
        for weight in self.each(data, "weights"):
            key: str = weight["name"]
            name: str = names.get(key, key)
            param = name.startswith("p_") or not self._keys
            role = Role.STATE if name in updated else Role.PARAM if param else Role.CONST
            vid = self.declare(weight, role, name)
            self.sources[vid] = (key, *tied.get(key, ()))

    def declare(self, tensor: Data, role: Role, name: str | None = None) -> int:
        name = str(name or tensor["name"])
        if name in self._vids:
            raise Unexpected(f"{name!r} is declared twice")
        look = (shape_of(tensor), text(tensor, "dtype").removeprefix("torch."), tensor.get("device", "cpu"))
        spec = self._specs.get(look)
        if spec is None:
            spec = self._specs[look] = self._spec(*look)
        strides = strides_of(tensor)
        if strides is not None:
            self._check_dims("strides", strides)
        self.stubs.append(ValueDecl(name, spec, role, strides))
        self._vids[name] = vid = len(self.stubs) - 1
        return vid

    def _spec(self, shape: tuple[Dim, ...], dtype: str, device: str) -> TensorSpec:
        self._check_dims("shape", shape)
        torch_const("device", device)
        return TensorSpec(shape, dtype, device)

    def _check_dims(self, where: str, sizes: tuple[Dim, ...]) -> None:
        """
        Raises:
            Unexpected: a size names an unknown dim, or is no expression.
        """
        for size in sizes:
            if isinstance(size, str) and (unknown := dims_in(size, where) - self.dims):
                known = f"one of {', '.join(sorted(self.dims))}" if self.dims else "only numbers, as there are no dims"
                raise Unexpected(f"{where}: found {size!r} of the dim {min(unknown)!r}, expected {known}")

    def vid(self, name: str) -> int:
        if name not in self._vids:
            key = self._keys.get(name)
            where = f": weight_name_mapping has it as {key!r}, which weights has not" if key else ""
            raise Unexpected(f"the tensor {name!r} is used, and nothing makes it{where}")
        return self._vids[name]

    def resolve(self, tensor: Data) -> int:
        """The vid of a tensor that is read, found by its name; a wrong `producer_output_idx` is refused."""
        if place := tensor.get("producer_output_idx"):  # a model has many tensors, and few are not the first of theirs
            name, expected = tensor["name"], self._places.get(tensor["name"], 0)
            if place != expected:
                raise Unexpected(f"{name!r}: producer_output_idx: found {place!r}, expected {expected}")
        vid = self._vids.get(tensor["name"])
        return self.vid(tensor["name"]) if vid is None else vid

    def nodes(self, data: Data) -> None:
        for node in self.each(data, "nodes"):
            if text(node, "op_type") == GETITEM:
                self._vids[node["outputs"][0]["name"]] = self.vid(node["inputs"][node["attrs"]["index"]]["name"])
            else:
                self._node(node)

    def _node(self, node: Data) -> None:
        name = text(node, "name")
        if name in self._nodes:
            raise Unexpected(f"name: found {name!r}, which an earlier node has, expected one of its own")
        self._nodes.add(name)
        inputs = tuple(self.resolve(one) for one in rows(node, "inputs"))
        outputs = tuple(self.declare(one, Role.TMP) for one in rows(node, "outputs"))
        if len(outputs) > 1:
            self._places |= {self.stubs[vid].name: place for place, vid in enumerate(outputs)}
        self.ops.append(
            Op(
                oid=len(self.ops),
                kind=node["op_type"],
                inputs=inputs,
                outputs=outputs,
                attrs=self._call(node, len(inputs)),
                name=name,
                origin=text(node, "module_path", ""),
                line=text(node, "line", ""),
                bodies=self._bodies(node, len(outputs)) if "bodies" in node else (),
            )
        )

    def _call(self, node: Data, inputs: int) -> dict[str, Attr]:
        kind, attrs = node["op_type"], mapping(node, "attrs")
        call = read_call(kind, inputs, node)
        if "call" in node:
            for name, item in call.items():
                self._check_dims(name, tuple(part.expression for part in parts(item) if type(part) is SymExpr))
        check_call(kind, inputs, call, call if "call" in node else attrs, self.whole)
        return call

    def _bodies(self, node: Data, results: int) -> tuple[Graph, ...]:
        found: list[Graph] = []
        at = self.where
        for index, body in enumerate(rows(node, "bodies")):
            self.where = f"{at}.bodies[{index}]"
            reader = DocumentReader(self.whole, self.dims)
            with reader.locate_errors():
                found.append(reader.body(body))
                if node["op_type"] == COND and len(found[-1].outputs) != results:
                    raise Unexpected(f"found {len(found[-1].outputs)}, expected {results}, as its node has")
        self.where = at
        return tuple(found)

    def facts(self, data: Data) -> GraphFacts:
        self.where = "updates"
        return GraphFacts(
            {self.vid(name): self.vid(after) for name, after in mapping(data, "updates").items()},
            self.sources,
            *read_dims(data),
        )

    def body(self, data: Data) -> Graph:
        payloads: dict[str, Payload] = {}
        inputs = [self.declare(one, Role.INPUT) for one in self.each(data, "inputs")]
        for name, constant in mapping(data, "constants").items():
            tensor = read_constant(name, constant, {})
            shape, dtype = list(tensor.shape), dtype_name(tensor.dtype)
            self.declare({"name": name, "shape": shape, "dtype": dtype}, Role.CONST)
            payloads[name] = TensorPayload(tensor)
        self.nodes(data)
        self.where = "outputs"
        outputs = [self.vid(name) for name in as_expected(data["outputs"], "outputs", "a list of names", are_names)]
        return assemble(text(data, "name"), self.stubs, self.ops, inputs, outputs, payloads)


GETITEM = "<built-in function getitem>"
COND = "higher_order.cond"
