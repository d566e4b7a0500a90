"""Run two matched models on the same inputs, and measure how far their outputs and common inner values are apart.

`pair_values` says which inner values are common: a value of one model may be a value of the other by the nodes that
make both, or by the nodes that read both.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
from onnx import ModelProto, TensorProto

from passes.context import PassContext
from passes.diff.model_matching import ModelMatching
from passes.errors import ModelError, StepFailed
from passes.graph.formatting import format_type
from passes.graph.op_facts import COMMUTATIVE
from passes.matching.flat_graph import ABSENT, Item, NodeMatching
from passes.model.signature import contradicts
from passes.optimize import plan_draws
from passes.proof.draw_choice import choose_in_worker
from passes.proof.numbers import DRAWN, Errors, compare, least_precise
from passes.proof.prover import worst_errors
from passes.weights.detached import DetachedModel
from passes.weights.sharing import MappedModel, portable

AT_ONCE: Final = 72
"""How many values one run compares, which are all in memory at once: the layers of a report and some outputs."""

MOST_SAID: Final = 200
"""Characters of a message of onnxruntime that are kept."""


@dataclass(frozen=True, slots=True)
class ValueErrors:
    """A value that both models make, by its name in each, with the worst errors of all draws."""

    before: str
    after: str
    errors: Errors


@dataclass(frozen=True, slots=True)
class Numbers:
    """The measured differences of two models.

    outputs: name in the second model → the worst errors of all draws.
    values: inner values, in the order in which the second model computes them; empty if they were not asked for.
    draws: the labels of the draws on which both models ran.
    not_run: a sentence on each draw on which the second model does not run.
    not_compared: outputs, by their name in the second model, whose values are random.
    """

    outputs: Mapping[str, Errors]
    values: tuple[ValueErrors, ...] = ()
    draws: tuple[str, ...] = ()
    not_run: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()

    @property
    def first_apart(self) -> ValueErrors | None:
        """The first inner value that is out of tolerance."""
        return next((value for value in self.values if not value.errors.ok), None)


@dataclass(frozen=True, slots=True)
class DrawnInputs:
    """Inputs of the first model, with a label for messages."""

    label: str
    feeds: Mapping[str, np.ndarray]


LATER: Final = "let both models begin after it: onnxline extract MODEL -o OUT --from VALUE --proof structure"
"""What helps where an input is no tensor."""


def draw_inputs(
    matched: ModelMatching, context: PassContext, most: int | None = None, advice: str = LATER
) -> list[DrawnInputs]:
    """The draws of a proof (`passes.optimize.plan_draws`) on which the first model runs.

    A dim that is open in the first model and fixed in the second one gets the fixed size.

    Args:
        matched: the two models.
        context: whose proof worker runs the first model.
        most: how many draws to return; None for all.
        advice: of the error.

    Raises:
        ModelError: an input is no tensor.
        StepFailed: the first model does not run.
    """
    plan = plan_draws(matched.before, inputs=_with_fixed_dims(matched), advice=advice)
    chosen, _ = choose_in_worker(matched.before, plan, context)
    return [DrawnInputs(choice.draw.label, choice.feeds) for choice in chosen[:most]]


def _with_fixed_dims(matched: ModelMatching) -> ModelProto:
    """The inputs of the first model, with the fixed sizes of the second model's inputs."""
    inputs = ModelProto()
    inputs.graph.input.extend(matched.before.proto.graph.input)
    inputs.graph.initializer.extend(TensorProto(name=tensor.name) for tensor in matched.before.proto.graph.initializer)
    fixed = {matched.inputs.get(info.name): info.type.tensor_type.shape.dim for info in matched.after.proto.graph.input}
    for info in inputs.graph.input:
        for dim, new_dim in zip(info.type.tensor_type.shape.dim, fixed.get(info.name, ()), strict=False):
            if new_dim.HasField("dim_value") and not dim.HasField("dim_value"):
                dim.dim_value = new_dim.dim_value
    return inputs


