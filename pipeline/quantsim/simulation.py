"""Runs of the quantized model: by the specification of the operators, or as a device may run them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnxruntime

from passes.weights.detached import DetachedModel, attach
from passes.weights.sessions import Session
from pipeline.errors import UsageError
from pipeline.quantsim.noise import sqnr_db

__all__ = ["DeviceLike", "OutputNoise", "compare_outputs", "run_device_like"]

Feeds = Mapping[str, np.ndarray]
Outputs = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class OutputNoise:
    """How far an output of the quantized model is from that of the float model, over all samples."""

    sqnr_db: float
    max_abs: float


@dataclass(frozen=True, slots=True)
class DeviceLike:
    """onnxruntime with all its optimizations: `fused` counts the operators of the graph that it runs, and `outputs`
    are compared with those of the float model."""

    outputs: dict[str, OutputNoise]
    fused: dict[str, int]
    has_vnni: bool


def compare_outputs(model: DetachedModel, quantized: DetachedModel, samples: Iterable[Feeds]) -> dict[str, OutputNoise]:
    """Run both models on all samples, without graph optimization: so onnxruntime computes what the specification says.

    Raises:
        StepFailed: onnxruntime refuses the quantized model.
        UsageError: the float model gives NaN.
    """
    expected, found = Session.of(model), Session.of(quantized)
    return _compare((expected.run(feeds), found.run(feeds)) for feeds in samples)


def run_device_like(
    model: DetachedModel, quantized: DetachedModel, samples: Iterable[Feeds], folder: Path
) -> DeviceLike:
    """Run the quantized model with every optimization of onnxruntime, which has integer kernels and fusions of its own.

    Args:
        folder: for the optimized graph.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 4
    if _has_narrow_floats(quantized):
        # onnxruntime 1.31 fuses them into QGemm, for which it then has no kernel
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    path = folder / "device_like.onnx"
    options.optimized_model_filepath = str(path)
    session = onnxruntime.InferenceSession(
        attach(quantized).SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=[CLIP_FUSION] if _quantizes_to(quantized, UNKNOWN_TO_CLIP_FUSION) else None,
    )
    names = [output.name for output in session.get_outputs()]
    expected = Session.of(model)
    outputs = _compare(
        (expected.run(feeds), dict(zip(names, map(np.asarray, session.run(None, dict(feeds))), strict=True)))
        for feeds in samples
    )
    graph = onnx.load(path, load_external_data=False).graph
    counts = Counter(f"{node.domain}.{node.op_type}".lstrip(".") for node in graph.node)
    return DeviceLike(outputs, dict(counts.most_common()), _has_vnni())


def _compare(runs: Iterable[tuple[Outputs, Outputs]]) -> dict[str, OutputNoise]:
    sums: dict[str, list[float]] = {}
    for expected, found in runs:
        for name, array in expected.items():
            if array.dtype.kind != "f" or not array.size:
                continue
            if np.isnan(array).any():
                raise UsageError(
                    f"quantsim: output {name!r} of the float model holds NaN on a sample, so no noise can be told; "
                    "give data like that in use as quantsim.calibration.data"
                )
            known = sums.setdefault(name, [0.0, 0.0, 0.0])
            wanted = array.astype(np.float64)
            difference = found[name].astype(np.float64) - wanted
            known[0] += float((wanted**2).sum())
            known[1] += float((difference**2).sum())
            known[2] = float(np.maximum(known[2], np.abs(difference).max()))  # NaN stays, which `max` passes over
    return {name: OutputNoise(sqnr_db(signal, noise), largest) for name, (signal, noise, largest) in sums.items()}


def _has_narrow_floats(model: DetachedModel) -> bool:
    """Whether values are quantized to floats of 8 bits."""
    return any(tensor.data_type in NARROW_FLOATS for tensor in model.proto.graph.initializer)


NARROW_FLOATS: Final = (onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT8E5M2)


def _quantizes_to(model: DetachedModel, types: Collection[int]) -> bool:
    """Whether a QuantizeLinear makes numbers of one of `types`."""
    graph = model.proto.graph
    stored = {tensor.name: tensor.data_type for tensor in graph.initializer}
    quantizers = (node for node in graph.node if node.op_type == "QuantizeLinear" and len(node.input) > 2)
    return any(stored.get(node.input[2]) in types for node in quantizers)


CLIP_FUSION: Final = "ClipQuantRewrite"
"""onnxruntime's rewrite that leaves out a Clip in front of a QuantizeLinear."""

UNKNOWN_TO_CLIP_FUSION: Final = (onnx.TensorProto.INT4, onnx.TensorProto.UINT4, *NARROW_FLOATS)
"""Types whose limits that rewrite of onnxruntime 1.31 does not know: it refuses the model."""


def _has_vnni() -> bool:
    """Whether the processor has the instructions that sum products of 8 bits in 32."""
    info = Path("/proc/cpuinfo")
    return info.is_file() and "vnni" in info.read_text(errors="replace")
