"""The run before the simulation: its configuration, a conversion that the formats need, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from passes.encodings.aimet import read_aimet
from passes.graph.op_facts import opset_of
from passes.load import load_model
from passes.proof.draws import InputSampler
from passes.recipe.recipe import names_of
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.config import ModelConfig, PartConfig, QuantSimConfig, RunConfig, locate
from pipeline.config.sections import Step
from pipeline.errors import CheckFailed
from pipeline.quantsim.new_formats import new_precisions
from pipeline.quantsim.profiles import formats_of, read_profile
from pipeline.quantsim.qdq import first_opset

if TYPE_CHECKING:  # a report, which `to-int8` has not
    from pipeline.result import RunResult

DEFAULT_OPSET: Final = 21
"""The first opset whose QuantizeLinear takes 4 and 16 bits; at 23 torch hides scores and softmax in one operator."""


def prepare_config(config: RunConfig) -> RunConfig:
    """The configuration of the run before the simulation: with the steps that prepare, of each part its own, and, where
    nothing else was asked for, an opset that has the operators of quantization, and no operators that ONNX does not
    have. Where a step reads data, and `verify.inputs` has none, it reads that of the calibration."""
    if config.model.parts is not None:
        return change_parts(config, {name: prepare_config(config.of_part(name)) for name in config.model.part_names})
    settings = config.quantsim or QuantSimConfig()
    recipe = (*config.passes.recipe, *settings.prepare)
    contrib = config.passes.contrib or "refuse"
    passes = config.passes.model_copy(update={"recipe": recipe, "contrib": contrib})
    update: dict[str, object] = {"passes": passes, "quantsim": settings}
    if _reads_calibration(config, recipe) and not _why_not_read(config) and not config.model.part_names:
        update["verify"] = config.verify.model_copy(update={"inputs": settings.calibration.data})
    if config.model.onnx is None and "opset" not in config.export.model_fields_set:
        update["export"] = config.export.model_copy(update={"opset": DEFAULT_OPSET})
    recipes = {name: prepare_config(config.of_part(name)).passes.recipe for name in config.model.part_names}
    return _give_recipes(config.model_copy(update=update), recipes)


def _reads_calibration(config: RunConfig, recipe: Sequence[Any]) -> bool:
    """Whether a step of the recipe looks at activations, and the data of the calibration alone says what these are."""
    data = config.quantsim.calibration.data if config.quantsim else ()
    is_open = not config.verify.inputs and config.verify.proof == "numbers"
    return bool(data) and is_open and not READING.isdisjoint(names_of(recipe))


def _why_not_read(config: RunConfig) -> str:
    """Why the data of the calibration cannot be `verify.inputs` of a model by itself; empty where it can."""
    if config.quantsim is not None and config.quantsim.calibration.args:
        return "its loader is called with quantsim.calibration.args"
    if config.export.input_names:
        return "it has the names of export.input_names, and not those of torch"
    return ""


def change_parts(config: RunConfig, parts: Mapping[str, RunConfig]) -> RunConfig:
    """The configuration of own parts, each of which has the sections of its configuration in `parts`."""
    own = {}
    for name, part in parts.items():
        sections = {key: section for key, section in part.to_mapping().items() if key in PartConfig.model_fields}
        sections["export"].pop("weights")  # all parts have one
        if part.model.onnx is not None:
            del sections["export"]
        own[name] = PartConfig.model_validate(sections)
    return config.model_copy(update={"parts": own})


def _give_recipes(config: RunConfig, recipes: Mapping[str, tuple[Any, ...]]) -> RunConfig:
    """The configuration with these recipes of its parts."""
    parts = dict(config.parts)
    for name, recipe in recipes.items():
        if recipe != config.of_part(name).passes.recipe:
            own = parts.get(name, PartConfig())
            parts[name] = own.model_copy(update={"passes": {**own.passes, "recipe": list(recipe)}})
    return config.model_copy(update={"parts": parts})


def add_conversion(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """The configuration with a step that brings the model to the opset that the formats need, where it has an earlier
    one and no step of the recipe chooses another; and a sentence on that. Parts have each their own step."""
    if config.model.part_names:
        found = {name: add_conversion(config.of_part(name)) for name in config.model.part_names}
        recipes = {name: part.passes.recipe for name, (part, _) in found.items()}
        notes = dict.fromkeys(note for _, own in found.values() for note in own)
        return _give_recipes(config, recipes), tuple(notes)
    settings = config.quantsim or QuantSimConfig()
    opset = config.export.opset
    if config.model.onnx is not None:
        opset = opset_of(load_model(locate(config.model.onnx)))
    steps, first = find_conversion(settings, opset)
    if not steps or CONVERSION in names_of(config.passes.recipe):
        return config, ()
    start = len(config.passes.recipe) - len(settings.prepare)
    recipe = (*config.passes.recipe[:start], *steps, *config.passes.recipe[start:])
    passes = config.passes.model_copy(update={"recipe": recipe})
    note = f"{first}: {CONVERSION} is added to the steps"
    return config.model_copy(update={"passes": passes}), (note,)


def find_conversion(settings: QuantSimConfig, opset: int) -> tuple[list[Step], str]:
    """The step that brings a model of `opset` to the opset that the formats need, with a sentence on that; no step
    where it has that opset."""
    if settings.encodings_from is not None:
        formats = [encoding.precision for encoding in read_aimet(Path(settings.encodings_from))[0].values()]
    else:
        formats = formats_of(settings)
    if settings.suggest is not None:
        formats += new_precisions(settings.suggest, read_profile(settings).target)
    needed, what = max(map(first_opset, formats), default=(0, ""))
    if opset >= needed:
        return [], ""
    return [{CONVERSION: {"to": needed}}], f"the model has opset {opset}, and {needed} is the first with {what}"


def add_untie(config: RunConfig) -> RunConfig:
    """Add a last step that copies weights as AIMET's simulation needs it, for a profile with AIMET's conventions.

    A recipe that names `untie`, or a configuration with a file of encodings, is returned as it is.
    """
    if config.model.part_names:
        recipes = {name: add_untie(config.of_part(name)).passes.recipe for name in config.model.part_names}
        return _give_recipes(config, recipes)
    if "untie" in names_of(config.passes.recipe):
        return config
    recipe = (*config.passes.recipe, *find_untie(config.quantsim or QuantSimConfig()))
    return config.model_copy(update={"passes": config.passes.model_copy(update={"recipe": recipe})})


def find_untie(settings: QuantSimConfig) -> list[Step]:
    """The step that copies weights, for a profile with AIMET's conventions and without a file of encodings."""
    is_adopted = settings.encodings_from is not None
    return [] if is_adopted or read_profile(settings).placement.conventions is None else [UNTIE]