def compare_numbers(
    matched: ModelMatching, draws: Sequence[DrawnInputs], context: PassContext, *, values: bool = False
) -> Numbers:
    """Run both models on each of `draws` and compare their outputs; with `values` also their inner values.

    Raises:
        ModelError: they have no output in common, by name or place, or the second model takes other inputs.
        StepFailed: onnxruntime refuses one of them, or stops.
    """
    outputs = [(old, new) for new, old in matched.outputs.items()]
    if not outputs:
        raise ModelError("the models have no output in common, so there are no values to compare")
    missing = matched.after.index.required_inputs.keys() - matched.inputs.keys()
    if missing:
        raise ModelError(
            f"the second model has an input {min(missing)!r} that the first has not, so there are no values to compare"
        )
    for new, old in matched.inputs.items():
        types = matched.before.index.required_inputs[old], matched.after.index.required_inputs[new]
        if contradicts(types[0].type, types[1].type):
            first, second = map(format_type, types)
            raise ModelError(
                f"{old!r} is {first} in the first model, and {new!r} is {second} in the second, so they take no values "
                "in common"
            )
    distances, failed = measure_pairs(matched, outputs, draws, context)
    if failed.keys() >= {draw.label for draw in draws}:
        raise StepFailed(f"the second model does not run: {next(iter(failed.values()))}")
    draws = [draw for draw in draws if draw.label not in failed]
    inner = measure_pairs(matched, list(_common_values(matched)), draws, context)[0] if values else {}
    return Numbers(
        {name: errors for (_, name), (_, errors) in distances.items()},
        tuple(ValueErrors(*pair, errors) for pair, (_, errors) in inner.items()),
        tuple(draw.label for draw in draws),
        tuple(f"the second model does not run on {label}: {why[:MOST_SAID]}" for label, why in failed.items()),
        tuple(pair[1] for pair in outputs if pair not in distances),
    )


def measure_pairs(
    matched: ModelMatching,
    pairs: Sequence[Pair],
    draws: Sequence[DrawnInputs],
    context: PassContext,
    *,
    may_collapse: bool = False,
) -> tuple[dict[Pair, Distance], dict[str, str]]:
    """The worst distance of each comparable pair of values over all draws; and label → reason for each draw on which
    the second model does not run.

    A pair is judged by the less precise of the types that the two models compute it in.

    Args:
        matched: the matched nodes and values of the two models.
        pairs: values of the two models to compare.
        draws: inputs for the first model.
        context: whose proof worker runs the models.
        may_collapse: see `measure_distances`.

    Raises:
        StepFailed: onnxruntime refuses one of the models, or stops on the first.
    """
    models = [portable(model, context.spill) for model in (matched.before, matched.after)]
    olds, news = matched.computed_in
    computed_in = {
        (old, new): DRAWN if olds.get(old) == DRAWN else least_precise(olds.get(old), news.get(new))
        for old, new in pairs
    }
    names = matched.inputs.items()
    feeds = [{**draw.feeds, **{new: draw.feeds[old] for new, old in names if old in draw.feeds}} for draw in draws]
    distances, failed = dict[Pair, Distance](), dict[str, str]()
    for start in range(0, len(pairs), AT_ONCE):
        part = pairs[start : start + AT_ONCE]
        answers: list[list[Distance | None] | str] = context.proofs.ask(
            measure_distances,
            before=models[0],
            after=models[1],
            pairs=part,
            draws=feeds,
            computed_in={pair: computed_in[pair] for pair in part},
            may_collapse=may_collapse,
        )
        types, measured = dict[str, str](), []
        for draw, answer in zip(draws, answers, strict=True):
            if isinstance(answer, str):
                failed[draw.label] = answer
                continue
            known = {str(index): distance for index, distance in enumerate(answer) if distance is not None}
            types |= {index: dtype for index, (dtype, _) in known.items()}
            measured.append({index: errors for index, (_, errors) in known.items()})
        distances |= {part[int(index)]: (types[index], errors) for index, errors in worst_errors(measured).items()}
    return distances, failed


