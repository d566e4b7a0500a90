"""Run the quantized model and compare its outputs with those of the float model.

Without optimizations onnxruntime computes what ONNX specifies; with them, what a device may compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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
from passes.graph.index import computed_values, initializers_of
from passes.graph.op_facts import BIAS, BIASED
from passes.suggest import plural
from passes.weights.detached import PROTOBUF_LIMIT, DetachedModel
from passes.weights.files import save
from passes.weights.ort_values import run_session
from passes.weights.sessions import Session, describe_refusal
from pipeline.config import KEYS
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
    """A Relu that onnxruntime wrongly removed: its result (`tensor`), and the dtype of the quantizer that reads it."""

    op: str
    tensor: str
    dtype: str


@dataclass(frozen=True, slots=True)
class DeviceLike:
    """The quantized model by onnxruntime with its optimizations.

    outputs: the noise of each output. fused: operator → how many nodes of the optimized graph are it, fused ones and
    all others. has_vnni: whether this processor has instructions for 8-bit products. dropped: operators that the
    optimizations wrongly removed. not_run: why onnxruntime cannot run the model with its optimizations, though it can
    without them; `outputs` and `fused` are empty then. rounded_biases: those in float that onnxruntime has rounded."""

    outputs: dict[str, OutputNoise]
    fused: dict[str, int]
    has_vnni: bool
    dropped: tuple[DroppedOperator, ...] = ()
    not_run: str = ""
    rounded_biases: tuple[str, ...] = ()

    def notes(self) -> Iterator[str]:
        """A sentence for each fault of onnxruntime that makes the values of this run wrong or missing."""
        if self.not_run:
            yield (
                "onnxruntime runs the model only without its optimizations, so there is no ratio for a device; with "
                f"them it says: {self.not_run}"
            )
        if self.dropped:
            first = self.dropped[0]
            yield (
                f"with its optimizations onnxruntime drops {plural(len(self.dropped), 'operator')} before a "
                f"quantizer, such as the {first.op} of {first.tensor!r} before {first.dtype}, which has negative "
                "numbers that the operator would have removed: the ratio with optimizations is wrong"
            )
        if self.rounded_biases:
            count, first = plural(len(self.rounded_biases), "bias", "biases"), self.rounded_biases[0]
            yield (
                f"with its optimizations onnxruntime rounds {count} in float to 32 bits in the scale of the products, "
                f"such as {first!r}: the ratio with optimizations has this rounding, and the one without has none"
            )


def compare_outputs(model: DetachedModel, quantized: DetachedModel, samples: Iterable[Feeds]) -> dict[str, OutputNoise]:
    """Run both models on all samples, without graph optimization: so onnxruntime computes what the specification says.

    Args:
        model: in float.
        quantized: the other model.
        samples: input → array.

    Raises:
        StepFailed: onnxruntime cannot run one of the models, or an output has another shape.
        UsageError: the float model gives NaN.
    """
    expected, found, sums = Session.of(model), Session.of(quantized), _OutputSums()
    for feeds in samples:
        sums.add(expected.run(feeds), found.run(feeds))
    return sums.noise()


def simulate_outputs(
    model: DetachedModel, quantized: DetachedModel, samples: Iterable[Feeds], folder: Path, data: str = KEYS.data
) -> tuple[dict[str, OutputNoise], DeviceLike]:
    """`compare_outputs`, and the same with onnxruntime's optimizations, which bring integer kernels and fusions: the
    float model runs once on each sample. Where onnxruntime cannot run the optimized model, `not_run` says why.

    Args:
        model: in float.
        quantized: the other model.
        samples: input → array.
        folder: for the quantized model and the optimized graph.
        data: what messages call the option of the samples.

    Raises:
        StepFailed: onnxruntime cannot run the quantized model without optimizations, or an output has another shape.
        UsageError: onnxruntime cannot run the float model, or that gives NaN.
    """
    with _named_as_float(""):
        expected = Session.of(model)
    exact, sums = Session.of(quantized), _OutputSums(data)
    device = _DeviceRun(quantized, folder)
    for feeds in samples:
        with _named_as_float(f"; give samples of other sizes ({data})"):
            wanted = expected.run(feeds)
        sums.add(wanted, exact.run(feeds))
        device.add(wanted, feeds)
    return sums.noise(), device.finish()


@contextmanager
def _named_as_float(advice: str) -> Iterator[None]:
    """Let an error of a run say that it is the float model that does not run."""
    try:
        yield
    except StepFailed as failure:
        raise UsageError(f"the float model does not run: {failure}{advice}") from failure


def find_least_ratio(model: DetachedModel, quantized: DetachedModel, samples: Iterable[Feeds]) -> float:
    """The ratio of the worst output in dB, by `compare_outputs`; infinite without outputs of floats."""
    return min((found.sqnr_db for found in compare_outputs(model, quantized, samples).values()), default=float("inf"))


class _DeviceRun:
    """A quantized model by onnxruntime with its optimizations, whose outputs are compared sample by sample.

    Args:
        quantized: the model.
        folder: for the model and the optimized graph.
    """

    def __init__(self, quantized: DetachedModel, folder: Path) -> None:
        self._quantized, self._path, self._sums = quantized, folder / "device_like.onnx", _OutputSums()
        self._session: _OptimizedSession | None = None
        self._why = ""
        try:
            self._session = _OptimizedSession(quantized, folder / "quantized.onnx", self._path)
        except _NotRun as reason:
            self._why = str(reason)

    def add(self, wanted: Outputs, feeds: Feeds) -> None:
        """Run the model on `feeds`, for which the float model gives `wanted`; not at all after a run that failed."""
        if self._session is None:
            return
        try:
            self._sums.add(wanted, self._session.run(feeds))
        except _NotRun as reason:
            self._session, self._why = None, str(reason)

    def finish(self) -> DeviceLike:
        if self._session is None:
            return DeviceLike({}, {}, _has_vnni(), not_run=self._why)
        graph = onnx.load(self._path, load_external_data=False).graph
        counts = Counter(f"{node.domain}.{node.op_type}".lstrip(".") for node in graph.node)
        dropped = tuple(_find_dropped(self._quantized, graph))
        rounded = tuple(dict.fromkeys(_find_rounded_biases(self._quantized, graph)))
        fused = dict(counts.most_common())
        return DeviceLike(self._sums.noise(), fused, _has_vnni(), dropped, rounded_biases=rounded)


class _NotRun(Exception):
    """Why onnxruntime with its optimizations does not run a model."""


class _OptimizedSession:
    """A session with all optimizations of onnxruntime except those that `_misleading_optimizers` names.

    Args:
        source: the file of the model, which is written here.
        optimized: the file of the graph that onnxruntime makes of it.

    Raises:
        _NotRun: onnxruntime cannot load the model.
    """

    def __init__(self, model: DetachedModel, source: Path, optimized: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 4
        # Idle threads that spin take the cores from the process that measures noise meanwhile.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        add_libraries(options)
        if any(tensor.data_type in NARROW_FLOATS for tensor in model.proto.graph.initializer):
            # onnxruntime 1.31 fuses products of 8-bit floats into QGemm, and has no kernel for that
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        save(model, source, external_from=PROTOBUF_LIMIT)
        options.optimized_model_filepath = str(optimized)
        if model.nbytes() > PROTOBUF_LIMIT:  # the optimized model may be too large for one file too
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
            raise _NotRun(describe_refusal(error)) from error
        self._names = [output.name for output in self._session.get_outputs()]

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name.

        Raises:
            _NotRun: a kernel stopped with an error.
        """
        try:
            results = run_session(self._session, self._names, feeds)
        except Exception as error:
            raise _NotRun(" ".join(str(error).split())) from error
        return dict(zip(self._names, map(np.asarray, results), strict=True))


