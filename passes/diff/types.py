"""The differences between two models, as data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from onnx import NodeProto

from passes.graph.op_facts import op_name
from passes.provenance.annotations import known_as, module_of
from passes.suggest import join_first, plural, shorten_lines
from passes.visible import html_table


@dataclass(frozen=True, slots=True)
class NodeLabel:
    """How a message names a node: by its name, or its first output where it has none.

    `module` is the path of the torch module that it comes from; empty if none is known.
    """

    op: str
    name: str
    module: str = ""

    def __str__(self) -> str:
        return f"{self.op} {self.name}" + (f" ({self.module})" if self.module else "")


@dataclass(frozen=True, slots=True)
class Replacement:
    """Nodes of the second model that replace nodes of the first; either side may be empty.

    `stored` are initializers of the second model that hold what the removed nodes computed from constants.
    """

    removed: tuple[NodeLabel, ...]
    added: tuple[NodeLabel, ...]
    stored: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text()

    def text(self, most: int = sys.maxsize) -> str:
        """The replacement as text, with at most `most` nodes on each side."""
        removed = join_first(self.removed, most)
        added = join_first((*self.added, *(f"stored constant {name}" for name in self.stored)), most)
        if not removed:
            return f"added {added}"
        return f"{removed} → {added}" if added else f"removed {removed}"


@dataclass(frozen=True, slots=True)
class AttributeChange:
    """A changed attribute; `before` or `after` is empty where the node does not have it."""

    node: NodeLabel
    attribute: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.node}: {self.attribute} {self.before or '(not given)'} → {self.after or '(not given)'}"


@dataclass(frozen=True, slots=True)
class InputChange:
    """The node reads another value at `position`; each value has its name from its own model, empty for none.

    Positions after the inputs are results of the bodies of If, Loop and Scan; `what` describes the position.
    """

    node: NodeLabel
    position: int
    before: str
    after: str
    what: str

    def __str__(self) -> str:
        return f"{self.node}: {self.what} {self.before or '(none)'} → {self.after or '(none)'}"


@dataclass(frozen=True, slots=True)
class InitializerChange:
    """A stored tensor: `before` or `after`, such as `float32[768,768]`, is empty if that model does not store it.

    `what` is the distance of two tensors of one type; or the form in which the second model holds weights of the first,
    whose names are `was`. `computed_by` is the node that makes the value in the other model.
    """

    name: str
    before: str
    after: str
    what: str = ""
    was: tuple[str, ...] = ()
    computed_by: str = ""

    def __str__(self) -> str:
        if self.was:
            return f"{join_first(self.was, SHOWN)} {self.before}, {self.what} → {self.name} {self.after}"
        if not self.before:
            how = f"computed by {self.computed_by} → stored constant" if self.computed_by else "added"
            return f"{how} {self.name} {self.after}"
        if not self.after:
            how = f"stored constant {self.name} {self.before} → computed by {self.computed_by}"
            removed = f"removed {self.name} {self.before}" + (f", {self.what}" if self.what else "")
            return how if self.computed_by else removed
        return f"{self.name} {self.before}" + (f" → {self.after}" if self.before != self.after else f": {self.what}")


SHOWN: Final = 6
"""Names of merged weights that are written out."""


@dataclass(frozen=True, slots=True)
class QuantizedValue:
    """A tensor of the first model, by its name there, that the second model quantizes and dequantizes.

    `how` is the number of scales, or the scale if there is one. `what` is the distance of a stored tensor's values.
    """

    name: str
    dtype: str
    how: str
    is_stored: bool
    what: str = ""

    def __str__(self) -> str:
        kind = "stored tensor" if self.is_stored else "value"
        return f"{kind} {self.name} quantized: {self.dtype} {self.how}" + (f"; {self.what}" if self.what else "")


@dataclass(frozen=True, slots=True)
class QuantizationChange:
    """A tensor that both models quantize, in different ways; `after` is float where the second does not quantize it.

    `before` and `after` are formats. `what` says how scales, zero points and stored values differ within one format.
    """

    name: str
    before: str
    after: str
    is_stored: bool
    what: str = ""

    def __str__(self) -> str:
        kind = "stored tensor" if self.is_stored else "value"
        change = f"{self.before}: {self.what}" if self.what else f"{self.before} → {self.after}"
        return f"{kind} {self.name} quantized otherwise: {change}"


@dataclass(frozen=True, slots=True)
class HeaderChange:
    """A difference at the level of the model: inputs, outputs, opsets and functions."""

    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what} {self.before or '(none)'} → {self.after or '(none)'}"


@dataclass(frozen=True, slots=True)
class Renaming:
    """A new name; `kind` is node, value or initializer."""

    kind: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.kind} {self.before} → {self.after}"


@dataclass(frozen=True, slots=True)
class Diff:
    """The differences of a second model from a first. Nodes have their names of the second model; lost nodes have their
    names of the first.

    `renamed` does not count as a difference: nodes are matched by what they compute.
    """

    replaced: tuple[Replacement, ...] = ()
    attributes: tuple[AttributeChange, ...] = ()
    rewired: tuple[InputChange, ...] = ()
    initializers: tuple[InitializerChange, ...] = ()
    quantized: tuple[QuantizedValue, ...] = ()
    """Tensors that the second model quantizes; their nodes and scales are in no other list."""
    requantized: tuple[QuantizationChange, ...] = ()
    """Tensors that both models quantize in different ways, or only the first; their nodes are in no other list."""
    header: tuple[HeaderChange, ...] = ()
    shared: tuple[HeaderChange, ...] = ()
    """Which of several equal values is read, for models that are equal node by node."""
    renamed: tuple[Renaming, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not any(getattr(self, field.name) for field in fields(self) if field.name != "renamed")

    @property
    def added(self) -> tuple[NodeLabel, ...]:
        return tuple(node for replacement in self.replaced for node in replacement.added)

    @property
    def removed(self) -> tuple[NodeLabel, ...]:
        return tuple(node for replacement in self.replaced for node in replacement.removed)

    def __len__(self) -> int:
        return len(list(self.entries()))

    def sections(self) -> dict[str, tuple[object, ...]]:
        """What differs, by section; renamed nodes are no difference."""
        return {
            "model": tuple(self.header),
            "nodes": tuple(self.replaced),
            "attributes": tuple(self.attributes),
            "inputs of nodes": tuple(self.rewired),
            "initializers": tuple(self.initializers),
            "quantized": (*self.quantized, *self.requantized),
            "which of equal values is read": tuple(self.shared),
        }

    def _repr_html_(self) -> str:
        rows = [(name, str(entry)) for name, entries in self.sections().items() for entry in entries]
        return html_table("diff", ("section", "what differs"), rows or [("", "no difference")])

    def __repr__(self) -> str:
        return shorten_lines((f"Diff: {plural(len(self), 'difference')}", *map(str, self.entries())))

    def entries(self) -> Iterator[object]:
        """All differences, one by one."""
        for field in fields(self):
            if field.name != "renamed":
                yield from getattr(self, field.name)


def label_of(node: NodeProto) -> NodeLabel:
    """What reports call a node: its operator, its name, and its innermost torch module."""
    return NodeLabel(op_name(node), known_as(node), module_of(node))