def _common_values(matched: ModelMatching) -> Iterator[Pair]:
    """The values that matched nodes of the main graphs make, without graph outputs.

    A value that matched nodes read instead of another value stands for that value: it is left out.
    """
    matching, inner = matched.nodes, [_inner_values(model) for model in (matched.before, matched.after)]
    read_as = pair_values(matched).read_as
    for old, new in matched.pairs():
        made = matching.before.items[old].outputs, matching.after.items[new].outputs
        for old_value, new_value in zip(*made, strict=False):
            pair = (matching.before.names[old_value], matching.after.names[new_value])
            if ABSENT in (old_value, new_value) or pair[0] not in inner[0] or pair[1] not in inner[1]:
                continue
            if matching.representative(old_value) in read_as.get(new_value, (matching.representative(old_value),)):
                yield pair


def _inner_values(model: DetachedModel) -> set[str]:
    index = model.index
    return index.producers.keys() - index.outputs.keys()


Pair = tuple[str, str]
"""The name of a value in the first model, and in the second."""

Distance = tuple[str, Errors]
"""The element type of the first of two values, and how far the second is from it."""


def measure_distances(
    before: MappedModel,
    after: MappedModel,
    pairs: Sequence[Pair],
    draws: Sequence[Mapping[str, np.ndarray]],
    computed_in: Mapping[Pair, str],
    may_collapse: bool,
) -> list[list[Distance | None] | str]:
    """For each draw the distance of each pair of values, None for values that are random or no tensors; or the reason
    why the second model does not run on the draw.

    Args:
        before: the first model.
        after: the second model.
        pairs: values of the two models to compare.
        draws: name → array, for each draw.
        computed_in: pair → the least precise type in the computation of both.
        may_collapse: treat shapes as equal if one merges neighbouring dims of the other: 16×32 for 2×8×32.

    Raises:
        StepFailed: onnxruntime refuses one of the models, or stops on the first.
    """
    sessions = [
        model.session(list(dict.fromkeys(names)), may_evaluate=True)
        for model, names in zip((before, after), zip(*pairs, strict=True), strict=True)
    ]
    ends = {info.name for info in before.model().graph.output}
    distances: list[list[Distance | None] | str] = []
    for feeds in draws:
        old = sessions[0].run(feeds)
        try:
            new = sessions[1].run(feeds)
        except StepFailed as failure:
            distances.append(" ".join(str(failure).split()))
            continue
        values = ((pair, old[pair[0]], _as_type(old[pair[0]], new[pair[1]], pair[0] in ends)) for pair in pairs)
        if may_collapse:
            values = (
                (pair, left, right.reshape(_expand_shape(right.shape, left.shape))) for pair, left, right in values
            )
        distances.append([_compare_values(left, right, computed_in[pair]) for pair, left, right in values])
    return distances


def _as_type(before: np.ndarray, after: np.ndarray, is_output: bool) -> np.ndarray:
    """`after` in the float type of `before`, for an inner value that one of the models holds in half precision."""
    halves = {np.dtype(name) for name in ("float16", "bfloat16", "float32")}
    is_rounded = not is_output and before.dtype != after.dtype and {before.dtype, after.dtype} <= halves
    return after.astype(before.dtype) if is_rounded else after


