"""Load and validate a model from a path, from bytes or in memory; an error is one sentence.

In a graph and in the bodies of its nodes every value is defined exactly once, and no node reads its own result. Nodes
may come in any order, as long as they form no cycle; loading sorts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Final

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto

from passes.errors import ModelError
from passes.graph.index import computed_values
from passes.graph.op_facts import ONNX_DOMAINS, attribute_of
from passes.graph.traversal import topological_order
from passes.load.nodes import (
    OperatorScope,
    bodies_in,
    check_calls,
    check_node,
    describe_node,
    functions_by_key,
    sparse_in,
    tensors_in,
)
from passes.load.tensors import FoundFiles, check_sparse, check_tensor
from passes.load.values import OPEN_DIM, check_entries, check_text, check_value

OLDEST_IR: Final = 3
"""The first version in which a model says which operators it means."""
MOST_BYTES: Final = 2**31 - 1
"""The size limit of one protobuf message."""


def load_model(
    source: str | Path | bytes | ModelProto,
    folder: Path | None = None,
    *,
    may_be_empty: bool = False,
    may_lack_outputs: bool = False,
) -> ModelProto:
    """Load a model that the rest of the code can trust. External data must exist, but is not read.

    One thing is changed in a model that is read: dims of -1, which Paddle's exporter writes, become open. A model in
    memory is not changed.

    Args:
        source: nodes may come in any order.
        folder: of the external data; by default that of the path (of the file that a link leads to).
        may_be_empty: weights may be left out: a tensor without data, or a data file that is missing.
        may_lack_outputs: outputs may have no producer, as where a tool has fused over a pinned value.

    Raises:
        ModelError: the file is missing, truncated or no ONNX; or the model is invalid. One sentence: what was found, at
            which node, tensor or value, and what was expected.
    """
    if isinstance(source, ModelProto):
        check_model(source, folder, may_be_empty=may_be_empty, may_lack_outputs=may_lack_outputs)
        return source
    if isinstance(source, bytes):
        model = _parse(source, "the model")
        check_model(model, folder, may_be_empty=may_be_empty, may_lack_outputs=may_lack_outputs)
    else:
        path = Path(source)
        model = _read(path)
        folder = folder or (path.resolve().parent if path.is_symlink() else path.parent)
        try:
            check_model(model, folder, may_be_empty=may_be_empty, may_lack_outputs=may_lack_outputs)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error
    free_dims(model)
    return model


def to_path(model: object) -> Path:
    """`model` as a path, where a model or its path is asked for.

    Raises:
        ModelError: it is something else.
    """
    if not isinstance(model, str | PathLike):
        raise ModelError(f"found {type(model).__name__}, expected an onnx.ModelProto or the path of an ONNX file")
    return Path(model)


def check_model(
    model: ModelProto, folder: Path | None = None, *, may_be_empty: bool = False, may_lack_outputs: bool = False
) -> None:
    """Validate a model in memory; see `load_model`.

    Raises:
        ModelError: it is not valid.
    """
    if not model.HasField("graph"):
        raise ModelError("it holds no graph; is it an ONNX file, and complete?")
    if not (model.graph.node or model.graph.output):
        raise ModelError("its graph has neither nodes nor outputs; is the file complete?")
    for text, what in (
        (model.producer_name, "producer's name"),
        (model.producer_version, "producer's version"),
        (model.domain, "domain"),
        (model.doc_string, "description"),
    ):
        check_text(text, f"the model's {what}")
    check_entries(model.metadata_props, "the model's metadata")
    if not OLDEST_IR <= model.ir_version <= onnx.IR_VERSION:
        raise ModelError(
            f"it has the IR version {model.ir_version}, and onnx {onnx.__version__} reads {OLDEST_IR} to "
            f"{onnx.IR_VERSION}; is the file damaged, or onnx too old for it?"
        )
    versions = _versions(model.opset_import, "the model")
    functions = functions_by_key(model)
    for function in model.functions:
        check_text(function.name, "the name of a function")
        check_text(function.domain, f"the domain of the function {function.name!r}")
        own = _versions(function.opset_import, f"the function {function.name!r}")
        parameters = frozenset((*function.attribute, *(attribute.name for attribute in function.attribute_proto)))
        operators = OperatorScope({**versions, **own}, functions, parameters)
        GraphCheck(operators, folder, may_be_empty).check_function(function)
    root = None if folder is None else folder.resolve()
    GraphCheck(OperatorScope(versions, functions), root, may_be_empty, may_lack_outputs).check(model.graph)
    if functions:
        check_calls(model.graph, functions)


def _read(path: Path) -> ModelProto:
    try:
        if not path.is_file():
            raise ModelError(f"no ONNX file at {path}; expected an .onnx file, or the folder of a run that has ended")
        if path.stat().st_size > MOST_BYTES:
            raise ModelError(
                f"{path} has {path.stat().st_size / 2**30:.3g} GiB, and one protobuf message holds 2 GiB at most; "
                "save it with external data"
            )
        return onnx.load(path, load_external_data=False)
    except ModelError:
        raise
    except Exception as error:  # protobuf, and onnx's parsers of text, raise errors of many types
        raise ModelError(
            f"{path} is not a readable ONNX file ({path.stat().st_size} bytes; {error}); is it complete?"
        ) from error


def _parse(content: bytes, what: str) -> ModelProto:
    try:
        return onnx.load_from_string(content)
    except Exception as error:
        raise ModelError(f"{what} is not readable ONNX ({error}); is it complete?") from error


def _versions(imports: Iterable[OperatorSetIdProto], where: str) -> dict[str, int]:
    """Domain → version; ONNX's own domain is "".

    Raises:
        ModelError: a domain has two versions, or one that does not exist.
    """
    found: dict[str, int] = {}
    for entry in imports:
        check_text(entry.domain, f"a domain of {where}")
        domain = "" if entry.domain == "ai.onnx" else entry.domain
        known = onnx.defs.onnx_opset_version() if domain == "" else 2**31
        if not 1 <= entry.version <= known:
            raise ModelError(
                f"{where} imports version {entry.version} of {domain or 'ai.onnx'}; "
                + (f"onnx {onnx.__version__} has 1 to {known}" if domain == "" else "expected 1 or more")
            )
        if found.setdefault(domain, entry.version) != entry.version:
            raise ModelError(
                f"{where} imports the versions {found[domain]} and {entry.version} of {domain or 'ai.onnx'}; "
                "expected one"
            )
    return found


def free_dims(model: ModelProto) -> None:
    """Make dims of -1 open, in place."""
    graph = model.graph
    for info in (*graph.input, *graph.output, *graph.value_info):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_value == OPEN_DIM:
                dim.ClearField("dim_value")


MOST_NESTED: Final = 30
"""Graphs inside of each other. Protobuf reads a message of 100 levels, and a graph in a node takes three."""


@dataclass(frozen=True, slots=True)
class GraphCheck:
    """Checks graphs of one model.

    Args:
        operators: what the model's opsets and functions define.
        folder: that of the model file, in which external data lies; None if there is none.
        may_be_empty: whether an initializer may be without data.
        may_lack_outputs: whether an output of the model may have no producer, as in a part of a model.
    """

    operators: OperatorScope
    folder: Path | None
    may_be_empty: bool
    may_lack_outputs: bool = False

    def check(
        self,
        graph: GraphProto,
        outer: Sequence[set[str]] = (),
        taken: Sequence[set[str]] = (),
        where: str = "the graph",
    ) -> set[str]:
        """Check `graph`; returns the names that it reads from outside.

        Args:
            graph: the graph, or the body of a node.
            outer: for each graph around this one, all names that a node in here can read, also those of later nodes.
            taken: for each graph around this one, the names that no node in here may define again: those that are
                defined before the node with this body. As in ONNX's checker, later names may be used again.
            where: how messages call the graph.

        Raises:
            ModelError: naming the node, the tensor or the value.
        """
        if len(outer) >= MOST_NESTED:
            raise ModelError(f"{where} lies inside of {MOST_NESTED} other graphs; expected fewer")
        check_text(graph.name, f"the name of {where}")
        check_text(graph.doc_string, f"the description of {where}")
        check_entries(graph.metadata_props, f"the metadata of {where}")
        for note in graph.quantization_annotation:
            check_text(note.tensor_name, f"the name of a quantized tensor of {where}")
            check_entries(note.quant_parameter_tensor_names, f"the quantization of {note.tensor_name!r}")
        own = self._check_given(graph, is_inner=bool(outer))
        for info in graph.value_info:
            check_value(info, "value", typed=False)
        free = self._check_nodes(graph.node, own, outer, taken)
        names = set()
        for info in graph.output:
            check_value(info, "output", typed=False)
            if info.name in names:
                raise ModelError(f"{where} has the output {info.name!r} twice; expected one of each name")
            names.add(info.name)
            if info.name not in own and (outer or not self.may_lack_outputs):
                _require_visible(info.name, outer, f"is an output of {where}")
        return free | (names - own)

    def check_function(self, function: FunctionProto) -> None:
        """Check the body of a function, which sees nothing from outside.

        Raises:
            ModelError: naming the function, and the node or the value.
        """
        where = f"the function {function.name!r}"
        for text in (*function.input, *function.output, *function.attribute, function.doc_string):
            check_text(text, f"a name in {where}")
        check_entries(function.metadata_props, f"the metadata of {where}")
        own = set(function.input)
        if len(own) < len(function.input) or "" in own:
            raise ModelError(f"{where} has the inputs {list(function.input)}; expected a name of its own for each")
        for info in function.value_info:
            check_value(info, "value", typed=False)
        self._check_nodes(function.node, own, (), ())
        for name in function.output:
            if name not in own:
                _require_visible(name, (), f"is an output of {where}")

    def _check_given(self, graph: GraphProto, *, is_inner: bool) -> set[str]:
        """The names of inputs and initializers."""
        own: set[str] = set()
        for info in graph.input:
            check_value(info, "input", typed=not is_inner)
            if info.name in own:
                raise ModelError(f"there are two inputs {info.name!r}; expected one of each name")
            own.add(info.name)
        stored: set[str] = set()
        files: FoundFiles = {}
        tensors = [*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)]
        for tensor in graph.initializer:
            check_tensor(tensor, self.folder, may_be_empty=self.may_be_empty, files=files)
        for sparse in graph.sparse_initializer:
            check_sparse(sparse)
        for tensor in tensors:
            if not tensor.name or tensor.name in stored:
                raise ModelError(
                    f"there are two initializers {tensor.name!r}; expected one of each name"
                    if tensor.name
                    else "an initializer has no name; nothing can read it"
                )
            stored.add(tensor.name)
        return own | stored

    def _check_nodes(
        self, nodes: Sequence[NodeProto], own: set[str], outer: Sequence[set[str]], taken: Sequence[set[str]]
    ) -> set[str]:
        """Check `nodes`, and add their outputs to `own`; returns the names that they read from outside."""
        producers: dict[str, int] = {}
        for index, node in enumerate(nodes):
            check_node(node, self.operators)
            for name in node.output:
                if not name:
                    continue
                if name in own or any(name in names for names in taken):
                    other = (
                        f"{describe_node(nodes[producers[name]])} makes it"
                        if name in producers
                        else "an input, an initializer or an outer graph has it"
                    )
                    raise ModelError(
                        f"{describe_node(node)} makes {name!r}, but {other} already; expected a name of its own"
                    )
                own.add(name)
                producers[name] = index
        free: set[str] = set()
        is_sorted = True
        for index, node in enumerate(nodes):
            reads = {name for name in node.input if name}
            for name in reads:
                if name not in own:
                    _require_visible(name, outer, f"is read by {describe_node(node)}")
            if any(True for _ in bodies_in(node)):
                earlier = own - computed_values(nodes[index:]).keys()
                reads |= self._check_inside(node, (*outer, own), (*taken, earlier))
            elif node.attribute:
                self._check_inside(node, (), ())
            free |= reads - own
            is_sorted = is_sorted and all(producers.get(name, -1) < index for name in reads)
        if not is_sorted:
            _refuse_cycle(nodes)
        return free

    def _check_inside(self, node: NodeProto, outer: Sequence[set[str]], taken: Sequence[set[str]]) -> set[str]:
        """Check tensors and graphs of `node`'s attributes; returns the names that the graphs read from outside."""
        reads: set[str] = set()
        for tensor in tensors_in(node):
            check_tensor(tensor, self.folder, may_be_empty=False)
        for sparse in sparse_in(node):
            check_sparse(sparse)
        for name, body in bodies_in(node):
            where = f"the body {name!r} of {describe_node(node)}"
            _check_arity(node, body, where)
            reads |= self.check(body, outer, taken, where)
        return reads


