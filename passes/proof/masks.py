"""What names suggest: an input is a mask, an integer over a range or a noise level, and a dim the sum of others.

An attention mask holds zeros and ones, or 0 and a number far below zero. No row of a mask hides every position, since
runtimes differ in the result of attention to no position. A sliding window sees a few positions only. So one of two
neighbouring positions is visible, and in a mask of queries by keys each query sees itself and nothing later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

ADDITIVE: Final = -1e4
"""An input whose least value is at most this is a mask: the value hides a position when it is added to a score."""

HIDES: Final = -30000.0
"""The hiding value of a mask that declares none; every float type can hold it."""


class MaskForm(StrEnum):
    """Where the hidden elements of a mask may be."""

    FREE = "free"
    PADDING = "padding"
    """The last axis are positions: the first is visible, and one of two neighbours."""
    CAUSAL = "causal"
    """The last axes are queries and keys: a query sees itself, and nothing later."""


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask: its form, and the values of a visible and of a hidden element."""

    form: MaskForm
    visible: float = 1.0
    hidden: float = 0.0

    def apply(self, is_visible: np.ndarray) -> np.ndarray:
        """The elements of a mask; `is_visible` are random bools, in which the elements that the form shows are set."""
        if self.form is MaskForm.PADDING and is_visible.ndim:
            is_visible[..., ::2] = True
        elif self.form is MaskForm.CAUSAL and is_visible.ndim > 1:
            queries, keys = is_visible.shape[-2:]
            is_visible |= np.eye(queries, keys, keys - queries, dtype=bool)
            is_visible &= np.tri(queries, keys, keys - queries, dtype=bool)
            is_visible[..., : max(0, queries - keys), :1] = True
        return np.where(is_visible, self.visible, self.hidden)


def words_of(name: str) -> frozenset[str]:
    """The words of a name: `model.encoder_attention_mask` has `encoder`, `attention` and `mask`."""
    return frozenset("".join(sign if sign.isalnum() else " " for sign in name.lower()).split())


def summands_of(dim: str, dims: Collection[str]) -> tuple[str, ...]:
    """The names in `dims`, and integers, whose sum `dim` is by its name; empty if it is a size of its own.

    These are `past_sequence_length + 1`, as optimum names the dims of decoders, and `total_sequence_length`, the sum of
    `past_sequence_length` and `sequence_length` in models for onnxruntime-genai.
    """
    terms = [term.strip() for term in dim.split("+")]
    if dim.startswith("total_"):
        rest = dim.removeprefix("total_")
        terms = [f"past_{rest}", rest]
    is_sum = len(terms) > 1 and all(term.isdecimal() or term in dims for term in terms)
    return tuple(terms) if is_sum else ()


def independent_dims(dims: Iterable[str]) -> tuple[str, ...]:
    """The dims, each once, without those that are the sum of others."""
    named = dict.fromkeys(dims)
    return tuple(dim for dim in named if not summands_of(dim, named))


def size_of(dim: str, sizes: Mapping[str, int]) -> int:
    """The size of a dim: that in `sizes`, or the sum that its name says.

    Raises:
        KeyError: `sizes` has neither the dim nor its summands.
    """
    terms = () if dim in sizes else summands_of(dim, sizes)
    return sum(int(term) if term.isdecimal() else sizes[term] for term in terms) if terms else sizes[dim]


def mask_of(name: str, dtype: str, rank: int, low: float, high: float, *, is_assumed: bool) -> Mask | None:
    """The mask that an input is by its name, or by a range that ends far below zero; None for another input.

    Args:
        name: the name of the input.
        dtype: its dtype, by numpy's name.
        rank: the number of its axes.
        low: the least value to draw.
        high: the greatest value to draw.
        is_assumed: whether `low` and `high` are defaults, and not given by the caller.
    """
    words, is_float = words_of(name), "float" in dtype
    is_square = rank > 2
    if is_float and low <= ADDITIVE and high <= 1 and not is_assumed:
        return Mask(MaskForm.CAUSAL if rank > 1 else MaskForm.FREE, high, low)
    if not is_assumed or not words & MASKS or dtype in ("int8", "uint8"):
        return None
    is_attention = not words.isdisjoint(ATTENTIONS)
    form = MaskForm.FREE if is_square and not is_attention else MaskForm.CAUSAL if is_square else MaskForm.PADDING
    if is_float and is_square and is_attention:
        return Mask(form, 0.0, HIDES)
    return Mask(form, 0.0, 1.0) if "padding" in words else Mask(form)


def suggested_range(name: str, dtype: str) -> tuple[float, float] | None:
    """The range that the name of an input suggests, or None; integers exclude the upper end of the range."""
    words = words_of(name)
    if dtype in ("bool", "int8", "uint8"):
        return None
    return next((limits for key, limits in RANGES.items() if key in words), None)


MASKS: Final = frozenset({"mask", "masks"})
ATTENTIONS: Final = frozenset({"attention", "attn", "causal"})

RANGES: Final[Mapping[str, tuple[float, float]]] = {
    **dict.fromkeys(("timestep", "timesteps", "t"), (0.0, 1000.0)),
    **dict.fromkeys(("sigma", "sigmas"), (0.0, 80.0)),
    **dict.fromkeys(("guidance", "guidances"), (0.0, 10.0)),
    **dict.fromkeys(("position", "positions", "pos"), (0.0, 512.0)),
}
"""A word of a name → its range: steps and noise levels of diffusion, positions in a sequence."""
