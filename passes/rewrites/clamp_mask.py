"""Clamp the constants that mask attention: -3.4e38 and its like become a bound that quantization can represent.

A mask constant is a float of -9000 or less that reaches a Softmax through additions, selections and layout operators.
After the Softmax such a constant gives zeros. So does any bound that is far enough below the row's largest unmasked
score, and quantization of scores and mask then has a range of tens instead of one of 1e38.

A row that is masked as a whole is another matter: under -3.4e38 all its scores become equal, so its weights are equal.
An addition of a small bound would keep its scores apart. Where each element of the added mask is 0 or the constant, a
choice is therefore made between scores and bound (`select_scores`), which leaves such rows as they are; elsewhere the
step says that they change.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from passes.context import PassContext
from passes.errors import PolicyError
from passes.graph.index import take_name, value_names
from passes.graph.op_facts import ONNX_DOMAINS, attribute_of
from passes.rewrites.mask_constants import LAYOUT, MASKING, SHAPES, MaskedGraph, MaskUse, epsilon_of, is_op
from passes.rewrites.rewriter import Rewriter
from passes.step import PassResult, Step
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from passes.weights.sharing import MappedModel, portable

LONGEST_ROW: Final = 4096
"""The number of masked scores in one row whose weights together have to be lost in rounding."""


@dataclass(frozen=True, slots=True)
class ClampMask(Step, name="clamp-mask", reads="values"):
    """Raise the constants that mask attention to a finite bound, which quantization can represent. The constants are
    those added before a Softmax.

    By default the bound is chosen: the first multiple of ten under which, on the draws of the proof, all masked scores
    of a row together are lost in the rounding of its weights. `bound` sets it, also for a model that is not run.
    """

    bound: int | float | None = None

    def check(self, context: PassContext) -> None:
        if self.bound is not None and not -math.inf < self.bound < 0:
            raise PolicyError(f"pass {self.name!r}: bound is {self.bound!r}; expected a finite number below 0")

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        graph = MaskedGraph(model)
        if not graph.uses:
            return PassResult(model, changed=False, why=f"no stored constant masks a Softmax{_name_inputs(graph)}")
        graph = select_scores(_store_constants(graph))
        bound, seen = self.bound, ""
        if bound is None:
            draws = [dict(feeds) for feeds in context.draws()]
            if not draws:
                why = "no draw shows the range of the scores, so the mask stays; give `bound`, such as -30"
                return PassResult(model, changed=False, why=why)
            probe, scores = _observation(graph)
            source = portable(probe, context.spill)
            rows = context.worker.call(observe, model=source, scores=scores, gap=_gap(graph), feeds=draws)
            bound = -10.0 * math.ceil(max(facts.needed for facts in rows) / 10)
            whole = sum(facts.whole_rows for facts in rows)
            seen = f", {plural(whole, 'row')} of the draws" if whole else ", which no draw shows"
        if bound <= -MASKING:
            why = f"the scores of the draws need a bound of {bound:g}, so the mask stays"
            return PassResult(model, changed=False, why=why)
        words = f"masks with {bound:g}"
        if graph.changes_whole_rows():
            words += f"; a row that is masked as a whole gets other weights{seen}"
        return PassResult(_clamp(graph, bound), why=words)


def _name_inputs(graph: MaskedGraph) -> str:
    """Which inputs may mask in place of a constant."""
    names = graph.added_inputs()
    if not names:
        return ""
    which = f"the input {names[0]!r} is" if len(names) == 1 else f"the inputs {' and '.join(map(repr, names))} are"
    return f"; {which} added before it: where the caller makes a mask, give it a finite bound, such as -30"


@dataclass(frozen=True, slots=True)
class RowFacts:
    """How far below 0 the bound has to be, as the rows of one Softmax show."""

    distance: float = -math.inf
    """By the rows that are masked in part."""
    range_distance: float = 0.0
    """By the range of all scores."""
    whole_rows: int = 0
    """Rows without an unmasked score."""

    @property
    def needed(self) -> float:
        return self.range_distance if math.isinf(self.distance) else self.distance


def observe(
    model: MappedModel, scores: Sequence[tuple[str, str, int]], gap: float, feeds: Sequence[Mapping[str, np.ndarray]]
) -> list[RowFacts]:
    """In the worker: run every draw, and compare the rows of each Softmax with what they were without a mask.

    Args:
        model: the model that computes the scores.
        scores: of each Softmax its input, the same with masks of 0, and the axis.
        gap: how far masked scores have to be below the largest one of their row.
        feeds: name → array, for each draw.
    """
    session = model.session()
    facts = [RowFacts(range_distance=gap)] * len(scores)
    for draw in feeds:
        values = session.run(draw)
        for index, (masked, free, axis) in enumerate(scores):
            facts[index] = _rows_of(values[masked], values[free], axis, gap, facts[index])
    return facts


def _rows_of(masked: np.ndarray, free: np.ndarray, axis: int, gap: float, known: RowFacts) -> RowFacts:
    free = np.broadcast_to(free, masked.shape)
    is_masked = ~(masked > -MASKING)  # NaN too
    largest = np.where(is_masked, -np.inf, masked).max(axis, initial=-np.inf)
    largest_masked = np.where(is_masked, free, -np.inf).max(axis, initial=-np.inf)
    whole = ~np.isfinite(largest)
    both = ~whole & np.isfinite(largest_masked)
    distances = (largest_masked - largest)[both]
    spread = 0.0 if whole.all() else max(0.0, float(free.max() - largest[~whole].min()))
    return RowFacts(
        max(known.distance, gap + max(0.0, float(distances.max())) if both.any() else -math.inf),
        max(known.range_distance, gap + spread),
        known.whole_rows + int(whole.sum()),
    )


def _store_constants(graph: MaskedGraph) -> MaskedGraph:
    """The same model, where the mask constants are initializers."""
    rewriter = Rewriter(graph.view)
    for name in sorted({graph.constant_name(use) for use in graph.all_uses()} & graph.view.producers.keys()):
        node, array = graph.view.producers[name], graph.stored_values(name)
        if is_op(node, "Constant"):
            rewriter.take_out(node)
            rewriter.replace_tensor(name, array)
        else:
            rewriter.replace_node(
                node, "Expand", [rewriter.store(array.reshape(()), f"{name}_value"), node.input[0]], name
            )
    return MaskedGraph(rewriter.to_model())


def _observation(graph: MaskedGraph) -> tuple[DetachedModel, list[tuple[str, str, int]]]:
    """A model that computes the scores with their masks as well as with masks of 0; and the argument for `observe`."""
    proto, taken = graph.model.copy_proto(), value_names(graph.model.proto.graph)
    uses = graph.all_uses()
    zero = {name: take_name(f"{name}_zero", taken) for name in sorted({graph.constant_name(use) for use in uses})}
    proto.graph.initializer.extend(
        numpy_helper.from_array(_raise(graph.stored_values(name), 0.0), new) for name, new in zero.items()
    )
    at, renamed = {use.spot for use in uses}, dict[str, str]()
    for position in graph.path_nodes(uses):
        node = proto.graph.node.add()
        node.CopyFrom(graph.nodes[position])
        node.name = ""
        for slot, name in enumerate(node.input):
            node.input[slot] = zero[name] if (position, slot) in at else renamed.get(name, name)
        for slot, name in enumerate(node.output):
            node.output[slot] = renamed[name] = take_name(f"{name}_zero", taken)
    del proto.graph.output[:], proto.graph.value_info[:]
    flattens = any(entry.version < 13 and entry.domain in ONNX_DOMAINS for entry in proto.opset_import)
    scores = []
    for position in graph.uses:
        value = graph.nodes[position].input[0]
        axis = attribute_of(graph.nodes[position], "axis", 1 if flattens else -1)
        shown = [take_name(f"{value}_{kind}", taken) for kind in ("masked", "free")]
        for source, name in zip((value, renamed[value]), shown, strict=True):
            flat = take_name(f"{name}_flat", taken)
            matrix = helper.make_node("Flatten", [source], [flat], axis=axis)  # as Softmax did before opset 13
            proto.graph.node.append(matrix if flattens else helper.make_node("Identity", [source], [flat]))
            proto.graph.node.append(helper.make_node("Cast", [flat], [name], to=TensorProto.FLOAT))
            proto.graph.output.append(onnx.ValueInfoProto(name=name))
        scores.append((*shown, -1 if flattens else axis))
    return graph.model.with_proto(proto), scores


def _gap(graph: MaskedGraph) -> float:
    """The distance from the largest score at which others, even a whole long row of them, are lost in rounding."""
    epsilon = min(epsilon_of(graph.values(use)) for use in graph.all_uses())
    return math.log(2 * LONGEST_ROW / epsilon)


def _clamp(graph: MaskedGraph, bound: float) -> DetachedModel:
    """The model with `bound` for its mask constants; a constant with other consumers stays next to the new one."""
    rewriter, by_name = Rewriter(graph.view), defaultdict[str, list[MaskUse]](list)
    for use in graph.all_uses():
        by_name[graph.constant_name(use)].append(use)
    renamed = defaultdict[int, dict[int, str]](dict)
    for name, uses in by_name.items():
        raised = _raise(graph.stored_values(name), bound / min(abs(use.factor) for use in uses))
        if graph.is_read_elsewhere(name, uses):
            new = rewriter.store(raised, f"{name}_clamped")
            for use in uses:
                renamed[use.node][use.slot] = new
        else:
            rewriter.replace_tensor(name, raised)
    for position, names in renamed.items():
        node = graph.nodes[position]
        inputs = [names.get(slot, name) for slot, name in enumerate(node.input)]
        rewriter.replace_node(node, node.op_type, inputs, *node.output)
    return rewriter.to_model()


def _raise(array: np.ndarray, limit: float) -> np.ndarray:
    """The elements of a constant, with its masking values at `limit`."""
    wide = array.astype(np.float32)
    low, high = np.asarray(limit, array.dtype), np.asarray(-limit, array.dtype)
    return np.where(wide <= -MASKING, low, np.where(wide >= MASKING, high, array)).astype(array.dtype)


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
    rewriter, hidden = Rewriter(graph.view), dict[str, str]()
    for found in find_sums(graph):
        add = graph.nodes[found.node]
        if found.mask not in hidden:
            zero = rewriter.store(np.zeros((), found.dtype), f"{found.mask}_zero")
            rewriter.place = graph.view.positions[found.mask] + 1
            name = rewriter.free(f"{found.mask}_hidden")
            hidden[found.mask] = rewriter.add_node("Less", [found.mask, zero], name, add, "hidden")
        rewriter.replace_node(add, "Where", [hidden[found.mask], found.mask, found.scores], add.output[0])
    return MaskedGraph(rewriter.to_model()) if rewriter.changes else graph


def _select_by_condition(graph: MaskedGraph) -> MaskedGraph:
    """Where a condition chooses between 0 and the constant, it chooses between the scores and the constant."""
    rewriter = Rewriter(graph.view)
    for use in graph.all_uses():
        select = graph.nodes[use.node]
        if not graph.is_choice_of_zero(use) or not graph.depends_on_input(select.input[0]):
            continue
        for add in (graph.nodes[position] for position in sorted(graph.readers[select.output[0]])):
            if is_op(rewriter.producers[add.output[0]], "Add") and len(set(add.input)) == 2:
                scores = next(name for name in add.input if name != select.output[0])
                branches = [scores, scores]
                branches[use.slot - 1] = graph.constant_name(use)
                rewriter.replace_node(add, "Where", [select.input[0], *branches], add.output[0])
    return MaskedGraph(rewriter.to_model()) if rewriter.changes else graph


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
                sums.append(MaskSum(position, value, others[0], graph.values(min(known)).dtype))
            else:
                spoiled |= known
    while more := {use for known in masks.values() if known & spoiled for use in known} - spoiled:
        spoiled |= more
    return sorted((found for found in sums if not masks[found.mask] & spoiled), key=lambda found: found.node)


def _find_masks(graph: MaskedGraph) -> Mapping[str, frozenset[MaskUse]]:
    """The values whose elements are 0 or hide all → the constants that they are computed from."""
    uses = graph.all_uses()
    at = {use.spot: use for use in uses if use.factor == 1 and _hides_all(graph.values(use))}
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
