"""The quantization noise of each tensor, measured within one session.

A combined model computes the float and the quantized values side by side, and outputs two numbers for each tensor: the
sum of squares of the float values, and that of the differences. So a model of any size is measured sample by sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import NodeProto, helper

from passes.encodings.from_qdq import DEQUANTIZED, choose_stems, rename_values
from passes.graph.index import copy_of, initializers_of, replace_entries
from passes.graph.op_facts import first_output
from passes.graph.traversal import live_nodes, positions_of, reads_of, sort_nodes
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from passes.worker.platforms import return_free_memory
from pipeline.quantsim.encodings import Encoding
from pipeline.quantsim.qdq import find_fixed_values, insert_qdq, quantize_nodes
from pipeline.quantsim.sites import Site

Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Noise:
    """Sums of squares over all samples.

    local: of the differences where the step alone is quantized, and reads float values.
    total: of the differences where the whole model is quantized.
    """

    signal: float
    local: float
    total: float

    @property
    def local_db(self) -> float:
        """The signal-to-quantization-noise ratio of the step alone, in dB; infinite where nothing differs."""
        return sqnr_db(self.signal, self.local)

    @property
    def total_db(self) -> float:
        """The signal-to-quantization-noise ratio of the tensor in the quantized model, in dB."""
        return sqnr_db(self.signal, self.total)


def is_measured(site: Site) -> bool:
    """Whether noise is measured there: the step computes numbers, in float32, and is in no body."""
    return site.role == "activation" and not site.moves and site.dtype == "float32" and not site.body_of


def describe_ratio(ratio: float) -> str:
    """`31.20 dB`; `exact` where nothing differs, and `zero` where there is no signal, or infinite noise."""
    return f"{ratio:.2f} dB" if math.isfinite(ratio) else "exact" if ratio > 0 else "zero"


def sqnr_db(signal: float, noise: float) -> float:
    """The ratio of two sums of squares in dB; minus infinity where there is no signal, or infinite noise."""
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal and math.isfinite(noise) else -math.inf


def noise_power(ratio: float) -> float:
    """The noise (a sum of squares) at a ratio in dB of a signal of 1; 0 where the ratio is infinite or NaN."""
    return 10 ** (-ratio / 10) if math.isfinite(ratio) else 0.0


def measure_noise(
    model: DetachedModel,
    encodings: Mapping[str, Encoding],
    tensors: Sequence[str] | Mapping[str, Sequence[NodeProto]],
    samples: Iterable[Feeds],
    observer: Callable[[int], object] = lambda _: None,
    *,
    tuned: DetachedModel | None = None,
    has_total: bool = True,
) -> dict[str, Noise]:
    """The noise of `tensors`, which are computed values of `model`.

    Args:
        model: in float.
        encodings: tensor → its scale and format.
        samples: input → array.
        observer: called after each sample with the number of samples that are done.
        tensors: with the nodes that are one step together, where that is more than the node that makes the value.
        tuned: `model` with the weights that are quantized in place of its own.
        has_total: whether the whole quantized model is run; otherwise `total` is 0.

    Raises:
        StepFailed: onnxruntime refuses the combined model, or fails in it.
    """
    found = walk_noise(model, encodings, tensors, samples, tuned=tuned, has_total=has_total)
    while True:
        try:
            observer(next(found))
        except StopIteration as end:
            return end.value


def walk_noise(
    model: DetachedModel,
    encodings: Mapping[str, Encoding],
    tensors: Sequence[str] | Mapping[str, Sequence[NodeProto]],
    samples: Iterable[Feeds],
    *,
    tuned: DetachedModel | None = None,
    has_total: bool = True,
) -> Generator[int, None, dict[str, Noise]]:
    """`measure_noise` as a generator, which yields the number of samples that are done after each."""
    if not tensors:  # onnxruntime runs no model without outputs
        return {}
    parts = PARTS if has_total else (SIGNAL, LOCAL)
    session = Session.of(_combine(model, encodings, tensors, tuned or model, parts), in_order=True)
    return_free_memory()
    sums = {name: [0.0, 0.0, 0.0] for name in tensors}
    for done, feeds in enumerate(samples, 1):
        outputs = session.run(feeds)
        for name, total in sums.items():
            for index, part in enumerate(parts):
                total[index] += float(outputs[f"{name}{part}"])
        yield done
    return {name: Noise(*total) for name, total in sums.items()}


SIGNAL: Final = "/signal"
LOCAL: Final = "/local"
TOTAL: Final = "/total"
PARTS: Final = (SIGNAL, LOCAL, TOTAL)
DIFFERENCE: Final = "/difference"

STEP: Final = "/step"

QUANTIZED: Final = "quantized/"
"""The prefix of the quantized model's names in the combined one."""


