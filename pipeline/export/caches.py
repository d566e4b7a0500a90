"""transformers' key/value caches as trees of tensors, so that torch.export takes and returns them.

torch keeps one table of tree types for the process; a type is entered once, and only when a model can return it.

transformers has two ways to enter them. The one for DynamicCache makes tensors while it rebuilds a cache, which torch's
decomposition then misses among its constants (torch 2.13, transformers 5.23); the general one does not, but numbers the
tensors. So: the general one, with names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["register_cache_types", "register_caches"]


def register_caches(module: nn.Module) -> None:
    """Enter the caches of `transformers` into torch's table, if the module is one of its models."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return
    model: Any = next((one for one in module.modules() if isinstance(one, transformers.PreTrainedModel)), None)
    if model is None:
        return
    from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model

    register_cache_types()
    register_cache_pytrees_for_model(model)  # classes of the model's own file; it skips what is there


def register_cache_types() -> None:
    """Enter the caches of `transformers` itself, where it is loaded; for those who have no model at hand."""
    transformers = sys.modules.get("transformers")
    for cache in () if transformers is None else _subclasses(transformers.Cache):
        if cache not in pytree.SUPPORTED_NODES:
            _register(cache)


def _register(cache: type) -> None:
    from transformers.exporters.exporter_dynamo import _pytree_flatten, _pytree_unflatten

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        leaves, context = _pytree_flatten(value)
        keys: list[Any] = [pytree.MappingKey(name) for name in _tensor_names(context, "")]
        return list(zip(keys, leaves, strict=True)), context

    pytree.register_pytree_node(
        cache,
        _pytree_flatten,
        _pytree_unflatten,
        serialized_type_name=f"{cache.__module__}.{cache.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


def _tensor_names(context: Any, above: str) -> Iterator[str]:
    """`layers.0.keys`, from the description that transformers' flattening makes of an object."""
    if isinstance(context, list):
        context = dict(enumerate(context))
    if not isinstance(context, dict):
        return
    if context.get("_t") in ("tensor", "sym"):
        yield above
        return
    inside = context.get("s", context.get("v", context)) if "_t" in context else context
    if isinstance(inside, list):
        inside = dict(enumerate(inside))
    for key, value in inside.items() if isinstance(inside, dict) else ():
        yield from _tensor_names(value, f"{above}.{key}" if above else str(key))


def _subclasses(cls: type) -> Iterator[type]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)
