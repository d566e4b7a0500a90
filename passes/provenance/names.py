"""Node names: given back to the nodes that survived, and unique all the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from onnx import NodeProto

__all__ = ["free_name", "restore_names"]


def restore_names(survivors: Iterable[tuple[NodeProto, str]], made: Iterable[NodeProto]) -> None:
    """Rename nodes in place. A survivor, given with its name from before, has it back; a new node makes way for it.

    No name appears twice unless it did before. Nodes without a name stay so.
    """
    survivors, made = list(survivors), list(made)
    taken: set[str] = set()
    late = []
    for node, name in survivors:
        if name:
            node.name = name
            taken.add(name)
        else:
            late.append(node)
    for node in (*late, *made):
        if node.name:
            node.name = free_name(node.name, taken)
            taken.add(node.name)


def free_name(name: str, taken: Collection[str]) -> str:
    """`name`, or where it is taken the first of `name_2`, `name_3`, … that is free."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
