"""Dims by the names that the caller gave them, which torch.export drops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

__all__ = ["dim_names", "inputs_of"]


def dim_names(program: ExportedProgram, dynamic_shapes: Any) -> dict[str, str]:
    """{torch's symbol: the caller's name}; a dim that the caller left to torch is called by its input and axis."""
    found: dict[str, str] = {}
    asked = dict(_asked(program, dynamic_shapes))
    for name, tensor in inputs_of(program):
        for axis, size in enumerate(tensor.shape):
            symbol = str(size)
            if isinstance(size, torch.SymInt) and symbol.isidentifier():
                found.setdefault(symbol, asked.get((name, axis)) or f"{name}_{axis}")
    return found


def inputs_of(program: ExportedProgram) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, fake tensor) of each tensor that the program is called with, in order."""
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if kinds.get(node.name) is InputKind.USER_INPUT and isinstance(value, torch.Tensor):
            yield node.name, value


def _asked(program: ExportedProgram, dynamic_shapes: Any) -> Iterator[tuple[tuple[str, int], str]]:
    """((input, axis), name) of every `Dim("batch")` in `dynamic_shapes`."""
    if dynamic_shapes is None:
        return
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    shapes = list(dynamic_shapes.values()) if isinstance(dynamic_shapes, Mapping) else list(dynamic_shapes)
    flat = pytree.tree_leaves(shapes, is_leaf=_is_shape)
    for spec, shape in zip(specs, flat, strict=False):
        axes = shape.items() if isinstance(shape, Mapping) else enumerate(shape or ())
        for axis, dim in axes:
            name = getattr(dim, "__name__", None)
            if isinstance(name, str) and name.isidentifier():
                yield (spec.arg.name, int(axis)), name


def _is_shape(item: Any) -> bool:
    """One tensor's entry: None, {axis: dim}, or a tuple of dims."""
    if item is None or (isinstance(item, Mapping) and all(isinstance(key, int) for key in item)):
        return True
    return isinstance(item, list | tuple) and not any(isinstance(part, Mapping | list | tuple) for part in item)
