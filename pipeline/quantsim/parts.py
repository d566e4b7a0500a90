"""The simulation of a run in parts: each part on its calls in the chain, one scale for what parts share, and the chain.

Each part is simulated as a model by itself (stages.py), on the calls that `record` has kept (chain_record.py). A value
that two parts have gets one range: what one hands to the other, and of prefill and decode all that both compute. Then
the quantized parts are put together, and the chain says what each part and each layer costs, and which formats reach a
target (chain_noise.py, suggest.py).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from passes.suggest import bytes_text, plural
from passes.visible import Table, json_text
from passes.weights.detached import DetachedModel, read_model
from passes.weights.files import save_together
from passes.weights.sessions import Session
from pipeline.config import QuantSimConfig, RunConfig
from pipeline.errors import UsageError
from pipeline.events import Event, Note, Observer, Progress, StageEnded, time_stage
from pipeline.parts import PartsResult
from pipeline.parts.folder import WEIGHTS
from pipeline.parts.report import QUANTIZED, remove_quantized, save_chain
from pipeline.parts.slots import Step
from pipeline.quantsim.chain_noise import TITLES, ChainJudge, ChainNoise, QuantizedChain, rate_chain
from pipeline.quantsim.chain_record import ChainSamples, record
from pipeline.quantsim.chains import PartsChain, open_chain
from pipeline.quantsim.encodings import Range
from pipeline.quantsim.layer_costs import CostedModel, CostMetric, LayerCosts, measure_costs
from pipeline.quantsim.metric import MetricResult
from pipeline.quantsim.optimize import Chosen, refuse_numpy_operators
from pipeline.quantsim.preparation import describe_run, inline_layers
from pipeline.quantsim.report import MOST_LAYERS, QuantSimResult, page_data, to_json_data
from pipeline.quantsim.shared_values import SharedValues
from pipeline.quantsim.stages import Simulation
from pipeline.quantsim.suggest import MetricTarget, Placements, Suggestion, suggest, suggestion_text, weight_bytes
from pipeline.report import ChainQuantization
from pipeline.stages.report import ENCODINGS, QUANTIZATION_REPORT, QUANTIZED_MODEL, save_quantization, write_page
from pipeline.stages.source import leaves_unread, why_not_compared
from pipeline.workspace import Workspace

ALIKE: Final = ("prefill", "decode")
"""Parts that are one module at different numbers of tokens, and share one set of weights."""

METRIC: Final = "token-agreement"
"""The metric of a chain that writes text: the part of its greedy tokens that the parts in float write too."""


@dataclass(frozen=True, repr=False)
class PartsQuantSimResult(QuantSimResult):
    """The simulations of all parts; `report` is that of the first part.

    chain: None where nothing is run.
    metric: of the chain, where `quantsim.metric` names it.
    costs: what each layer costs that metric, where that was asked for.
    weight_bytes, quantized_weight_bytes: of the constants of all parts; what parts share is counted once.
    """

    parts: Mapping[str, QuantSimResult] = field(default_factory=dict)
    chain: QuantizedChain | None = None
    suggestion: Suggestion | None = None
    metric: MetricResult | None = None
    costs: LayerCosts | None = None
    weight_bytes: int = 0
    quantized_weight_bytes: int = 0

    def chain_lines(self, most: int | None) -> Iterator[str]:
        """What the chain says, of its `most` worst layers."""
        if self.chain is not None:
            yield from self.chain.lines(most)
        if self.metric is not None:
            yield str(self.metric)
        if self.suggestion is not None:
            yield from suggestion_text(self.suggestion).splitlines()
        if self.weight_bytes:
            before, after = bytes_text(self.weight_bytes), bytes_text(self.quantized_weight_bytes)
            yield f"weights of all parts: {before} → {after}"

    def chain_page(self) -> ChainQuantization | None:
        """What the page of the run shows; None where nothing is run."""
        if self.chain is None:
            return None
        notes = (*([str(self.metric)] if self.metric else ()), *self.chain.sentences())
        suggestion = suggestion_text(self.suggestion) if self.suggestion else ""
        return ChainQuantization(self.chain.noise.sentence, TITLES, self.chain.rows, notes, suggestion)

    def to_json(self) -> dict[str, Any]:
        """The chain, and what is suggested for it, as plain data."""
        found = {"chain": self.chain, "metric": self.metric, "suggestion": self.suggestion}
        return {key: to_json_data(asdict(value)) if value is not None else None for key, value in found.items()}

    def tables(self) -> Iterator[Table]:
        for name, result in self.parts.items():
            yield from (table._replace(title=f"part {name}: {table.title}") for table in result.tables())
        yield Table("chain of the parts", [(line,) for line in self.chain_lines(MOST_LAYERS)])

    def __repr__(self) -> str:
        lines = [f"part {name}: {result!r}" for name, result in self.parts.items()]
        return "\n".join(["PartsQuantSimResult", *lines, *self.chain_lines(0)])


def check_settings_of_parts(config: RunConfig) -> dict[str, QuantSimConfig]:
    """The settings of each part, without those of the chain as a whole.

    Raises:
        UsageError: a setting has no meaning for a run in parts, or differs between parts that it binds together.
    """
    whole = config.quantsim or QuantSimConfig()
    metric = whole.metric
    if metric is not None:
        given = sorted(metric.model_fields_set - {"use", "bound"})
        if metric.use != METRIC or given or config.model.task in (None, "feature-extraction"):
            what = f"{metric.use} with {', '.join(given)}" if given else metric.use
            raise UsageError(
                f"quantsim.metric: found {what} for a run in parts, expected {METRIC} of a chain that writes text, "
                "without options but bound; or name one part: --set model.part="
                f"{config.model.part_names[0]}"
            )
    found: dict[str, QuantSimConfig] = {}
    for name in config.model.part_names:
        settings = config.of_part(name).quantsim or QuantSimConfig()
        for key in ("metric", "suggest"):
            if getattr(settings, key) != getattr(whole, key):
                raise UsageError(
                    f"parts.{name}.quantsim.{key}: the chain of all parts has one; expected it under quantsim"
                )
        if any(
            getattr(settings.calibration, key) != getattr(whole.calibration, key) for key in ("data", "args", "seed")
        ):
            raise UsageError(
                f"parts.{name}.quantsim.calibration: the calls of all parts are those of one chain; expected data, "
                "args and seed under quantsim"
            )
        if settings.shard_mib:
            raise UsageError(
                f"parts.{name}.quantsim.shard_mib is for a single model: name one part: --set model.part={name}"
            )
        if settings.optimize != whole.optimize and config.model.part_names == ALIKE:
            raise UsageError(
                f"parts.{name}.quantsim.optimize: prefill and decode share their weights, which are rounded once; "
                "expected it under quantsim"
            )
        found[name] = settings.model_copy(update={"suggest": None, "metric": None})
    return found


def simulate_parts(
    config: RunConfig,
    before: PartsResult,
    notes: Sequence[str],
    show: Observer,
    *,
    holds_out: bool = False,
    costs_budget_s: float | None = None,
) -> PartsQuantSimResult:
    """Simulate all parts of the run `before`, by the quantsim of `config`. `notes` stand in every report, `show` gets
    each event with its part, and `holds_out` and `costs_budget_s` are those of `QuantSim`.

    Raises:
        UsageError, CheckFailed: as for `QuantSim.run`.
    """
    why, settings = why_not_compared(config), check_settings_of_parts(config)
    said = set[str]()

    def show_of(part: str, event: Event) -> None:
        """Show an event of a part with its name; what all parts say of their common data is shown once."""
        if isinstance(event, StageEnded):
            event = replace(event, detail=": ".join(filter(None, (part, event.detail))))
        if not isinstance(event, Note) or event.text not in said:
            show(event)
        if isinstance(event, Note):
            said.add(event.text)

    with ExitStack() as stack:
        workspaces = {name: Workspace(result.folder) for name, result in before.parts.items()}
        for workspace in (Workspace(before.folder), *workspaces.values()):
            stack.enter_context(workspace.acquire())
        is_unread = bool(why) and leaves_unread(config)
        models, simulations = dict[str, DetachedModel](), dict[str, Simulation]()
        for name, result in before.parts.items():
            models[name], inlined = inline_layers(read_model(result.model, unread=is_unread), result.sampler)
            own = (*notes, *describe_run(result, config.of_part(name)), *inlined)
            simulations[name] = Simulation(models[name], settings[name], workspaces[name], partial(show_of, name), own)
        if why:
            found = {name: simulation.place_only(why) for name, simulation in simulations.items()}
            return PartsQuantSimResult(before.folder, next(iter(found.values())).report, (), parts=found)
        for name, model in models.items():
            if settings[name].optimize:
                refuse_numpy_operators(model)
        holds_out |= any(known.optimize for known in settings.values())
        if holds_out:
            show(Note("ranges and steps are fitted to some samples, and all is judged on others"))
        chosen = PartsSimulation(config, before, settings, models, simulations, show, holds_out, costs_budget_s)
        return chosen.run()


@dataclass(frozen=True, eq=False)
class PartsSimulation:
    """The stages over all parts; those of one part are in its `Simulation`."""

    config: RunConfig
    before: PartsResult
    settings: Mapping[str, QuantSimConfig]
    models: Mapping[str, DetachedModel]
    simulations: Mapping[str, Simulation]
    show: Observer
    holds_out: bool
    costs_budget_s: float | None

    def run(self) -> PartsQuantSimResult:
        workspace, chain = Workspace(self.before.folder), open_chain(self.config, self.before)
        for simulation in self.simulations.values():
            simulation.begin()  # place
        shared = SharedValues.of(chain, self.models)
        shared.refuse_two_formats({name: simulation.placement for name, simulation in self.simulations.items()})
        remove_quantized(workspace)
        steps = {name: Session.of(model).run for name, model in self.models.items()}
        with tempfile.TemporaryDirectory(dir=workspace.scratch) as folder:
            samples, judge = self._record(chain, steps, Path(folder))  # the calls of each part, and ranges
            found = self._finish(samples, shared, judge)
        write_quantized(chain, {name: result.folder / QUANTIZED_MODEL for name, result in found.items()}, workspace)
        if chain.is_alike:
            write_joined([result.folder / ENCODINGS for result in found.values()], workspace)
        with time_stage(self.show, "chain") as details:
            quantized = {name: simulation.quantized for name, simulation in self.simulations.items()}
            rated = rate_chain(judge, quantized, {name: result.report for name, result in found.items()})
            details.append(rated.noise.sentence)
        sizes = [
            weight_bytes(self.models[name], simulation.placement, shared.stored_before(name))
            for name, simulation in self.simulations.items()
        ]
        result = PartsQuantSimResult(
            workspace.folder,
            next(iter(found.values())).report,
            (*([ENCODINGS] if chain.is_alike else ()), QUANTIZED, QUANTIZATION_REPORT),
            parts=found,
            chain=rated,
            suggestion=self._suggest(judge, rated, shared),
            metric=self._rate(rated.noise, judge.subjects),
            costs=self._measure_costs(judge, rated, shared),
            weight_bytes=sum(before for before, _ in sizes),
            quantized_weight_bytes=sum(after for _, after in sizes),
        )
        workspace.write_text(QUANTIZATION_REPORT, json_text(result.to_json(), indent=1) + "\n")
        if (page := result.chain_page()) is not None:
            save_chain(page, self.before.report, workspace)
        return result

    def _record(
        self, chain: PartsChain, steps: Mapping[str, Step], folder: Path
    ) -> tuple[dict[str, ChainSamples], ChainJudge]:
        """Run the chain in float, measure ranges on all calls, and keep those that the stages of each part read."""
        wanted = {name: max(known.calibration.samples, known.evaluation) for name, known in self.settings.items()}
        identity: list[object] = [
            hashlib.sha256(model.proto.SerializeToString(deterministic=True)).hexdigest()
            for model in self.models.values()
        ]
        identity.append(wanted)
        samples = {
            name: ChainSamples(known, chain, folder, name, identity, holds_out=self.holds_out)
            for name, known in self.settings.items()
        }
        with time_stage(self.show, "calibrate") as details:
            opened = {
                name: simulation.open_calibration(samples[name])
                for name, simulation in self.simulations.items()
                if simulation.needs_ranges
            }
            recording = record(
                chain,
                steps,
                folder,
                wanted,
                {name: found.measurement.add for name, found in opened.items()},
                lambda done, count: self.show(Progress("calibrate", f"{chain.noun} {done}", done, count)),
                holds_out=self.holds_out,
            )
            for name, found in opened.items():
                self.simulations[name].take_ranges(found, samples[name])
            details += [f"{plural(found, 'call')} of {name}" for name, found in recording.seen.items()]
        return samples, ChainJudge(chain, steps, recording.cases)

    def _finish(
        self, samples: Mapping[str, ChainSamples], shared: SharedValues, judge: ChainJudge
    ) -> dict[str, QuantSimResult]:
        """Simulate each part, with one range for what parts share, and the roundings of the first for their weights."""
        placements = {name: simulation.placement for name, simulation in self.simulations.items()}
        ranges: dict[str, dict[str, Range]] = {}
        if not any(known.encodings_from for known in self.settings.values()):
            for name, placement in shared.unify(placements).items():
                self.simulations[name].placement = placements[name] = placement
            ranges = self._ranges(placements, shared)
        found: dict[str, QuantSimResult] = {}
        for name, simulation in self.simulations.items():
            chosen = None
            if found and shared.are_alike and self.settings[name].optimize:
                chosen = shared.keep(next(iter(self.simulations.values())).chosen)

            def rate(chosen: Chosen, name: str = name) -> float:
                members = self.models if shared.are_alike else [name]
                quantized = {
                    member: self.simulations[member].quantize(
                        placements[member], ranges[member], chosen if member == name else shared.keep(chosen)
                    )
                    for member in members
                }
                return judge.compare(quantized).sqnr_db

            found[name] = simulation.finish(samples[name], ranges.get(name), chosen, rate)
            part = self.before.parts[name]
            save_quantization(page_data(found[name].report), part.report, Workspace(part.folder))
            write_page(part.report, part.optimize.pictures, Workspace(part.folder))
        return found

    def _ranges(self, placements: Placements, shared: SharedValues) -> dict[str, dict[str, Range]]:
        ranges = {name: self.simulations[name].ranges(placement) for name, placement in placements.items()}
        return shared.join(ranges, placements)

    def _measure_costs(self, judge: ChainJudge, rated: QuantizedChain, shared: SharedValues) -> LayerCosts | None:
        """What each layer alone costs the metric of the chain; None where that is not asked for."""
        if self.costs_budget_s is None:
            return None
        with time_stage(self.show, "layers") as details:
            found = measure_costs(
                {
                    name: CostedModel(simulation.tuned, simulation.encodings, rated.ratios_of(name))
                    for name, simulation in self.simulations.items()
                },
                CostMetric(METRIC, 1.0, lambda models: judge.compare(models).agreement, lambda value: 1.0 - value),
                self.costs_budget_s,
                lambda done, count: self.show(Progress("layers", f"layer {done}", done, count)),
                are_alike=shared.are_alike,
            )
            details.append(plural(len(found.costs), "layer"))
        return found

    def _rate(self, noise: ChainNoise, subjects: int) -> MetricResult | None:
        """The metric of the chain, which is 1 in float; None where none is named."""
        metric = (self.config.quantsim or QuantSimConfig()).metric
        return metric and MetricResult(
            METRIC, 1.0, noise.agreement, subjects, lower_is_better=False, bound=metric.bound
        )

    def _suggest(self, judge: ChainJudge, rated: QuantizedChain, shared: SharedValues) -> Suggestion | None:
        """Formats of layers of all parts that meet the target, each simulated by the chain."""
        target = (self.config.quantsim or QuantSimConfig()).suggest
        if target is None:
            return None
        if not rated.layers:
            self.show(Note("nothing is suggested, since the sensitivity of layers is not known"))
            return None

        def compare(placements: Placements) -> ChainNoise:
            placements = shared.unify(placements)
            ranges = self._ranges(placements, shared)
            return judge.compare(
                {name: self.simulations[name].quantize(placements[name], ranges[name]) for name in placements}
            )

        def find_limited(placements: Placements) -> dict[str, list[str]]:
            placements = shared.unify(placements)
            ranges = self._ranges(placements, shared)
            return {
                name: self.simulations[name].find_limited(placement, ranges[name])
                for name, placement in placements.items()
            }

        goal = None
        if (drop := target.metric_drop) is not None:
            goal = MetricTarget(lambda found: compare(found).agreement, lambda value: value >= 1 - drop)
        entries = {
            name: simulation.layered_model(rated.ratios_of(name), shared.stored_before(name))
            for name, simulation in self.simulations.items()
        }
        with time_stage(self.show, "suggest") as details:
            found = suggest(
                target, entries, lambda found: compare(found).sqnr_db, find_limited, goal, are_alike=shared.are_alike
            )
            details.append(plural(found.simulations, "simulation"))
        return found


def write_quantized(chain: PartsChain, files: Mapping[str, Path], workspace: Workspace) -> None:
    """Write the quantized parts as the folder of models has those in float, with all that lies there."""
    target = workspace.folder / QUANTIZED
    shutil.copytree(chain.models, target, ignore=shutil.ignore_patterns("*.onnx", "*.onnx_data", WEIGHTS))
    models = {chain.file(target, name): read_model(file) for name, file in files.items()}
    if chain.hands_over:
        save_together(models, target / WEIGHTS)
        return
    for file, model in models.items():
        save_together({file: model}, file.with_name(f"{file.name}_data"))


def write_joined(files: Iterable[Path], workspace: Workspace) -> None:
    """Write one file of AIMET's for parts that are alike: all encodings of the first part, and what others add."""
    texts = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    workspace.write_text(ENCODINGS, json.dumps(join_encodings(texts), indent=2) + "\n")


def join_encodings(texts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries of the first file, and those of the others by further names."""
    joined: dict[str, Any] = {}
    for text in texts:
        for key, entries in text.items():
            if isinstance(entries, list):
                names = {entry["name"] for entry in joined.setdefault(key, [])}
                joined[key] += [entry for entry in entries if entry["name"] not in names]
            elif isinstance(entries, dict):
                joined[key] = {**entries, **joined.get(key, {})}
            else:
                joined[key] = entries
    return joined
