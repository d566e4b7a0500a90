"""Compare what two models compute: their outputs, their layers, and the values that both have.

Only values with a counterpart are compared. A value that one optimizer fused away, or cut elsewhere, is compared at the
next value that both have: `meets` names that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from passes.context import PassContext, limit_runs, open_context
from passes.diff.compare import compare_matched
from passes.diff.formats import UNCOMPARED, distance_text, layers_as_data, layers_text, numbers_as_data, numbers_text
from passes.diff.layers import LayerErrors, compare_layers
from passes.diff.model_matching import ModelMatching, match_models
from passes.diff.numbers import DrawnInputs, Numbers, compare_numbers, draw_inputs
from passes.diff.types import InitializerChange
from passes.errors import ModelError, StepFailed
from passes.matching.flat_graph import ABSENT
from passes.proof.prover import SPACE
from passes.visible import html_table, visible_line
from passes.weights.detached import OpenableModel, open_model
from passes.worker.messages import REFUSED


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """How far the second model is from the first.

    `meets`: a value of the first model that the second does not have → the next value that both have, by its name in
    the first model, at which it is compared; empty where only outputs follow.
    `stored`: tensors that differ, also in elements that no input reads, such as a row of a table.
    `unpaired`: a sentence on each output that only one of the models has.
    """

    numbers: Numbers
    layers: tuple[LayerErrors, ...]
    meets: Mapping[str, str]
    stored: tuple[InitializerChange, ...] = ()
    unpaired: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all outputs are within tolerance, on each draw or sample."""
        return not self.numbers.not_run and all(errors.ok for errors in self.numbers.outputs.values())

    def text(self, most: int | None = 20) -> str:
        shown = numbers_text(self.numbers, most=most, title="outputs and common values").lstrip("\n")
        shown += layers_text(self.layers, most=most)
        further = *self._unpaired_lines(), *self._stored_lines(most), *self._meeting_lines(most)
        return shown + "".join(f"{line}\n" for line in further)

    def _unpaired_lines(self) -> Iterator[str]:
        yield from ("", *map(visible_line, self.unpaired)) if self.unpaired else ()

    def _stored_lines(self, most: int | None) -> Iterator[str]:
        if not self.stored:
            return
        yield ""
        yield "stored tensors that differ, also where none of these inputs reads them"
        for change in self.stored[:most]:
            yield visible_line(f"  {change}")
        if most is not None and len(self.stored) > most:
            yield f"  and {len(self.stored) - most} more"

    def _meeting_lines(self, most: int | None) -> Iterator[str]:
        if not self.meets:
            return
        yield ""
        count = len(self.meets)
        yield f"{count} of the first model's values have no counterpart, and are compared where both meet again"
        for name, meeting in list(self.meets.items())[:most]:
            yield visible_line(f"  {name}: at {meeting or 'the outputs'}")
        if most is not None and len(self.meets) > most:
            yield f"  and {len(self.meets) - most} more"

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [("output", name, distance_text(errors)) for name, errors in self.numbers.outputs.items()]
        rows += [("output", name, UNCOMPARED) for name in self.numbers.not_compared]
        rows += [("layer", layer.layer or layer.before, distance_text(layer.errors)) for layer in self.layers]
        rows += [("value", value.before, distance_text(value.errors)) for value in self.numbers.values]
        return html_table("comparison", ("what", "name", "distance"), rows)

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "ok": self.ok,
            **numbers_as_data(self.numbers, ""),
            "layers": layers_as_data(self.layers),
            "meets": dict(self.meets),
            "stored": [asdict(change) for change in self.stored],
            "unpaired": self.unpaired,
        }


def compare(
    before: OpenableModel,
    after: OpenableModel,
    feeds: Sequence[Mapping[str, np.ndarray]] = (),
    *,
    context: PassContext | None = None,
) -> ModelComparison:
    """Run two models on the same inputs and compare outputs, layers and the values that both have.

    Args:
        before: a path, a message, a DetachedModel, or a result that has a model, such as a PassRun; it stays as it is.
        after: the model that is compared with it, in any of these forms.
        feeds: inputs of the first model, name → array of its shape and dtype; seeded draws when there are none.
        context: workers and a folder that several calls share.

    Returns:
        A ModelComparison, of which `print` shows a table.

    Raises:
        ModelError: a model cannot be read, onnxruntime refuses one of them, or they have no output in common.

    Example:
        >>> import onnxline
        >>> onnxline.compare("model.onnx", "model.onnx").ok
        True
    """
    first, second = open_model(before), open_model(after)
    matched = match_models(first, second)
    with nullcontext(context) if context else open_context() as context, limit_runs(context, first, feeds):
        given = [DrawnInputs(f"sample {index}", arrays) for index, arrays in enumerate(feeds)]
        try:
            found = compare_matching(matched, given or draw_inputs(matched, context), context)
        except StepFailed as failure:
            raise ModelError(f"{failure}{SPACE if REFUSED in str(failure) else ''}") from failure
    changes = compare_matched(matched).initializers
    stored = tuple(change for change in changes if change.before == change.after)
    return replace(found, stored=stored, unpaired=tuple(_unpaired_outputs(matched)))


def _unpaired_outputs(matched: ModelMatching) -> Iterator[str]:
    sides = ("first", matched.before, {*matched.outputs.values()}), ("second", matched.after, matched.outputs.keys())
    for which, model, paired in sides:
        for name in model.index.outputs:
            if name not in paired:
                yield f"output {name}: only the {which} model has it, so it is not compared"


def compare_matching(
    matched: ModelMatching, draws: Sequence[DrawnInputs], context: PassContext, *, values: bool = True
) -> ModelComparison:
    """`compare` of models that are matched already, on `draws`; without `values` outputs and layers alone."""
    numbers = compare_numbers(matched, draws, context, values=values)
    layers = compare_layers(matched, draws, context)
    compared = {entry.before for entry in (*numbers.values, *layers)}
    return ModelComparison(numbers, layers, _meeting_places(matched, compared) if values else {})


def _meeting_places(matched: ModelMatching, compared: Set[str]) -> dict[str, str]:
    """Each computed value of the first model that was not `compared`, as no output is → the next one that was."""
    matching = matched.nodes.before
    compared = compared | matched.before.index.outputs.keys()
    found: dict[int, str] = {}
    for item in reversed(matching.items):
        for value in item.outputs:
            if value == ABSENT:
                continue
            name = matching.names[value]
            if name in compared:
                found[value] = name
                continue
            readers = (matching.items[reader].outputs for reader, _ in matching.uses[value])
            places = (found.get(made, "") for outputs in readers for made in outputs if made != ABSENT)
            found[value] = next(filter(None, places), "")
    own, constants = matched.before.index.producers, matching.constants
    named = {value: matching.names[value] for value in found if value not in constants}
    return {name: found[value] for value, name in reversed(named.items()) if name in own and name not in compared}
