"""The stages of the simulation, in order: read `Simulation.execute` first."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from passes.errors import StepFailed
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from pipeline.config import QuantSimConfig, SuggestConfig
from pipeline.errors import EXTRAS, MissingExtra, Unsupported
from pipeline.events import Note, Observer, Progress, time_stage
from pipeline.jobs import choose_executor
from pipeline.quantsim.calibration import Calibration, open_calibration
from pipeline.quantsim.encodings import Encoding, Range, encode, find_limited_biases
from pipeline.quantsim.encodings_file import encode_chosen_infinities, encodings_text
from pipeline.quantsim.files import check_weights, write_layouts, write_simulation
from pipeline.quantsim.layer_costs import CostedModel, CostMetric, LayerCosts, measure_costs
from pipeline.quantsim.metric import TaskMetric
from pipeline.quantsim.new_formats import check_new_formats
from pipeline.quantsim.noise import Noise, is_measured
from pipeline.quantsim.noise_worker import begin_noise
from pipeline.quantsim.optimize import Chosen, Optimization, OptimizedStep, select_weights
from pipeline.quantsim.optimizers import optimizers_of
from pipeline.quantsim.placement import Placement
from pipeline.quantsim.prepared_layers import judge_preparation
from pipeline.quantsim.profiles import rules_of
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.quantizer import ModelQuantizer
from pipeline.quantsim.range_notes import describe_limited_biases
from pipeline.quantsim.report import QuantSimReport, QuantSimResult, make_placement_report, make_report, report_text
from pipeline.quantsim.samples import Samples
from pipeline.quantsim.sensitivity import count_needed_samples, estimate_sensitivity, find_layers
from pipeline.quantsim.simulation import find_least_ratio
from pipeline.quantsim.suggest import LayeredModel, MetricTarget, Placements, Suggestion, suggest
from pipeline.stages.report import ENCODINGS, QUANTIZATION_REPORT, remove_quantization
from pipeline.workspace import Workspace


class Simulation(ModelQuantizer):
    """The stages, a method each; those up to the quantized model are those of `ModelQuantizer`."""

    def __init__(
        self,
        model: DetachedModel,
        settings: QuantSimConfig,
        workspace: Workspace,
        observer: Observer,
        notes: Sequence[str] = (),
        costs_budget_s: float | None = None,
    ) -> None:
        super().__init__(model, settings, observer, workspace.scratch)
        self._workspace, self._notes, self._costs_budget_s = workspace, notes, costs_budget_s
        self.chosen = Chosen()

    def open_metric(self, samples: Samples) -> TaskMetric | None:
        """The metric of the task with its value in float; None where none is named."""
        metric, count = self._settings.metric, self._settings.evaluation
        if metric is None:
            return None
        with time_stage(self._send, "metric") as details:
            found = TaskMetric(metric, self._model, lambda: samples.of_metric(count))
            details.append(f"{found.name} {found.float_value:.4f} in float")
        return found

    def execute(self, samples: Samples) -> QuantSimResult:
        self.begin()
        self.find_ranges(samples)
        return self.finish(samples)

    def begin(self) -> None:
        """Decide formats, by rules or by the encodings of a file."""
        super().begin()
        if self.needs_ranges:
            check_new_formats(self._settings.suggest, self._model.proto, self._profile.target)
            check_weights(self._model, self._settings)

    def find_ranges(self, samples: Samples) -> None:
        """Measure what values each activation takes."""
        if not self.needs_ranges:
            return
        with time_stage(self._send, "calibrate") as details:
            calibration = self.open_calibration(samples)
            for sample in samples.first(samples.fitted):
                if (measured := calibration.measurement.add(sample)) is not None:
                    self._send(Progress("calibrate", f"sample {measured.samples}", measured.samples, samples.fitted))
                    measured.save(calibration.file, calibration.key)
            details.append(self._settings.calibration.method)
            self.take_ranges(calibration, samples)

    def open_calibration(self, samples: Samples) -> Calibration:
        """A measurement of the quantized tensors, which goes on where a stopped run has ended."""
        if samples.note:
            self._send(Note(samples.note))
        return open_calibration(
            self._model, self.placement, self._settings.calibration, samples, self._workspace.stages
        )

    def take_ranges(self, calibration: Calibration, samples: Samples) -> None:
        """End the measurement, and leave in float what is infinite or NaN on a sample, where the model drops that."""
        self._take_measured(calibration.finish(keep=not samples.may_change))

    def finish(
        self,
        samples: Samples,
        ranges: Mapping[str, Range] | None = None,
        chosen: Chosen | None = None,
        rate: Callable[[Chosen], float] | None = None,
    ) -> QuantSimResult:
        """Encode, simulate and measure noise.

        Args:
            samples: the inputs.
            ranges: of groups, where other models have a say in them.
            chosen: the roundings of another model that shares the weights, in place of `quantsim.optimize`.
            rate: gives a ratio in dB that no step may lower; by default steps report the least of the outputs.
        """
        measured, steps = self._measured, tuple[OptimizedStep, ...]()
        if measured is not None and ranges is None:
            ranges = self.ranges(self.placement)
        if self._given is None:
            assert ranges is not None, "find_ranges has run"
            if chosen is not None:
                self.chosen = chosen.suit(self.placement)
            elif self._settings.optimize:  # weights otherwise than to the nearest
                self.chosen, steps = self.optimize(self.placement, ranges, samples, rate)
        placement, encodings, ties = self.encode(ranges or {}, self.chosen.encodings)  # scales and zero points
        self.encodings, self.tuned = encodings, (tuned := self.chosen.tune(self._model))
        self.quantized = insert_qdq(tuned, encodings)  # the model with QuantizeLinear and DequantizeLinear
        self.layers = find_layers(self._model, encodings, self._sites)
        metric = self.open_metric(samples)  # how well the model does its task
        with self.begin_noise(placement, encodings, tuned, samples) as noise_of_all:
            outputs, device = self.simulate(self.quantized, samples)  # by the specification, and as a device has them
            noise = self.measure(noise_of_all)  # what each tensor adds, and the sum up to it
        sensitivity, why_not = self.estimate(encodings, tuned, samples)  # what each layer alone does to the outputs
        layouts = self.write_layouts(samples)  # the weights as other tools store them
        written = filter(None, layouts.values())
        notes = (*self._notes, *ties, *describe_limited_biases(encodings, tuned, placement.names), *written)
        report = make_report(placement, noise, sensitivity, why_not, outputs, device, self._model, notes)
        rows = (*judge_preparation(self._workspace.folder, self._settings, samples), *steps)
        report = replace(report, optimized=rows, metric=metric.result(self.quantized) if metric else None)
        if metric and self._costs_budget_s is not None:
            report = replace(report, costs=self.measure_costs(metric, encodings, tuned, sensitivity))
        if measured and self._settings.suggest:  # which layers to quantize otherwise, for a target
            report = replace(report, suggestion=self.suggest(self._settings.suggest, sensitivity, samples, metric))
        files = self._write(report, placement, encodings, tuned if steps or chosen else None)
        return QuantSimResult(self._workspace.folder, report, (*files, *layouts))

    def write_layouts(self, samples: Samples) -> dict[str, str]:
        """The files of `quantsim.layouts`, each with a sentence on its proof."""
        layouts, folder = self._settings.layouts, self._workspace.folder
        if not layouts:
            return write_layouts(self.quantized, (), folder, {})
        with time_stage(self._send, "layouts") as details:
            details.append(", ".join(layouts))
            return write_layouts(self.quantized, layouts, folder, next(iter(samples.evaluation(1))))

    def quantize(
        self, placement: Placement, ranges: Mapping[str, Range], chosen: Chosen | None = None
    ) -> DetachedModel:
        """The model quantized by `placement` and `ranges` of groups, with the roundings of the steps or `chosen`."""
        chosen = self.chosen.suit(placement) if chosen is None else chosen
        return insert_qdq(chosen.tune(self._model), encode(placement, ranges, self._model, chosen.encodings))

    def find_limited(self, placement: Placement, ranges: Mapping[str, Range]) -> list[str]:
        """The biases that their format does not hold."""
        encodings = encode(placement, ranges, self._model, self.chosen.suit(placement).encodings)
        return [name for name, *_ in find_limited_biases(encodings, self._model)]

    def layered_model(
        self, sensitivity: Mapping[str, float], stored_elsewhere: Collection[str] = frozenset()
    ) -> LayeredModel:
        """The model with its rules, for a suggestion."""
        rules = rules_of(self._settings, self._model)
        own = (sensitivity, stored_elsewhere, self._in_float, self._profile.target)
        return LayeredModel(self._model, rules, self.layers, *own)

    def place_only(self, why: str) -> QuantSimResult:
        """What needs no weights: placement, coverage and sizes. `why` says why nothing is run."""
        report = make_placement_report(self.place(), self._model, why, self._notes)
        self._send(Note(f"nothing is calibrated or simulated, only placed: {why}"))
        remove_quantization(self._workspace)
        self._workspace.write_text(QUANTIZATION_REPORT, report_text(report))
        return QuantSimResult(self._workspace.folder, report, (QUANTIZATION_REPORT,))

    def round_in_shards(self, path: Path, samples: Samples) -> QuantSimResult:
        """Weights alone, read shard by shard and rounded to the nearest, or by `optimize` on the samples; `path` is the
        file that refers to them."""
        from pipeline.quantsim.shards import (  # few runs need it
            FOLDER,
            TABLE,
            WEIGHT_TYPES,
            FittingData,
            quantize_in_shards,
        )

        settings, placement, data = self._settings, self.place(dtypes=WEIGHT_TYPES), None
        count = samples.fitted + settings.evaluation
        for step in optimizers_of(settings.optimize):
            data = FittingData(step, lambda: samples.first(count), samples.fitted, [samples.identity(), count])
        with time_stage(self._send, "shards") as details:
            found = quantize_in_shards(
                self._model,
                path,
                placement,
                self._workspace.folder / FOLDER,
                settings.shard_mib or 0,
                choose_executor(settings.shard_ray, settings.shard_jobs),
                lambda done, count: self._send(Progress("shards", f"job {done}", done, count)),
                data,
            )
            details.append(str(found))
        why = "weights alone are rounded, and no quantized model is run"
        report = make_placement_report(placement, self._model, why, (*self._notes, str(found)))
        report = replace(report, optimized=(found.step,) if found.step else ())
        remove_quantization(self._workspace)
        self._workspace.write_text(QUANTIZATION_REPORT, report_text(report))
        files = (f"{FOLDER}/{found.file.name}", f"{FOLDER}/{TABLE}", QUANTIZATION_REPORT)
        return QuantSimResult(self._workspace.folder, report, files)

    def optimize(
        self,
        placement: Placement,
        ranges: Mapping[str, Range],
        samples: Samples,
        rate: Callable[[Chosen], float] | None,
    ) -> tuple[Chosen, tuple[OptimizedStep, ...]]:
        """Weights as libraries round them, where a layer is better for it on samples that the library has not seen."""
        settings = self._settings
        with (
            time_stage(self._send, "optimize") as details,
            tempfile.TemporaryDirectory(dir=self._workspace.scratch) as folder,
        ):
            optimization = Optimization(
                self._model,
                placement,
                select_weights(placement, encode(placement, ranges, self._model)),
                lambda: samples.layer_evaluation(settings.evaluation),
                rate or (lambda chosen: self._rate(placement, ranges, chosen, samples)),
                Path(folder),
                must_not_fall=rate is not None,
            )
            found = optimization.run(
                optimizers_of(settings.optimize),
                samples.fitting(),
                lambda name, done: self._send(Progress("optimize", name, done, len(settings.optimize))),
            )
            details.append(", ".join(f"{row.name} {row.status}" for row in found[1]))
        return found

    def _rate(self, placement: Placement, ranges: Mapping[str, Range], chosen: Chosen, samples: Samples) -> float:
        """The least ratio of the outputs in dB."""
        quantized = self.quantize(placement, ranges, chosen)
        return find_least_ratio(self._model, quantized, samples.evaluation(self._settings.evaluation))

    def measure_costs(
        self, metric: TaskMetric, encodings: dict[str, Encoding], tuned: DetachedModel, sensitivity: dict[str, float]
    ) -> LayerCosts:
        """What each layer alone costs the task."""
        with time_stage(self._send, "layers") as details:
            found = measure_costs(
                {"": CostedModel(tuned, encodings, sensitivity)},
                CostMetric(metric.name, metric.float_value, lambda models: metric.rate(models[""]), metric.loss),
                self._costs_budget_s or 0.0,
                lambda done, count: self._send(Progress("layers", f"layer {done}", done, count)),
            )
            details.append(plural(len(found.costs), "layer"))
        return found

    def begin_noise(
        self, placement: Placement, encodings: dict[str, Encoding], tuned: DetachedModel, samples: Samples
    ) -> AbstractContextManager[Callable[[], dict[str, Noise]]]:
        """Begin to measure noise in a process of its own, where that is quicker."""
        count = self._settings.evaluation
        computed = [placed.site.tensor for placed in placement.sites if is_measured(placed.site)]

        def note(done: int) -> None:
            self._send(Progress("measure", f"sample {done}", done, count))

        return begin_noise(
            self._model, encodings, computed, lambda: samples.evaluation(count), count, note, tuned=tuned
        )

    def measure(self, noise_of_all: Callable[[], dict[str, Noise]]) -> dict[str, Noise]:
        """The noise of each tensor, once it is measured."""
        with time_stage(self._send, "measure"):
            found = noise_of_all()
        return {name: noise for name, noise in found.items() if math.isfinite(noise.signal)}  # infinity has no ratio

    def estimate(
        self, encodings: dict[str, Encoding], tuned: DetachedModel, samples: Samples
    ) -> tuple[dict[str, float], str]:
        """What each layer alone does to the outputs; or why that is not estimated."""
        if not self._settings.sensitivity:
            return {}, "quantsim.sensitivity is false"
        with time_stage(self._send, "sensitivity") as details:
            count = count_needed_samples(self._settings.evaluation, len(self.layers))

            def note(done: int) -> None:
                self._send(Progress("sensitivity", f"sample {done}", done, count))

            try:
                held = samples.evaluation(count)
                found = estimate_sensitivity(self._model, encodings, held, observer=note, tuned=tuned)
            except (Unsupported, StepFailed, ModuleNotFoundError) as error:
                if isinstance(error, ModuleNotFoundError):
                    if error.name not in EXTRAS:
                        raise
                    error = MissingExtra(str(error.name), "it")
                self._send(Note(f"sensitivity is not estimated: {error}"))
                return {}, str(error)
            details.append(plural(len(found), "layer"))
        return found, "" if found else "no layer is quantized"

    def suggest(
        self, target: SuggestConfig, sensitivity: dict[str, float], samples: Samples, metric: TaskMetric | None
    ) -> Suggestion | None:
        """Formats of single layers that meet the target, simulated with the ranges that were measured."""
        if not sensitivity:
            self._send(Note("nothing is suggested, since the sensitivity of layers is not known"))
            return None

        def simulate(placements: Placements) -> float:
            [placement] = placements.values()
            return self._rate(placement, self.ranges(placement), self.chosen.suit(placement), samples)

        def find_limited(placements: Placements) -> dict[str, list[str]]:
            return {name: self.find_limited(found, self.ranges(found)) for name, found in placements.items()}

        def rate(placements: Placements) -> float:
            assert metric is not None
            [placement] = placements.values()
            return metric.rate(self.quantize(placement, self.ranges(placement)))

        goal = None
        if metric is not None and (drop := target.metric_drop) is not None:
            goal = MetricTarget(rate, lambda value: metric.is_within(value, drop))
        with time_stage(self._send, "suggest") as details:
            found = suggest(target, {"": self.layered_model(sensitivity)}, simulate, find_limited, goal)
            details.append(plural(found.simulations, "simulation"))
        return found

    def _write(
        self, report: QuantSimReport, placement: Placement, encodings: dict[str, Encoding], tuned: DetachedModel | None
    ) -> tuple[str, ...]:
        chosen = encode_chosen_infinities(self._model, placement, encodings)
        unsigned = self._profile.find_asymmetric(self._model, self._sites) | chosen.keys()
        text, notes = encodings_text(self._model, encodings | chosen, self._settings.encodings, unsigned)
        for sentence in notes:
            self._send(Note(f"{ENCODINGS} {sentence}"))
        return write_simulation(self._workspace, report, self.quantized, text, tuned)
