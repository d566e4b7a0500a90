"""Write sums of scores and a mask as a choice between the scores and the mask, where an input decides the mask.

Under -3.4e38 all scores of a row that is masked as a whole become equal, so its weights are equal. A choice keeps that
under any bound, and a sum does not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from onnx import NodeProto

from passes.rewrites.graph_edit import GraphEdit
from passes.rewrites.mask_constants import LAYOUT, SHAPES, MaskedGraph, MaskUse, epsilon_of, is_op


@dataclass(frozen=True, slots=True)
class MaskSum:
    """The sum at position `node` of scores and a mask."""

    node: int
    mask: str
    scores: str
    dtype: np.dtype[Any]


def select_scores(graph: MaskedGraph) -> MaskedGraph:
    """The same model, where scores are chosen instead of added to a mask that an input decides.

    A causal mask that no input decides masks no row as a whole.
    """
    graph = _select_by_condition(graph)
    edit, hidden = GraphEdit.of(graph.view), dict[str, str]()
    for found in find_sums(graph):
        add = graph.nodes[found.node]
        if found.mask not in hidden:
            zero = edit.store(np.zeros((), found.dtype), f"{found.mask}_zero")
            edit.position = graph.view.positions[found.mask] + 1
            name = edit.free(f"{found.mask}_hidden")
            hidden[found.mask] = edit.add_node("Less", [found.mask, zero], name, add, "hidden")
        edit.replace_node(add, "Where", [hidden[found.mask], found.mask, found.scores], add.output[0])
    return MaskedGraph(edit.model()) if edit.nodes else graph


def _select_by_condition(graph: MaskedGraph) -> MaskedGraph:
    """Where a condition chooses between 0 and the constant, it chooses between the scores and the constant."""
    edit = GraphEdit.of(graph.view)
    for use in graph.all_uses():
        select = graph.nodes[use.node]
        if not graph.is_choice_of_zero(use) or not graph.depends_on_input(select.input[0]):
            continue
        for add in (graph.nodes[position] for position in sorted(graph.readers[select.output[0]])):
            if is_op(add, "Add") and len(set(add.input)) == 2 and id(add) not in edit.removed:
                scores = next(name for name in add.input if name != select.output[0])
                branches = [scores, scores]
                branches[use.slot - 1] = graph.constant_name(use)
                edit.replace_node(add, "Where", [select.input[0], *branches], add.output[0])
    return MaskedGraph(edit.model()) if edit.nodes else graph


def find_sums(graph: MaskedGraph) -> list[MaskSum]:
    """The sums of scores and a mask, in order, where nothing but such sums reads the mask."""
    masks = _find_masks(graph)
    sums, spoiled = list[MaskSum](), set[MaskUse]()
    for value, known in masks.items():
        for position in graph.readers[value]:
            node = graph.nodes[position]
            if node.op_type in SHAPES or set(node.output) & masks.keys():
                continue
            others = [name for name in node.input if name != value]
            if is_op(node, "Add") and len(others) == 1 and graph.depends_on_input(value):
                sums.append(MaskSum(position, value, others[0], graph.values(min(known, key=_spot_of)).dtype))
            else:
                spoiled |= known
    while more := {use for known in masks.values() if known & spoiled for use in known} - spoiled:
        spoiled |= more
    return sorted((found for found in sums if not masks[found.mask] & spoiled), key=lambda found: found.node)


def _spot_of(use: MaskUse) -> tuple[int, int]:
    return use.node, use.slot


def _find_masks(graph: MaskedGraph) -> Mapping[str, frozenset[MaskUse]]:
    """The values whose elements are 0 or hide all → the constants that they are computed from."""
    uses = graph.all_uses()
    at = {(use.node, use.slot): use for use in uses if use.factor == 1 and _hides_all(graph.values(use))}
    masks: dict[str, frozenset[MaskUse]] = {}
    for position in graph.path_nodes(uses):
        node = graph.nodes[position]
        known = {slot: masks[name] for slot, name in enumerate(node.input) if name in masks}
        known |= {slot: frozenset({at[position, slot]}) for slot in range(len(node.input)) if (position, slot) in at}
        if known and _makes_mask(graph, node, known.keys()):
            masks |= dict.fromkeys(node.output, frozenset[MaskUse]().union(*known.values()))
    return masks


def _makes_mask(graph: MaskedGraph, node: NodeProto, slots: Collection[int]) -> bool:
    """Whether the elements of a result are 0 or hide all, where those of the inputs at `slots` do.

    A product of a mask with values that are computed takes these as 0 or 1.
    """
    if node.op_type == "Where":
        others = [graph.constant(node.input[slot]) for slot in (1, 2) if slot not in slots]
        return all(operand is not None and not operand.any() for operand in others)
    if node.op_type == "Mul":
        return len(slots) == 1 and all(graph.constant(node.input[1 - slot]) is None for slot in slots)
    if node.op_type in ("Add", "Sum"):
        return len(slots) == len(node.input)
    return node.op_type in MOVING and 0 in slots


def _hides_all(array: np.ndarray) -> bool:
    """Whether each element of a constant is 0 or a number in which a sum is lost, and finite."""
    wide = array.astype(np.float32)
    return bool((((wide <= -8 / epsilon_of(array)) & np.isfinite(wide)) | (wide == 0)).all())


MOVING: Final = LAYOUT - {"Cast", "CastLike", "Pad"}
"""Operators whose result has elements of their first input and zeros, of the same type."""