def _combine(
    model: DetachedModel,
    encodings: Mapping[str, Encoding],
    tensors: Sequence[str] | Mapping[str, Sequence[NodeProto]],
    tuned: DetachedModel,
    parts: Sequence[str],
) -> DetachedModel:
    """One model with the float model, the quantized one, and each step alone, quantized and fed with floats."""
    outputs = {info.name for info in model.proto.graph.output}
    producers = model.index.producers
    both, steps = _put_side_by_side(model, encodings, tuned)
    graph = both.proto.graph
    for name in tensors:
        is_renamed = name in encodings and name not in outputs
        values = {TOTAL: steps.name_of(name) if is_renamed else f"{QUANTIZED}{name}"}
        values[LOCAL] = steps.add(tensors[name] if isinstance(tensors, Mapping) else [producers[name]])[name]
        _add_sum(graph, f"{name}{SIGNAL}", name)
        for part, value in ((part, values[part]) for part in parts if part in values):
            graph.node.append(helper.make_node("Sub", [name, value], [f"{name}{part}{DIFFERENCE}"]))
            _add_sum(graph, f"{name}{part}", f"{name}{part}{DIFFERENCE}")
    if TOTAL not in parts:
        replace_entries(graph.node, live_nodes(graph)[::-1])
    _sort_side_by_side(graph, model.proto.graph)
    _declare_copies(graph, model.proto.graph)
    for node in graph.node:
        node.ClearField("metadata_props")  # three copies of where each node comes from may be larger than the graph
    return both


def _put_side_by_side(
    model: DetachedModel, encodings: Mapping[str, Encoding], tuned: DetachedModel
) -> tuple[DetachedModel, QuantizedSteps]:
    """The float model and the quantized one in one graph that has no outputs yet, and what adds steps to it."""
    quantized = insert_qdq(tuned, encodings)
    stems = choose_stems(model.proto.graph, encodings)
    proto = model.copy_proto()
    graph = proto.graph
    tensors = zip(graph.initializer, tuned.proto.graph.initializer, strict=True)
    other = {tensor.name for tensor, changed in tensors if tensor != changed}
    shared = {info.name for info in graph.input} | initializers_of(graph).keys() - other
    for tensor in quantized.proto.graph.initializer:
        if tensor.name not in shared:
            copy = graph.initializer.add()
            copy.CopyFrom(tensor)
            copy.name = QUANTIZED + tensor.name
    for node in quantized.proto.graph.node:
        graph.node.append(_with_prefix(node, shared))
    del graph.output[:], graph.value_info[:]
    constants = {*model.index.initializers}
    fixed = find_fixed_values(model.proto.graph, constants) | other
    both = DetachedModel(proto, {**model.weights, **quantized.weights})
    return both, QuantizedSteps(graph, encodings, constants, fixed, stems)


def _declare_copies(both: onnx.GraphProto, model: onnx.GraphProto) -> None:
    """Give a value of `model` and its copies the type that the value has there."""
    known = {info.name: info for info in (*model.value_info, *model.output)}
    for name in (name for node in both.node for name in node.output):
        if info := known.get(name.removeprefix(QUANTIZED).rpartition(f"{STEP}/")[2]):
            copy = both.value_info.add()
            copy.CopyFrom(info)
            copy.name = name


