"""Calls of a decoder filled up, so that a backend compiles the part for few lengths of its cache.

Rows are added before the cache where a mask hides them. A decoder after an encoder has no mask over its own cache, and
may count positions by the rows of the cache. A token sees no later token, though: there the tokens since the last block
are read again in each call, filled up by later tokens to a whole block, over a cache of whole blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import onnx

from passes.proof.numbers import compare
from pipeline.errors import OnnxlineError
from pipeline.parts.slots import Step, state_slots
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


class TokenBlocks:
    """A `Step` that calls `step` with a multiple of `TOKENS` tokens.

    The first call that gets additional tokens is made with two kinds of them, over the same sizes, so that a quantized
    model rounds alike. Where results differ, as logits of the last token alone do, each further call is made as it is
    given: so it is with quantized decoders, whose ranges are of calls with one token, so that their mask is cut off. So
    is a call whose additional tokens have no position.

    Args:
        step: a call of the part, for sizes of which each is compiled.
        graph: of the part. One with a state that has no row for each token is called as it is.
        new: the input with a row for each new token.
        mask: the input with a column for each row of the cache and each new token, where the part has one.
    """

    def __init__(self, step: Step, graph: onnx.GraphProto, new: str, mask: str | None = None) -> None:
        self._step, self._new, self._mask = step, new, mask
        computed = {value.name for value in graph.output}
        slots = [slot for slot in state_slots(graph) if slot.after in computed]
        self._axes = {slot: slot.shape.index(0) for slot in slots if slot.grows and 0 in slot.shape}
        self._hides_later: bool | None = None if slots and len(self._axes) == len(slots) else False
        self._returned: dict[str, np.ndarray] = {}
        self._start: dict[str, np.ndarray] = {}
        """The states before the first of `_tokens`, by the names of inputs."""
        self._tokens = np.zeros(0)

    def __call__(self, feeds: Feeds) -> Mapping[str, np.ndarray]:
        if self._hides_later is False:
            return self._step(feeds)
        states = {slot.before: feeds[slot.before] for slot in self._axes}
        count, tokens = feeds[self._new].shape[1], feeds[self._new]
        if self._returned and all(self._returned[name] is array for name, array in states.items()):
            states, tokens = self._start, np.concatenate([self._tokens, tokens], axis=1)
        whole = {**feeds, **states, self._new: tokens}
        outputs = self._call_filled(whole)
        if self._hides_later is None and tokens.shape[1] % TOKENS:  # a whole block gets no tokens that would tell
            found = {name: array.copy() for name, array in (outputs or {}).items()}  # a plan uses the memory again
            others = self._call_filled(whole, token=0) or {}
            self._hides_later = bool(found and others) and all(
                compare(array, others[name]).ok for name, array in found.items()
            )
            outputs = found if self._hides_later else None
        outputs = outputs or self._step(whole)
        self._go_on(states, tokens, outputs)
        return {**outputs, LOGITS: outputs[LOGITS][:, -count:]}

    def _call_filled(self, feeds: Feeds, token: int = 1) -> dict[str, np.ndarray] | None:
        """The outputs of a call with `token` after the others, without its rows; None where that is not possible."""
        count = feeds[self._new].shape[1]
        more = -count % TOKENS
        pads = [(0, 0), (0, more), *[(0, 0)] * (feeds[self._new].ndim - 2)]
        filled = {**feeds, self._new: np.pad(feeds[self._new], pads, constant_values=token)}
        if self._mask is not None:
            filled[self._mask] = np.pad(feeds[self._mask], ((0, 0), (0, more)), constant_values=1)
        try:
            outputs = dict(self._step(filled))
        except (OnnxlineError, IndexError, RuntimeError):  # a place that its table of positions does not have
            return None
        outputs[LOGITS] = outputs[LOGITS][:, :count]
        for slot, axis in self._axes.items():
            rows = outputs[slot.after].shape[axis] - more
            outputs[slot.after] = outputs[slot.after][(slice(None),) * axis + (slice(rows),)]
        return outputs

    def _go_on(self, states: Feeds, tokens: np.ndarray, outputs: Mapping[str, np.ndarray]) -> None:
        """Note what the next call continues: states up to the last whole block, and the tokens after it."""
        done = tokens.shape[1] // TOKENS * TOKENS
        self._returned = {slot.before: outputs[slot.after] for slot in self._axes}
        self._start, self._tokens = dict(states), tokens[:, done:]
        for slot, axis in self._axes.items() if done else ():
            rows = slice(states[slot.before].shape[axis] + done)
            self._start[slot.before] = outputs[slot.after][(slice(None),) * axis + (rows,)].copy()


LOGITS: Final = "logits"

TOKENS: Final = 16
"""Of a block: reading 16 tokens takes about as long as a sixteenth of what it takes to compile a small decoder."""
