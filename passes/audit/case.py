"""One model that passes are tried on, with what it should compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

__all__ = ["Case", "value_of"]


@dataclass(frozen=True, slots=True)
class Case:
    """`name` begins with the source: `node/test_abs`.

    Args:
        feeds: arrays, lists of arrays, or None, by input.
        expected: by position of the outputs; None where the model itself has to say.
        rtol, atol: of the test; None for the tolerances by dtype of `passes.proof.numbers`.
    """

    name: str
    model: onnx.ModelProto
    feeds: Mapping[str, Any] = field(default_factory=dict)
    expected: Sequence[Any] | None = None
    rtol: float | None = None
    atol: float | None = None


def value_of(given: Any) -> Any:
    """A value as a test has it, as numpy has it: tensors become arrays, also in lists and optionals."""
    if isinstance(given, onnx.TensorProto):
        return numpy_helper.to_array(given)
    if isinstance(given, list | tuple):
        return [value_of(one) for one in given]
    return given if given is None else np.asarray(given)
