"""A CallSignature ↔ JSON.

A number is the index of a tensor among the graph's inputs or outputs; `{"value": 3}` a constant, `{"float": "inf"}` one
that JSON has not, `{"int": "36893488147419103232"}` one of more than 64 bits; `{"kind", "keys", "items", "fixed"}` a
branch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import StrictStr

from pipeline.torch_ir.document.document import DocumentHead
from pipeline.torch_ir.document.parse import describe_mistake, parse, write_place
from pipeline.torch_ir.errors import Unexpected
from pipeline.torch_ir.tree import Branch, CallSignature, Leaf, Tree, leaves

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class _BranchData:
    kind: StrictStr
    items: tuple[Any, ...]
    keys: tuple[StrictStr, ...] | None = None
    fixed: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _SignatureData:
    inputs: Any = field(default=None)
    outputs: Any = field(default=None)


def write_signature(signature: CallSignature) -> dict[str, Any]:
    """Empty where nothing is known of either side."""
    sides = {"inputs": signature.inputs, "outputs": signature.outputs}
    return {side: _write_tree(tree) for side, tree in sides.items() if tree is not None}


def read_signature(head: DocumentHead) -> CallSignature:
    """The signature of an IR.

    Raises:
        Unexpected: no such trees, or trees of other tensors than the graph's; the message says where.
    """
    sides = parse(_SignatureData, head.signature, ("signature",))
    call = _read_side("inputs", sides.inputs, len(head.graph_inputs))
    if call is not None and not _is_call(call):
        what = "a tuple of the positional arguments, a tuple, and of those by name, a dict"
        raise Unexpected(f"signature.inputs: {describe_mistake(sides.inputs, what)}")
    return CallSignature(call, _read_side("outputs", sides.outputs, len(head.graph_outputs)))


def _read_side(side: str, data: Any, count: int) -> Tree | None:
    if data is None:
        return None
    tree = _read_tree(data, ("signature", side))
    indices = [leaf.index for _, leaf in leaves(tree) if leaf.index is not None]
    if sorted(indices) != list(range(count)):
        what = f"each tensor of graph_{side} once, by the numbers 0 to {count - 1}" if count else "no tensors"
        raise Unexpected(f"signature.{side}: {describe_mistake(indices, what)}")
    return tree


def _read_tree(data: Any, path: Path) -> Tree:
    if type(data) is int and data >= 0:
        return Leaf(data)
    if not isinstance(data, Mapping) or not data:
        what = "the number of a tensor, a constant or a branch"
        raise Unexpected(f"{write_place(path)}: {describe_mistake(data, what)}")
    if "items" not in data:
        return Leaf(None, _read_constant(data, path))
    branch = parse(_BranchData, data, path)
    count = len(branch.items)
    if branch.keys is not None and len(branch.keys) != count:
        what = f"a list of {count} strings, one for each of its items"
        raise Unexpected(f"{write_place((*path, 'keys'))}: {describe_mistake(data['keys'], what)}")
    return Branch(
        branch.kind,
        branch.keys,
        tuple(_read_tree(item, (*path, "items", at)) for at, item in enumerate(branch.items)),
        None
        if branch.fixed is None
        else {key: _read_constant(item, (*path, "fixed", key)) for key, item in branch.fixed.items()},
    )


def _read_constant(data: Any, path: Path) -> Any:
    if not isinstance(data, Mapping) or len(data) != 1:
        raise Unexpected(f"{write_place(path)}: " + describe_mistake(data, 'a constant, as in {"value": 3}'))
    ((form, item),) = data.items()
    try:
        return FORMS[form](item)
    except (KeyError, TypeError, ValueError) as error:
        what = f"one of {', '.join(FORMS)} with its value"
        raise Unexpected(f"{write_place(path)}: {describe_mistake(data, what)}") from error


def _write_tree(tree: Tree) -> Any:
    if isinstance(tree, Branch):
        keys = {} if tree.keys is None else {"keys": list(tree.keys)}
        fixed = {path: _write_constant(value) for path, value in (tree.fixed or {}).items()}
        known = {"fixed": fixed} if fixed else {}
        return {"kind": tree.kind, **keys, "items": [_write_tree(child) for child in tree.children], **known}
    return _write_constant(tree.value) if tree.index is None else tree.index


def _write_constant(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, int) and value.bit_length() > 63:  # orjson would read a float
        return {"int": str(value)}
    return {"value": value}


def _is_call(tree: Tree) -> bool:
    """Whether the tree is that of a call: a tuple of positional arguments, and a dict of those by name."""
    return isinstance(tree, Branch) and tree.kind == "tuple" and _kinds(tree.children) == ["tuple", "dict"]


def _kinds(trees: Sequence[Tree]) -> list[str]:
    return [tree.kind if isinstance(tree, Branch) else "" for tree in trees]


def _refuse_nested(item: Any) -> Any:
    if isinstance(item, list | dict):
        raise TypeError(item)
    return item


FORMS = {"value": _refuse_nested, "float": float, "int": int}