def _expand_shape(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """`wanted`, if one of the shapes merges neighbouring dims of the other; else `shape`."""
    ends, wanted_ends = (set(accumulate(dims, operator.mul)) for dims in (shape, wanted))
    is_alike = math.prod(shape) == math.prod(wanted) and (ends <= wanted_ends or wanted_ends <= ends)
    return wanted if is_alike else shape


def _compare_values(before: np.ndarray, after: np.ndarray, computed_in: str) -> Distance | None:
    if computed_in == DRAWN:
        return None
    is_text = all(isinstance(item, str) for array in (before, after) for item in array.ravel())
    if object in (before.dtype, after.dtype) and not is_text:
        return None
    return str(before.dtype), compare(before, after, computed_in=computed_in)


@dataclass(frozen=True, slots=True)
class ValuePairs:
    """Which values of two models may be the same, by value id; equal values of the first model are one representative.

    Matched nodes need not make the same value: a Conv into which a BatchNormalization was folded makes the value that
    the BatchNormalization made before.
    """

    read_as: Mapping[int, Set[int]]
    """Value of the second model → the values of the first that matched nodes read at the same position."""
    certain: Mapping[int, Set[int]]
    """The part of `read_as` where both models compute an output from the values by equal nodes with equal weights."""
    news: Mapping[int, Iterable[int]]
    """Value of the first model → the values of the second that may be it; those made by matched nodes come first."""


def pair_values(matched: ModelMatching) -> ValuePairs:
    """Pair the values of two models, from the outputs up."""
    matching = matched.nodes
    before, after = matching.before, matching.after
    read_as: dict[int, set[int]] = defaultdict(set)
    for name, old_name in matched.outputs.items():
        read_as[after.outputs[name]].add(matching.representative(before.outputs[old_name]))
    certain = defaultdict(set, {new: set(olds) for new, olds in read_as.items()})
    for index in reversed(range(len(after.items))):
        item, old_index = after.items[index], matching.old_of[index]
        if old_index < 0:
            if item.op[1] in QUANTIZING:  # its results stand for its input
                for known in (read_as, certain):
                    known[item.inputs[0]] |= known[item.outputs[0]]
            continue
        old_item = before.items[old_index]
        made = [pair for pair in zip(item.outputs, old_item.outputs, strict=False) if ABSENT not in pair]
        is_certain = any(matching.representative(old) in certain[new] for new, old in made)
        is_certain &= item.op_digest == old_item.op_digest and _read_same_constants(matching, item, old_item)
        for new, old in _read_at_same_position(matching, item, old_item):
            read_as[new].add(old)
            if is_certain:
                certain[new].add(old)
    news: dict[int, dict[int, None]] = defaultdict(dict)
    for new, old in enumerate(matching.value_of):
        for value in (old, *sorted(read_as.get(new, ()))):
            if value >= 0:
                news[matching.representative(value)][new] = None
    return ValuePairs(dict(read_as), dict(certain), dict(news))


QUANTIZING: Final = frozenset({"QuantizeLinear", "DequantizeLinear"})


def _read_at_same_position(matching: NodeMatching, item: Item, old_item: Item) -> Iterator[tuple[int, int]]:
    """Pairs (new, old) of values, without constants, that two matched nodes read at the same position.

    An unmatched operand of a commutative op pairs with every unmatched operand: their values decide which is which.
    """
    news, olds = ([value for value in node.inputs if value != ABSENT] for node in (item, old_item))
    pairs = list(zip(news, map(matching.representative, olds), strict=False)) if len(news) == len(olds) else []
    if item.op[1] in COMMUTATIVE:
        both = list(itertools.product(news, map(matching.representative, olds)))
        known = [(new, old) for new, old in both if matching.counterpart(new) == old]
        seen, old_seen = {new for new, _ in known}, {old for _, old in known}
        pairs = [*known, *((new, old) for new, old in both if new not in seen and old not in old_seen)]
    constants = matching.after.constants, matching.before.constants
    return ((new, old) for new, old in pairs if new not in constants[0] and old not in constants[1])


def _read_same_constants(matching: NodeMatching, item: Item, old_item: Item) -> bool:
    """Whether two nodes read the same constants, except weights that were quantized."""
    before, after = matching.before, matching.after
    olds = Counter(
        before.value_digests[value] for value in old_item.inputs if value != ABSENT and value in before.constants
    )
    news = [value for value in item.inputs if value != ABSENT and value in after.constants]
    others = [value for value in news if after.value_digests[value] not in olds]
    producers = [after.producers[value] for value in others]
    are_quantized = all(index >= 0 and after.items[index].op[1] in QUANTIZING for index in producers)
    return len(news) == olds.total() and are_quantized
