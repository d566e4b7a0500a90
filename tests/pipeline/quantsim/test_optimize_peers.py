"""`ada-round` and `scale-estimation` with the real AIMET and NNCF: bits that a seed repeats, and what they take; and
`gptq` on scales of its own.

The former run in the environments whose interpreters AIMET_PYTHON and NNCF_PYTHON name.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from passes.weights.detached import DetachedModel
from pipeline.quantsim.encodings import encode, quantize, round_trip
from pipeline.quantsim.optimize import Chosen, Optimization, OptimizedStep
from pipeline.quantsim.optimizers import optimizers_of
from pipeline.quantsim.placement import place
from tests.pipeline.quantsim.pictures_of_qdq import dependent_rows, model_of, rule
from tests.support.interpreters import AIMET, NNCF

PRODUCTS = """g (float[16, 32] x) => (float[16, 8] y) {
    h = MatMul(x, first)
    r = Relu(h)
    y = MatMul(r, second)
}"""

needs_aimet = pytest.mark.skipif(not os.environ.get(AIMET), reason=f"{AIMET} names no interpreter that has AIMET")
needs_nncf = pytest.mark.skipif(not os.environ.get(NNCF), reason=f"{NNCF} names no interpreter that has NNCF")


def products() -> DetachedModel:
    draw = np.random.default_rng(0)
    shapes = {"first": (32, 24), "second": (24, 8)}
    return model_of(PRODUCTS, 21, **{name: draw.normal(size=dims).astype(np.float32) for name, dims in shapes.items()})


def run(folder: Path, weights: str, step: dict[str, Any]) -> tuple[Chosen, OptimizedStep]:
    folder.mkdir()
    model, held = products(), dependent_rows(2, seed=2)
    placement = place(model, [rule("op:*", weights, "float")])
    optimization = Optimization(model, placement, encode(placement, {}, model), lambda: held, lambda _: 0.0, folder)
    chosen, (row,) = optimization.run(optimizers_of([step]), dependent_rows(4, seed=1))
    return chosen, row


def bits_of(chosen: Chosen) -> dict[str, bytes]:
    arrays = {f"{name} numbers": array for name, array in chosen.arrays.items()}
    arrays |= {f"{name} scale": encoding.scale for name, encoding in chosen.encodings.items()}
    arrays |= {f"{name} zero": encoding.zero_point for name, encoding in chosen.encodings.items()}
    return {name: array.tobytes() for name, array in arrays.items()}


@needs_aimet
def test_ada_round_rounds_up_or_down_and_gives_the_same_bits_with_the_same_seed(tmp_path: Path) -> None:
    options = {"python": os.environ[AIMET], "iterations": 200}
    chosen, row = run(tmp_path / "a", "int4/channel", {"ada-round": {**options, "seed": 3}})
    again, _ = run(tmp_path / "b", "int4/channel", {"ada-round": {**options, "seed": 3}})
    assert (row.status, row.release) == ("ran", row.release) and row.release.startswith("aimet-onnx ")
    assert bits_of(chosen) == bits_of(again)
    model = products()
    taken = [layer.weight for layer in row.layers if layer.taken]
    assert taken
    for name in taken:
        encoding, array = chosen.encodings[name], model.array(model.index.initializers[name])
        nearest, found = (quantize(values, encoding).astype(int) for values in (array, chosen.arrays[name]))
        assert set(np.unique(found - nearest)) <= {-1, 0, 1}
        assert (found != nearest).any()
        exact = array / encoding.spread(array, encoding.scale)
        assert (np.abs(found - np.clip(exact, -7, 7)) < 1).all(), "a number is rounded further than up or down"


@needs_nncf
@pytest.mark.parametrize("weights", ["uint4/block8", "int4/channel/asymmetric"])
def test_scale_estimation_chooses_scales_and_gives_the_same_bits_again(weights: str, tmp_path: Path) -> None:
    step = {"scale-estimation": {"python": os.environ[NNCF]}}
    chosen, row = run(tmp_path / "a", weights, step)
    again, _ = run(tmp_path / "b", weights, step)
    assert row.status == "ran" and row.release.startswith("nncf ")
    assert bits_of(chosen) == bits_of(again)
    nearest = encode(place(products(), [rule("op:*", weights, "float")]), {}, products())
    taken = [layer for layer in row.layers if layer.taken]
    assert taken and all(layer.after_db > layer.before_db for layer in taken)
    for layer in taken:
        found, known = chosen.encodings[layer.weight], nearest[layer.weight]
        assert (found.scale != known.scale).any()
        numbers = quantize(chosen.arrays[layer.weight], found)
        assert numbers.min() >= found.precision.lowest and numbers.max() <= found.precision.highest


@needs_nncf
def test_scale_estimation_leaves_what_is_symmetric(tmp_path: Path) -> None:
    _, row = run(tmp_path / "a", "int4/block32", {"scale-estimation": {"python": os.environ[NNCF]}})
    assert row.status == "reverted"
    assert set(row.left) == {"first", "second"}
    assert "no asymmetric format of 4 bits" in row.left["first"]


@pytest.mark.parametrize("weights", ["int4/channel", "int4/block8", "uint4/block8"])
def test_gptq_on_scales_of_least_squared_error(tmp_path: Path, weights: str) -> None:
    """Of the parts of a range's scale, none has less error."""
    model = products()
    chosen, row = run(tmp_path / "fitted", weights, {"gptq": {"mse": True}})
    assert row.status == "ran"
    ranges = encode(place(model, [rule("op:*", weights, "float")]), {}, model)
    for name in chosen.arrays:
        array, own, found = model.array(model.index.initializers[name]), ranges[name], chosen.encodings[name].scale
        errors = [
            np.square(round_trip(array, replace(own, scale=scale), is_stored=True) - array).sum()
            for scale in (found, *(own.scale * np.float32(part) for part in (1, 0.9, 0.8, 0.7, 0.6)))
        ]
        assert errors[0] < errors[1] and errors[0] <= min(errors[1:])
