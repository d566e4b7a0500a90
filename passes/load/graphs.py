"""Check a graph and the bodies of its nodes: every value is defined exactly once, and no node reads its own result.

Nodes may come in any order, as long as they form no cycle; loading sorts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from onnx import FunctionProto, GraphProto, NodeProto

from passes.errors import ModelError
from passes.graph.index import computed_values
from passes.graph.op_facts import ONNX_DOMAINS, attribute_of
from passes.graph.traversal import topological_order
from passes.load.nodes import OperatorScope, bodies_in, check_node, describe_node, sparse_in, tensors_in
from passes.load.tensors import FoundFiles, check_sparse, check_tensor
from passes.load.values import check_entries, check_text, check_value

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
