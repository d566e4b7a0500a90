"""Nested arguments and results as flat, named tensors, in the order in which torch.export flattens them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree

from pipeline.errors import SourceError, Unsupported
from pipeline.export.source import Example


def not_dense(tensor: torch.Tensor) -> str:
    """Say what a tensor is that is not dense, and what to call; empty for a dense tensor.

    Check this before reading the shape: a nested tensor has none.
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
    """(torch's TreeSpec, the children one level down, their names by the type's own flattening); None of a leaf.

    Names are such as `keys` or `layers.0.keys`; None where the type has none.
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
    return str(next((getattr(key, field) for kind, field in FIELDS.items() if isinstance(key, kind)), key))


FIELDS = {pytree.MappingKey: "key", pytree.SequenceKey: "idx", pytree.GetAttrKey: "name"}


def parameter_names(module: nn.Module) -> tuple[list[str], bool]:
    """The names of forward's parameters, and whether it takes any other keyword too."""
    parameters = inspect.signature(module.forward).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def input_tensors(module: nn.Module, example: Example) -> dict[str, torch.Tensor]:
    """Flat name → tensor. The name is the parameter's, then the keys inside it: `batch.image`, `xs.0`."""
    return {name: leaf for name, leaf in named_leaves(module, example) if isinstance(leaf, torch.Tensor)}


def named_leaves(module: nn.Module, example: Example) -> list[tuple[str, Any]]:
    """(name, leaf) of every leaf of the example, constants included, in the order of `tree_flatten`."""
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
    """The example with copies of `feeds` as its tensors; constants stay. Shares no memory with the example.

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
        Unsupported: there is a leaf that is no tensor.
    """
    kept = [(".".join(path), leaf) for path, leaf in leaves_with_path(result) if leaf is not None]
    for name, leaf in kept:
        place = repr(name) if name else "the top"
        if isinstance(leaf, torch.Tensor) and (other := not_dense(leaf)):
            raise Unsupported(f"the model's output at {place}: found {other}")
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
    used: list[str] = []
    for name in names:
        count, fresh = 0, name
        while fresh in used:
            count, fresh = count + 1, f"{name}_{count + 1}"
        used.append(fresh)
    return used
