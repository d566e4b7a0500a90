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

__all__ = ["fixed_values", "register_cache_types", "register_caches"]


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
    model = next((one for one in every_module(module) if isinstance(one, kind)), None)
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
    return {path: value for path, value in _fixed_parts(context, "") if type(value) in PLAIN}


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
    keys: list[Any] = [pytree.MappingKey(name) for name in _names(context, "")]
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
    parts = [_rebuild(one, tensors) for one in part.parts]
    if part.kind in (list, tuple):
        return part.kind(parts)
    values = dict(zip(part.keys, parts, strict=True))
    if part.kind is dict:
        return values
    cache = object.__new__(part.kind)
    vars(cache).update(values)
    return cache


def _names(part: Part, above: str) -> Iterator[str]:
    """The paths of the tensors, in their order: `layers.0.keys`."""
    if isinstance(part, TensorLeaf):
        yield above
    elif isinstance(part, Nested):
        for key, child in zip(part.keys, part.parts, strict=True):
            yield from _names(child, _under(above, key))


def _fixed_parts(part: Part, above: str) -> Iterator[tuple[str, Any]]:
    """(path, value) of everything that is no tensor, in order."""
    if isinstance(part, Fixed):
        yield above, part.value
    elif isinstance(part, Nested):
        for key, child in zip(part.keys, part.parts, strict=True):
            yield from _fixed_parts(child, _under(above, key))


def _under(above: str, key: Any) -> str:
    return f"{above}.{key}" if above else str(key)


def _subclasses(cls: type) -> Iterator[type]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


LEAVES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)

PLAIN = (bool, int, float, str)

OPAQUE = (type, FunctionType, MethodType, ModuleType, nn.Module)
"""Types that are not taken apart."""
