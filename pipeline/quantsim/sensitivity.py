"""How much each layer moves the outputs when it alone is quantized: an estimate for all layers at once.

What a layer adds to its own result is measured: it is computed from what it reads in float, and from the same
quantized. How that reaches the outputs of the model is taken as linear: for a random direction of the outputs one
backward pass gives the gradient for every layer's result, and the noise of a layer is the sum of
(gradient · difference)² over the elements of its result. Elements are squared one by one, as rounding errors of
neighbours have little to do with each other: then one direction says as much as many would of a sum. A run of the model
for each layer measures the same, with as many runs as there are layers (benchmarks/quant_sensitivity.py compares the
two).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import NodeProto

from passes.graph.traversal import reads_of
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.quantsim.encodings import Encoding
from pipeline.quantsim.noise import drop_unread_nodes, sqnr_db
from pipeline.quantsim.sites import find_sites

PRODUCTS: Final = frozenset({"Conv", "ConvTranspose", "Gemm", "GRU", "LSTM", "MatMul", "RNN"})

DIRECTIONS: Final = 1
"""Of the outputs, for each sample; each is one backward pass, and tells less than another sample would."""

Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Layer:
    """A product, with the bias that is added to it.

    weights: stored tensors that it reads behind layout operators.
    """

    nodes: tuple[NodeProto, ...]
    weights: tuple[str, ...] = ()

    @property
    def output(self) -> str:
        """What it hands on, by which the layer is known: of a recurrent one that leaves out the sequence, a state."""
        return self.outputs[0]

    @property
    def outputs(self) -> tuple[str, ...]:
        """All that it hands on: a recurrent layer has its last states beside the sequence."""
        return tuple(filter(None, self.nodes[-1].output))

    def tensors(self) -> tuple[str, ...]:
        """What is quantized with the layer: what it reads, and what it makes."""
        names = (name for node in self.nodes for name in (*node.input, *node.output) if name)
        return tuple(dict.fromkeys((*names, *self.weights)))


def find_layers(model: DetachedModel, encodings: Mapping[str, Encoding]) -> tuple[Layer, ...]:
    """The layers of which something is quantized, in graph order."""
    graph = model.proto.graph
    constants = {tensor.name for tensor in graph.initializer}
    outputs = {info.name for info in graph.output}
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in reads_of(node):
            readers.setdefault(name, []).append(node)
    sources = {value: site.tensor for site in find_sites(model) for value in site.moved_to}
    layers: list[Layer] = []
    for node in graph.node:
        if node.op_type not in PRODUCTS:
            continue
        behind = readers.get(node.output[0], [])
        is_biased = len(behind) == 1 and behind[0].op_type == "Add" and not constants.isdisjoint(behind[0].input)
        nodes = (node, behind[0]) if is_biased and node.output[0] not in outputs else (node,)
        layer = Layer(nodes, tuple(sources[name] for name in node.input if name in sources))
        if not encodings.keys().isdisjoint(layer.tensors()):
            layers.append(layer)
    return tuple(layers)


def count_needed_samples(count: int, layers: int) -> int:
    """How many of `count` samples the estimate takes for so many layers: half of them, and in a small model fewer, so
    that it costs about a tenth of a run of the model for each layer with all samples."""
    return min(-(-count // 2), -(-count * layers // RUNS))


RUNS: Final = 50
"""Ten times the runs of the model that one sample of the estimate costs, all else of it included."""


def estimate_sensitivity(
    model: DetachedModel,
    encodings: Mapping[str, Encoding],
    samples: Iterable[Feeds],
    directions: int = DIRECTIONS,
    observer: Callable[[int], object] = lambda _: None,
) -> dict[str, float]:
    """Layer, by its output → the ratio of signal to noise, in dB, of the model's outputs if that layer alone were
    quantized. Several outputs count alike. The values of one sample lie in memory together.

    Raises:
        Unsupported: the model has operators between its layers and its outputs that no gradient goes through.
        StepFailed: onnxruntime refuses a step.
    """
    from pipeline.quantsim.gradients import (
        Backward,  # torch takes seconds to import
        QuantizedLayers,
    )
    from pipeline.runtime.tensors import as_tensor

    layers = find_layers(model, encodings)
    if not layers:
        return {}
    nodes = [node for layer in layers for node in layer.nodes]
    inside = {name for node in nodes for name in filter(None, node.output)}
    backward = Backward(model, [name for layer in layers for name in layer.outputs], inside)
    own = {name for layer in layers for name in layer.tensors()}
    chosen = {name: encoding for name, encoding in encodings.items() if name in own}
    quantized = QuantizedLayers(model, chosen, [layer.nodes for layer in layers])
    reads = {name for node in nodes for name in node.input if name and name not in backward.computed}
    reads.update(backward.reads)
    session = _session_of(model, reads)
    draw = np.random.default_rng(0)
    noise = dict.fromkeys((layer.output for layer in layers), 0.0)
    signal = 0.0
    scales: dict[str, float] = {}
    for done, feeds in enumerate(samples, 1):
        values = {**feeds, **(session.run(feeds) if session else {})}
        forward = backward.forward(values)
        known = {name: as_tensor(values[name]) for name in reads.intersection(values)}
        differences = quantized.measure_differences({**known, **forward.values})
        outputs = forward.outputs()
        scales = scales or {name: 1 / (math.sqrt(_power(array)) or 1) for name, array in outputs.items()}
        signal += directions * sum(_power(scales[name] * array) for name, array in outputs.items())
        for _ in range(directions):
            gradients = forward.gradients(
                {name: _direction(draw, array, scales[name]) for name, array in outputs.items()}
            )
            for layer in layers:
                reached = (name for name in layer.outputs if name in gradients)
                noise[layer.output] += sum(_power(gradients[name] * differences[name]) for name in reached)
        observer(done)
    return {name: sqnr_db(signal, power) for name, power in noise.items()}


def _direction(draw: np.random.Generator, array: np.ndarray, scale: float) -> np.ndarray:
    """Random signs, of the size `scale`."""
    return np.where(draw.integers(0, 2, array.shape, np.bool_), array.dtype.type(scale), array.dtype.type(-scale))


def _power(array: np.ndarray) -> float:
    return float(np.square(array, dtype=np.float64).sum())


def _session_of(model: DetachedModel, reads: Collection[str]) -> Session | None:
    """What computes the values `reads` that are neither inputs nor weights; None where there is nothing to compute."""
    made = {name for node in model.proto.graph.node for name in node.output}
    wanted = sorted(made.intersection(reads))
    if not wanted:
        return None
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    drop_unread_nodes(proto.graph)
    return Session.of(DetachedModel(proto, model.weights))