class _OutputSums:
    """Sums over samples for the noise of each output of floats."""

    def __init__(self, data: str = KEYS.data) -> None:
        self._data = data
        self._sums: dict[str, list[float]] = {}

    def add(self, expected: Outputs, found: Outputs) -> None:
        """Compare the outputs of one sample.

        Raises:
            StepFailed: an output has another shape. UsageError: the float model gives NaN.
        """
        for name, array in expected.items():
            if array.dtype.kind != "f" or not array.size:
                continue
            if np.isnan(array).any():
                raise UsageError(
                    f"output {name!r} of the float model holds NaN on a sample, so its noise is not known; give "
                    f"samples like those in use ({self._data})"
                )
            if found[name].shape != array.shape:
                raise StepFailed(f"output {name!r} has the shape {found[name].shape}, expected {array.shape}")
            known = self._sums.setdefault(name, [0.0, 0.0, 0.0])
            wanted = array.astype(np.float64)
            with np.errstate(
                over="ignore", invalid="ignore"
            ):  # an infinite output overflows here: its noise is infinite
                difference = found[name].astype(np.float64) - wanted
                known[0] += float((wanted**2).sum())
                known[1] += float((difference**2).sum())
            known[2] = float(np.maximum(known[2], np.abs(difference).max()))  # keeps NaN, which Python's max may lose

    def noise(self) -> dict[str, OutputNoise]:
        return {name: OutputNoise(sqnr_db(sums[0], sums[1]), sums[2]) for name, sums in self._sums.items()}


