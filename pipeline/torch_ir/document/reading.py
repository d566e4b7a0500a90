"""The JSON of an IR, ours or pytorch-ir's, as a Graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pipeline.importers.from_torch.payload import TensorPayload
from pipeline.ir import Graph, Op, Payload, Role, TensorSpec
from pipeline.ir.assemble import Facts, Stub, assemble
from pipeline.torch_ir.call import read_call
from pipeline.torch_ir.document.constants import read_constant
from pipeline.torch_ir.document.dims import dims_in, read_dims
from pipeline.torch_ir.document.expected import Unexpected, mapping, rows, shape_of, strides_of, text
from pipeline.torch_ir.errors import SerializationError
from pipeline.torch_ir.words import word

__all__ = ["read_graph"]

GETITEM = "<built-in function getitem>"

Data = Mapping[str, Any]


def read_graph(data: Data, constants: Mapping[str, torch.Tensor]) -> Graph:
    """The Graph of an IR as `document` writes it; `constants` are its values by checkpoint name.

    Raises:
        SerializationError: the data is no IR, or names a tensor that nothing makes; the message says where.
    """
    reader = Reader()
    try:
        reader.weights(data)
        inputs = [reader.declare(one, Role.INPUT) for one in reader.each(data, "graph_inputs")]
        reader.nodes(data)
        outputs = [reader.used(one) for one in reader.each(data, "graph_outputs")]
        payloads: dict[str, Payload] = {
            stub.name: TensorPayload(constants[keys[0]])
            for vid, keys in reader.sources.items()
            if keys[0] in constants and (stub := reader.stubs[vid])
        }
        facts = reader.facts(data)
        return assemble(data.get("model_name", ""), reader.stubs, reader.ops, inputs, outputs, payloads, facts=facts)
    except Unexpected as error:
        raise SerializationError(f"IR JSON: {reader.where}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise SerializationError(f"IR JSON: {reader.where}: {what}; expected what IR.save writes") from error


class Reader:
    """Values and ops as they are read; `where` says how far it came."""

    def __init__(self) -> None:
        self.where = "the top level"
        self.stubs: list[Stub] = []
        self.ops: list[Op] = []
        self.sources: dict[int, tuple[str, ...]] = {}
        self._vids: dict[str, int] = {}
        self._places: dict[str, int] = {}
        """Which result of its op a value is, of those with several."""
        self._specs: dict[tuple[Any, ...], TensorSpec] = {}
        """A model has many tensors and few looks."""

    def each(self, data: Data, key: str) -> Iterator[Data]:
        """The objects in the list `data[key]`, with `where` at each."""
        self.where = "the top level"
        for index, one in enumerate(rows(data, key)):
            self.where = f"{key}[{index}]"
            yield one

    def weights(self, data: Data) -> None:
        """Weights are used by the names of their placeholders; where there is no mapping, by their own."""
        self.where = "the top level"
        updated, tied, placeholders = (mapping(data, key) for key in ("updates", "tied", "weight_name_mapping"))
        names = {key: name for name, key in placeholders.items()}
        for weight in self.each(data, "weights"):
            key: str = weight["name"]
            name: str = names.get(key, key)
            param = name.startswith("p_") or not placeholders
            role = Role.STATE if name in updated else Role.PARAM if param else Role.CONST
            vid = self.declare(weight, role, name)
            self.sources[vid] = (key, *tied.get(key, ()))

    def declare(self, tensor: Data, role: Role, name: str | None = None) -> int:
        name = str(name or tensor["name"])
        if name in self._vids:
            raise ValueError(f"{name!r} is declared twice")
        look = (shape_of(tensor), text(tensor, "dtype").removeprefix("torch."), tensor.get("device", "cpu"))
        spec = self._specs.get(look)
        if spec is None:
            spec = self._specs[look] = _spec(*look)
        self.stubs.append(Stub(name, spec, role, strides_of(tensor)))
        self._vids[name] = vid = len(self.stubs) - 1
        return vid

    def vid(self, name: str) -> int:
        if name not in self._vids:
            raise ValueError(f"the tensor {name!r} is used, and nothing makes it")
        return self._vids[name]

    def used(self, tensor: Data) -> int:
        """The vid of a tensor that is read. Its name decides; a place that its producer has not is refused."""
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
        mapping(node, "attrs")
        inputs = tuple(self.used(one) for one in rows(node, "inputs"))
        outputs = tuple(self.declare(one, Role.TMP) for one in rows(node, "outputs"))
        if len(outputs) > 1:
            self._places |= {self.stubs[vid].name: place for place, vid in enumerate(outputs)}
        self.ops.append(
            Op(
                oid=len(self.ops),
                kind=node["op_type"],
                inputs=inputs,
                outputs=outputs,
                attrs=read_call(node["op_type"], len(inputs), node),
                name=text(node, "name"),
                origin=node.get("module_path", ""),
                line=node.get("line", ""),
                bodies=tuple(map(read_body, node.get("bodies", ()))),
            )
        )

    def facts(self, data: Data) -> Facts:
        self.where = "updates"
        return Facts(
            {self.vid(name): self.vid(after) for name, after in mapping(data, "updates").items()},
            self.sources,
            *read_dims(data),
        )


def _spec(shape: tuple[int | str, ...], dtype: str, device: str) -> TensorSpec:
    for dim in shape:
        if isinstance(dim, str):
            dims_in(dim, "shape")
    word("device", device)
    return TensorSpec(shape, dtype, device)


def read_body(data: Data) -> Graph:
    reader = Reader()
    payloads: dict[str, Payload] = {}
    inputs = [reader.declare(one, Role.INPUT) for one in data["inputs"]]
    for name, constant in data.get("constants", {}).items():
        tensor = read_constant(name, constant, {})
        shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        reader.declare({"name": name, "shape": shape, "dtype": dtype}, Role.CONST)
        payloads[name] = TensorPayload(tensor)
    reader.nodes(data)
    return assemble(
        data["name"], reader.stubs, reader.ops, inputs, [reader.vid(name) for name in data["outputs"]], payloads
    )
