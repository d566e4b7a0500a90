"""Short names for values, for as long as a library works on them.

onnxoptimizer compares the name of each value that it reads with the names of all others, so a call costs by the square
of the nodes; names that fit into a C++ string without an allocation halve that.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from onnx import GraphProto

from passes.graph.traversal import every_graph

__all__ = ["ShortNames"]


class ShortNames:
    """Renames the values of `graph`, and of the graphs inside of it, in place; later gives them their names back, in
    whatever passes have made of it one after the other.

    One name becomes one name wherever it is used, so scopes stay what they are.
    """

    def __init__(self, graph: GraphProto) -> None:
        self._short: dict[str, str] = {}
        _rename(graph, lambda name: self._short.setdefault(name, f"v{len(self._short)}"))
        self._full = {short: name for name, short in self._short.items()}

    def restore(self, graph: GraphProto) -> None:
        """Give the values of `graph`, which was made of the first one, their names back. New values keep the names that
        they have, unless another has it."""
        _rename(graph, self._restored)

    def quote_own_names(self, message: str) -> str:
        """What a library says about the graph, with the names that its values have outside."""
        return re.sub(r"\bv\d+\b", lambda short: self._full.get(short[0], short[0]), message)

    def _restored(self, short: str) -> str:
        if short not in self._full:
            free = short
            while free in self._short:
                free += "_"
            self._short[free] = short
            self._full[short] = free
        return self._full[short]


def _rename(graph: GraphProto, renamed: Callable[[str], str]) -> None:
    for one in every_graph(graph):
        for node in one.node:
            for names in (node.input, node.output):
                names[:] = [renamed(name) if name else "" for name in names]
        for named in (one.input, one.output, one.value_info, one.initializer):
            for entry in named:
                entry.name = renamed(entry.name)
        for sparse in one.sparse_initializer:
            sparse.values.name = renamed(sparse.values.name)
        for annotation in one.quantization_annotation:
            annotation.tensor_name = renamed(annotation.tensor_name)
            for parameter in annotation.quant_parameter_tensor_names:
                parameter.value = renamed(parameter.value)
