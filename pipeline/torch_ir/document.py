"""All that a file of an IR holds: pytorch-ir's keys, and ours, which are optional.

ours   format_version; dims {name: [least, most or null]}, guards, updates {state or input: its value after a run},
       tied {weight: its other names in a checkpoint}, signature {inputs, outputs}, unsaved [buffers that no
       checkpoint has]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, Field, StrictInt, StrictStr

from pipeline.errors import SourceError
from pipeline.ir import DimRange
from pipeline.ir.dims import names_in
from pipeline.torch_ir.errors import SerializationError, Unexpected, describe_mistake, explain_as, parse, write_path
from pipeline.torch_ir.nodes import LIMIT, OR_NULL, OpNode, TensorMeta
from pipeline.torch_ir.tree import Branch, CallSignature, Leaf, Tree, leaves

FORMAT_VERSION = 1

Bound: TypeAlias = Annotated[StrictInt, Field(ge=0, lt=LIMIT)]


def _in_order(span: tuple[int, int | None]) -> tuple[int, int | None]:
    if span[1] is not None and span[1] < span[0]:
        raise ValueError(span)
    return span


Span: TypeAlias = Annotated[
    tuple[Bound, Bound | None],
    AfterValidator(_in_order),
    explain_as("the least and the most size, as in [2, 9] or [2, null]"),
]
Names: TypeAlias = Mapping[StrictStr, StrictStr]


@dataclass(frozen=True)
class DocumentHead:
    """The keys of the JSON that are read as soon as a file is loaded. Constants and the signature are still data."""

    graph_inputs: tuple[Any, ...]
    graph_outputs: tuple[Any, ...]
    weights: Any
    nodes: Any
    model_name: StrictStr = ""
    pytorch_version: StrictStr = ""
    dims: Mapping[str, Span] = field(default_factory=dict)
    guards: Annotated[tuple[StrictStr, ...], explain_as("a list of expressions")] = ()
    signature: Mapping[str, Any] = field(default_factory=dict)
    unsaved: Annotated[tuple[StrictStr, ...], explain_as("a list of names of buffers")] = ()
    constants: Annotated[Mapping[str, Mapping[str, Any]], OR_NULL] = field(default_factory=dict)

    @property
    def ranges(self) -> dict[str, DimRange]:
        return {name: DimRange(*span) for name, span in self.dims.items()}


@dataclass(frozen=True)
class IRDocument(DocumentHead):
    """All keys."""

    graph_inputs: tuple[TensorMeta, ...]
    graph_outputs: tuple[TensorMeta, ...]
    weights: tuple[TensorMeta, ...]
    nodes: tuple[OpNode, ...]
    weight_name_mapping: Annotated[Names, OR_NULL] = field(default_factory=dict)
    updates: Names = field(default_factory=dict)
    tied: Mapping[str, tuple[StrictStr, ...]] = field(default_factory=dict)


def read_head(data: Any, what: str) -> DocumentHead:
    """The head of the file `what`, whose JSON is `data`.

    Raises:
        SerializationError: the data is of a later format, or lacks a key.
        Unexpected: it is no IR; the message says where.
    """
    if not isinstance(data, Mapping):
        raise Unexpected(f"the top level: {describe_mistake(data, 'an object')}")
    version = data.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise SerializationError(
            f"{what}: found format_version {version!r}, expected {FORMAT_VERSION}; "
            "read it with the release that wrote it"
        )
    if missing := [key for key in ("graph_inputs", "graph_outputs", "weights", "nodes") if key not in data]:
        said = f"the key {missing[0]} is" if len(missing) == 1 else f"the keys {', '.join(missing)} are"
        raise SerializationError(f"{what}: {said} missing; expected what IR.save writes")
    head = parse(DocumentHead, data)
    check_guards(head)
    return head


def check_guards(head: DocumentHead) -> None:
    """
    Raises:
        Unexpected: a guard is no expression, or one of other dims.
    """
    for index, guard in enumerate(head.guards):
        if not names_of(guard, f"guards[{index}]") <= head.dims.keys():
            known = f"an expression of {', '.join(head.dims)}" if head.dims else "none, as there are no dims"
            raise Unexpected(f"guards[{index}]: {describe_mistake(guard, known)}")


def names_of(expression: str, where: str) -> frozenset[str]:
    """The dims that `expression` names.

    Raises:
        Unexpected: it is no expression.
    """
    try:
        return names_in(expression)
    except SourceError as error:
        raise Unexpected(f"{where}: {error}") from error


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
        what = f"each tensor of graph_{side} once, by the indices 0 to {count - 1}" if count else "no tensors"
        raise Unexpected(f"signature.{side}: {describe_mistake(indices, what)}")
    return tree


def _read_tree(data: Any, path: Path) -> Tree:
    if type(data) is int and data >= 0:
        return Leaf(data)
    if not isinstance(data, Mapping) or not data:
        what = "the number of a tensor, a constant or a branch"
        raise Unexpected(f"{write_path(path)}: {describe_mistake(data, what)}")
    if "items" not in data:
        return Leaf(None, _read_constant(data, path))
    branch = parse(_BranchData, data, path)
    count = len(branch.items)
    if branch.keys is not None and len(branch.keys) != count:
        what = f"a list of {count} strings, one for each of its items"
        raise Unexpected(f"{write_path((*path, 'keys'))}: {describe_mistake(data['keys'], what)}")
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
        raise Unexpected(f"{write_path(path)}: " + describe_mistake(data, 'a constant, as in {"value": 3}'))
    ((form, item),) = data.items()
    try:
        return FORMS[form](item)
    except (KeyError, TypeError, ValueError) as error:
        what = f"one of {', '.join(FORMS)} with its value"
        raise Unexpected(f"{write_path(path)}: {describe_mistake(data, what)}") from error


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
    if not isinstance(tree, Branch) or tree.kind != "tuple":
        return False
    return [child.kind if isinstance(child, Branch) else "" for child in tree.children] == ["tuple", "dict"]


def _refuse_nested(item: Any) -> Any:
    if isinstance(item, list | dict):
        raise TypeError(item)
    return item


FORMS = {"value": _refuse_nested, "float": float, "int": int}
