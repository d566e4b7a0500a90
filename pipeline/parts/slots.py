"""The states of a part, as its inputs and outputs name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx

from pipeline.verify.backends import Feeds

PAST_PREFIX: Final = "past_key_values."
PRESENT_PREFIX: Final = "present."

GROWING: Final = frozenset({"key", "value", "indexer_key", "key_scale", "value_scale", "indexer_key_scale"})
"""Names of the states that have a row for each token; the others have a fixed size."""

Step = Callable[[Feeds], Mapping[str, np.ndarray]]
"""One call of a part: inputs by name → outputs by name."""


@dataclass(frozen=True, slots=True)
class StateSlot:
    """A state as input and output of a part; `shape` has 0 along an open axis, and 1 for the batch."""

    before: str
    after: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def grows(self) -> bool:
        return self.before.rpartition(".")[2] in GROWING


def state_slots(graph: onnx.GraphProto) -> tuple[StateSlot, ...]:
    """The states of a part, from its inputs: the first named dim is the batch, and any other grows."""
    slots = []
    for value in graph.input:
        if value.name.startswith(PAST_PREFIX):
            tensor = value.type.tensor_type
            sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
            shape = tuple(int(axis == 0) if size is None else size for axis, size in enumerate(sizes))
            after = PRESENT_PREFIX + value.name.removeprefix(PAST_PREFIX)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            slots.append(StateSlot(value.name, after, shape, np.dtype(dtype)))
    return tuple(slots)
