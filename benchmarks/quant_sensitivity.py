"""Does the estimate of `pipeline.quantsim.noise` give the order of a run for each layer, and what does each cost?

    python -m benchmarks.quant_sensitivity [--model NAME ...] [--profile qnn-htp] [--markdown FILE]

Exhaustive: for each layer a model in which that layer alone is quantized, a session of onnxruntime, and all samples.
The estimate has the settings of `onnxline quantsim`, so it takes half of the samples or fewer. Both begin with the same
ranges, in one process that holds one core; torch is imported before. "Of another loop" is the correlation of the loop
with itself over as many other samples (the ranges are of all): where it is low, the samples decide the order. "A layer
in runs" is what the estimate takes for a layer, over one run of the float model by onnxruntime on the samples that the
estimate reads.
The models come from a run into runs/benchmarks/quant_sensitivity/. MiniLM's mask is held to -30: as it is, it would
take the range of every score.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from benchmarks.measure import machine, versions_line
from passes.weights.detached import DetachedModel, detach
from passes.weights.sessions import Session
from pipeline.config import QuantSimConfig, RunConfig
from pipeline.export.load import read_onnx_file
from pipeline.export.source import draw_inputs, named_dims
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import Encoding, encode
from pipeline.quantsim.placement import place
from pipeline.quantsim.profiles import rules_of
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.sensitivity import Layer, count_needed_samples, estimate_sensitivity, find_layers
from pipeline.run import Pipeline

FOLDER: Final = Path("runs/benchmarks/quant_sensitivity")

SAMPLES: Final = 8
"""As many as `quantsim.evaluation` has by default."""

LOWEST: Final = -30.0
"""Of a mask: softmax makes zero of it, and of less."""

MODELS: Final[Mapping[str, tuple[str, ...]]] = {
    "attention_block": ("configs/attention_block.yaml",),
    "minilm": ("configs/minilm.yaml",),
    "small_vit": (
        "configs/vit_base_keep_qkv.yaml",
        "model.transformers.config={hidden_size: 192, num_hidden_layers: 6, num_attention_heads: 3, "
        "intermediate_size: 768}",
        "passes.recipe=[default]",
    ),
}

Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    layers: int
    samples: int
    correlation: float
    another_loop: float
    greatest_error_db: float
    exhaustive_s: float
    estimate_s: float
    forward_s: float


def measure_each_alone(
    model: DetachedModel, encodings: Mapping[str, Encoding], layers: Sequence[Layer], samples: Sequence[Feeds]
) -> dict[str, float]:
    """Layer → signal to noise of the outputs, in dB, by a run of the model in which it alone is quantized."""
    expected = [Session.of(model).run(feeds) for feeds in samples]
    scales = {name: 1 / (np.linalg.norm(array.astype(np.float64)) or 1) for name, array in expected[0].items()}
    signal = sum(_power(scales[name] * array) for outputs in expected for name, array in outputs.items())
    found: dict[str, float] = {}
    for layer in layers:
        session = Session.of(_quantized_alone(model, encodings, layer))
        noise = 0.0
        for feeds, outputs in zip(samples, expected, strict=True):
            results = session.run(feeds)
            noise += sum(_power(scales[name] * (results[name] - array)) for name, array in outputs.items())
        found[layer.output] = 10 * np.log10(signal / noise) if noise else np.inf
    return found


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's coefficient: that of Pearson, of the ranks."""
    one, two = (np.argsort(np.argsort(values)) for values in (first, second))
    return float(np.corrcoef(one, two)[0, 1])


def _power(array: np.ndarray) -> float:
    return float(np.square(array, dtype=np.float64).sum())


