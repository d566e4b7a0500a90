"""IR, the result of `extract_ir`: a thin view of a Graph, with pytorch-ir's names, its files, and the check of one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import InitVar, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from passes.run.gc_pause import pause_collector
from pipeline.errors import InternalError, UsageError
from pipeline.ir import Graph, check
from pipeline.torch_ir.document import files, writing
from pipeline.torch_ir.document.constants import THRESHOLD, read_constant, write_constant
from pipeline.torch_ir.document.edits import apply_edits, is_identical
from pipeline.torch_ir.document.files import explain_errors, parse_json
from pipeline.torch_ir.document.header import constants_in, read_head, write_tree
from pipeline.torch_ir.document.reader import read_graph
from pipeline.torch_ir.errors import SerializationError
from pipeline.torch_ir.fields import TEXT, report_unexpected
from pipeline.torch_ir.nodes import OpNode, Parts, TensorMeta, parts_of
from pipeline.torch_ir.tree import CallSignature
from pipeline.torch_ir.validation import a_number, mistaken, path_of

Tensors = Mapping[str, torch.Tensor]


@dataclass(slots=True)
class GraphSource:
    """The Graph behind an IR. `found` is the Graph, or the data of a file, which is read when the Graph is needed.

    `shown` is the view that the Graph was read from; None where the view is made from the Graph, by `parts_of`.
    `handed` are the nodes of the view that the user has, as objects, each with the name of its op.
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
            with pause_collector(), report_unexpected(self.what):
                self.found = read_graph(self.found, constants, whole="signature" in self.found)
        return self.found

    @pause_collector()
    def apply_view(self, view: Parts, name: str, constants: Tensors, whole: bool) -> GraphSource:
        """This source if `view` is unchanged; else the source of a new Graph, called `name`, with the edits of `view`.

        Raises:
            SerializationError: there is no such Graph; the message says where.
        """
        graph = self.graph(constants)
        if is_identical(self.shown or parts_of(graph), view):
            return self
        with report_unexpected("IR, as it was put together", "change that part of it"):
            graph = read_graph(apply_edits(graph, name, view, self.handed), constants, whole)
        return GraphSource(graph, deepcopy(view), pair_with_names(view.nodes))

    def rename(self, name: str, constants: Tensors) -> GraphSource:
        """The source of the same Graph by another name."""
        return replace(self, found=replace(self.graph(constants), name=name))


def pair_with_names(nodes: Iterable[OpNode]) -> list[tuple[OpNode, str]]:
    """Each node with the name that it has now."""
    return [(node, node.name) for node in nodes]


EMPTY = Graph("", (), (), (), ())


