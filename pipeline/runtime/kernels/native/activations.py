"""Activations as `sources/activations.h` numbers them."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.runtime.kernels.post_ops import PostOp

CODES: Mapping[tuple[str, str], int] = {
    ("none", ""): 0,
    ("relu", ""): 1,
    ("gelu", "none"): 2,
    ("gelu", "tanh"): 3,
    ("swish", ""): 4,
    ("sigmoid", ""): 5,
    ("tanh", ""): 6,
    ("hardswish", ""): 7,
    ("hardtanh", ""): 8,
    ("leaky_relu", ""): 9,
}
"""By oneDNN's name and algorithm, as `PostOp` has them."""


def settings_of(after: PostOp) -> tuple[float, ...]:
    """The code of an activation, and its numbers."""
    return (CODES[after.name, after.algorithm], *map(float, after.numbers))
