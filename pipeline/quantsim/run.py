"""The whole simulation: the run of the model, and the stages on its final model (stages.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from passes.custom_ops import declare_ops
from passes.suggest import plural
from passes.weights.detached import DetachedModel, read_model
from pipeline.argument_checks import FLAG, FUNCTION, NUMBER, PATH, a, expects
from pipeline.config import QuantSimConfig, RunConfig
from pipeline.errors import CheckFailed, UsageError
from pipeline.events import Note, Observer, PartStarted, show_progress
from pipeline.export.load import read_onnx_file
from pipeline.export.source import InputSpec
from pipeline.parts import PartsResult
from pipeline.quantsim.files import check_layouts
from pipeline.quantsim.hidden_values import refuse_quantized_activations
from pipeline.quantsim.metric import check_metric
from pipeline.quantsim.optimize import refuse_numpy_operators
from pipeline.quantsim.optimizers import optimizers_of
from pipeline.quantsim.parts import PartsQuantSimResult, check_settings_of_parts, simulate_parts
from pipeline.quantsim.preparation import (
    add_conversion,
    add_untie,
    change_parts,
    describe_run,
    inline_layers,
    prepare_config,
    section_of,
)
from pipeline.quantsim.report import QuantSimResult, page_data
from pipeline.quantsim.rule_checks import check_rules
from pipeline.quantsim.samples import KEY, Samples, enlarge
from pipeline.quantsim.stages import Simulation
from pipeline.result import RunResult
from pipeline.run import Pipeline
from pipeline.stages.report import remove_quantization, save_quantization, write_page
from pipeline.stages.source import leaves_unread, why_not_compared
from pipeline.verify.user_inputs import input_files
from pipeline.workspace import Workspace


class QuantSim:
    """One simulation of one configuration; `run` gives a QuantSimResult.

    Args:
        config: its section `quantsim` may be missing; then everything is by default.
        out: the folder of the artifacts; `runs/<name>` below the working directory by default.
        observer: called with each event.
        progress: None shows a progress bar in a notebook and on a terminal, True shows lines elsewhere too, and False
            shows nothing.
        holds_out: whether noise is measured on samples that the calibration has not seen, as with `quantsim.optimize`.
        costs_budget_s: seconds for the metric of the model with each layer alone quantized; None measures none.

    Raises:
        UsageError: an argument is of another type.
    """

    @expects(
        config=a(RunConfig, "a RunConfig, as RunConfig.from_yaml reads"),
        out=PATH.or_none(),
        observer=FUNCTION,
        progress=FLAG.or_none(),
        holds_out=FLAG,
        costs_budget_s=NUMBER.or_none(),
    )
    def __init__(
        self,
        config: RunConfig,
        out: str | Path | None = None,
        observer: Observer = lambda _: None,
        *,
        progress: bool | None = None,
        holds_out: bool = False,
        costs_budget_s: float | None = None,
    ) -> None:
        self._holds_out, self._costs_budget_s = holds_out, costs_budget_s
        self._config, self._out, self._observer, self._progress = prepare_config(config), out, observer, progress

    def run(self) -> QuantSimResult:
        """Run all stages; the ranges of a stopped run are taken up where it stopped.

        Raises:
            UsageError, PassError: something that was given is wrong, such as a rule that matches nothing.
            CheckFailed: the run before the simulation failed, onnxruntime refuses the quantized model, or a step of
                `optimize` failed where `passes.strict` is set.
        """
        with show_progress(self._progress, self._observer) as show, declare_ops(self._config.custom_ops):
            return self._run(show)

    def _run(self, show: Observer) -> QuantSimResult:
        if self._config.model.parts is not None:
            return self._run_own_parts(show)
        _check_settings(self._config)
        if self._config.model.part_names:
            check_settings_of_parts(self._config)
        config, conversion = self._convert(self._config, show)
        before = Pipeline(config, self._out, show, writes_page=False).run()  # it is written with the quantization
        if isinstance(before, PartsResult):
            result = simulate_parts(
                config, before, conversion, show, holds_out=self._holds_out, costs_budget_s=self._costs_budget_s
            )
            self._check_steps(result.parts.values())
            return result
        notes = (*conversion, *describe_run(before, config))
        return self._simulate_run(before, config, notes, show)

    def _run_own_parts(self, show: Observer) -> PartsQuantSimResult:
        """Simulate each part as a model by itself, on data of its own: parts of one's own have no chain."""
        parts = {name: self._config.of_part(name) for name in self._config.model.part_names}
        conversions = dict[str, tuple[str, ...]]()
        for name, part in parts.items():
            _check_settings(part)
            parts[name], conversions[name] = self._convert(part, show)
        before = Pipeline(change_parts(self._config, parts), self._out, show).run()
        assert isinstance(before, PartsResult)
        found = dict[str, QuantSimResult]()
        with Workspace(before.folder).acquire():
            for name, part in parts.items():
                show(PartStarted(name))
                notes = (*conversions[name], *describe_run(before.parts[name], part))
                found[name] = self._simulate_run(before.parts[name], part, notes, show)
        return PartsQuantSimResult(before.folder, next(iter(found.values())).report, (), parts=found)

    def _convert(self, config: RunConfig, show: Observer) -> tuple[RunConfig, tuple[str, ...]]:
        """The configuration with the opset that its formats need, and what is said of that, and with the copies of
        weights that its profile needs; a file of AIMET that is not understood is named here."""
        config, conversion = add_conversion(config)
        for note in conversion:
            show(Note(note))
        return add_untie(config), conversion

    def _simulate_run(
        self, before: RunResult, config: RunConfig, notes: Sequence[str], show: Observer
    ) -> QuantSimResult:
        """Simulate the final model of a run that ended well, and write the page of the run anew."""
        workspace = Workspace(before.folder)
        with workspace.acquire():
            try:
                result = self._simulate(before, config, workspace, notes, show)
                save_quantization(page_data(result.report), before.report, workspace)
            except UsageError as error:  # something that was given is wrong: the results of an earlier run stay
                for note in notes:
                    error.add_note(note)
                raise
            except Exception:
                remove_quantization(workspace)
                raise
            finally:
                write_page(before.report, before.optimize.pictures, workspace)
            self._check_steps([result])
            return replace(result, run=before.report)

    def _check_steps(self, results: Iterable[QuantSimResult]) -> None:
        failed = [step for result in results for step in result.report.optimized if step.status == "failed"]
        if failed and self._config.passes.strict:
            raise CheckFailed(f"quantsim.optimize, with passes.strict: {failed[0]}")

    def _simulate(
        self, before: RunResult, config: RunConfig, workspace: Workspace, notes: Sequence[str], show: Observer
    ) -> QuantSimResult:
        settings, why = config.quantsim or QuantSimConfig(), why_not_compared(config)
        model = read_model(before.model, unread=bool(why) and leaves_unread(config))
        model, inlined = inline_layers(model, before.sampler)
        notes = (*notes, *inlined)
        refuse_quantized_activations(model)
        simulation = Simulation(model, settings, workspace, show, notes, self._costs_budget_s)
        if why:
            if not settings.shard_mib:
                return simulation.place_only(why)
            samples = Samples(settings, _read_specs(before.model, config) if settings.optimize else (), None)
            if settings.optimize:
                self._hold_out(samples, settings, show)
            return simulation.round_in_shards(before.model, samples)
        if settings.optimize:
            refuse_numpy_operators(model)
        specs = _read_specs(before.model, config, model)
        sampler, source = before.sampler, config.model
        if sampler is not None and source.onnx is not None and not (config.verify.inputs or settings.calibration.data):
            sampler = enlarge(sampler, model, source.dims)
        seen = max(config.verify.max_inputs if config.verify.inputs else 0, config.verify.draws)
        samples = Samples(settings, specs, sampler, seen)
        if self._holds_out or settings.optimize:
            self._hold_out(samples, settings, show)
        return simulation.execute(samples)

    def _hold_out(self, samples: Samples, settings: QuantSimConfig, show: Observer) -> None:
        held, seen = samples.hold_out(settings.evaluation), plural(samples.fitted, "sample")
        show(Note(f"ranges and steps are fitted to {seen}, and all is judged on {held} others"))


