"""IR: what `extract_ir` gives back. A thin view of a Graph, with pytorch-ir's names and files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import InitVar, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from passes.run.gc_pause import pause_collector
from pipeline.errors import UsageError
from pipeline.ir import Graph
from pipeline.torch_ir.document import files, writing
from pipeline.torch_ir.document.constants import THRESHOLD, read_constant, write_constant
from pipeline.torch_ir.document.edits import alike, edited
from pipeline.torch_ir.document.fields import TEXT, refused
from pipeline.torch_ir.document.header import constants_in, read_head, write_tree
from pipeline.torch_ir.document.reader import read_graph
from pipeline.torch_ir.errors import SerializationError
from pipeline.torch_ir.nodes import OpNode, Parts, TensorMeta, parts_of
from pipeline.torch_ir.tree import Signature
from pipeline.torch_ir.validation import a_number, mistaken, path_of

__all__ = ["EMPTY", "IR", "Source", "an_ir", "named"]

Tensors = Mapping[str, torch.Tensor]


@dataclass(slots=True)
class Source:
    """`found` is the Graph, or the data of a file, which is read when somebody asks for the Graph.

    `shown` is the view that the Graph was read from; None where the Graph was first, and shows what `parts_of` says.
    `handed` are the nodes of the view, as the objects that whoever asked for them has, and the names of their ops.
    """

    found: Graph | Mapping[str, Any]
    shown: Parts | None = None
    handed: list[tuple[OpNode, str]] = field(default_factory=list)
    what: str = TEXT
    """The file that the data is of."""

    def graph(self, constants: Tensors) -> Graph:
        """
        Raises:
            SerializationError: the data is no IR.
        """
        if not isinstance(self.found, Graph):
            with pause_collector(), refused(self.what):
                self.found = read_graph(self.found, constants, whole="signature" in self.found)
        return self.found

    @pause_collector()
    def seen(self, view: Parts, name: str, constants: Tensors, whole: bool) -> Source:
        """This one, where `view` is as it was shown; otherwise that of the Graph `name`, of which it is the view.

        Raises:
            SerializationError: there is no such Graph; the message says where.
        """
        graph = self.graph(constants)
        if alike(self.shown or parts_of(graph), view):
            return self
        with refused("IR, as it was put together", "change that part of it"):
            graph = read_graph(edited(graph, name, view, self.handed), constants, whole)
        return Source(graph, deepcopy(view), named(view.nodes))

    def called(self, name: str, constants: Tensors) -> Source:
        """That of the same Graph by another name."""
        return replace(self, found=replace(self.graph(constants), name=name))


def named(nodes: Iterable[OpNode]) -> list[tuple[OpNode, str]]:
    """Each node with the name that it has now."""
    return [(node, node.name) for node in nodes]


EMPTY = Graph("", (), (), (), ())


@dataclass
class IR:
    """A model as a graph of aten operations.

    The first five fields are a view of the Graph, made when somebody asks for one of them; or the Graph is made from
    them, for an IR that is put together by hand. What is changed in them, or assigned, counts: the Graph follows when
    it is asked for next. `constants` holds the values of lifted constants and of non-persistent buffers by their names
    in the model, where they are known; `unsaved` the names of all non-persistent buffers, which no checkpoint has.
    """

    nodes: list[OpNode] = field(default_factory=list)
    graph_inputs: list[TensorMeta] = field(default_factory=list)
    graph_outputs: list[TensorMeta] = field(default_factory=list)
    weights: list[TensorMeta] = field(default_factory=list)
    weight_name_mapping: dict[str, str] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    model_name: str = ""
    pytorch_version: str = ""
    signature: Signature = field(default_factory=Signature)
    unsaved: frozenset[str] = frozenset()
    source: InitVar[Source | None] = None
    """What the view does not show, which `dataclasses.replace` hands on."""

    def __post_init__(self, source: Source | None) -> None:
        vars(self)["source"] = source or Source(EMPTY)  # where `replace` looks for it

    @classmethod
    def of(
        cls,
        graph: Graph,
        constants: dict[str, torch.Tensor] | None = None,
        signature: Signature | None = None,
        pytorch_version: str = torch.__version__,
        unsaved: frozenset[str] = frozenset(),
    ) -> IR:
        """The IR whose graph is `graph`."""
        made = cls(
            constants={} if constants is None else constants,
            model_name=graph.name,
            pytorch_version=pytorch_version,
            signature=signature or Signature(),
            unsaved=unsaved,
            source=Source(graph),
        )
        return made._unseen()

    @property
    def graph(self) -> Graph:
        """The static IR proper: values, ops, updates of states, named dims.

        Raises:
            SerializationError: a file, or what was changed in the view, is no IR; the message says where.
        """
        if not PARTS.isdisjoint(vars(self)):
            self._take_edits()
        graph = self._source.graph(self.constants)
        if graph.name == self.model_name:
            return graph
        vars(self)["source"] = self._source.called(self.model_name, self.constants)
        return self._source.graph(self.constants)

    @property
    def _source(self) -> Source:
        return vars(self)["source"]

    def settled(self) -> IR:
        """The IR as it is now. What is changed in this one afterwards does not count there."""
        return IR.of(self.graph, self.constants, self.signature, self.pytorch_version, self.unsaved)

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

    @pause_collector()
    def save(self, path: str | Path, *, threshold: int = THRESHOLD) -> None:
        """Write the IR as JSON, at once; `m.json.zst` is packed. Constants over `threshold` bytes lie in a file beside.

        Raises:
            SerializationError: a file cannot be written, and what was there stays; or `threshold` is no number of 0
                or more; with infinity, all constants are in the JSON.
        """
        path = path_of("the IR", path, SerializationError)
        if threshold != math.inf:
            a_number("threshold", threshold, "a number of bytes of 0 or more, as in 4096", SerializationError)
        with files.explained(path, "written"):
            files.save(path, self._sections(), self.constants, threshold)

    @classmethod
    @pause_collector()
    def load(cls, path: str | Path) -> IR:
        """The IR of a file of `save`, or of pytorch-ir.

        Raises:
            NoIRFile: there is no such file (a FileNotFoundError too).
            SerializationError: the file cannot be read, or is no IR; or the file of its constants is gone.
        """
        path = path_of("the IR", path, SerializationError)
        return cls._of_written(*files.load(path), what=str(path))

    def __eq__(self, other: object) -> bool:
        """Whether the documents are the same, to the bit of each constant."""
        return self.to_dict() == other.to_dict() if isinstance(other, IR) else NotImplemented

    def __repr__(self) -> str:
        view = parts_of(self.graph) if PARTS.isdisjoint(vars(self)) else self
        parts = {
            "nodes": view.nodes,
            "inputs": view.graph_inputs,
            "outputs": view.graph_outputs,
            "weights": view.weights,
        }
        counts = (f"{name}={len(part) if isinstance(part, list) else repr(part)}" for name, part in parts.items())
        return f"IR(model_name={self.model_name!r}, {', '.join(counts)})"

    if not TYPE_CHECKING:  # a checker would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Asked for what is not there, as a part that nobody has seen: all of them are made then."""
            if name not in PARTS:
                return object.__getattribute__(self, name)  # which says that there is none
            self._see()
            return vars(self)[name]

    @pause_collector()
    def _see(self) -> None:
        made = parts_of(self._source.graph(self.constants))
        if "nodes" not in vars(self):
            self._source.handed = named(made.nodes)
        vars(self).update({name: getattr(made, name) for name in PARTS - vars(self).keys()})

    def _unseen(self) -> IR:
        for name in PARTS:
            delattr(self, name)
        return self

    def _take_edits(self) -> None:
        view = Parts(self.nodes, self.graph_inputs, self.graph_outputs, self.weights, self.weight_name_mapping)
        seen = self._source.seen(view, self.model_name, self.constants, whole=self.signature != Signature())
        if seen is not self._source:
            vars(self)["source"] = seen
            graph = seen.graph(self.constants)
            self.signature = self.signature.fitting(len(graph.inputs), len(graph.outputs))

    @classmethod
    def _of_written(
        cls, data: Mapping[str, Any], held: Mapping[str, Mapping[str, torch.Tensor]], what: str = TEXT
    ) -> IR:
        head = read_head(data, what)
        with refused(what):
            constants = {key: read_constant(key, one, held) for key, one in constants_in(data, what).items()}
        made = cls(
            constants=constants,
            model_name=head.model_name,
            pytorch_version=head.pytorch_version,
            signature=head.signature,
            unsaved=head.unsaved,
            source=Source(data, what=what),
        )
        return made._unseen()

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


def an_ir(given: Any, error: type[UsageError]) -> IR:
    """
    Raises:
        UsageError: (as `error`) it is no IR.
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


PARTS = frozenset(one.name for one in fields(Parts))
"""The fields of an IR that are the view of its Graph."""
