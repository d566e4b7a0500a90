"""Runs of the quantized model: by the specification of the operators, or as a device may run them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import GraphProto, NodeProto, TensorProto, helper

from passes.suggest import plural
from passes.weights.detached import PROTOBUF_LIMIT, DetachedModel
from passes.weights.files import save
from passes.weights.sessions import Session
from pipeline.errors import UsageError
from pipeline.quantsim.noise import sqnr_db

__all__ = ["DeviceLike", "DroppedOperator", "OutputNoise", "compare_outputs", "run_device_like"]

Feeds = Mapping[str, np.ndarray]
Outputs = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class OutputNoise:
    """How far an output of the quantized model is from that of the float model, over all samples."""

    sqnr_db: float
    max_abs: float


@dataclass(frozen=True, slots=True)
class DroppedOperator:
    """An operator that sets numbers to a limit, with its result and the dtype of the quantizer behind it."""

    op: str
    tensor: str
    dtype: str


@dataclass(frozen=True, slots=True)
class DeviceLike:
    """onnxruntime with all its optimizations: `fused` counts the operators of the graph that it runs, and `outputs`
    are compared with those of the float model. `dropped` are operators that it leaves out and must not."""

    outputs: dict[str, OutputNoise]
    fused: dict[str, int]
    has_vnni: bool
    dropped: tuple[DroppedOperator, ...] = ()

    def notes(self) -> Iterator[str]:
        """A sentence where the numbers of this run are wrong by onnxruntime's own fault."""
        if self.dropped:
            first = self.dropped[0]
            yield (
                f"with its optimizations onnxruntime drops {plural(len(self.dropped), 'operator')} in front of a "
                f"quantizer, such as the {first.op} of {first.tensor!r} in front of {first.dtype}, which has numbers "
                "below those that it lets through: the ratio with optimizations is wrong, and says nothing of a device"
            )


def compare_outputs(model: DetachedModel, quantized: DetachedModel, samples: Iterable[Feeds]) -> dict[str, OutputNoise]:
    """Run both models on all samples, without graph optimization: so onnxruntime computes what the specification says.

    Raises:
        StepFailed: onnxruntime refuses the quantized model.
        UsageError: the float model gives NaN.
    """
    expected, found = Session.of(model), Session.of(quantized)
    return _compare((expected.run(feeds), found.run(feeds)) for feeds in samples)


def run_device_like(
    model: DetachedModel,
    quantized: DetachedModel,
    samples: Iterable[Feeds],
    folder: Path,
    external_from: int = PROTOBUF_LIMIT,
) -> DeviceLike:
    """Run the quantized model with every optimization of onnxruntime, which has integer kernels and fusions of its own.

    Args:
        folder: for the quantized model and the optimized graph.
        external_from: bytes from which weights lie in files beside these.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 4
    if _has_narrow_floats(quantized):
        # onnxruntime 1.31 fuses them into QGemm, for which it then has no kernel
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    source, path = folder / "quantized.onnx", folder / "device_like.onnx"
    save(quantized, source, external_from=external_from)
    options.optimized_model_filepath = str(path)
    if quantized.nbytes() > external_from:  # what it optimizes may be as large
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", f"{path.name}.data")
    session = onnxruntime.InferenceSession(
        source,
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=[CLIP_FUSION] if _quantizes_to(quantized, UNKNOWN_LIMITS) else None,
    )
    names = [output.name for output in session.get_outputs()]
    expected = Session.of(model)
    outputs = _compare(
        (expected.run(feeds), dict(zip(names, map(np.asarray, session.run(None, dict(feeds))), strict=True)))
        for feeds in samples
    )
    graph = onnx.load(path, load_external_data=False).graph
    counts = Counter(f"{node.domain}.{node.op_type}".lstrip(".") for node in graph.node)
    dropped = tuple(_find_dropped(quantized, graph))
    return DeviceLike(outputs, dict(counts.most_common()), _has_vnni(), dropped)


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


NARROW_FLOATS: Final = (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2)


def _quantizes_to(model: DetachedModel, types: Collection[int]) -> bool:
    """Whether a QuantizeLinear makes numbers of one of `types`."""
    return any(zero_point.data_type in types for _, zero_point in _quantizers(model))


def _quantizers(model: DetachedModel) -> Iterator[tuple[NodeProto, TensorProto]]:
    """Each QuantizeLinear with its stored zero point."""
    graph = model.proto.graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "QuantizeLinear" and len(node.input) > 2 and node.input[2] in stored:
            yield node, stored[node.input[2]]


def _find_dropped(quantized: DetachedModel, optimized: GraphProto) -> Iterator[DroppedOperator]:
    """The Relu operators that are not in the optimized graph, in front of a quantizer that has negative numbers. One
    that is fused into the operator before it still makes the same value."""
    made = {name for node in optimized.node for name in node.output}
    makers = {name: node for node in quantized.proto.graph.node for name in node.output}
    for quantizer, zero_point in _quantizers(quantized):
        maker = makers.get(quantizer.input[0])
        is_limited = maker is not None and maker.op_type == "Relu" and maker.output[0] not in made
        if maker is None or not is_limited or zero_point.data_type not in UNKNOWN_LIMITS:
            continue
        dtype = helper.tensor_dtype_to_np_dtype(zero_point.data_type)
        limits = ml_dtypes.iinfo(dtype) if zero_point.data_type in WHOLE_TYPES else ml_dtypes.finfo(dtype)
        if float(quantized.array(zero_point).min()) > float(limits.min):
            yield DroppedOperator(maker.op_type, maker.output[0], dtype.name)


CLIP_FUSION: Final = "ClipQuantRewrite"
"""onnxruntime's rewrite that leaves out a Clip in front of a QuantizeLinear."""

WHOLE_TYPES: Final = (TensorProto.INT4, TensorProto.UINT4)

UNKNOWN_LIMITS: Final = (*WHOLE_TYPES, *NARROW_FLOATS)
"""Types whose limits the rewrites of onnxruntime 1.31 do not know. That of Clip refuses the model; that of Relu leaves
it out, as if no number lay below zero."""


def _has_vnni() -> bool:
    """Whether the processor has the instructions that sum products of 8 bits in 32."""
    info = Path("/proc/cpuinfo")
    return info.is_file() and "vnni" in info.read_text(errors="replace")
