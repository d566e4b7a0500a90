"""Which inputs and outputs of two models are the same: by name, else by place and type."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import GraphProto, ValueInfoProto

from passes.graph.formatting import spelled_type

__all__ = ["same_inputs", "same_outputs"]


def same_inputs(before: GraphProto, after: GraphProto) -> Mapping[str, str]:
    """Input of `after` → input of `before`; what has a default is no such input."""
    return _paired(*([info for info in graph.input if info.name not in _stored(graph)] for graph in (before, after)))


def same_outputs(before: GraphProto, after: GraphProto) -> Mapping[str, str]:
    """Output of `after` → output of `before`."""
    return _paired(list(before.output), list(after.output))


def _paired(olds: list[ValueInfoProto], news: list[ValueInfoProto]) -> dict[str, str]:
    known = {info.name for info in olds} & {info.name for info in news}
    old_rest, new_rest = ([info for info in infos if info.name not in known] for infos in (olds, news))
    found = {info.name: info.name for info in news if info.name in known}
    if len(old_rest) == len(new_rest):  # else nobody knows which one came, and which went
        pairs = zip(old_rest, new_rest, strict=True)
        found |= {new.name: old.name for old, new in pairs if spelled_type(old) == spelled_type(new)}
    return found


def _stored(graph: GraphProto) -> set[str]:
    return {tensor.name for tensor in graph.initializer}
