"""The whole simulation of a configuration: the run that prepares the model or the parts, and their simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from passes.encodings.aimet import read_aimet
from passes.graph.op_facts import opset_of
from passes.load import load_model
from passes.recipe.recipe import names_of
from passes.weights.detached import read_model
from pipeline.argument_checks import FLAG, FUNCTION, PATH, a, expects
from pipeline.config import ModelConfig, QuantSimConfig, RunConfig, locate
from pipeline.errors import UsageError
from pipeline.events import Note, Observer, show_progress
from pipeline.export.load import read_onnx_file
from pipeline.parts import PartsResult
from pipeline.quantsim.parts import simulate_parts
from pipeline.quantsim.profiles import formats_of
from pipeline.quantsim.qdq import first_opset
from pipeline.quantsim.report import (
    QuantSimResult,
    page_data,
)
from pipeline.quantsim.samples import KEY, Samples, enlarge
from pipeline.quantsim.stages import Simulation
from pipeline.result import RunResult
from pipeline.run import Pipeline
from pipeline.stages.report import (
    remove_quantization,
    save_quantization,
    write_page,
)
from pipeline.stages.source import leaves_unread, why_not_compared
from pipeline.verify.user_inputs import input_files
from pipeline.workspace import Workspace

DEFAULT_OPSET: Final = 21
"""The first opset whose QuantizeLinear takes 4 and 16 bits; at 23 torch hides scores and softmax in one operator."""


def prepare_config(config: RunConfig) -> RunConfig:
    """The configuration of the run before the simulation: with the steps that prepare, and, where nothing else was
    asked for, an opset that has the operators of quantization, and no operators that ONNX does not have."""
    settings = config.quantsim or QuantSimConfig()
    recipe = (*config.passes.recipe, *settings.prepare)
    contrib = config.passes.contrib or "refuse"
    passes = config.passes.model_copy(update={"recipe": recipe, "contrib": contrib})
    update: dict[str, object] = {"passes": passes, "quantsim": settings}
    if config.model.onnx is None and "opset" not in config.export.model_fields_set:
        update["export"] = config.export.model_copy(update={"opset": DEFAULT_OPSET})
    return config.model_copy(update=update)


class QuantSim:
    """One simulation of one configuration; `run` gives a QuantSimResult.

    Args:
        config: its section `quantsim` may be missing; then everything is by default.
        out: the folder of the artifacts; `runs/<name>` below the working directory by default.
        observer: called with each event.
        progress: None shows a progress bar in a notebook and on a terminal, True shows lines elsewhere too, and False
            shows nothing.

    Raises:
        UsageError: an argument is of another type.
    """

    @expects(
        config=a(RunConfig, "a RunConfig, as RunConfig.from_yaml reads"),
        out=PATH.or_none(),
        observer=FUNCTION,
        progress=FLAG.or_none(),
    )
    def __init__(
        self,
        config: RunConfig,
        out: str | Path | None = None,
        observer: Observer = lambda _: None,
        *,
        progress: bool | None = None,
    ) -> None:
        self._config, self._out, self._observer, self._progress = prepare_config(config), out, observer, progress

    def run(self) -> QuantSimResult:
        """Run all stages; the ranges of a stopped run are taken up where it stopped.

        Raises:
            UsageError, PassError: something that was given is wrong, such as a rule that matches nothing.
            CheckFailed: the run before the simulation failed, or onnxruntime refuses the quantized model.
        """
        with show_progress(self._progress, self._observer) as show:
            return self._run(show)

    def _run(self, show: Observer) -> QuantSimResult:
        settings = self._config.quantsim or QuantSimConfig()
        input_files(settings.calibration.data, KEY)  # a missing file is named before a model is loaded
        config, conversion = _with_conversion(self._config, settings)  # and so is a file of AIMET not understood
        for note in conversion:
            show(Note(note))
        pipeline = Pipeline(config, self._out, show)
        before = pipeline.run()
        notes = (*conversion, *_describe_run(before, config))
        if isinstance(before, PartsResult):
            return simulate_parts(config, before, notes, show)
        workspace = Workspace(pipeline.folder)
        with workspace.acquire():
            try:
                result = self._simulate(before, settings, workspace, notes, show)
            except UsageError as error:  # something that was given is wrong: the results of an earlier run stay
                for note in notes:
                    error.add_note(note)
                raise
            except Exception:
                remove_quantization(workspace)
                write_page(before.report, before.optimize.pictures, workspace)
                raise
            save_quantization(page_data(result.report), before.report, workspace)
            write_page(before.report, before.optimize.pictures, workspace)
            return result

    def _simulate(
        self, before: RunResult, settings: QuantSimConfig, workspace: Workspace, notes: Sequence[str], show: Observer
    ) -> QuantSimResult:
        why = why_not_compared(self._config)
        model = read_model(before.model, unread=bool(why) and leaves_unread(self._config))
        simulation = Simulation(model, settings, workspace, show, notes)
        if why:
            return simulation.place_only(why)
        specs = read_onnx_file(str(before.model), _section_of(before.model, self._config)).inputs
        sampler, source = before.sampler, self._config.model
        if sampler is not None and source.onnx is not None and not self._config.verify.inputs:
            sampler = enlarge(sampler, model, source.dims)
        return simulation.execute(Samples(settings, specs, sampler))


def _with_conversion(config: RunConfig, settings: QuantSimConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """The configuration with a step that brings the model to the opset that the formats need, where it has an earlier
    one and no step of the recipe chooses another; and a sentence on that."""
    if settings.encodings_from is not None:
        formats = [encoding.precision for encoding in read_aimet(Path(settings.encodings_from))[0].values()]
    else:
        formats = formats_of(settings)
    needed, what = max(map(first_opset, formats), default=(0, ""))
    opset = config.export.opset
    if config.model.onnx is not None:
        opset = opset_of(load_model(locate(config.model.onnx)))
    if opset >= needed or CONVERSION in names_of(config.passes.recipe):
        return config, ()
    step = {CONVERSION: {"to": needed}}
    start = len(config.passes.recipe) - len(settings.prepare)
    recipe = (*config.passes.recipe[:start], step, *config.passes.recipe[start:])
    passes = config.passes.model_copy(update={"recipe": recipe})
    note = f"quantsim: the model has opset {opset}, and {what} needs {needed}: {CONVERSION} is added to the steps"
    return config.model_copy(update={"passes": passes}), (note,)


def _describe_run(result: RunResult, config: RunConfig) -> Iterator[str]:
    """A sentence for each step of the preparation that did not stand, and for each backend that fell short."""
    settings = config.quantsim or QuantSimConfig()
    prepared = {*names_of(settings.prepare), CONVERSION}
    for row in result.passes:
        if row.status.counts_as_reverted and row.name in prepared:
            yield f"quantsim: {row.name} did not stand ({row.status.replace('_', ' ')}): {row.reason}"
    for backend in result.runtime.backends:
        if backend.shortfall:
            yield f"backend {backend.name}: {backend.shortfall}"


CONVERSION: Final = "convert-opset"


def _section_of(path: Path, config: RunConfig) -> ModelConfig:
    """The section `model` for the final model. Of a torch source the file itself declares the inputs, under the names
    that they were exported with."""
    inputs = {} if config.model.onnx is None else config.model.inputs
    return ModelConfig(onnx=str(path), inputs=inputs, dims=config.model.dims)
