"""Names for a model while a library works on it: short names for values, and numbers for nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from onnx import GraphProto, ModelProto, NodeProto

from passes.graph.traversal import every_graph


class ShortNames:
    """Renames the values of `graph` and of its inner graphs in place; later restores the full names in the graphs that
    passes made from it.

    A name becomes the same short name wherever it is used, so scopes do not change.
    """

    def __init__(self, graph: GraphProto) -> None:
        self._short: dict[str, str] = {}
        _rename(graph, lambda name: self._short.setdefault(name, f"v{len(self._short)}"))
        self._full = {short: name for name, short in self._short.items()}

    def restore(self, graph: GraphProto) -> None:
        """Give the values of `graph`, which was made of the first one, their names back. New values keep the names that
        they have, unless another has it."""
        _rename(graph, self._restore_name)

    def quote_own_names(self, message: str) -> str:
        """What a library says about the graph, with the names that its values have outside."""
        return re.sub(r"\bv\d+\b", lambda short: self._full.get(short[0], short[0]), message)

    def _restore_name(self, short: str) -> str:
        if short not in self._full:
            free = short
            while free in self._short:
                free += "_"
            self._short[free] = short
            self._full[short] = free
        return self._full[short]


def _rename(graph: GraphProto, rename: Callable[[str], str]) -> None:
    for subgraph in every_graph(graph):
        for node in subgraph.node:
            for names in (node.input, node.output):
                names[:] = [rename(name) if name else "" for name in names]
        for named in (subgraph.input, subgraph.output, subgraph.value_info, subgraph.initializer):
            for entry in named:
                entry.name = rename(entry.name)
        for sparse in subgraph.sparse_initializer:
            sparse.values.name = rename(sparse.values.name)
        for annotation in subgraph.quantization_annotation:
            annotation.tensor_name = rename(annotation.tensor_name)
            for parameter in annotation.quant_parameter_tensor_names:
                parameter.value = rename(parameter.value)


NUMBERED: Final = "onnxline.node/"


def number_nodes(model: ModelProto) -> list[str]:
    """Name each node by its place, in place; returns the names that they had.

    What is carried across a pass anyway goes, since it takes longer to read than many a pass to run.
    """
    del model.metadata_props[:]
    names = []
    for place, node in enumerate(model.graph.node):
        names.append(node.name)
        node.name = f"{NUMBERED}{place}"
        node.ClearField("doc_string")
        del node.metadata_props[:]
    return names


def restore_names(model: ModelProto, names: Sequence[str], source: Sequence[NodeProto]) -> None:
    """Give the nodes of `model` their `names`, where those are numbers the names of the `source` nodes."""
    for node, name in zip(model.graph.node, names, strict=True):
        place = name.removeprefix(NUMBERED)
        node.name = name if place == name else source[int(place)].name


def quote_own_names(message: str, source: Sequence[NodeProto]) -> str:
    """What a library says of a numbered model, with the names that its nodes have in `source`."""

    def find_name(number_nodes: re.Match[str]) -> str:
        place = int(number_nodes[1])
        node = source[place] if place < len(source) else NodeProto()
        return next((name for name in (node.name, *node.output) if name), number_nodes[0])

    return re.sub(rf"{re.escape(NUMBERED)}(\d+)", find_name, message)
