"""The example that writes a model by hand runs, and learns."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import author_digits
from train_digits_qat import run


def test_a_model_by_hand_learns_digits_and_goes_on_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "states.safetensors"
    found = author_digits.run(3, path, quiet=True)
    assert found.samples == 360
    assert found.metrics["accuracy"] > 0.9  # seen: 96 %
    assert author_digits.run(3, path, quiet=True) == found


# The example trains a quantized CNN to within a point of the CNN in float.


@pytest.mark.parametrize(("epochs", "tuning_epochs"), [(4, 1), (8, 4)])
def test_weights_of_4_bits_are_within_a_point_of_floats(epochs: int, tuning_epochs: int, tmp_path: Path) -> None:
    found = run(tmp_path, epochs=epochs, tuning_epochs=tuning_epochs)
    assert found.in_float > 0.96
    assert found.trained > found.in_float - 0.01
    model = onnx.load(tmp_path / "digits.qat.onnx")
    stored = [tensor for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.INT4]
    assert len([tensor for tensor in stored if tensor.name.endswith("_quantized")]) == 3
