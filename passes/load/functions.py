"""The model's own functions: none calls itself, and all of them inlined stay of a size that can be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

from passes.errors import ModelError

__all__ = ["FunctionKey", "check_calls", "key_of_call", "own_functions"]

FunctionKey = tuple[str, str, str]
"""Domain, name and overload."""

MOST_NODES: Final = 2_000_000
"""Of a model whose functions are inlined."""


def own_functions(model: ModelProto) -> dict[FunctionKey, FunctionProto]:
    """
    Raises:
        ModelError: two have the same name.
    """
    found: dict[FunctionKey, FunctionProto] = {}
    for function in model.functions:
        key = (_domain(function.domain), function.name, getattr(function, "overload", ""))
        if key in found:
            raise ModelError(f"the model has two functions {_spelled(key)}; expected one of each name")
        found[key] = function
    return found


def key_of_call(node: NodeProto) -> FunctionKey:
    """What a node would call, if the model had such a function."""
    return (_domain(node.domain), node.op_type, getattr(node, "overload", ""))


def check_calls(graph: GraphProto, functions: Mapping[FunctionKey, FunctionProto]) -> None:
    """
    Raises:
        ModelError: a function calls itself, on whatever way; or the inlined model has too many nodes.
    """
    sizes: dict[FunctionKey, int] = {}
    for key in functions:
        _measure(key, functions, sizes)
    total = sum(sizes.get(key_of_call(node), 1) for node in _nodes(graph))
    if total > MOST_NODES:
        raise ModelError(
            f"the model's functions are {total:,} nodes once they are inlined; expected {MOST_NODES:,} at most"
        )


def _measure(start: FunctionKey, functions: Mapping[FunctionKey, FunctionProto], sizes: dict[FunctionKey, int]) -> None:
    """Find the number of nodes of an inlined function, after those of what it calls; a long chain needs no stack."""
    path: list[FunctionKey] = [start]
    while path:
        key = path[-1]
        if key in sizes:
            path.pop()
            continue
        called = [callee for node in _nodes(functions[key]) if (callee := key_of_call(node)) in functions]
        unknown = [callee for callee in dict.fromkeys(called) if callee not in sizes]
        if unknown:
            if unknown[0] in path:
                circle = [*path[path.index(unknown[0]) :], unknown[0]]
                raise ModelError(
                    f"the function {_spelled(unknown[0])} calls itself ({' → '.join(map(_spelled, circle))}); "
                    "ONNX has no recursion"
                )
            path.append(unknown[0])
            continue
        sizes[key] = min(1 + sum(sizes.get(key_of_call(node), 1) for node in _nodes(functions[key])), 2**62)
        path.pop()


def _nodes(graph: GraphProto | FunctionProto) -> Iterator[NodeProto]:
    """All nodes, inner ones too; protobuf bounds how deep they can lie."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)
            for inner in attribute.graphs:
                yield from _nodes(inner)


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _spelled(key: FunctionKey) -> str:
    domain, name, overload = key
    return f"{domain or 'ai.onnx'}::{name}" + (f":{overload}" if overload else "")
