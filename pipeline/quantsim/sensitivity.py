"""How much of a model's outputs each layer costs where it alone is quantized: estimated for all layers at once.

What a layer adds to its own result is measured: it is computed from what it reads in float, and from the same
quantized. How that reaches the outputs of the model is taken as linear: for a random direction of the outputs one
backward pass gives the gradient for every layer's result, and the noise of a layer is made of gradient · difference.
That is summed over the rows of a product, or the places of a convolution, and then squared: they have read the same
rounded weight, so their errors are alike where what they read is alike, and a mean over them, as an attention of nearly
equal weights takes, does not make them smaller. The channels are squared one by one, as their errors have little to do
with each other: then one direction says as much as many would of one sum. A run of the model for each layer measures
the same, with as many runs as there are layers (benchmarks/quant_sensitivity.py compares the two).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from onnx import NodeProto

from passes.graph.index import keep_outputs
from passes.graph.op_facts import MATRIX_PRODUCTS, PRODUCTS, RECURRENT
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.quantsim.encodings import Encoding
from pipeline.quantsim.noise import Feeds, sqnr_db
from pipeline.quantsim.sites import Site, find_sites

WEIGHTED: Final = PRODUCTS | RECURRENT

DIRECTIONS: Final = 1
"""Random directions of the outputs that are followed back for each sample. A direction costs one backward pass; another
sample improves the estimate more than another direction."""

LEAST_SIGNS: Final = 16
"""Random signs of one sample at least, and sums that are squared: the square of one sum with random signs may be near
zero. Few signs may all be the same, and nothing moves the sum of a Softmax."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A product, with the bias that is added to it.

    weights: stored tensors that it reads after layout operators.
    """

    nodes: tuple[NodeProto, ...]
    weights: tuple[str, ...] = ()

    @property
    def output(self) -> str:
        """The first result, which names the layer; of a recurrent layer without a sequence output, a last state."""
        return self.outputs[0]

    @property
    def outputs(self) -> tuple[str, ...]:
        """All results: a recurrent layer has its last states as well as the sequence."""
        return tuple(filter(None, self.nodes[-1].output))

    def tensors(self) -> tuple[str, ...]:
        """The tensors that are quantized with the layer: its operands, weights and results."""
        return tuple(dict.fromkeys((*self.values(), *self.weights)))

    def values(self) -> tuple[str, ...]:
        """What its nodes read and make."""
        return tuple(name for node in self.nodes for name in (*node.input, *node.output) if name)


def find_layers(model: DetachedModel, encodings: Mapping[str, object], sites: Sequence[Site] = ()) -> tuple[Layer, ...]:
    """The layers of which something is quantized, in graph order; `sites` are those of `model`, if known."""
    index, constants = model.index, model.index.initializers.keys()
    sources = {value: site.tensor for site in sites or find_sites(model) for value in site.moved_to}
    layers: list[Layer] = []
    for node in index.nodes:
        if node.op_type not in WEIGHTED:
            continue
        readers = [] if node.output[0] in index.outputs else [index.nodes[at] for at in index.readers[node.output[0]]]
        is_biased = [reader.op_type for reader in readers] == ["Add"] and not constants.isdisjoint(readers[0].input)
        nodes = (node, *readers) if is_biased else (node,)
        layer = Layer(nodes, tuple(sources[name] for name in node.input if name in sources))
        if not encodings.keys().isdisjoint(layer.tensors()):
            layers.append(layer)
    return tuple(layers)


def group_layers(layers: Mapping[str, Iterable[Layer]], *, are_alike: bool) -> list[tuple[tuple[str, Layer], ...]]:
    """The layers of several models, each with the name of its model: alone, or where the models `are_alike` together
    with those of the other models that have its name."""
    groups: dict[object, tuple[tuple[str, Layer], ...]] = {}
    for name, own in layers.items():
        for layer in own:
            key = layer.output if are_alike else (name, layer.output)
            groups[key] = (*groups.get(key, ()), (name, layer))
    return [*groups.values()]


def count_needed_samples(count: int, layers: int) -> int:
    """How many of `count` samples the estimate takes for `layers` layers: half of them, and in a small model fewer, so
    that it costs about a tenth of a run of the model for each layer with all samples."""
    return min(-(-count // 2), -(-count * layers // RUNS))


RUNS: Final = 50
"""Ten times the cost of one sample of the estimate, in runs of the model: the estimate for one sample takes as long as
five runs."""


def estimate_sensitivity(
    model: DetachedModel,
    encodings: Mapping[str, Encoding],
    samples: Iterable[Feeds],
    directions: int = DIRECTIONS,
    observer: Callable[[int], object] = lambda _: None,
    tuned: DetachedModel | None = None,
) -> dict[str, float]:
    """Layer, by its output → the ratio of signal to noise, in dB, of the model's outputs if that layer alone were
    quantized. Several outputs count alike. The model runs in pieces, each with its values in memory together.

    Args:
        model: the float model.
        encodings: by tensor.
        samples: feeds of the model, by input; `count_needed_samples` says how many are enough.
        directions: how many random directions of the outputs are followed back for each sample, at least.
        observer: gets how many samples are done.
        tuned: the model with the weights that are quantized, where an algorithm changed them; by default, `model`.

    Returns:
        dB by layer; empty for a model without layers that are quantized.

    Raises:
        Unsupported: the model has operators between its layers and its outputs that no gradient goes through.
        StepFailed: onnxruntime refuses a step.
    """
    from pipeline.quantsim.gradients import Backward  # torch takes seconds to import
    from pipeline.quantsim.torch_nodes import QuantizedLayers
    from pipeline.runtime.tensors import as_tensor

    layers = find_layers(model, encodings)
    if not layers:
        return {}
    company = {name: layer.values() for layer in layers for name in layer.outputs}
    inside = {name for layer in layers for node in layer.nodes for name in filter(None, node.output)}
    backward = Backward(model, company, inside)
    own = {name for layer in layers for name in layer.tensors()}
    chosen = {name: encoding for name, encoding in encodings.items() if name in own}
    quantized = QuantizedLayers(tuned or model, chosen, [layer.nodes for layer in layers])
    reads = (set().union(*company.values()) - backward.computed).union(backward.reads)
    session = _session_of(model, reads)
    layer_of = {name: layer for layer in layers for name in layer.outputs}
    draw = np.random.default_rng(0)
    noise = dict.fromkeys((layer.output for layer in layers), 0.0)
    signal = 0.0
    scales: dict[str, float] = {}
    for done, feeds in enumerate(samples, 1):
        values = {**feeds, **(session.run(feeds) if session else {})}
        forward = backward.forward(values)
        known = {name: as_tensor(values[name]) for name in reads.intersection(values)}
        outputs = forward.outputs()
        scales = scales or {name: 1 / (math.sqrt(_power(array)) or 1) for name, array in outputs.items()}
        elements = sum(array.size for array in outputs.values())
        count = max(directions, -(-LEAST_SIGNS // max(elements, 1)))
        signal += sum(_power(scales[name] * array) for name, array in outputs.items())

        def add_noise(
            name: str,
            gradients: np.ndarray,
            made: Mapping[str, Any],
            known: Mapping[str, Any] = known,
            count: int = count,
        ) -> None:
            layer = layer_of[name]
            differences = quantized.measure_differences(layer.nodes, {**known, **made})[name]
            noise[layer.output] += _noise_power(layer, differences, gradients) / count

        for number in range(count):
            lines = {name: _direction(draw, array, scales[name]) for name, array in outputs.items()}
            forward.visit_gradients(lines, add_noise, is_last=number == count - 1)
        observer(done)
    return {name: sqnr_db(signal, power) for name, power in noise.items()}


def _direction(draw: np.random.Generator, array: np.ndarray, scale: float) -> np.ndarray:
    """Random signs, of the size `scale`."""
    return np.where(draw.integers(0, 2, array.shape, np.bool_), array.dtype.type(scale), array.dtype.type(-scale))


def _noise_power(layer: Layer, differences: np.ndarray, gradients: np.ndarray) -> float:
    """The sum of squares of gradient · difference, where those that share a weight are summed first; `differences` are
    overwritten.

    An element with a gradient of 0 reaches no output and adds nothing, even where it is infinite, as in a rounded mask.
    """
    noise = differences.astype(np.result_type(differences, gradients), copy=False)
    np.multiply(noise, gradients, out=noise, where=gradients != 0)
    noise[gradients == 0] = 0
    operator, axes = layer.nodes[0].op_type, range(noise.ndim)
    shared = () if operator in RECURRENT else tuple(axes[-2:-1] if operator in MATRIX_PRODUCTS else axes[2:])
    if shared and math.prod(noise.shape[axis] for axis in shared) * LEAST_SIGNS <= noise.size:
        noise = noise.sum(shared, dtype=np.float64)
    return _power(noise)


def _power(array: np.ndarray) -> float:
    """The sum of squares; slice by slice, as float64 doubles an array."""
    flat = array.reshape(-1)
    return sum(
        float(np.square(flat[start : start + SLICE], dtype=np.float64).sum()) for start in range(0, flat.size, SLICE)
    )


SLICE: Final = 2**20
"""Elements that are squared at a time."""


def _session_of(model: DetachedModel, reads: Collection[str]) -> Session | None:
    """A session that computes those of the values `reads` that nodes make; None where no node makes any."""
    made = model.index.producers.keys()
    wanted = sorted(made & {*reads})
    if not wanted:
        return None
    proto = model.copy_proto()
    keep_outputs(proto.graph, wanted)
    return Session.of(model.with_proto(proto))
