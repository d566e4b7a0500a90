"""Give each module, or each node, a weight of its own, where several read one: a tied embedding and output projection.
And the counterpart: store a weight once that is stored several times.

After `untie`, quantization chooses a scale for each copy. The copies share their bytes in memory, and in a `.data`
file; a model that is one file holds them twice. `tie` also finds a copy that is transposed, as a folded Transpose
leaves it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.context import PassContext
from passes.errors import PolicyError
from passes.graph.index import GraphIndex, free_name, replace_all_uses_with, replace_entries, value_names
from passes.graph.inference import EVERY_FLOAT
from passes.graph.op_facts import PRODUCTS
from passes.graph.traversal import bodies_in, reads_of
from passes.provenance import module_path_of
from passes.step import PassResult, Step
from passes.suggest import plural
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class Untie(Step, name="untie", reads="structure"):
    """Give each module that reads a tied weight a copy of its own. The first module keeps the weight; the names of the
    copies are `NAME_2`, `NAME_3`, ….

    A node without a module counts as one, and with `each_node` so does every node. Nodes with a body keep what they
    read, and so do all nodes a scalar. The names follow the order of consumers in the graph.

    Args:
        each_node: every node counts as a module.
        by_operator: one copy for each operator type, as AIMET needs it, since all readers of an AIMET quantizer have
            one type. Only a weight that both a product and another operator read, also through a Transpose, is copied:
            such as the table of an embedding that is the output projection too.
    """

    each_node: bool = False
    by_operator: bool = False

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        proto = model.copy_proto()
        graph, taken = proto.graph, value_names(proto.graph)
        index = GraphIndex(graph)
        stored, fed = index.initializers.items(), index.inputs
        tied = {name: tensor for name, tensor in stored if _is_weight(tensor) and name not in fed}
        if self.by_operator:
            tied = {name: tensor for name, tensor in tied.items() if _is_read_by_others_too(_operators(index, name))}
        names = {name: dict[Hashable, str]() for name in tied}
        for node in graph.node:
            if bodies_in(node):
                for name in tied.keys() & set(reads_of(node)):
                    names[name].setdefault(node.SerializeToString(), name)
                continue
            for slot, name in enumerate(node.input):
                if name in tied:
                    node.input[slot] = _name_for(name, names[name], self._consumer_of(node, index), taken)
        copies = [(tied[name], copy) for name, known in names.items() for copy in known.values() if copy != name]
        for tensor, name in copies:
            copied = graph.initializer.add()
            copied.CopyFrom(tensor)
            copied.name = name
        if not copies:
            readers = "products and other operators" if self.by_operator else "several modules"
            return PassResult(model, changed=False, why=f"no weight is read by {readers}")
        return PassResult(model.with_proto(proto), why=f"{plural(len(copies), 'copy', 'copies')} of tied weights")

    def check(self, context: PassContext) -> None:
        if self.each_node and self.by_operator:
            raise PolicyError(f"pass {self.name!r}: found each_node and by_operator; give one of them")

    def _consumer_of(self, node: NodeProto, index: GraphIndex) -> Hashable:
        """The innermost module around a node, or the node itself, by what it computes; or its operator."""
        if self.by_operator:
            return tuple(sorted(_operators(index, *node.output))) if node.op_type in LAYOUT else (node.op_type,)
        module = None if self.each_node else module_path_of(node)
        return module.paths[-1] if module is not None and module.paths else tuple(node.output)


@dataclass(frozen=True, slots=True)
class Tie(Step, name="tie", reads="values"):
    """Store a matrix once that is stored several times, also where one copy is transposed. All consumers of equal
    float matrices read the first; a copy that is its transpose becomes a Transpose of it.

    Equal matrices have the same dtype, shape and bits. A matrix whose elements are all equal, such as the zeros of an
    adapter that is not trained, stays as it is; so do vectors, and outputs of the model.
    """

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        index = model.index
        reserved = index.inputs.keys() | index.outputs.keys()
        first: dict[Hashable, tuple[str, bool]] = {}
        same: dict[str, str] = {}
        transposed: dict[str, str] = {}
        for name, tensor in index.initializers.items():
            if name in reserved or not _is_weight(tensor) or sum(dim > 1 for dim in tensor.dims) < 2:
                continue
            key = tensor.data_type, *tensor.dims, model.digest(tensor)
            if key not in first:
                first[key] = name, False
                if len(tensor.dims) == 2:
                    key_of_transpose = tensor.data_type, *reversed(tensor.dims), model.transposed_digest(tensor, (1, 0))
                    first.setdefault(key_of_transpose, (name, True))
            elif not _is_uniform(model, tensor):
                source, is_transposed = first[key]
                (transposed if is_transposed else same)[name] = source
        if not same and not transposed:
            return PassResult(model, changed=False, why="no matrix is stored twice")
        proto = model.copy_proto()
        graph = proto.graph
        replace_all_uses_with(graph.node, same)
        turns = [
            helper.make_node("Transpose", [source], [name], name=name, perm=[1, 0])
            for name, source in transposed.items()
        ]
        replace_entries(graph.node, [*turns, *graph.node])
        gone = same.keys() | transposed.keys()
        replace_entries(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in gone])
        return PassResult(model.with_proto(proto), why=f"{plural(len(gone), 'copy', 'copies')} of weights tied")


def _operators(index: GraphIndex, *names: str) -> set[str]:
    """The operators that read values, also after operators of `LAYOUT`; no Shape, which reads no element."""
    nodes = [node for name in names for node in index.consumers[name] if node.op_type != "Shape"]
    direct = {node.op_type for node in nodes if node.op_type not in LAYOUT}
    return direct.union(*(_operators(index, *node.output) for node in nodes if node.op_type in LAYOUT))


def _is_read_by_others_too(operators: set[str]) -> bool:
    """Whether a product is among several operators."""
    return len(operators) > 1 and not PRODUCTS.isdisjoint(operators)


LAYOUT: Final = ("Transpose", "Identity")
"""What AIMET looks through from a weight to its readers."""


def _is_uniform(model: DetachedModel, tensor: TensorProto) -> bool:
    """Whether all elements of a matrix are equal; False for a matrix that stays unread."""
    return not model.is_unread(tensor) and np.ptp(model.array(tensor)) == 0


def _name_for(name: str, known: dict[Hashable, str], consumer: Hashable, taken: set[str]) -> str:
    """What a module or a node calls the weight `name`: the first one as before."""
    if consumer not in known:
        known[consumer] = free_name(name, taken) if known else name
        taken.add(known[consumer])
    return known[consumer]


def _is_weight(tensor: TensorProto) -> bool:
    return tensor.data_type in EVERY_FLOAT and bool(tensor.dims) and math.prod(tensor.dims) > 1
