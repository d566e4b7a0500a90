"""Nested arguments and results as flat, named tensors, in the order in which torch.export flattens them.

transformers' key/value caches are such trees too, so that torch.export takes and returns them. torch keeps one table of
tree types for the process; a type is registered once, and only when a model can return it. transformers registers some
caches itself, depending on its release, and its functions make tensors while they rebuild a cache: torch then misses
them among the constants when it decomposes (torch 2.13). Ours passes every tensor through.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree

from passes.graph.index import take_name
from pipeline.errors import SourceError, Unsupported
from pipeline.export.source import Example
from pipeline.importers.from_torch.modules import every_module


def not_dense(tensor: torch.Tensor) -> str:
    """What `tensor` is instead of a plain dense tensor, and what to do; empty for a plain dense tensor.

    Call this before reading the shape: a nested tensor has none.
    """
    if is_functorch_wrapped_tensor(tensor):
        return "a wrapper of torch.func (vmap, grad, jvp), expected a plain tensor: make the call outside of it"
    if tensor.is_nested:
        return "a nested tensor, expected a dense one: call torch.nested.to_padded_tensor"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype}), expected a plain one: call .dequantize()"
    if tensor.layout is not torch.strided:
        name = "sparse" if "sparse" in str(tensor.layout) else "packed"
        return f"a {name} tensor ({tensor.layout}), expected a dense one: call .to_dense()"
    return ""


Path = tuple[str, ...]


def branch_of(item: Any) -> tuple[Any, list[Any], list[str] | None] | None:
    """The children of `item` one level down.

    Returns:
        (torch's TreeSpec, the children, their names such as `keys` or `layers.0.keys`, or None if the type gives its
        children no names); None if `item` is a leaf.
    """
    children, spec = pytree.tree_flatten(item, is_leaf=lambda part: part is not item)
    if spec.is_leaf():
        return None
    named = pytree.SUPPORTED_NODES[spec.type].flatten_with_keys_fn
    return spec, children, None if named is None else [_key(key) for key, _ in named(item)[0]]


def leaves_with_path(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, leaf) in the order of `tree_flatten`; a path has keys of mappings, names of fields, or positions."""
    branch = branch_of(tree)
    if branch is None:
        yield path, tree
        return
    _, children, names = branch
    if names is None:
        keys = list(tree) if isinstance(tree, Mapping) else []
        names = [str(key) for key in (keys if len(keys) == len(children) else range(len(children)))]
    for name, child in zip(names, children, strict=True):
        yield from leaves_with_path(child, (*path, name))


def _key(key: Any) -> str:
    """The name in a key of torch's pytree."""
    return str(next((getattr(key, field) for kind, field in FIELDS.items() if isinstance(key, kind)), key))


FIELDS = {pytree.MappingKey: "key", pytree.SequenceKey: "idx", pytree.GetAttrKey: "name"}


def named_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, those that `**kwargs` takes among them."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        is_rest = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        arguments |= value if is_rest else {name: value}
    return arguments


def parameter_names(module: nn.Module) -> tuple[list[str], bool]:
    """(the names of forward's parameters, whether forward has `**kwargs`)."""
    parameters = inspect.signature(module.forward).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def input_tensors(module: nn.Module, example: Example) -> dict[str, torch.Tensor]:
    """Flat name → tensor. The name is the parameter's, then the keys inside it: `batch.image`, `xs.0`."""
    return {name: leaf for name, leaf in named_leaves(module, example) if isinstance(leaf, torch.Tensor)}


def named_leaves(module: nn.Module, example: Example) -> list[tuple[str, Any]]:
    """(unique name, leaf) of each leaf of the example, constants included, in the order of `tree_flatten`."""
    leaves = list(leaves_with_path((example.args, example.kwargs)))
    names = _unique([".".join(_input_path(module, path)) for path, _ in leaves])
    return [(name, leaf) for name, (_, leaf) in zip(names, leaves, strict=True)]


