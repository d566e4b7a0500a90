"""The leaves of a nested value with their paths, also through types that torch knows without names for their children.

torch's own `tree_flatten_with_path` refuses those: the outputs of transformers 5.9, say, or a class that was
entered with two functions only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils import _pytree as pytree

__all__ = ["leaves_with_path", "own_names"]

Path = tuple[str, ...]


def leaves_with_path(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, leaf) in the order of `tree_flatten`; a path has keys of mappings, names of fields, or positions."""
    children, spec = pytree.tree_flatten(tree, is_leaf=lambda one: one is not tree)
    if spec.is_leaf():
        yield path, tree
        return
    for key, child in zip(_keys(tree, spec, len(children)), children, strict=True):
        yield from leaves_with_path(child, (*path, key))


def own_names(item: Any, kind: Any) -> list[str] | None:
    """The names of the children of `item` as the flattening of its type, `kind`, has them: `keys`, `layers.0.keys`.

    None where it has none. `kind` is the type of its TreeSpec, which is one for all named tuples.
    """
    named = pytree.SUPPORTED_NODES[kind].flatten_with_keys_fn
    return None if named is None else [_key(key) for key, _ in named(item)[0]]


def _keys(tree: Any, spec: Any, count: int) -> list[str]:
    own = own_names(tree, spec.type)
    if own is not None:
        return own
    names = list(tree) if isinstance(tree, Mapping) else []
    return [str(name) for name in (names if len(names) == count else range(count))]


def _key(key: Any) -> str:
    return str(next((getattr(key, field) for kind, field in FIELDS.items() if isinstance(key, kind)), key))


FIELDS = {pytree.MappingKey: "key", pytree.SequenceKey: "idx", pytree.GetAttrKey: "name"}
