"""IR: what `extract_ir` gives back. A thin view of a Graph, with pytorch-ir's names and files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from passes.collector import collector_paused
from pipeline.errors import UserMistake
from pipeline.ir import Graph
from pipeline.torch_ir.document import files, writing
from pipeline.torch_ir.document.constants import THRESHOLD, Beside, read_constant, write_constant
from pipeline.torch_ir.document.hand import by_hand
from pipeline.torch_ir.document.head import constants_in, read_head
from pipeline.torch_ir.document.reading import read_graph
from pipeline.torch_ir.document.signature import write_tree
from pipeline.torch_ir.errors import SerializationError
from pipeline.torch_ir.given import mistaken, path_of
from pipeline.torch_ir.nodes import OpNode, Parts, TensorMeta, parts_of, stored
from pipeline.torch_ir.tree import Tree

__all__ = ["IR", "Signature", "an_ir"]


@dataclass(frozen=True, slots=True)
class Signature:
    """How the arguments (a tuple of args and kwargs) and the result of the model nest; None where nobody knows."""

    inputs: Tree | None = None
    outputs: Tree | None = None


class IR:
    """A model as a graph of aten operations.

    `nodes`, `graph_inputs`, `graph_outputs`, `weights` and `weight_name_mapping` are made from the Graph when they are
    asked for; or the Graph from them, for an IR that is put together by hand. `constants` holds the values of lifted
    constants and of non-persistent buffers by their names in the model, where they are known; `unsaved` the names of
    all non-persistent buffers, which no checkpoint has.
    """

    def __init__(
        self,
        nodes: Sequence[OpNode] = (),
        graph_inputs: Sequence[TensorMeta] = (),
        graph_outputs: Sequence[TensorMeta] = (),
        weights: Sequence[TensorMeta] = (),
        weight_name_mapping: Mapping[str, str] | None = None,
        constants: Mapping[str, torch.Tensor] | None = None,
        model_name: str = "",
        pytorch_version: str = "",
    ) -> None:
        mapping = dict(weight_name_mapping or {})
        self._parts: Parts | None = Parts(list(nodes), list(graph_inputs), list(graph_outputs), list(weights), mapping)
        self._graph: Graph | None = None
        self._written: Mapping[str, Any] | None = None
        self.model_name = model_name
        self.pytorch_version = pytorch_version
        self.constants = dict(constants or {})
        self.signature = Signature()
        self.unsaved: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        graph: Graph,
        constants: Mapping[str, torch.Tensor] | None = None,
        signature: Signature | None = None,
        pytorch_version: str = torch.__version__,
        unsaved: frozenset[str] = frozenset(),
    ) -> IR:
        """The IR whose graph is `graph`."""
        made = cls(model_name=graph.name, pytorch_version=pytorch_version, constants=constants)
        made._graph, made._parts = graph, None
        made.signature, made.unsaved = signature or Signature(), unsaved
        return made

    @property
    def graph(self) -> Graph:
        """The static IR proper: values, ops, updates of states, named dims."""
        if self._graph is None:
            self._graph = self._read()
        return self._graph

    @collector_paused()
    def _read(self) -> Graph:
        data = self._written if self._written is not None else by_hand(self.model_name, self._view())
        return read_graph(data, self.constants)

    @property
    def nodes(self) -> list[OpNode]:
        return self._view().nodes

    @property
    def graph_inputs(self) -> list[TensorMeta]:
        return self._view().graph_inputs

    @property
    def graph_outputs(self) -> list[TensorMeta]:
        return self._view().graph_outputs

    @property
    def weights(self) -> list[TensorMeta]:
        return self._view().weights

    @property
    def weight_name_mapping(self) -> dict[str, str]:
        return self._view().weight_name_mapping

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, as it is saved; constants of any size are in it."""
        found = {key: list(part) if key == "nodes" else part for key, part in self._sections()}
        return found | {"constants": {key: write_constant(key, tensor) for key, tensor in self.constants.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> IR:
        """The IR that `to_dict` wrote, or pytorch-ir.

        Raises:
            SerializationError: the data is no IR, or of a later format.
        """
        return cls._of_written(data, {})

    @collector_paused()
    def save(self, path: str | Path, *, threshold: int = THRESHOLD) -> None:
        """Write the IR as JSON, at once; `m.json.zst` is packed. Constants over `threshold` bytes lie in a file beside.

        Raises:
            SerializationError: a file cannot be written, and what was there stays; or `threshold` is no number.
        """
        path = path_of("the IR", path, SerializationError)
        if not isinstance(threshold, int | float):
            raise mistaken("threshold", threshold, "a number of bytes, as in 4096", SerializationError)
        with files.explained(path, "written"):
            self._save(path, threshold)

    def _save(self, path: Path, threshold: int) -> None:
        prefix = files.sidecar_prefix(path)
        beside = Beside(threshold)
        constants = {key: write_constant(key, tensor, beside) for key, tensor in self.constants.items()}
        large = path.with_name(files.sidecar_name(prefix, beside.tensors))
        constants |= {key: {"file": large.name, **constants[key]} for key in beside.tensors}
        was_there = large.exists()
        if beside.tensors:
            files.write_tensors(large, beside.tensors)
        try:
            files.write(path, self._text(constants))
        except SerializationError:
            if not was_there:
                large.unlink(missing_ok=True)
            raise
        files.remove_others(path, prefix, keep=large.name if beside.tensors else "")

    @classmethod
    @collector_paused()
    def load(cls, path: str | Path) -> IR:
        """The IR of a file of `save`, or of pytorch-ir.

        Raises:
            SerializationError: the file cannot be read, or is no IR; or the file of its constants is gone.
        """
        path = path_of("the IR", path, SerializationError)
        data = files.read(path)
        wanted = {str(one["file"]) for one in constants_in(data).values() if "file" in one}
        return cls._of_written(data, {name: files.read_tensors(path, name) for name in wanted})

    def __eq__(self, other: object) -> bool:
        """Whether the documents are the same, to the bit of each constant."""
        return self.to_dict() == other.to_dict() if isinstance(other, IR) else NotImplemented

    def __repr__(self) -> str:
        graph = self.graph
        return (
            f"IR(model_name={self.model_name!r}, nodes={len(graph.ops)}, inputs={len(graph.inputs)}, "
            f"outputs={len(graph.outputs)}, weights={len(list(stored(graph)))})"
        )

    @classmethod
    def _of_written(cls, data: Mapping[str, Any], held: Mapping[str, Mapping[str, torch.Tensor]]) -> IR:
        head = read_head(data)
        constants = {key: read_constant(key, one, held) for key, one in constants_in(data).items()}
        made = cls(model_name=head.model_name, pytorch_version=head.pytorch_version, constants=constants)
        made._written, made._parts = data, None
        made.signature, made.unsaved = Signature(*head.trees), head.unsaved
        return made

    @collector_paused()
    def _view(self) -> Parts:
        if self._parts is None:
            self._parts = parts_of(self.graph)
        return self._parts

    def _sections(self) -> Iterator[tuple[str, Any]]:
        graph = self.graph
        trees = {"inputs": self.signature.inputs, "outputs": self.signature.outputs}
        yield "format_version", writing.FORMAT_VERSION
        yield "model_name", self.model_name
        yield "pytorch_version", self.pytorch_version
        yield from writing.facts(graph).items()
        if any(tree is not None for tree in trees.values()):
            yield "signature", {side: write_tree(tree) for side, tree in trees.items() if tree is not None}
        if self.unsaved:
            yield "unsaved", sorted(self.unsaved)
        yield "nodes", writing.nodes(graph)

    def _text(self, constants: Mapping[str, Any]) -> Iterator[str]:
        """The JSON in pieces, a line for each node, so that a large graph is never one string."""
        encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode
        opening = "{"
        for key, part in (*self._sections(), ("constants", constants)):
            yield f"{opening}{encode(key)}:"
            opening = ",\n"
            if key == "nodes":
                yield "["
                for index, node in enumerate(part):
                    yield f",\n{encode(node)}" if index else f"\n{encode(node)}"
                yield "]"
            else:
                yield encode(part)
        yield "}\n"


def an_ir(given: Any, error: type[UserMistake]) -> IR:
    """
    Raises:
        UserMistake: (as `error`) it is no IR.
    """
    if isinstance(given, IR):
        return given
    hints = {
        str | Path: "IR.load reads a file",
        Graph: "IR.of(graph) is the IR of a graph",
        torch.nn.Module: "extract_ir makes one of a module",
        Mapping: "IR.from_dict reads one",
    }
    raise mistaken("ir", given, "an IR", error, hints)