UNTIE: Final = {"untie": {"by_operator": True}}


def describe_run(result: RunResult, config: RunConfig) -> Iterator[str]:
    """A sentence for each step of the preparation that did not stand or changed nothing, and for each backend that fell
    short."""
    settings = config.quantsim or QuantSimConfig()
    prepared = {*names_of(settings.prepare), CONVERSION}
    for row in result.passes:
        if row.status.counts_as_reverted and row.name in prepared:
            yield f"{row.name} did not stand ({row.status.replace('_', ' ')}): {row.reason}"
        elif row.name in prepared and not row.changed and row.name != CONVERSION:
            yield f"{row.name} changed nothing: {row.reason or 'it found nothing to change'}"
        elif row.name == "untie" and row.changed and UNTIE in config.passes.recipe:
            yield f"untie is added: {row.reason}, as AIMET refuses a weight of a product that others read too"
    if _reads_calibration(config, config.passes.recipe):
        steps = " and ".join(dict.fromkeys(name for name in names_of(config.passes.recipe) if name in READING))
        why = _why_not_read(config) or "it is data of the chain of all parts"
        key = f"parts.{config.model.part}.verify.inputs" if config.model.part else "verify.inputs"
        yield (
            f"{steps} took activations from random draws and not from quantsim.calibration.data, since "
            f"{why}; give inputs like those in use as {key}"
        )
    for backend in result.runtime.backends:
        if backend.shortfall:
            yield f"backend {backend.name}: {backend.shortfall}"


READING: Final = frozenset({"awq", "clamp-mask", "smooth-quant"})
"""Steps that look at activations."""

CONVERSION: Final = "convert-opset"


def section_of(path: Path, config: RunConfig) -> ModelConfig:
    """The section `model` for the final model. Of a torch source the file itself declares the inputs, under the names
    that they were exported with."""
    inputs = {} if config.model.onnx is None else config.model.inputs
    return ModelConfig(onnx=str(path), inputs=inputs, dims=config.model.dims)


def inline_layers(model: DetachedModel, sampler: InputSampler | None) -> tuple[DetachedModel, tuple[str, ...]]:
    """The model with its layers in place of calls of one function, since each layer has ranges of its own.

    Args:
        model: as a run with `export.functions` has written it; any other is returned as it is.
        sampler: draws the inputs on which both models are compared; None where nothing is run.

    Returns:
        The model, and a sentence on it.

    Raises:
        CheckFailed: onnxruntime gives other outputs without functions.
    """
    if not model.has_layers():
        return model, ()
    flat, count = model.without_functions(), plural(len(model.proto.functions), "function")
    what = f"{count} of equal layers {'is' if len(model.proto.functions) == 1 else 'are'} inlined"
    what += ", as each layer has ranges of its own"
    if sampler is None:
        return flat, (what,)
    feeds = sampler.draw(0)
    found = Session.of(flat).run(feeds)
    for name, array in Session.of(model).run(feeds).items():
        if not np.array_equal(array, found[name], equal_nan=array.dtype.kind == "f"):
            raise CheckFailed(f"{what}, and onnxruntime gives another {name!r}; leave out export.functions")
    return flat, (f"{what}; outputs are equal bit for bit",)