def _quantized_alone(model: DetachedModel, encodings: Mapping[str, Encoding], layer: Layer) -> DetachedModel:
    """The model in which what `layer` reads is quantized for it only: the others read the value itself."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    own = {node.output[0] for node in layer.nodes}
    constants = {tensor.name for tensor in proto.graph.initializer}
    made = {name for node in layer.nodes for name in node.output}
    chosen = {name: encodings[name] for name in layer.tensors() if name in encodings and name in constants | made}
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    for node in nodes:
        for index, name in enumerate(node.input if node.output[0] in own else ()):
            if name in encodings and name not in constants | made:
                copy = f"{name}/alone"
                if copy not in chosen:
                    proto.graph.node.append(helper.make_node("Identity", [name], [copy]))
                chosen[copy] = encodings[name]
                node.input[index] = copy
        proto.graph.node.append(node)
    return insert_qdq(DetachedModel(proto, model.weights), chosen)


def compare(name: str, profile: str) -> Row:
    """Both ways on one model."""
    source, *settings = MODELS[name]
    config = RunConfig.from_source(source, [*settings, "export.opset=21", "runtime.backends=[torch]"])
    path = Pipeline(config, FOLDER / name).run().model
    model = _with_finite_mask(path)
    specs = read_onnx_file(str(path), config.model.model_copy(update={"onnx": str(path), "transformers": None})).inputs
    sizes = {dim: config.model.sizes(dim)[0] for dim in named_dims(specs)}
    samples = [draw_inputs(specs, sizes, seed) for seed in range(2 * SAMPLES)]
    samples, others = samples[:SAMPLES], samples[SAMPLES:]
    placement = place(model, rules_of(QuantSimConfig.model_validate({"profile": profile}), model))
    encodings = encode(placement, calibrate(model, placement, [*samples, *others]), model)
    layers = find_layers(model, encodings)
    estimate_sensitivity(model, encodings, samples[:1], 1)  # imports torch, and wakes its threads
    count = count_needed_samples(SAMPLES, len(layers))
    begun = time.process_time()
    estimated = estimate_sensitivity(model, encodings, samples[:count])
    between = time.process_time()
    forward_s = time_forward(model, samples[:count])
    start = time.process_time()
    measured = measure_each_alone(model, encodings, layers, samples)
    end = time.process_time()
    again = measure_each_alone(model, encodings, layers, others)
    numbers, near, other = ([found[layer.output] for layer in layers] for found in (measured, estimated, again))
    worst = max(abs(one - two) for one, two in zip(numbers, near, strict=True))
    correlation, another_loop = rank_correlation(numbers, near), rank_correlation(numbers, other)
    return Row(name, len(layers), count, correlation, another_loop, worst, end - start, between - begun, forward_s)


def time_forward(model: DetachedModel, samples: Sequence[Feeds]) -> float:
    """Seconds of the float model on all samples, in a session that has run once."""
    session = Session.of(model)
    session.run(samples[0])
    begun = time.process_time()
    for feeds in samples:
        session.run(feeds)
    return time.process_time() - begun


def _with_finite_mask(path: Path) -> DetachedModel:
    proto = onnx.load(path)
    for tensor in proto.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32 and array.size and array.min() < -1e30:
            tensor.CopyFrom(numpy_helper.from_array(np.maximum(array, np.float32(LOWEST)), tensor.name))
    return detach(proto)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--profile", default="qnn-htp")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # or threads of torch and onnxruntime wait for each other
    torch.set_num_threads(1)
    lines = [
        "| model | layers | samples | Spearman | of another loop | greatest error | exhaustive | estimate | ratio | "
        "a layer in runs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in arguments.model or MODELS:
        row = compare(name, arguments.profile)
        lines.append(
            f"| {row.model} | {row.layers} | {row.samples} of {SAMPLES} | {row.correlation:.3f} | "
            f"{row.another_loop:.3f} | {row.greatest_error_db:.1f} dB | {row.exhaustive_s:.2f} s | "
            f"{row.estimate_s:.3f} s | {row.estimate_s / row.exhaustive_s:.3f} | "
            f"{row.estimate_s / row.layers / row.forward_s:.3f} |"
        )
        print(lines[-1], flush=True)
    text = "\n".join([*lines, "", f"Machine: {machine()}. {versions_line()}"])
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