NARROW_FLOATS: Final = (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2)


def _misleading_optimizers(model: DetachedModel) -> Iterator[str]:
    """The optimizers to switch off: they change what the model computes, which no device does."""
    if any(zero_point.data_type in UNKNOWN_LIMITS for _, zero_point in _quantizers(model)):
        yield CLIP_FUSION
    if _has_float_weights(model):
        yield WEIGHT_QUANTIZATION


def _has_float_weights(model: DetachedModel) -> bool:
    """Whether an operator of `BIASED` reads quantized values and a weight that stays in float, directly or after
    nodes such as a Transpose."""
    graph = model.proto.graph
    dequantizers = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    quantized = {name for node in dequantizers for name in node.input}
    stored = model.index.initializers.keys() - quantized
    floats = find_fixed_values(graph, stored) | stored
    dequantized = computed_values(dequantizers)
    return any(
        node.op_type in BIASED and node.input[0] in dequantized and node.input[1] in floats for node in graph.node
    )


def _quantizers(model: DetachedModel) -> Iterator[tuple[NodeProto, TensorProto]]:
    """Each QuantizeLinear with its stored zero point."""
    graph = model.proto.graph
    stored = initializers_of(graph)
    for node in graph.node:
        if node.op_type == "QuantizeLinear" and len(node.input) > 2 and node.input[2] in stored:
            yield node, stored[node.input[2]]


def _find_dropped(quantized: DetachedModel, optimized: GraphProto) -> Iterator[DroppedOperator]:
    """The Relus whose result the optimized graph no longer has, although the quantizer after them has negative numbers.

    A Relu that was fused into the operator before it does not count: its result is still there.
    """
    made = computed_values(optimized.node)
    producers = quantized.index.producers
    for quantizer, zero_point in _quantizers(quantized):
        producer = producers.get(quantizer.input[0])
        is_limited = producer is not None and producer.op_type == "Relu" and producer.output[0] not in made
        if producer is None or not is_limited or zero_point.data_type not in UNKNOWN_LIMITS:
            continue
        dtype = helper.tensor_dtype_to_np_dtype(zero_point.data_type)
        limits = ml_dtypes.iinfo(dtype) if zero_point.data_type in INT4_TYPES else ml_dtypes.finfo(dtype)
        # Above the lowest value, so that some quantized values are negative.
        if float(quantized.array(zero_point).min()) > float(limits.min):
            yield DroppedOperator(producer.op_type, producer.output[0], dtype.name)


def _find_rounded_biases(quantized: DetachedModel, optimized: GraphProto) -> Iterator[str]:
    """The biases that the quantized model has in float, and the optimized graph as integers of 32 bits, which
    onnxruntime names by the product."""
    integers = [tensor.name for tensor in optimized.initializer if tensor.data_type == TensorProto.INT32]
    stored = initializers_of(quantized.proto.graph)
    for node in quantized.proto.graph.node:
        bias = node.input[BIAS] if node.op_type in BIASED and len(node.input) > BIAS else ""
        if bias in stored and any(name.startswith(f"{node.name}_bias_int32") for name in integers):
            yield bias


CLIP_FUSION: Final = "ClipQuantRewrite"
"""onnxruntime's rewrite that leaves out a Clip before a QuantizeLinear."""

WEIGHT_QUANTIZATION: Final = "WeightBiasQuantization"
"""onnxruntime's rewrite that gives 8 bits and one scale to a weight that stays in float, where a product reads
quantized values. It also gives biases the 32 bits that integer kernels need, so it is switched off only where a weight
is in float."""

INT4_TYPES: Final = (TensorProto.INT4, TensorProto.UINT4)

UNKNOWN_LIMITS: Final = (*INT4_TYPES, *NARROW_FLOATS)
"""Types whose limits onnxruntime 1.31 does not know. Its rewrite of a Clip before a quantizer fails on them; its
rewrite of a Relu removes the Relu, as if these types had no negative numbers."""


def _has_vnni() -> bool:
    """Whether the processor has VNNI, instructions that sum 8-bit products in 32 bits."""
    info = Path("/proc/cpuinfo")
    return info.is_file() and "vnni" in info.read_text(errors="replace")
