"""How arguments and the result nest, as JSON.

A number is the index of a tensor among the graph's inputs or outputs; `{"value": 3}` a constant, `{"float": "inf"}`
one that JSON has not, `{"int": "36893488147419103232"}` one of more than 64 bits; `{"kind", "keys", "items", "fixed"}`
a branch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.torch_ir.document.expected import (
    Unexpected,
    are_names,
    as_expected,
    is_list,
    is_object,
    is_text,
    is_whole,
    rows,
)
from pipeline.torch_ir.tree import Branch, Leaf, Tree, leaves

__all__ = ["read_trees", "write_tree"]


def write_tree(tree: Tree) -> Any:
    if isinstance(tree, Branch):
        keys = {} if tree.keys is None else {"keys": list(tree.keys)}
        fixed = {path: _write_constant(value) for path, value in (tree.fixed or {}).items()}
        known = {"fixed": fixed} if fixed else {}
        return {"kind": tree.kind, **keys, "items": [write_tree(child) for child in tree.children], **known}
    return _write_constant(tree.value) if tree.index is None else tree.index


def read_trees(data: Mapping[str, Any]) -> tuple[Tree | None, Tree | None]:
    """Those of the arguments and of the result, of the IR `data`; None where it has none.

    Raises:
        Unexpected: no such trees, or trees of other tensors than the graph's; the message says where.
    """
    signature = as_expected(data.get("signature") or {}, "signature", "an object", is_object)
    inputs, outputs = (_side(signature, side, data) for side in ("inputs", "outputs"))
    if inputs is not None:
        what = "a tuple of the positional arguments, a tuple, and of those by name, a dict"
        as_expected(signature["inputs"], "signature.inputs", what, lambda _: _is_call(inputs))
    return inputs, outputs


def _side(signature: Mapping[str, Any], side: str, data: Mapping[str, Any]) -> Tree | None:
    if side not in signature:
        return None
    where = f"signature.{side}"
    tree = _read(signature[side], where)
    count = len(rows(data, f"graph_{side}"))
    found = [leaf.index for _, leaf in leaves(tree) if leaf.index is not None]
    what = f"each tensor of graph_{side} once, by the numbers 0 to {count - 1}" if count else "no tensors"
    as_expected(found, where, what, lambda item: sorted(item) == list(range(count)))
    return tree


def _read(data: Any, where: str) -> Tree:
    if is_whole(data):
        return Leaf(data)
    as_expected(data, where, "the number of a tensor, a constant or a branch", lambda item: is_object(item) and item)
    if "items" not in data:
        return Leaf(None, _read_constant(data, where))
    kind = as_expected(data.get("kind"), f"{where}.kind", "a string", is_text)
    items = as_expected(data["items"], f"{where}.items", "a list", is_list)
    fixed = as_expected(data.get("fixed", {}), f"{where}.fixed", "an object", is_object)
    return Branch(
        kind,
        _keys(data, where, len(items)),
        tuple(_read(item, f"{where}.items[{index}]") for index, item in enumerate(items)),
        {path: _read_constant(one, f"{where}.fixed[{path!r}]") for path, one in fixed.items()}
        if "fixed" in data
        else None,
    )


def _keys(data: Mapping[str, Any], where: str, count: int) -> tuple[str, ...] | None:
    if data.get("keys") is None:
        return None
    what = f"a list of {count} strings, one for each of its items"
    return tuple(as_expected(data["keys"], f"{where}.keys", what, lambda keys: are_names(keys) and len(keys) == count))


def _read_constant(data: Any, where: str) -> Any:
    as_expected(data, where, 'a constant, as in {"value": 3}', lambda item: is_object(item) and len(item) == 1)
    ((form, item),) = data.items()
    try:
        return FORMS[form](item)
    except (KeyError, TypeError, ValueError) as error:
        raise Unexpected(
            f"{where}: found {str(data)[:60]}, expected one of {', '.join(FORMS)} with its value"
        ) from error


def _write_constant(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, int) and value.bit_length() > 63:  # orjson would read a float
        return {"int": str(value)}
    return {"value": value}


def _is_call(tree: Tree) -> bool:
    """Positional arguments, and those by name."""
    return isinstance(tree, Branch) and tree.kind == "tuple" and _kinds(tree.children) == ["tuple", "dict"]


def _kinds(trees: Sequence[Tree]) -> list[str]:
    return [tree.kind if isinstance(tree, Branch) else "" for tree in trees]


def _plain(item: Any) -> Any:
    if isinstance(item, list | dict):
        raise TypeError(item)
    return item


FORMS = {"value": _plain, "float": float, "int": int}
