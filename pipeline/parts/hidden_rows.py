"""Rows before a cache that its masks hide, so that a backend compiles a part for few lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import onnx

from passes.proof.numbers import compare
from pipeline.errors import OnnxlineError
from pipeline.parts.slots import Step, state_slots
from pipeline.parts.token_blocks import TokenBlocks
from pipeline.verify.backends import Feeds


def fill_up(step: Step, graph: onnx.GraphProto) -> Step:
    """`step` over a cache with zeros before its first row, up to a multiple of `ROWS`, and masks that hide them: a
    backend that compiles the graph for each combination of sizes does so once for `ROWS` tokens, and not for each.

    A model that is given no positions may count them by the rows of its cache, as BART does: the first call over a
    cache is made without those zeros too. Where the results differ, or there is no mask over the cache, `TokenBlocks`
    fill up the tokens after the last one.

    Args:
        graph: of the part; one without states is called as it is.
    """
    slots, inputs = state_slots(graph), {value.name for value in graph.input}
    axes = {slot: slot.shape.index(0) for slot in slots if slot.grows and 0 in slot.shape}
    if not slots:
        return step
    new, has_mask = next(name for name in NEW if name in inputs), MASKS[0] in inputs
    blocks = TokenBlocks(step, graph, new, MASKS[0] if has_mask else None)
    if not has_mask:
        return blocks
    counts_rows = None if axes and POSITIONS not in inputs else False

    def call_filled(feeds: Feeds, hidden: int) -> Mapping[str, np.ndarray]:
        filled = {name: np.pad(feeds[name], ((0, 0), (hidden, 0))) for name in MASKS if name in feeds}
        for slot, axis in axes.items():
            pads = [(hidden * (at == axis), 0) for at in range(len(slot.shape))]
            filled[slot.before] = np.pad(feeds[slot.before], pads)
        outputs = dict(step({**feeds, **filled}))
        for slot, axis in axes.items():
            outputs[slot.after] = outputs[slot.after][(slice(None),) * axis + (slice(hidden, None),)]
        return outputs

    def is_other(exact: Mapping[str, np.ndarray], feeds: Feeds, hidden: int) -> bool:
        try:
            found = call_filled(feeds, hidden)
        except (OnnxlineError, IndexError, RuntimeError):  # a place that its table of positions does not have
            return True
        return any(not compare(array, found[name]).ok for name, array in exact.items())

    def call(feeds: Feeds) -> Mapping[str, np.ndarray]:
        nonlocal counts_rows
        tokens = next(feeds[name].shape[1] for name in NEW if name in feeds)
        hidden = (tokens - feeds[MASKS[0]].shape[1]) % ROWS
        if counts_rows:
            return blocks(feeds)
        if not hidden:
            return step(feeds)
        if counts_rows is None:
            exact = {name: array.copy() for name, array in step(feeds).items()}  # a plan may use the memory again
            counts_rows = is_other(exact, feeds, hidden)
            return exact
        return call_filled(feeds, hidden)

    return call


MASKS: Final = ("attention_mask", "token_type_ids", "prefix_mask")
"""Inputs with a column for each row of the cache and each new token; the first one is 0 for what is hidden."""

NEW: Final = ("input_ids", "inputs_embeds")
"""Inputs with a row for each new token; a part has one of them."""

POSITIONS: Final = "position_ids"

ROWS: Final = 64
