"""A sequence whose tensors have constant places, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pipeline.errors import SourceError, Unsupported
from pipeline.importers.from_onnx.attributes import Attributes
from pipeline.ir.spec import TensorSpec

__all__ = ["Pieces", "split_pieces"]


MOST_PIECES = 2**16
"""Tensors of one sequence."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The tensors of a sequence: what Split makes of them, and what is read at each place."""

    axis: int
    sizes: tuple[int, ...]
    parts: tuple[TensorSpec, ...]
    """Specs as Split makes them."""
    items: tuple[TensorSpec, ...]
    """Specs as SequenceAt reads them: without the axis if keepdims is 0."""
    names: dict[int, str] = field(default_factory=dict)
    """Place → the output of the first SequenceAt that reads it."""

    def pick(self, index: int, name: str) -> TensorSpec:
        """Note that `name` is the tensor at `index`, and say what it is."""
        if not -len(self.items) <= index < len(self.items):
            raise SourceError(f"{name!r} is read from place {index} of a sequence of {len(self.items)} tensors")
        place = range(len(self.items))[index]
        self.names.setdefault(place, name)
        return self.items[place]


def split_pieces(attributes: Attributes, spec: TensorSpec, split: np.ndarray | None) -> Pieces:
    """What SplitToSequence makes of a tensor of `spec`; `split` is its second input: one size, all sizes, or None."""
    axis = attributes.integer("axis")
    if not -spec.rank <= axis < spec.rank:
        raise SourceError(f"SplitToSequence has the axis {axis}, and what it splits has {spec.rank} axes")
    axis %= spec.rank
    sizes = _sizes(spec.sizes[axis], split)
    parts = tuple(TensorSpec((*spec.shape[:axis], size, *spec.shape[axis + 1 :]), spec.dtype) for size in sizes)
    items = parts
    if split is None and not attributes.flag("keepdims", True):
        items = tuple(TensorSpec((*spec.shape[:axis], *spec.shape[axis + 1 :]), spec.dtype) for _ in sizes)
    return Pieces(axis, sizes, parts, items)


def _sizes(total: int, split: np.ndarray | None) -> tuple[int, ...]:
    """How long each piece of `total` is; `split` is one size for all but the last, or the size of each."""
    if split is not None and split.ndim:
        sizes = tuple(int(size) for size in split.reshape(-1))
        if sum(sizes) != total or any(size < 0 for size in sizes):
            raise SourceError(f"SplitToSequence splits {total} into {list(sizes)}; expected sizes that make {total}")
        return sizes
    step = 1 if split is None else int(split.item())
    if step < 1:
        raise SourceError(f"SplitToSequence splits {total} into pieces of {step}; expected 1 or more")
    if total > MOST_PIECES * step:
        raise Unsupported(f"SplitToSequence makes {total // step:,} tensors; expected {MOST_PIECES:,} at most")
    return tuple(min(step, total - start) for start in range(0, total, step))