def _sort_side_by_side(both: onnx.GraphProto, model: onnx.GraphProto) -> None:
    """Put what is computed of a value of `model` next to the node that computes the value, so that it is soon freed.

    At each place are the float value, the sums that read it, the nodes of the quantized model that read it, and the
    steps alone that do. So what is rounded waits as integers for the float value after it.
    """
    own = positions_of(model.node)
    known = dict(own)  # value → the position of the float value that it stands for, or is computed from
    places: dict[str, int] = {}
    rounded = {node.input[0] for node in both.node if node.op_type == "QuantizeLinear"}

    def place_of(node: NodeProto) -> tuple[int, int]:
        read = max((known.get(name, -1) for name in reads_of(node)), default=-1)
        found = max((own.get(name.removeprefix(QUANTIZED), -1) for name in node.output), default=-1)
        known.update(dict.fromkeys(node.output, found if found >= 0 else read))
        place, rank = known[node.output[0]], ORDER["step"]
        if any(name in own for name in node.output):
            rank = ORDER["float"]
        elif node.output[0].endswith((*PARTS, DIFFERENCE)):
            rank = ORDER["sum"]
        elif any(name.startswith(QUANTIZED) for name in node.output):
            rank = ORDER["quantized"]
            place = place if rounded.isdisjoint(node.output) else read
        if node.op_type == "QuantizeLinear":
            place = places.get(node.input[0], -1)
        places.update(dict.fromkeys(node.output, place))
        return place, rank

    order = sorted((*place_of(node), index) for index, node in enumerate(both.node))
    replace_entries(both.node, [both.node[index] for *_, index in order])
    sort_nodes(both)


ORDER: Final = {kind: rank for rank, kind in enumerate(("float", "sum", "quantized", "step"))}


class QuantizedSteps:
    """Adds single steps that read quantized float values, each value quantized once.

    Args:
        graph: holds both models, the quantized one under names with a prefix.
        constants: the stored tensors of the float model.
        fixed: its values that are computed from these alone, which the quantized model computes from quantized ones,
            and constants that have other elements there.
        stems: how the names of the quantized model's new values begin.
    """

    def __init__(
        self,
        graph: onnx.GraphProto,
        encodings: Mapping[str, Encoding],
        constants: Collection[str],
        fixed: Collection[str],
        stems: Mapping[str, str],
    ) -> None:
        self._stems = stems
        self._graph, self._encodings, self._constants, self._fixed = graph, encodings, constants, fixed
        self._quantized: dict[str, str] = {}
        self._added: dict[str, dict[str, str]] = {}

    def add(self, nodes: Sequence[NodeProto]) -> dict[str, str]:
        """Add copies of `nodes` that read quantized float values; returns result → its quantized value."""
        title = f"{first_output(nodes[-1])}{STEP}"
        if title in self._added:
            return self._added[title]
        results = self._added[title] = {}
        for node in nodes:
            copy = copy_of(node)
            copy.name = f"{title}/{first_output(node)}"
            rename_values(copy, lambda read: results.get(read) or self._read(read), reads_only=True)
            for index, output in enumerate(node.output):
                copy.output[index] = f"{title}/{output}" if output else ""
            self._graph.node.append(copy)
            for output in filter(None, node.output):
                results[output] = self._quantize(output, f"{title}/{output}", f"{title}/{output}")
        return results

    def _read(self, name: str) -> str:
        if name not in self._encodings:
            return f"{QUANTIZED}{name}" if name in self._fixed else name
        if name in self._constants:
            return self.name_of(name)
        if name not in self._quantized:
            self._quantized[name] = self._quantize(name, name, f"{name}/float")
        return self._quantized[name]

    def _quantize(self, name: str, value: str, title: str) -> str:
        """`value` in the format of `name`, whose scale and zero point the quantized model has."""
        encoding = self._encodings.get(name)
        if encoding is None:
            return value
        result = f"{title}{DEQUANTIZED}"
        self._graph.node.extend(quantize_nodes(value, result, encoding, f"{QUANTIZED}{self._stems[name]}", title))
        return result

    def name_of(self, name: str) -> str:
        """What the quantized model calls a constant or a value after both operators."""
        return f"{QUANTIZED}{self._stems[name]}{DEQUANTIZED}"


def _with_prefix(node: NodeProto, shared: Collection[str]) -> NodeProto:
    copy = copy_of(node)
    copy.name = QUANTIZED + node.name if node.name else ""
    rename_values(copy, lambda name: name if name in shared else QUANTIZED + name)
    return copy


def _add_sum(graph: onnx.GraphProto, name: str, value: str) -> None:
    """An output `name`, the sum of squares of `value`."""
    graph.node.append(helper.make_node("ReduceSumSquare", [value], [name], keepdims=0))
    graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, []))