@dataclass
class IR:
    """A model as a graph of aten operations.

    The first five fields are a view of the Graph, made when one of them is first read; for an IR that is built by hand,
    the Graph is made from them. Edits of these fields count: the Graph is updated when it is next needed.

    `constants` holds the values of lifted constants and of non-persistent buffers by their names in the model, where
    they are known; `unsaved` the names of all non-persistent buffers, which no checkpoint has.
    """

    nodes: list[OpNode] = field(default_factory=list)
    graph_inputs: list[TensorMeta] = field(default_factory=list)
    graph_outputs: list[TensorMeta] = field(default_factory=list)
    weights: list[TensorMeta] = field(default_factory=list)
    weight_name_mapping: dict[str, str] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    model_name: str = ""
    pytorch_version: str = ""
    signature: CallSignature = field(default_factory=CallSignature)
    unsaved: frozenset[str] = frozenset()
    source: InitVar[GraphSource | None] = None
    """What the view does not show, which `dataclasses.replace` hands on."""

    def __post_init__(self, source: GraphSource | None) -> None:
        vars(self)["source"] = source or GraphSource(EMPTY)  # where `replace` looks for it

    @classmethod
    def of(
        cls,
        graph: Graph,
        constants: dict[str, torch.Tensor] | None = None,
        signature: CallSignature | None = None,
        pytorch_version: str = torch.__version__,
        unsaved: frozenset[str] = frozenset(),
    ) -> IR:
        """The IR whose graph is `graph`."""
        made = cls(
            constants={} if constants is None else constants,
            model_name=graph.name,
            pytorch_version=pytorch_version,
            signature=signature or CallSignature(),
            unsaved=unsaved,
            source=GraphSource(graph),
        )
        return made._forget_view()

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
        vars(self)["source"] = self._source.rename(self.model_name, self.constants)
        return self._source.graph(self.constants)

    @property
    def _source(self) -> GraphSource:
        return vars(self)["source"]

    def snapshot(self) -> IR:
        """A copy of the IR as it is now; later edits of this one do not change it."""
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
        with files.explain_errors(path, "written"):
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
            """Make the view when one of its parts is first read."""
            if name not in PARTS:
                return object.__getattribute__(self, name)  # which raises AttributeError
            self._make_view()
            return vars(self)[name]

    @pause_collector()
    def _make_view(self) -> None:
        made = parts_of(self._source.graph(self.constants))
        if "nodes" not in vars(self):
            self._source.handed = pair_with_names(made.nodes)
        vars(self).update({name: getattr(made, name) for name in PARTS - vars(self).keys()})

    def _forget_view(self) -> IR:
        for name in PARTS:
            delattr(self, name)
        return self

    def _take_edits(self) -> None:
        view = Parts(self.nodes, self.graph_inputs, self.graph_outputs, self.weights, self.weight_name_mapping)
        source = self._source.apply_view(view, self.model_name, self.constants, whole=self.signature != CallSignature())
        if source is not self._source:
            vars(self)["source"] = source
            graph = source.graph(self.constants)
            self.signature = self.signature.fitting(len(graph.inputs), len(graph.outputs))

    @classmethod
    def _of_written(
        cls, data: Mapping[str, Any], held: Mapping[str, Mapping[str, torch.Tensor]], what: str = TEXT
    ) -> IR:
        head = read_head(data, what)
        with report_unexpected(what):
            constants = {key: read_constant(key, one, held) for key, one in constants_in(data, what).items()}
        made = cls(
            constants=constants,
            model_name=head.model_name,
            pytorch_version=head.pytorch_version,
            signature=head.signature,
            unsaved=head.unsaved,
            source=GraphSource(data, what=what),
        )
        return made._forget_view()

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


def serialize_ir(ir: IR) -> str:
    """The IR as one string of JSON, constants included."""
    return json.dumps(an_ir(ir, SerializationError).to_dict(), allow_nan=False)


def deserialize_ir(json_str: str | bytes) -> IR:
    """The IR of a string of `serialize_ir`.

    Raises:
        SerializationError: it is no text, no JSON, or no IR.
    """
    if not isinstance(json_str, str | bytes):
        raise mistaken(
            "the text of the IR", json_str, "a str or bytes", SerializationError, {dict: "IR.from_dict reads it"}
        )
    return IR.from_dict(parse_json("the text of the IR", json_str.encode() if isinstance(json_str, str) else json_str))


def save_ir(ir: IR, path: str | Path) -> None:
    """`ir.save(path)`; makes the folder if there is none.

    Raises:
        SerializationError: the file cannot be written.
    """
    ir, path = an_ir(ir, SerializationError), path_of("the IR", path, SerializationError)
    with explain_errors(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
    ir.save(path)


def load_ir(path: str | Path) -> IR:
    """`IR.load(path)`.

    Raises:
        NoIRFile: there is no such file (a FileNotFoundError too).
        SerializationError: it is no IR.
    """
    return IR.load(path)


def validate_ir(ir: IR) -> bool:
    """Check the IR against every rule of the Graph. Returns True.

    Raises:
        SerializationError: a rule is broken, or a tensor is used that nothing makes; the message lists all.
    """
    try:
        check(an_ir(ir, SerializationError).graph)
    except InternalError as error:
        raise SerializationError(f"the IR {ir.model_name!r} is not sound: {error}") from error
    return True