def _input_path(module: nn.Module, path: tuple[str, ...]) -> list[str]:
    where, first, *rest = path
    if where == "1":  # kwargs
        return [first, *rest]
    signature = list(inspect.signature(module.forward).parameters.values())
    position = int(first)
    for index, parameter in enumerate(signature):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return [parameter.name, str(position - index), *rest]
        if index == position:
            return [parameter.name, *rest]
    return ["args", first, *rest]


def refill(module: nn.Module, example: Example, feeds: Mapping[str, torch.Tensor]) -> Example:
    """The example with copies of `feeds` in place of its tensors, by `input_tensors`' names; constants stay.

    Raises:
        SourceError: a tensor is missing from `feeds`.
    """
    named = named_leaves(module, example)
    filled = [_feed_of(name, feeds) if isinstance(leaf, torch.Tensor) else leaf for name, leaf in named]
    args, kwargs = pytree.tree_unflatten(filled, pytree.tree_structure((example.args, example.kwargs)))
    return Example(args, kwargs)


def _feed_of(name: str, feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if name not in feeds:
        raise SourceError(f"no value for the input {name!r}; found {', '.join(feeds) or 'none'}")
    return feeds[name].clone()


def output_tensors(result: Any) -> dict[str, torch.Tensor]:
    """Flat name → tensor. `None` is dropped, as the exporter drops it; a bare tensor is called `output`.

    Raises:
        Unsupported: there is a leaf that is no tensor, or one of complex numbers.
    """
    kept = [(".".join(path), leaf) for path, leaf in leaves_with_path(result) if leaf is not None]
    for name, leaf in kept:
        place = repr(name) if name else "the top"
        if isinstance(leaf, torch.Tensor) and (other := not_dense(leaf)):
            raise Unsupported(f"the model's output at {place}: found {other}")
        if isinstance(leaf, torch.Tensor) and leaf.is_complex():
            raise Unsupported(
                f"the model's output at {place}: found {leaf.dtype}, and a graph of ONNX gives no complex "
                "numbers; return their parts (torch.view_as_real)"
            )
        if not isinstance(leaf, torch.Tensor):
            kind = type(leaf).__name__
            known = f", or call torch.export.register_dataclass({kind}) once before" if is_dataclass(leaf) else ""
            raise Unsupported(
                f"the model returns {kind} {leaf!r:.60} at {place}, and an ONNX graph "
                f"returns tensors only; leave it out of what forward returns{known}"
            )
    if not kept:
        raise SourceError("the model returns no tensor; expected at least one")
    names = _unique([_readable(name) for name, _ in kept])
    return {name: leaf for name, (_, leaf) in zip(names, kept, strict=True)}


def _readable(name: str) -> str:
    if not name:
        return "output"
    return f"output_{name}" if name[0].isdigit() else name


def _unique(names: list[str]) -> list[str]:
    used: set[str] = set()
    return [take_name(name, used, 1) for name in names]


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
    modelling = sys.modules.get("transformers.modeling_utils")  # not loaded: the module is none of its models
    if modelling is None:
        return
    kind: type = modelling.PreTrainedModel
    model = next((part for part in every_module(module) if isinstance(part, kind)), None)
    if model is None:
        return
    register_cache_types()
    for cache in _caches_in_file_of(type(model)):
        _register(cache)


def register_cache_types() -> None:
    """Register the caches of `transformers` where it is loaded; for callers that have no model."""
    transformers = sys.modules.get("transformers")
    for cache in () if transformers is None else _subclasses(transformers.Cache):
        _register(cache)


def fixed_values(context: Any) -> dict[str, bool | int | float | str] | None:
    """The bools, ints, floats and strings that a trace fixes of a cache: {"layers.0.cumulative_length_int": 2}.

    Args:
        context: that of the cache's TreeSpec.

    Returns:
        Path → value, without other objects (dtypes, devices, configurations); None if another library has registered
        the type of the cache.
    """
    if not isinstance(context, Nested):
        return None
    fixed = {path: leaf.value for path, leaf in _leaves(context) if isinstance(leaf, Fixed)}
    return {path: value for path, value in fixed.items() if type(value) in PLAIN}


def _caches_in_file_of(model: type) -> Iterator[type]:
    """The classes in the model's own file that are caches by their name, though not subclasses of `Cache`."""
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
