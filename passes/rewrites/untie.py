"""Give each module, or each node, a weight of its own, where several read one: a tied embedding and output projection.

Quantization then chooses a scale for each of them. The copies share their bytes in memory, and in a `.data` file; a
model that is one file holds them twice.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar, Final

from onnx import GraphProto, NodeProto, TensorProto

from passes.context import PassContext
from passes.graph.index import GraphIndex
from passes.graph.traversal import bodies_in, reads_of
from passes.provenance import module_path_of
from passes.provenance.weight_origins import free_name
from passes.step import Description, PassResult, Step, structure
from passes.suggest import plural
from passes.weights.detached import DetachedModel

FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16})


@dataclass(frozen=True, slots=True)
class Untie(Step):
    """Copy each float weight for every module that reads it but the first; the names are `NAME_2`, `NAME_3`, ….

    A node without a module counts as one, and with `each_node` so does every node. Nodes with a body keep what they
    read, and so do all nodes a scalar. The names follow the order of readers in the graph.
    """

    each_node: bool = False
    name: str = field(default="untie", init=False)
    source: str = field(default="onnxline", init=False)
    description: ClassVar[Description] = structure("Give each module that reads a tied weight a copy of its own")

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        proto = model.copy_proto()
        graph, taken = proto.graph, _value_names(proto.graph)
        index = GraphIndex(graph)
        stored, fed = index.initializers.items(), index.inputs
        tied = {name: tensor for name, tensor in stored if _is_weight(tensor) and name not in fed}
        names = {name: dict[Hashable, str]() for name in tied}
        for node in graph.node:
            if bodies_in(node):
                for name in tied.keys() & set(reads_of(node)):
                    names[name].setdefault(node.SerializeToString(), name)
                continue
            for slot, name in enumerate(node.input):
                if name in tied:
                    node.input[slot] = _name_for(name, names[name], self._reader_of(node), taken)
        copies = [(tied[name], copy) for name, known in names.items() for copy in known.values() if copy != name]
        for tensor, name in copies:
            copied = graph.initializer.add()
            copied.CopyFrom(tensor)
            copied.name = name
        if not copies:
            return PassResult(model, changed=False)
        return PassResult(model.with_proto(proto), why=f"{plural(len(copies), 'copy', 'copies')} of tied weights")

    def _reader_of(self, node: NodeProto) -> Hashable:
        """The innermost module around a node, or the node itself, by what it computes."""
        place = None if self.each_node else module_path_of(node)
        return place.paths[-1] if place is not None and place.paths else tuple(node.output)


def _name_for(name: str, known: dict[Hashable, str], reader: Hashable, taken: set[str]) -> str:
    """What a module or a node calls the weight `name`: the first one as before."""
    if reader not in known:
        known[reader] = free_name(name, taken) if known else name
        taken.add(known[reader])
    return known[reader]


def _is_weight(tensor: TensorProto) -> bool:
    return tensor.data_type in FLOATS and bool(tensor.dims) and math.prod(tensor.dims) > 1


def _value_names(graph: GraphProto) -> set[str]:
    index = GraphIndex(graph)
    return {*index.producers, *index.initializers, *index.types}
