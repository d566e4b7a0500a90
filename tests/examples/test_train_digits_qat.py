"""The example trains a quantized CNN to within a point of the CNN in float."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from train_digits_qat import run


@pytest.mark.parametrize(("epochs", "tuning_epochs"), [(4, 1), (8, 4)])
def test_weights_of_4_bits_are_within_a_point_of_floats(epochs: int, tuning_epochs: int, tmp_path: Path) -> None:
    found = run(tmp_path, epochs=epochs, tuning_epochs=tuning_epochs)
    assert found.in_float > 0.96
    assert found.trained > found.in_float - 0.01
    model = onnx.load(tmp_path / "digits.qat.onnx")
    stored = [tensor for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.INT4]
    assert len([tensor for tensor in stored if tensor.name.endswith("_quantized")]) == 3
