"""transformers' key/value caches as trees of tensors, so that torch.export takes and returns them.

torch keeps one table of tree types for the process; a type is registered once, and only when a model can return it.

transformers registers some caches itself, depending on its release, and its functions make tensors while they rebuild a
cache: torch's decomposition then misses them among its constants (torch 2.13). Ours passes every tensor through.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipeline.importers.from_torch.modules import every_module


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A leaf: the next tensor or symbolic number of the flat list."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A value that is the same in every call: a number, a flag, a dtype, a configuration."""

    value: Any


@dataclass(frozen=True, slots=True)
class Nested:
    """A list, tuple or dict, or an object with its attributes; `keys` are indices, keys or names."""

    kind: type
    keys: tuple[Any, ...]
    parts: tuple[Part, ...]


Part: TypeAlias = TensorLeaf | Fixed | Nested


def register_caches(module: nn.Module) -> None:
    """Register the caches of `transformers` in torch's table, if the module is one of its models."""
    modelling = sys.modules.get("transformers.modeling_utils")  # a library that is not loaded has made no model
    if modelling is None:
        return
    kind: type = modelling.PreTrainedModel
    model = next((part for part in every_module(module) if isinstance(part, kind)), None)
    if model is None:
        return
    register_cache_types()
    for cache in _caches_beside(type(model)):
        _register(cache)


def register_cache_types() -> None:
    """Register the caches of `transformers` where it is loaded; for callers that have no model."""
    transformers = sys.modules.get("transformers")
    for cache in () if transformers is None else _subclasses(transformers.Cache):
        _register(cache)


def fixed_values(context: Any) -> dict[str, bool | int | float | str] | None:
    """The plain values that a trace holds of a cache, by path: {"layers.0.cumulative_length_int": 2}.

    `context` is that of the cache's TreeSpec. Objects (dtypes, devices, configurations) are left out. None where
    another library has registered the type.
    """
    if not isinstance(context, Nested):
        return None
    fixed = {path: leaf.value for path, leaf in _leaves(context) if isinstance(leaf, Fixed)}
    return {path: value for path, value in fixed.items() if type(value) in PLAIN}


def _caches_beside(model: type) -> Iterator[type]:
    """Classes of the model's own file that are caches by name, without the base class."""
    for name, value in vars(sys.modules[model.__module__]).items():
        if isinstance(value, type) and name.endswith("Cache") and value.__module__ == model.__module__:
            yield value


def _register(cache: type) -> None:
    if cache not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            cache,
            _flatten,
            _unflatten,
            serialized_type_name=f"{cache.__module__}.{cache.__qualname__}",
            flatten_with_keys_fn=_flatten_with_keys,
        )


def _flatten(cache: Any) -> tuple[list[Any], Nested]:
    tensors: list[Any] = []
    return tensors, _take_apart(type(cache), vars(cache), tensors)


def _flatten_with_keys(cache: Any) -> tuple[list[tuple[Any, Any]], Nested]:
    tensors, context = _flatten(cache)
    keys: list[Any] = [pytree.MappingKey(path) for path, leaf in _leaves(context) if isinstance(leaf, TensorLeaf)]
    return list(zip(keys, tensors, strict=True)), context


def _unflatten(tensors: Any, context: Any) -> Any:
    return _rebuild(context, iter(tensors))


def _part(value: Any, tensors: list[Any]) -> Part:
    if isinstance(value, LEAVES):
        tensors.append(value)
        return TensorLeaf()
    if type(value) in (list, tuple):
        return _take_apart(type(value), dict(enumerate(value)), tensors)
    if type(value) is dict:
        return _take_apart(dict, value, tensors)
    if isinstance(value, OPAQUE) or not hasattr(value, "__dict__") or hasattr(value, "to_dict"):
        return Fixed(value)  # to_dict: a configuration
    return _take_apart(type(value), vars(value), tensors)


def _take_apart(kind: type, children: dict[Any, Any], tensors: list[Any]) -> Nested:
    return Nested(kind, tuple(children), tuple(_part(value, tensors) for value in children.values()))


def _rebuild(part: Part, tensors: Iterator[Any]) -> Any:
    if isinstance(part, TensorLeaf):
        return next(tensors)
    if isinstance(part, Fixed):
        return part.value
    parts = [_rebuild(child, tensors) for child in part.parts]
    if part.kind in (list, tuple):
        return part.kind(parts)
    values = dict(zip(part.keys, parts, strict=True))
    if part.kind is dict:
        return values
    cache = object.__new__(part.kind)
    vars(cache).update(values)
    return cache


def _leaves(part: Part, path: str = "") -> Iterator[tuple[str, TensorLeaf | Fixed]]:
    """(path, leaf) of every leaf, in order: `layers.0.keys`."""
    if isinstance(part, Nested):
        for key, child in zip(part.keys, part.parts, strict=True):
            yield from _leaves(child, f"{path}.{key}" if path else str(key))
    else:
        yield path, part


def _subclasses(cls: type) -> Iterator[type]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


LEAVES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)

PLAIN = (bool, int, float, str)

OPAQUE = (type, FunctionType, MethodType, ModuleType, nn.Module)
"""Types that are not taken apart."""
