"""Comparison of models with merged projections, before a pass and after it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from passes.proof.draws import draw_array
from passes.rewrites.split_product import SplitModel
from passes.weights.detached import DetachedModel, attach
from passes.weights.sessions import Session
from tests.support.onnx_models import detached

TOLERANCE = 2e-6
"""Sums of 32 float32 products of about 0.03 each, which a matrix of another width adds up in another order."""


def split_and_compare(
    model: onnx.ModelProto, split: Callable[[DetachedModel], SplitModel], feeds: dict[str, np.ndarray] | None = None
) -> SplitModel:
    """Split `model`, and check what holds for every form: a valid model, the same signature, the same outputs, and
    nothing left to do for a second run."""
    before = detached(model)
    text = before.proto.SerializeToString()
    result = split(before)
    assert before.proto.SerializeToString() == text, "the given model was changed"
    after = attach(result.model)
    onnx.checker.check_model(after, full_check=True)
    assert list(after.graph.input) == list(model.graph.input)
    assert list(after.graph.output) == list(model.graph.output)
    drawn = feeds or {
        info.name: draw_array(
            info.name, [dim.dim_value or 4 for dim in info.type.tensor_type.shape.dim], "float32", -1, 1
        )
        for info in model.graph.input
    }
    was, now = Session.of(before).run(drawn), Session.of(result.model).run(drawn)
    for name, value in was.items():
        np.testing.assert_allclose(now[name], value, rtol=0, atol=TOLERANCE)
    assert split(result.model).split == ()
    return result


def assert_parts_of(merged: np.ndarray, parts: list[np.ndarray], axis: int = -1) -> None:
    """Each slice of `merged` is in one of `parts`, bit for bit and once."""

    def slices(array: np.ndarray) -> list[bytes]:
        moved = np.moveaxis(array, axis, 0)
        return [moved[at].tobytes() for at in range(len(moved))]

    assert sorted(slices(merged)) == sorted(one for part in parts for one in slices(part))
