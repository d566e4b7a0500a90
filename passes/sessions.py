"""onnxruntime sessions over detached models: weights are shared with the session, and nothing is optimized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto

from passes.errors import StepFailed
from passes.reads import reads_of
from passes.weights import DetachedModel, Weight, clear_data, inline

__all__ = ["Session"]


class Session:
    """A model ready to run on the CPU with graph optimization off.

    onnxruntime's own fusions would hide what a pass did (measured: 1.8e-7 against exactly 0), and prepacking would copy
    the weights.

    Raises:
        StepFailed: onnxruntime refuses the model.
    """

    def __init__(self, model: DetachedModel, extra_outputs: Sequence[str] = ()) -> None:
        proto, names, tensors = _with_shared_weights(model, extra_outputs)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.add_session_config_entry("session.disable_prepacking", "1")
        # Idle threads that spin take the cores from the process that runs the passes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if names:
            options.add_external_initializers(names, [value for value, _ in tensors])
        self._kept_alive = tensors
        try:
            self._session = onnxruntime.InferenceSession(
                proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise StepFailed(f"onnxruntime refuses the model: {error}") from error
        self.inputs = tuple(entry.name for entry in self._session.get_inputs())
        self.outputs = tuple(entry.name for entry in self._session.get_outputs())

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name.

        Raises:
            StepFailed: onnxruntime stopped with an error.
        """
        given = {name: array for name, array in feeds.items() if name in self.inputs}
        try:
            results = self._session.run(None, given)
        except Exception as error:
            raise StepFailed(f"onnxruntime stopped: {error}") from error
        return {name: np.asarray(result) for name, result in zip(self.outputs, results, strict=True)}


def _with_shared_weights(
    model: DetachedModel, extra_outputs: Sequence[str]
) -> tuple[onnx.ModelProto, list[str], list[tuple[onnxruntime.OrtValue, np.ndarray]]]:
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    taken = {output.name for output in proto.graph.output}
    for name in extra_outputs:
        if name not in taken:
            proto.graph.output.add(name=name)
    _drop_unread(proto.graph)
    names: list[str] = []
    values: list[tuple[onnxruntime.OrtValue, np.ndarray]] = []
    for tensor in proto.graph.initializer:
        weight = model.weight(tensor)
        if weight is None:
            continue
        value = _ort_value(weight)
        if value is None:
            inline(tensor, weight.data)
            continue
        clear_data(tensor)
        tensor.data_location = TensorProto.EXTERNAL
        # The location is never opened: the value of that name is given to the session.
        for key, entry in (("location", "given"), ("offset", "0"), ("length", str(weight.data.nbytes))):
            tensor.external_data.add(key=key, value=entry)
        names.append(tensor.name)
        values.append(value)
    return proto, names, values


def _drop_unread(graph: onnx.GraphProto) -> None:
    """Remove initializers that nobody reads: onnxruntime drops them itself and then fails to find the given value."""
    read = {output.name for output in graph.output} | {name for node in graph.node for name in reads_of(node)}
    read |= {info.name for info in graph.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    if len(kept) < len(graph.initializer):
        del graph.initializer[:]
        graph.initializer.extend(kept)


def _ort_value(weight: Weight) -> tuple[onnxruntime.OrtValue, np.ndarray] | None:
    """The weight as onnxruntime's value over the same memory, with the array that owns it; None where numpy has no such
    dtype (bfloat16) or the bytes lie unaligned, and the weight has to go inline."""
    if weight.data_type == TensorProto.BFLOAT16:
        return None
    array = weight.array()
    if not array.flags.aligned:
        array = array.copy()
    return onnxruntime.OrtValue.ortvalue_from_numpy(array), array
