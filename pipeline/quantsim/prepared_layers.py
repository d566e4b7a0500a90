"""What a step of `quantsim.prepare` that moves factors between weights does to each layer once the layer is quantized.

Such a step rounds nothing, so it is judged by two simulations: of the model before it and of the model after it, each
with ranges of its own. The ratio of a layer is that of its result where the layer alone is quantized.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from passes.errors import OnnxlineError
from passes.recipe.recipe import OWN_STEPS, names_of
from passes.weights.detached import DetachedModel, read_model
from pipeline.config import QuantSimConfig
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.noise import measure_noise, sqnr_db
from pipeline.quantsim.optimize import OptimizedLayer, OptimizedStep
from pipeline.quantsim.placement import place
from pipeline.quantsim.profiles import rules_of
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.samples import Feeds, Samples
from pipeline.quantsim.sensitivity import find_layers
from pipeline.quantsim.simulation import find_least_ratio
from pipeline.quantsim.stored_constants import declare_types, store_constants
from pipeline.stages.passes import AFTER, BEFORE, EQUALIZING, find_equalized


def judge_preparation(folder: Path, settings: QuantSimConfig, samples: Samples) -> Iterator[OptimizedStep]:
    """Judge each step of `quantsim.prepare` that is one of `EQUALIZING` and has changed the model.

    Args:
        folder: of the run, where the models before and after these steps are.
        samples: ranges are measured on those that are fitted, and noise on those that no step has seen.

    Yields:
        A row for each step, in order.
    """
    wanted = EQUALIZING.intersection(names_of(settings.prepare))
    for name, step in find_equalized(folder):
        if name in wanted:
            begun = time.perf_counter()
            try:
                row = _judge(name, step, settings, samples)
            except OnnxlineError as error:  # the model before the step may be one that no rule fits
                row = OptimizedStep(name, "ran", f"its layers are not judged: {error}", kind="prepare")
            yield replace(row, release=_release(name), seconds=time.perf_counter() - begun)


def _release(name: str) -> str:
    """The library that computes the factors."""
    return OWN_STEPS[name]().source


def _judge(name: str, folder: Path, settings: QuantSimConfig, samples: Samples) -> OptimizedStep:
    unseen = list(samples.unseen(settings.evaluation))
    if not unseen:
        return OptimizedStep(name, "ran", "it has seen every sample, so its layers are not judged", kind="prepare")
    before, after = (_Simulated.of(read_model(folder / file), settings, samples, unseen) for file in (BEFORE, AFTER))
    layers = tuple(
        OptimizedLayer(layer, after.weights[layer], ratio, after.layers[layer], taken=True)
        for layer, ratio in before.layers.items()
        if layer in after.layers
    )
    return OptimizedStep(
        name, "ran", "", layers=layers, outputs_db=(before.outputs_db, after.outputs_db), kind="prepare"
    )


@dataclass(frozen=True, slots=True)
class _Simulated:
    """Layer → its ratio in dB, and its weight; and the least ratio of the outputs."""

    layers: dict[str, float]
    weights: dict[str, str]
    outputs_db: float

    @classmethod
    def of(
        cls, model: DetachedModel, settings: QuantSimConfig, samples: Samples, unseen: Sequence[Feeds]
    ) -> _Simulated:
        model = declare_types(store_constants(model))
        placement = place(model, rules_of(settings, model))
        ranges = calibrate(model, placement, samples.first(samples.fitted), settings.calibration.method)
        encodings = encode(placement, ranges, model)
        weights = {placed.site.tensor for placed in placement.quantized_sites() if placed.site.role == "weight"}
        layers = {
            layer.output: (layer, own[0])
            for layer in find_layers(model, encodings)
            if (own := [name for name in layer.tensors() if name in weights])
        }
        noise = measure_noise(
            model, encodings, {name: layer.nodes for name, (layer, _) in layers.items()}, unseen, has_total=False
        )
        return cls(
            {name: sqnr_db(found.signal, found.local) for name, found in noise.items()},
            {name: weight for name, (_, weight) in layers.items()},
            find_least_ratio(model, insert_qdq(model, encodings), unseen),
        )
