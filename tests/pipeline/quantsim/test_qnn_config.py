"""Encodings of `qnn-htp` as overrides of onnxruntime's configuration for QNN: every scale that it rounds by is ours."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

from passes.encodings.encoding import share_by_moves
from passes.weights.detached import DetachedModel, attach
from pipeline.config import QuantSimConfig
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.placement import place
from pipeline.quantsim.profiles import rules_of
from tests.pipeline.quantsim.pictures_of_qdq import model_of

DRAW = np.random.default_rng(0)

SAMPLE = {"x": DRAW.normal(size=(1, 64)).astype(np.float32)}


class Reader(CalibrationDataReader):
    """One sample."""

    def __init__(self) -> None:
        self._left = iter([SAMPLE])

    def get_next(self) -> dict[str, np.ndarray] | None:  # type: ignore[override]
        return next(self._left, None)


def network() -> DetachedModel:
    """An input that is reshaped before all else, a depthwise convolution, and limits after a sum."""
    return model_of(
        """g (float[1, 64] x) => (float[1, 4, 4, 4] y) {
            image = Reshape(x, shape)
            c = Conv <group = 4> (image, kernel)
            r = Relu(c)
            a = Add(r, image)
            l = Clip(a, low, high)
            s = Sigmoid(a)
            t = Tanh(a)
            m = Mul(s, t)
            y = Mul(m, l)
        }""",
        shape=np.array([1, 4, 4, 4]),
        kernel=DRAW.normal(size=(4, 1, 1, 1)).astype(np.float32),
        low=np.array(0, np.float32),
        high=np.array(1, np.float32),
    )


def test_onnxruntime_rounds_by_our_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root.manager, "disable", logging.WARNING)
    model = network()
    placement = place(model, rules_of(QuantSimConfig(profile="qnn-htp"), model))
    own = share_by_moves(model.proto.graph, encode(placement, calibrate(model, placement, [SAMPLE]), model))
    stored = model.index.initializers
    expected = {  # symmetric formats have the zero point in the middle, as in AIMET's files
        name: (found.scale.item(), found.zero_point.item() + 2**15 * found.precision.signed)
        for name, found in own.items()
        if name not in stored
    }
    overrides = {
        name: [
            {"quant_type": QuantType.QUInt16, "scale": np.asarray(scale, np.float32), "zero_point": np.asarray(zero)}
        ]
        for name, (scale, zero) in expected.items()
    }
    source, target = tmp_path / "model.onnx", tmp_path / "qdq.onnx"
    onnx.save(attach(model), source)
    config = get_qnn_qdq_config(
        source,
        Reader(),
        activation_type=QuantType.QUInt16,
        weight_type=QuantType.QInt8,
        init_overrides=overrides,
        keep_removable_activations=True,
    )
    quantize(source, target, config)
    graph = onnx.load(target).graph
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    rounded = {
        node.input[0].removesuffix("_QuantizeLinear_Input"): tuple(values[name].item() for name in node.input[1:3])
        for node in graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] not in stored
    }
    assert rounded == {name: found for name, found in expected.items() if name != "x"}  # that is rounded as `image`
    assert rounded["s"] == (2**-16, 0) and rounded["t"] == (2**-15, 2**15)
