"""Names that torch.export drops: of dims that the caller named, and of weights that are one tensor with another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from pipeline.importers.from_torch.modules import every_tensor

__all__ = ["dim_names", "tied_in", "tied_names"]


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """{name: the other names of the same parameter or buffer}, for those that have any."""
    shared = _shared(model)
    if not shared:
        return {}
    names: dict[int, list[str]] = {}
    for walk in (model.named_parameters, model.named_buffers):
        for name, tensor in walk(remove_duplicate=False):
            if id(tensor) in shared:
                names.setdefault(id(tensor), []).append(name)
    return _others(names)


def tied_in(program: ExportedProgram) -> dict[str, list[str]]:
    """`tied_names`, of a program whose model is not at hand."""
    names: dict[int, list[str]] = {}
    for name, tensor in program.state_dict.items():
        names.setdefault(id(tensor), []).append(name)
    return _others(names)


def _others(names: Mapping[int, list[str]]) -> dict[str, list[str]]:
    groups = [group for group in names.values() if len(group) > 1]
    return {name: [one for one in group if one != name] for group in groups for name in group}


def _shared(model: nn.Module) -> set[int]:
    """Ids of tensors that stand in more than one place. Names are not made for it: a model may have 100,000 of them."""
    places = Counter(map(id, every_tensor(model)))
    return {tensor for tensor, count in places.items() if count > 1}


def dim_names(program: ExportedProgram, dynamic_shapes: Any) -> dict[str, str]:
    """{torch's symbol: the caller's name}; a dim that the caller left to torch is called by its input and axis."""
    found: dict[str, str] = {}
    asked = dict(_asked(program, dynamic_shapes))
    for name, tensor in _inputs(program):
        for axis, size in enumerate(tensor.shape):
            symbol = str(size)
            if isinstance(size, torch.SymInt) and symbol.isidentifier():
                found.setdefault(symbol, asked.get((name, axis)) or f"{name}_{axis}")
    return found


def _inputs(program: ExportedProgram) -> Iterator[tuple[str, torch.Tensor]]:
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if kinds.get(node.name) is InputKind.USER_INPUT and isinstance(value, torch.Tensor):
            yield node.name, value


def _asked(program: ExportedProgram, dynamic_shapes: Any) -> Iterator[tuple[tuple[str, int], str]]:
    """((input, axis), name) of every `Dim("batch")` and every "batch" in `dynamic_shapes`."""
    if dynamic_shapes is None:
        return
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    shapes = list(dynamic_shapes.values()) if isinstance(dynamic_shapes, Mapping) else list(dynamic_shapes)
    flat = pytree.tree_leaves(shapes, is_leaf=_is_shape)
    for spec, shape in zip(specs, flat, strict=False):
        axes = shape.items() if isinstance(shape, Mapping) else enumerate(shape or ())
        for axis, dim in axes:
            name = dim if isinstance(dim, str) else getattr(dim, "__name__", None)
            if isinstance(name, str) and name.isidentifier():
                yield (spec.arg.name, int(axis)), name


def _is_shape(item: Any) -> bool:
    """One tensor's entry: None, {axis: dim}, or a tuple of dims."""
    if item is None or (isinstance(item, Mapping) and all(isinstance(key, int) for key in item)):
        return True
    return isinstance(item, list | tuple) and not any(isinstance(part, Mapping | list | tuple) for part in item)
