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

from passes.custom_ops.declarations import add_libraries
from passes.errors import StepFailed
from passes.graph.index import initializers_of
from passes.graph.op_facts import BIASED
from passes.suggest import plural
from passes.weights.detached import PROTOBUF_LIMIT, DetachedModel
from passes.weights.files import save
from passes.weights.sessions import Session
from pipeline.errors import UsageError
from pipeline.quantsim.noise import sqnr_db
from pipeline.quantsim.qdq import find_fixed_values

Feeds = Mapping[str, np.ndarray]
Outputs = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class OutputNoise:
    """How far an output of the quantized model is from that of the float model, over all samples."""

    sqnr_db: float
    max_abs: float


@dataclass(frozen=True, slots=True)
class DroppedOperator:
    """An operator that sets numbers to a limit, with its result and the dtype of the quantizer after it."""

    op: str
    tensor: str
    dtype: str


@dataclass(frozen=True, slots=True)
class DeviceLike:
    """onnxruntime with all its optimizations: `fused` counts the operators of the graph that it runs, and `outputs`
    are compared with those of the float model. `dropped` are operators that it leaves out and must not.

    not_run: why it does not run the model so, though it does without them; then there is nothing else. Empty otherwise.
    """

    outputs: dict[str, OutputNoise]
    fused: dict[str, int]
    has_vnni: bool
    dropped: tuple[DroppedOperator, ...] = ()
    not_run: str = ""

    def notes(self) -> Iterator[str]:
        """A sentence where the numbers of this run are wrong or missing by onnxruntime's own fault."""
        if self.not_run:
            yield (
                "with its optimizations onnxruntime does not run the model, so there is no ratio of a device; without "
                f"them it does: {self.not_run}"
            )
        if self.dropped:
            first = self.dropped[0]
            yield (
                f"with its optimizations onnxruntime drops {plural(len(self.dropped), 'operator')} before a "
                f"quantizer, such as the {first.op} of {first.tensor!r} before {first.dtype}, which has numbers "
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
    Where these refuse the model, the reason is the result.

    Args:
        folder: for the quantized model and the optimized graph.
        external_from: bytes from which weights lie in files next to these.
    """
    path = folder / "device_like.onnx"
    expected = Session.of(model)
    try:
        session = _OptimizedSession(quantized, folder / "quantized.onnx", path, external_from)
        outputs = _compare((expected.run(feeds), session.run(feeds)) for feeds in samples)
    except _NotRun as reason:
        return DeviceLike({}, {}, _has_vnni(), not_run=str(reason))
    graph = onnx.load(path, load_external_data=False).graph
    counts = Counter(f"{node.domain}.{node.op_type}".lstrip(".") for node in graph.node)
    dropped = tuple(_find_dropped(quantized, graph))
    return DeviceLike(outputs, dict(counts.most_common()), _has_vnni(), dropped)


class _NotRun(Exception):
    """Why onnxruntime with its optimizations does not run a model."""


class _OptimizedSession:
    """A model as onnxruntime runs it with all its optimizations, but those that are known to go wrong.

    Args:
        source: the file of the model, which is written here.
        optimized: the file of the graph that onnxruntime makes of it.

    Raises:
        _NotRun: onnxruntime refuses the graph that it has made.
    """

    def __init__(self, model: DetachedModel, source: Path, optimized: Path, external_from: int) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 4
        add_libraries(options)
        if _has_narrow_floats(model):
            # onnxruntime 1.31 fuses them into QGemm, for which it then has no kernel
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        save(model, source, external_from=external_from)
        options.optimized_model_filepath = str(optimized)
        if model.nbytes() > external_from:  # what it optimizes may be as large
            key = "session.optimized_model_external_initializers_file_name"
            options.add_session_config_entry(key, f"{optimized.name}.data")
        try:
            self._session = onnxruntime.InferenceSession(
                source,
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=list(_misleading_optimizers(model)) or None,
            )
        except Exception as error:
            raise _NotRun(" ".join(str(error).split())) from error
        self._names = [output.name for output in self._session.get_outputs()]

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name.

        Raises:
            _NotRun: a kernel stopped with an error.
        """
        try:
            results = self._session.run(None, dict(feeds))
        except Exception as error:
            raise _NotRun(" ".join(str(error).split())) from error
        return dict(zip(self._names, map(np.asarray, results), strict=True))


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
            if found[name].shape != array.shape:
                raise StepFailed(f"output {name!r} has the shape {found[name].shape}, expected {array.shape}")
            known = sums.setdefault(name, [0.0, 0.0, 0.0])
            wanted = array.astype(np.float64)
            with np.errstate(over="ignore", invalid="ignore"):  # infinite numbers have infinite noise
                difference = found[name].astype(np.float64) - wanted
                known[0] += float((wanted**2).sum())
                known[1] += float((difference**2).sum())
            known[2] = float(np.maximum(known[2], np.abs(difference).max()))  # NaN stays, which `max` passes over
    return {name: OutputNoise(sqnr_db(signal, noise), largest) for name, (signal, noise, largest) in sums.items()}


def _has_narrow_floats(model: DetachedModel) -> bool:
    """Whether values are quantized to floats of 8 bits."""
    return any(tensor.data_type in NARROW_FLOATS for tensor in model.proto.graph.initializer)


NARROW_FLOATS: Final = (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2)


def _misleading_optimizers(model: DetachedModel) -> Iterator[str]:
    """What onnxruntime is not to do, since no device would: the model that it then runs is another."""
    if _quantizes_to(model, UNKNOWN_LIMITS):
        yield CLIP_FUSION
    if _has_float_weights(model):
        yield WEIGHT_QUANTIZATION


def _has_float_weights(model: DetachedModel) -> bool:
    """Whether a product of quantized numbers has its weight in float, also one in another layout."""
    graph = model.proto.graph
    dequantizers = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    whole = {name for node in dequantizers for name in node.input}
    stored = {tensor.name for tensor in graph.initializer} - whole
    floats = find_fixed_values(graph, stored) | stored
    dequantized = {name for node in dequantizers for name in node.output}
    return any(
        node.op_type in BIASED and node.input[0] in dequantized and node.input[1] in floats for node in graph.node
    )


def _quantizes_to(model: DetachedModel, types: Collection[int]) -> bool:
    """Whether a QuantizeLinear makes numbers of one of `types`."""
    return any(zero_point.data_type in types for _, zero_point in _quantizers(model))


def _quantizers(model: DetachedModel) -> Iterator[tuple[NodeProto, TensorProto]]:
    """Each QuantizeLinear with its stored zero point."""
    graph = model.proto.graph
    stored = initializers_of(graph)
    for node in graph.node:
        if node.op_type == "QuantizeLinear" and len(node.input) > 2 and node.input[2] in stored:
            yield node, stored[node.input[2]]


def _find_dropped(quantized: DetachedModel, optimized: GraphProto) -> Iterator[DroppedOperator]:
    """The Relu operators that are not in the optimized graph, before a quantizer that has negative numbers. One
    that is fused into the operator before it still makes the same value."""
    made = {name for node in optimized.node for name in node.output}
    producers = {name: node for node in quantized.proto.graph.node for name in node.output}
    for quantizer, zero_point in _quantizers(quantized):
        producer = producers.get(quantizer.input[0])
        is_limited = producer is not None and producer.op_type == "Relu" and producer.output[0] not in made
        if producer is None or not is_limited or zero_point.data_type not in UNKNOWN_LIMITS:
            continue
        dtype = helper.tensor_dtype_to_np_dtype(zero_point.data_type)
        limits = ml_dtypes.iinfo(dtype) if zero_point.data_type in WHOLE_TYPES else ml_dtypes.finfo(dtype)
        if float(quantized.array(zero_point).min()) > float(limits.min):
            yield DroppedOperator(producer.op_type, producer.output[0], dtype.name)


CLIP_FUSION: Final = "ClipQuantRewrite"
"""onnxruntime's rewrite that leaves out a Clip before a QuantizeLinear."""

WEIGHT_QUANTIZATION: Final = "WeightBiasQuantization"
"""onnxruntime's rewrite that gives 8 bits and one scale to a weight that stays in float, where products read quantized
numbers. It gives 32 bits to biases, too, which integer kernels need: so it is on where no weight is in float."""

WHOLE_TYPES: Final = (TensorProto.INT4, TensorProto.UINT4)

UNKNOWN_LIMITS: Final = (*WHOLE_TYPES, *NARROW_FLOATS)
"""Types whose limits the rewrites of onnxruntime 1.31 do not know. That of Clip refuses the model; that of Relu leaves
it out, as if no number lay below zero."""


def _has_vnni() -> bool:
    """Whether the processor has the instructions that sum products of 8 bits in 32."""
    info = Path("/proc/cpuinfo")
    return info.is_file() and "vnni" in info.read_text(errors="replace")