def _check_settings(config: RunConfig) -> None:
    """Check what needs no model, before one is loaded: files that are missing, steps and libraries that are not there.

    Raises:
        UsageError: one of them is wrong.
    """
    settings = config.quantsim or QuantSimConfig()
    if config.model.diffusers is None or config.model.part:
        input_files(settings.calibration.data, KEY)
    if settings.metric is not None:
        check_metric(settings.metric)
        input_files(settings.metric.data, "quantsim.metric.data")
        if why_not_compared(config):
            raise UsageError("quantsim.metric is measured by runs of the model: leave verify.proof at numbers")
    if settings.shard_mib:
        config.refuse_parts("quantsim.shard_mib")
        if not why_not_compared(config):
            raise UsageError("quantsim.shard_mib is for models that nothing is run of: set verify.proof to structure")
    if settings.layouts:
        config.refuse_parts("quantsim.layouts")
        if why_not_compared(config):
            raise UsageError("quantsim.layouts are proven by runs of the model: leave verify.proof at numbers")
    check_layouts(settings)
    check_rules(config)
    optimizers_of(settings.optimize)


def _read_specs(path: Path, config: RunConfig, opened: DetachedModel | None = None) -> tuple[InputSpec, ...]:
    return read_onnx_file(str(path), section_of(path, config), None if opened is None else opened.proto).inputs
