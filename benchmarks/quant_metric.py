"""`suggest: {metric_drop: …}` against every placement there is: the digits CNN by layers, MiniLM by its six layers.

    python -m benchmarks.quant_metric [--folder DIR] [--only digits|minilm] [--sentences 64]

Each unit has weights of few bits or of 8. For each drop the suggestion's bytes are compared with those of the smallest
placement that keeps the metric, of all 2^units, and the runs that each needed.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
import torch

from benchmarks.handoff import minilm
from benchmarks.handoff.harness import detach_copy
from benchmarks.handoff.models import export_minilm
from benchmarks.measure import machine, versions_line
from examples.train_digits import make_cnn, read_splits, train
from passes.weights.detached import DetachedModel, read_model
from pipeline.config import FormatsConfig, RunConfig, SuggestConfig
from pipeline.config.quantsim import MetricConfig, parse_precision
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.metric import Sample, TaskMetric
from pipeline.quantsim.placement import Placement, PlacementRule, place
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.sensitivity import estimate_sensitivity, find_layers
from pipeline.quantsim.suggest import LayeredModel, MetricTarget, suggest
from pipeline.quantsim.weight_sizes import weight_bytes
from pipeline.run import Pipeline

MORE: Final = "int8/channel"
DROPS: Final = (0.005, 0.01, 0.02, 0.05, 0.1)


@dataclass(frozen=True, slots=True)
class Study:
    """A model with weights of `fewer` bits, its units as selectors, the metric and the samples."""

    name: str
    model: DetachedModel
    fewer: str
    units: Sequence[str]
    metric: MetricConfig
    samples: Callable[[], Iterator[Sample]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "onnxline-metric")
    parser.add_argument("--only", choices=("digits", "minilm"))
    parser.add_argument("--sentences", type=int, default=64)
    chosen = parser.parse_args()
    print(f"{machine()}; {versions_line()}\n")
    print(
        "| model | metric in float | drop | suggested | exhaustive | bytes, × of exhaustive | runs | exhaustive runs |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, make in STUDIES.items():
        if chosen.only in (None, name):
            compare(make(chosen.folder, chosen.sentences))


def compare(study: Study) -> None:
    """A row for each drop."""
    model = study.model
    rules = [PlacementRule("op:*", parse_precision(study.fewer), "float")]
    metric = TaskMetric(study.metric, model, study.samples)
    known: dict[str, float] = {}

    def rate(placement: Placement) -> float:
        key = repr(sorted(placement.formats().items()))
        if key not in known:
            known[key] = metric.rate(insert_qdq(model, encode(placement, {}, model)))
        return known[key]

    begun = time.perf_counter()
    every: list[tuple[int, float]] = []
    for taken in itertools.product((False, True), repeat=len(study.units)):
        more = [
            PlacementRule(unit, parse_precision(MORE))
            for unit, is_more in zip(study.units, taken, strict=True)
            if is_more
        ]
        placement = place(model, [*rules, *more])
        every.append((weight_bytes(model, placement)[1], rate(placement)))
    exhaustive_s = time.perf_counter() - begun
    encodings = encode(place(model, rules), {}, model)
    sensitivity = estimate_sensitivity(model, encodings, itertools.islice(study.samples(), 4))
    layers = find_layers(model, encodings)
    for drop in DROPS:
        goal = MetricTarget(lambda found: rate(found[""]), lambda value, drop=drop: metric.is_within(value, drop))
        settings = SuggestConfig(metric_drop=drop, units=tuple(study.units), formats=FormatsConfig(weights=MORE))
        found = suggest(settings, {"": LayeredModel(model, rules, layers, sensitivity)}, lambda _: 0.0, metric=goal)
        good = [size for size, value in every if metric.is_within(value, drop)]
        least = min(good, default=0)
        ratio = (
            f"{found.weight_bytes / least:.3f}" if good and found.is_met else "out of reach" if not good else "missed"
        )
        cells = (
            f"{study.name}, {study.fewer}",
            f"{metric.name} {metric.float_value:.4f}",
            f"{drop:g}",
            f"{found.layers} units, {found.weight_bytes:,} B, {found.metric:.4f}",
            f"{least:,} B",
            ratio,
            str(found.simulations),
            str(len(every)),
        )
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{study.name}: {len(every)} placements in {exhaustive_s:.0f} s\n")


def digits(folder: Path, _: int) -> Study:
    """The CNN of configs/digits_cnn.yaml, trained here, and the images of its test."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "digits_cnn.pt"
    (x, y), (images, labels) = read_splits()[0]
    if not file.is_file():
        torch.manual_seed(0)
        torch.save(train(make_cnn, x, y, 30)[0].state_dict(), file)
    config = RunConfig.from_yaml(Path("configs/digits_cnn.yaml"), [f"model.checkpoint={file}", "export.opset=21"])
    run = Pipeline(config, folder / "digits").run()
    model = read_model(run.model)

    def samples() -> Iterator[Sample]:
        for start in range(0, len(images), 64):
            yield {"input": images[start : start + 64].numpy(), "label": labels[start : start + 64].numpy()}

    layers = find_layers(
        model, encode(place(model, [PlacementRule("op:*", parse_precision("int2/channel"), "float")]), {}, model)
    )
    units = [f"tensor:{next(name for name in layer.tensors() if name in model.index.initializers)}" for layer in layers]
    return Study("digits CNN", model, "int2/channel", units, MetricConfig(use="top-1", target=("label",)), samples)


def sentences(folder: Path, count: int) -> Study:
    """MiniLM's six layers as units; the embeddings of sentences that no step has seen."""
    model = detach_copy(onnx.load(export_minilm(21, folder)))
    batches = minilm.evaluation_samples()
    size = len(next(iter(batches[0].values())))
    taken = batches[: -(-count // size)]
    units = [f"module:*layer.{number}.*" for number in range(6)]
    metric = MetricConfig(use="retrieval-agreement", output=pooled_output(model))
    return Study("MiniLM", model, "int4/channel", units, metric, lambda: iter(taken))


def pooled_output(model: DetachedModel) -> str:
    """The output with a row for each sentence."""
    outputs = model.proto.graph.output
    return next(info.name for info in outputs if len(info.type.tensor_type.shape.dim) == 2)


STUDIES: Final[dict[str, Callable[[Path, int], Study]]] = {"digits": digits, "minilm": sentences}


if __name__ == "__main__":
    main()
