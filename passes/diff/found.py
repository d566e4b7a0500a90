"""What differs between two models, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

__all__ = [
    "AttributeChange",
    "Diff",
    "HeaderChange",
    "InitializerChange",
    "InputChange",
    "NodeLabel",
    "Renaming",
    "Replacement",
]


@dataclass(frozen=True, slots=True)
class NodeLabel:
    """How a node is spoken of: by its name, or its first output where it has none.

    `module` is the path of the torch module that it comes from; empty if none is known.
    """

    op: str
    name: str
    module: str = ""

    def __str__(self) -> str:
        return f"{self.op} {self.name}" + (f" ({self.module})" if self.module else "")


@dataclass(frozen=True, slots=True)
class Replacement:
    """Nodes of the second model that stand in the place of nodes of the first; on either side there may be none."""

    removed: tuple[NodeLabel, ...]
    added: tuple[NodeLabel, ...]

    def __str__(self) -> str:
        removed, added = (", ".join(map(str, nodes)) for nodes in (self.removed, self.added))
        if not self.removed:
            return f"added {added}"
        return f"{removed} → {added}" if self.added else f"removed {removed}"


@dataclass(frozen=True, slots=True)
class AttributeChange:
    """`before` or `after` is empty where the node does not say it."""

    node: NodeLabel
    attribute: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.node}: {self.attribute} {self.before or '(not given)'} → {self.after or '(not given)'}"


@dataclass(frozen=True, slots=True)
class InputChange:
    """The node reads another value at `position`; the values are called as in their own models, empty for none.

    Behind the inputs come what the bodies of If, Loop and Scan return; `what` says which it is.
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
    """A stored tensor: `before` or `after`, such as `float32[768,768]`, is empty where there is none.

    `what` says how far two of one type are apart.
    """

    name: str
    before: str
    after: str
    what: str = ""

    def __str__(self) -> str:
        if not self.before:
            return f"added {self.name} {self.after}"
        if not self.after:
            return f"removed {self.name} {self.before}"
        return f"{self.name} {self.before}" + (f" → {self.after}" if self.before != self.after else f": {self.what}")


@dataclass(frozen=True, slots=True)
class HeaderChange:
    """What a model says of itself: its inputs, outputs, opsets and functions."""

    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what} {self.before or '(none)'} → {self.after or '(none)'}"


@dataclass(frozen=True, slots=True)
class Renaming:
    """`kind` is node, value or initializer."""

    kind: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.kind} {self.before} → {self.after}"


@dataclass(frozen=True, slots=True)
class Diff:
    """What the second model has otherwise than the first. Nodes are named as in the second, lost ones as in the first.

    `renamed` is no difference: nodes are matched by what they compute.
    """

    replaced: tuple[Replacement, ...] = ()
    attributes: tuple[AttributeChange, ...] = ()
    rewired: tuple[InputChange, ...] = ()
    initializers: tuple[InitializerChange, ...] = ()
    header: tuple[HeaderChange, ...] = ()
    shared: tuple[HeaderChange, ...] = ()
    """Which of several equal values is read, where models are the same node by node."""
    renamed: tuple[Renaming, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not any(getattr(self, field.name) for field in fields(self) if field.name != "renamed")

    @property
    def added(self) -> tuple[NodeLabel, ...]:
        return tuple(node for one in self.replaced for node in one.added)

    @property
    def removed(self) -> tuple[NodeLabel, ...]:
        return tuple(node for one in self.replaced for node in one.removed)

    def __len__(self) -> int:
        return len(list(self.entries()))

    def entries(self) -> Iterator[object]:
        """All differences, one by one."""
        for field in fields(self):
            if field.name != "renamed":
                yield from getattr(self, field.name)
