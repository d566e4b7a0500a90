"""onnxruntime's calibrators, opened for a model of ours and given one sample at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal

import numpy as np
import onnx
import onnxruntime
from onnxruntime.quantization.calibrate import (
    CalibraterBase,
    CalibrationDataReader,
    EntropyCalibrater,
    MinMaxCalibrater,
    PercentileCalibrater,
)

from passes.weights.detached import DetachedModel, read_model
from passes.weights.files import save
from passes.weights.sessions import Session
from passes.weights.split_run import names_computed_in_numpy
from pipeline.errors import OnnxlineError, UsageError

Method = Literal["minmax", "percentile", "entropy", "mse"]

Feeds = Mapping[str, np.ndarray]


def open_calibrator(
    model: DetachedModel, tensors: Sequence[str], method: Method, percentile: float, folder: Path
) -> Any:
    """One of onnxruntime's calibrators. It measures the float tensors that the model has type information of, and that
    a node outside of bodies reads or makes. So the model is given to it with the types of `tensors`, and with a node
    that reads each input that only bodies read."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    outputs = {info.name for info in proto.graph.output}
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        for name in tensors
        if name not in outputs
    )
    known = {name for node in proto.graph.node for name in (*node.input, *node.output)}
    unseen = (name for name in tensors if name not in known)
    proto.graph.node.extend(onnx.helper.make_node("Identity", [name], [f"{name}/measured"]) for name in unseen)
    path = folder / "model.onnx"
    save(model.with_proto(proto), path)
    onnxruntime.set_default_logger_severity(ERRORS_ONLY)  # its calibrators take no options of a session
    try:
        kind, settings = CALIBRATORS[method]
        augmented, is_large = folder / "augmented.onnx", model.nbytes() > EXTERNAL_FROM
        settings = {**settings, "percentile": percentile} if method == "percentile" else settings
        calibrator = kind(path, None, str(augmented), use_external_data_format=is_large, **settings)
        calibrator.augment_graph()
        if names_computed_in_numpy(proto):
            calibrator.infer_session = _SplitSession(augmented)  # type: ignore[assignment] # what it calls is there
        else:
            calibrator.create_inference_session()
        return calibrator
    finally:
        onnxruntime.set_default_logger_severity(WARNINGS)


class _SplitSession:
    """What a calibrator calls of onnxruntime's session, for a model with operators that only numpy computes."""

    def __init__(self, path: Path) -> None:
        self._session = Session.of(read_model(path))

    def get_inputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in self._session.inputs]

    def get_outputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in self._session.outputs]

    def run(self, names: None, feeds: Feeds) -> list[np.ndarray]:
        found = self._session.run(feeds)
        return [found[name] for name in self._session.outputs]


WARNINGS, ERRORS_ONLY = 2, 3
"""Severities of onnxruntime's log; 2 is its default."""


def collect(calibrator: Any, sample: Feeds, number: int) -> None:
    try:
        calibrator.collect_data(_OneSample(sample))
    except OnnxlineError:
        raise
    except Exception as error:  # native code, with classes of its own
        shapes = ", ".join(f"{name}: {list(array.shape)}" for name, array in sample.items())
        raise UsageError(
            f"calibration: the model does not run on sample {number} ({shapes}): {error}; give samples of other sizes "
            "(quantsim.calibration.data)"
        ) from error


class _OneSample(CalibrationDataReader):
    """Hands out one sample, and then nothing."""

    def __init__(self, sample: Feeds) -> None:
        self._samples = [dict(sample)]

    def get_next(self) -> Any:
        return self._samples.pop() if self._samples else None


CALIBRATORS: Final[Mapping[Method, tuple[type[CalibraterBase], Mapping[str, Any]]]] = {
    "minmax": (MinMaxCalibrater, {}),
    "percentile": (PercentileCalibrater, {"symmetric": True}),
    "entropy": (EntropyCalibrater, {}),
    "mse": (PercentileCalibrater, {"symmetric": False}),
}
"""Method → onnxruntime's class and its settings. It counts the values of its percentile without their signs, which an
asymmetric range needs."""

EXTERNAL_FROM: Final = 2**30
"""Bytes of a model above which onnxruntime writes the weights of its copies to files of their own."""
