"""IR, the result of `extract_ir`: a read-only view of a Graph with pytorch-ir's names, its files, and its check."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from passes.graph.traversal import pause_collector
from pipeline.errors import InternalError, UsageError
from pipeline.ir import Graph, check
from pipeline.torch_ir import files
from pipeline.torch_ir.constants import THRESHOLD, read_constant, write_constant
from pipeline.torch_ir.document import FORMAT_VERSION, IRDocument, read_head, read_signature, write_signature
from pipeline.torch_ir.errors import TEXT, SerializationError, a_number, mistaken, parse, path_of, report_unexpected
from pipeline.torch_ir.files import explain_errors, parse_json
from pipeline.torch_ir.nodes import ConstantView, NodeSequence, OpNode, TensorMeta, key_of, meta_of, stored_values
from pipeline.torch_ir.reader import read_graph
from pipeline.torch_ir.tree import CallSignature

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class IR:
    """A model as a graph of aten operations. It cannot be changed; `dataclasses.replace(ir, nodes=…)` makes another.

    nodes, graph_inputs, graph_outputs, weights: the graph's operations and tensors; the weights by their names in a
        checkpoint.
    weight_name_mapping: {name in the graph: name in a checkpoint}; a tied weight has a name in the graph for each.
    model_name: by default that of the model's class.
    pytorch_version: the release of torch that captured the model; empty where it is not known.
    constants: the values of lifted constants and of non-persistent buffers by their names in the model, where they are
        known.
    signature: how arguments and results nest.
    unsaved: the names of all non-persistent buffers, which no checkpoint has.
    dims: {named dim: (least, most or None)}, the sizes that the graph holds for; `guards` are further conditions.
    updates: {weight or input, by its name in the graph: the tensor that it is after a run}.
    tied: {weight: its other names in a checkpoint}.
    """

    nodes: Sequence[OpNode] = field(default_factory=tuple)
    graph_inputs: Sequence[TensorMeta] = field(default_factory=tuple)
    graph_outputs: Sequence[TensorMeta] = field(default_factory=tuple)
    weights: Sequence[TensorMeta] = field(default_factory=tuple)
    weight_name_mapping: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    model_name: str = ""
    pytorch_version: str = ""
    signature: CallSignature = field(default_factory=CallSignature)
    unsaved: frozenset[str] = frozenset()
    dims: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    guards: Sequence[str] = field(default_factory=tuple)
    updates: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.constants, Mapping):  # else `graph` says what is wrong
            object.__setattr__(self, "constants", ConstantView(self.constants))

    @classmethod
    def of(
        cls,
        graph: Graph,
        constants: Mapping[str, torch.Tensor] | None = None,
        signature: CallSignature | None = None,
        pytorch_version: str = torch.__version__,
        unsaved: frozenset[str] = frozenset(),
    ) -> IR:
        """The IR whose graph is `graph`.

        Args:
            graph: the graph.
            constants: name → tensor, of the constants in the graph.
            signature: how the arguments and the result of the model nest; by default, that is not known.
            pytorch_version: torch's version that the graph comes from.
            unsaved: names of the buffers that no checkpoint has.
        """
        return cls._without_view(
            graph=graph,
            constants=ConstantView(constants or {}),
            model_name=graph.name,
            pytorch_version=pytorch_version,
            signature=signature or CallSignature(),
            unsaved=unsaved,
        )

    @classmethod
    def _without_view(cls, **known: Any) -> IR:
        """An IR whose view of its Graph is made when a part of it is first looked at."""
        made = cls()
        for name in VIEW:
            del vars(made)[name]
        vars(made).update(known)
        return made

    if not TYPE_CHECKING:  # a checker would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            if name not in VIEW:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            with pause_collector():
                vars(self).update(make_view(self.graph))
            return vars(self)[name]

    @cached_property
    def graph(self) -> Graph:
        """The static IR proper: values, ops, updates of states, named dims.

        Raises:
            SerializationError: a file, or the parts of an IR that was put together, are none; the message says where.
        """
        if "file" in vars(self):
            data, what = vars(self).pop("file")
            advice = "save the IR again"
        else:
            data, what = self._parts(), "IR, as it was put together"
            advice = "change that part of it"
        with pause_collector(), report_unexpected(what, advice):
            document = parse(IRDocument, data)
            read_signature(document)
            return read_graph(document, self.constants)

    def _parts(self) -> dict[str, Any]:
        """The fields as a IRDocument has them."""
        parts = {name: getattr(self, name) for name in (*VIEW, "model_name", "pytorch_version")}
        return {**parts, "unsaved": sorted(self.unsaved), "signature": write_signature(self.signature)}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, as it is saved; constants of any size are in it."""
        return {
            **{key: list(part) if key == "nodes" else part for key, part in self._sections()},
            "constants": {key: write_constant(key, tensor) for key, tensor in self.constants.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> IR:
        """The IR that `to_dict` wrote, or pytorch-ir.

        Args:
            data: what `json.load` gives for a file of `save`.

        Raises:
            SerializationError: the data is no IR, or of a later format.
        """
        return cls._read(data, {}, TEXT)

    @pause_collector()
    def save(self, path: str | Path, *, threshold: int = THRESHOLD) -> None:
        """Write the IR as JSON, at once; `m.json.zst` is packed. Constants over `threshold` bytes get another file.

        Args:
            path: the file to write; a name that ends with `.zst` packs it.
            threshold: in bytes, `math.inf` for one file; larger constants get a file next to `path`.

        Raises:
            SerializationError: a file cannot be written, and the old file stays; or `threshold` is no number of 0 or
                more.
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

        Args:
            path: the file; its constants lie next to it.

        Raises:
            NoIRFile: there is no such file (a FileNotFoundError too).
            SerializationError: the file cannot be read, or is no IR; or the file of its constants is gone.
        """
        path = path_of("the IR", path, SerializationError)
        return cls._read(*files.load(path), str(path))

    @classmethod
    def _read(cls, data: Any, held: Mapping[str, Tensors], what: str) -> IR:
        with report_unexpected(what):
            head = read_head(data, what)
            return cls._without_view(
                file=(data, what),
                constants=ConstantView({key: read_constant(key, item, held) for key, item in head.constants.items()}),
                model_name=head.model_name,
                pytorch_version=head.pytorch_version,
                signature=read_signature(head),
                unsaved=frozenset(head.unsaved),
            )

    def __eq__(self, other: object) -> bool:
        """Whether the documents are the same, to the bit of each constant."""
        return self.to_dict() == other.to_dict() if isinstance(other, IR) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        parts = {
            "nodes": self.nodes,
            "inputs": self.graph_inputs,
            "outputs": self.graph_outputs,
            "weights": self.weights,
        }
        counts = (f"{name}={len(part) if isinstance(part, Sequence) else repr(part)}" for name, part in parts.items())
        return f"IR(model_name={self.model_name!r}, {', '.join(counts)})"

    def _sections(self) -> Iterator[tuple[str, Any]]:
        """The keys of the JSON in order, but for the constants; the nodes are made one after another."""
        view = make_view(self.graph)
        view["graph_outputs"] = [replace(meta, producer_node=None) for meta in view["graph_outputs"]]
        yield "format_version", FORMAT_VERSION
        yield "model_name", self.model_name
        yield "pytorch_version", self.pytorch_version
        yield from ((key, [meta.to_dict() for meta in view[key]]) for key in TENSORS)
        yield "weight_name_mapping", view["weight_name_mapping"]
        ours = {
            "dims": {name: list(span) for name, span in view["dims"].items()},
            "guards": list(view["guards"]),
            "updates": view["updates"],
            "tied": {key: list(others) for key, others in view["tied"].items()},
            "signature": write_signature(self.signature),
            "unsaved": sorted(self.unsaved),
        }
        yield from ((key, item) for key, item in ours.items() if item)
        yield "nodes", (node.to_dict() for node in view["nodes"])


TENSORS = ("graph_inputs", "graph_outputs", "weights")
FACTS = ("weight_name_mapping", "dims", "guards", "updates", "tied")
VIEW = frozenset({"nodes", *TENSORS, *FACTS})
"""Fields of an IR that are a view of its Graph."""


def make_view(graph: Graph) -> dict[str, Any]:
    """The fields VIEW of an IR."""
    values, weights = graph.values, list(stored_values(graph))
    keys = {value.vid: key_of(graph, value) for value in weights}
    return {
        "nodes": NodeSequence(graph),
        "graph_inputs": tuple(meta_of(graph, values[vid]) for vid in graph.inputs),
        "graph_outputs": tuple(meta_of(graph, values[vid], with_producer=True) for vid in graph.outputs),
        "weights": tuple(meta_of(graph, value, keys[value.vid]) for value in weights),
        "weight_name_mapping": {value.name: keys[value.vid] for value in weights},
        "dims": {name: (span.least, span.most) for name, span in graph.dims.items()},
        "guards": graph.guards,
        "updates": {values[vid].name: values[after].name for vid, after in graph.updates.items()},
        "tied": {names[0]: names[1:] for vid, names in graph.sources.items() if vid in keys and names[1:]},
    }


def an_ir(given: Any, error: type[UsageError]) -> IR:
    """Return `given`, if it is an IR.

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


def serialize_ir(ir: IR) -> str:
    """The IR as one string of JSON, constants included.

    Args:
        ir: the IR.
    """
    return json.dumps(an_ir(ir, SerializationError).to_dict(), allow_nan=False)


def deserialize_ir(json_str: str | bytes) -> IR:
    """The IR of a string of `serialize_ir`.

    Args:
        json_str: the text, or its UTF-8 bytes.

    Raises:
        SerializationError: it is no text, no JSON, or no IR.
    """
    if not isinstance(json_str, str | bytes):
        raise mistaken(
            "the text of the IR", json_str, "a str or bytes", SerializationError, {dict: "IR.from_dict reads it"}
        )
    text = json_str.encode(errors="surrogatepass") if isinstance(json_str, str) else json_str
    return IR.from_dict(parse_json("the text of the IR", text))


def save_ir(ir: IR, path: str | Path) -> None:
    """`ir.save(path)`; makes the folder if there is none.

    Args:
        ir: the IR.
        path: the file to write.

    Raises:
        SerializationError: the file cannot be written.
    """
    ir, path = an_ir(ir, SerializationError), path_of("the IR", path, SerializationError)
    with explain_errors(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
    ir.save(path)


def load_ir(path: str | Path) -> IR:
    """`IR.load(path)`.

    Args:
        path: the file.

    Raises:
        NoIRFile: there is no such file (a FileNotFoundError too).
        SerializationError: it is no IR.
    """
    return IR.load(path)


def validate_ir(ir: IR) -> bool:
    """Check the IR against every rule of the Graph. Returns True.

    Args:
        ir: the IR.

    Raises:
        SerializationError: a rule is broken, or a tensor is used that nothing makes; the message lists all.
    """
    try:
        check(an_ir(ir, SerializationError).graph)
    except InternalError as error:
        raise SerializationError(f"the IR {ir.model_name!r} is not sound: {error}") from error
    return True
