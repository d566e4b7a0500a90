"""All that a file of an IR holds: pytorch-ir's keys, and ours, which are optional.

ours   format_version; dims {name: [least, most or null]}, guards, updates {state or input: its value after a run},
       tied {weight: its other names in a checkpoint}, signature {inputs, outputs}, unsaved [buffers that no
       checkpoint has]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, Field, StrictInt, StrictStr

from pipeline.errors import SourceError
from pipeline.ir import DimRange
from pipeline.ir.expression import names_in
from pipeline.torch_ir.document.nodes import LIMIT, OR_NULL, OpNode, TensorMeta
from pipeline.torch_ir.document.parse import describe_mistake, explain_as, parse
from pipeline.torch_ir.errors import SerializationError, Unexpected

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