def _refuse_cycle(nodes: Sequence[NodeProto]) -> None:
    """Refuse nodes that form a cycle; other unsorted nodes are allowed, since loading sorts them."""
    sorted_indices = set(topological_order(nodes))
    stuck = [node for index, node in enumerate(nodes) if index not in sorted_indices]
    if stuck:
        raise ModelError(
            f"{describe_node(stuck[0])} reads what is computed from its own output: {len(stuck)} nodes lie on or "
            "after a cycle; expected an order in which each node reads what others have made"
        )


def _require_visible(name: str, outer: Iterable[set[str]], how: str) -> None:
    if not any(name in names for names in outer):
        raise ModelError(f"{name!r} {how}, and nothing makes it; expected an input, an initializer or a node's output")


def _check_arity(node: NodeProto, body: GraphProto, where: str) -> None:
    """Refuse a body whose numbers of inputs and outputs do not fit its node."""
    if node.domain not in ONNX_DOMAINS:
        return
    takes = {"If": 0, "Loop": max(len(node.input), 2)}.get(node.op_type, len(body.input))
    if len(body.input) != takes:
        raise ModelError(f"{where} has {len(body.input)} inputs; expected {takes}")
    gives = {"If": len(node.output), "Loop": len(node.output) + 1}.get(node.op_type, len(body.output))
    if len(body.output) != gives:
        raise ModelError(f"{where} has {len(body.output)} outputs; expected {gives}")
    if node.op_type == "Scan":
        scanned = attribute_of(node, "num_scan_inputs", 0)
        states = len(body.input) - scanned
        if not (0 < scanned <= len(body.input) and states <= len(body.output)):
            raise ModelError(
                f"{where} has {len(body.input)} inputs and {len(body.output)} outputs; "
                f"expected numbers that fit num_scan_inputs = {scanned}"
            )
