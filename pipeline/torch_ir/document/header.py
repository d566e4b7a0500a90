"""The header of an IR's JSON: everything but tensors and nodes, such as named dims and the nesting of arguments.

The header is small, so it is read as soon as a file is loaded; tensors and nodes are read when they are needed.

In a `signature` a number is the index of a tensor among the graph's inputs or outputs; `{"value": 3}` a constant,
`{"float": "inf"}` one that JSON has not, `{"int": "36893488147419103232"}` one of more than 64 bits; `{"kind",
"keys", "items", "fixed"}` a branch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import SourceError
from pipeline.ir import DimRange
from pipeline.ir.expression import names_in
from pipeline.torch_ir.document.writing import FORMAT_VERSION
from pipeline.torch_ir.errors import SerializationError
from pipeline.torch_ir.fields import (
    TEXT,
    Unexpected,
    are_names,
    as_expected,
    is_list,
    is_object,
    is_text,
    is_whole,
    mapping,
    report_unexpected,
    rows,
    text,
)
from pipeline.torch_ir.tree import Branch, CallSignature, Leaf, Tree, leaves


@dataclass(frozen=True, slots=True)
class Head:
    """The fields of an IR that have these names."""

    model_name: str
    pytorch_version: str
    signature: CallSignature
    unsaved: frozenset[str]


def read_head(data: Mapping[str, Any], what: str = TEXT) -> Head:
    """Read the header of `data`, which is the content of the file `what`.

    Raises:
        SerializationError: the data is no IR, or of a later format, or its signature, dims or guards are none.
    """
    with report_unexpected(what):
        as_expected(data, "the top level", "an object", is_object)
        _refuse_other_formats(data, what)
        read_dims(data)  # the Graph takes them, when it is asked for
        unsaved = as_expected(data.get("unsaved") or (), "unsaved", "a list of names of buffers", are_names)
        names = text(data, "model_name", ""), text(data, "pytorch_version", "")
        return Head(*names, CallSignature(*read_trees(data)), frozenset(unsaved))


def constants_in(data: Mapping[str, Any], what: str = TEXT) -> Mapping[str, Mapping[str, Any]]:
    """The entry of each constant, by name.

    Raises:
        SerializationError: it is no object of objects.
    """
    with report_unexpected(what):
        found = mapping(data, "constants")
        for name, one in found.items():
            as_expected(one, f"constants: {name}", "an object of data and dtype", is_object)
        return found


def _refuse_other_formats(data: Mapping[str, Any], what: str) -> None:
    version = data.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise SerializationError(
            f"{what}: found format_version {version!r}, expected {FORMAT_VERSION}; "
            "read it with the release that wrote it"
        )
    missing = [key for key in ("graph_inputs", "graph_outputs", "weights", "nodes") if key not in data]
    if missing:
        said = f"the key {missing[0]} is" if len(missing) == 1 else f"the keys {', '.join(missing)} are"
        raise SerializationError(f"{what}: {said} missing; expected what IR.save writes")


def write_tree(tree: Tree) -> Any:
    if isinstance(tree, Branch):
        keys = {} if tree.keys is None else {"keys": list(tree.keys)}
        fixed = {path: _write_constant(value) for path, value in (tree.fixed or {}).items()}
        known = {"fixed": fixed} if fixed else {}
        return {"kind": tree.kind, **keys, "items": [write_tree(child) for child in tree.children], **known}
    return _write_constant(tree.value) if tree.index is None else tree.index


def read_trees(data: Mapping[str, Any]) -> tuple[Tree | None, Tree | None]:
    """The trees of the arguments and of the result of the IR `data`; None where it has none.

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
    """Whether the tree is that of a call: a tuple of positional arguments, and a dict of those by name."""
    return isinstance(tree, Branch) and tree.kind == "tuple" and _kinds(tree.children) == ["tuple", "dict"]


def _kinds(trees: Sequence[Tree]) -> list[str]:
    return [tree.kind if isinstance(tree, Branch) else "" for tree in trees]


def _refuse_nested(item: Any) -> Any:
    if isinstance(item, list | dict):
        raise TypeError(item)
    return item


FORMS = {"value": _refuse_nested, "float": float, "int": int}


def read_dims(data: Mapping[str, Any]) -> tuple[dict[str, DimRange], tuple[str, ...]]:
    """The ranges of named dims, and the guards, of the IR `data`.

    Raises:
        Unexpected: a range that is none or has no size in it, a guard that is no expression, or one of other dims.
    """
    what = "the least and the most size, as in [2, 9] or [2, null]"
    ranges = {
        name: DimRange(*as_expected(item, f"dims: {name}", what, _is_range))
        for name, item in mapping(data, "dims").items()
    }
    guards = as_expected(data.get("guards") or (), "guards", "a list of expressions", is_list)
    for index, guard in enumerate(guards):
        named = dims_in(guard, f"guards[{index}]")
        as_expected(guard, f"guards[{index}]", _of_dims(ranges), lambda _, named=named: named <= ranges.keys())
    return ranges, tuple(guards)


def dims_in(item: Any, where: str) -> frozenset[str]:
    """The dims that the expression `item` names.

    Raises:
        Unexpected: it is no expression.
    """
    try:
        return names_in(as_expected(item, where, "an expression of named dims, as text", is_text))
    except SourceError as error:
        raise Unexpected(f"{where}: {error}") from error


def _of_dims(ranges: Mapping[str, DimRange]) -> str:
    return f"an expression of {', '.join(ranges)}" if ranges else "none, as there are no dims"


def _is_range(item: Any) -> bool:
    if not (is_list(item) and len(item) == 2 and is_whole(item[0])):
        return False
    least, most = item
    return most is None or (is_whole(most) and most >= least)
