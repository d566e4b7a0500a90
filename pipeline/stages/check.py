"""Checks everything in a configuration but the model, before a model is opened or a file replaced.

Needs torch only to look for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from onnx.defs import onnx_opset_version

from passes.context import open_context
from passes.custom_ops.declarations import check_references
from passes.encodings.aimet import read_aimet
from passes.policy.policy import Policy
from passes.recipe.recipe import library_versions, steps_of
from passes.run.apply_step import check_names
from passes.step import Repeat, Step, flatten
from pipeline.compiler import find_compiler
from pipeline.config import ExportConfig, RunConfig, TrainConfig, is_hub_name, locate, locate_checkpoint, split_factory
from pipeline.errors import ConfigError, MissingExtra
from pipeline.export.source import named_axes, with_dynamic_shapes
from pipeline.export.user_code import check_function
from pipeline.workspace import Workspace, key_of

STAGE = "settings"


def default_folder(config: RunConfig, out: str | Path | None) -> Path:
    """Where the artifacts of a run go."""
    return Path(out) if out else Path("runs") / config.name


def check_settings(config: RunConfig, workspace: Workspace) -> tuple[Step | Repeat, ...]:
    """Check every name, option and path, and what is needed of the machine; return the steps of the recipe.

    Names that an earlier run in the same folder has checked with the libraries are not checked again.

    Raises:
        UsageError, PolicyError: one of them is wrong; the message suggests the nearest known one.
    """
    if config.model.parts is not None:
        if config.model.chain is not None:
            check_function(config.model.chain, "model.chain", f"the chain {config.model.chain}")
        first, *_ = [check_settings(config.of_part(name), workspace) for name in config.model.part_names]
        return first
    with config.name_keys():
        _check_paths(config)
        check_references(config.custom_ops)
        refuse_export_keys(config)
        for name, entry in with_dynamic_shapes(config.model, config.export).inputs.items():
            if entry.shape is not None:
                named_axes(name, entry.shape, entry)
        if config.export.opset > (latest := onnx_opset_version()):
            raise ConfigError(f"export.opset: found {config.export.opset}, expected {latest} at most, ONNX's latest")
        _check_extras(config)
        if config.runtime.native and "plan" in config.runtime.chosen:
            find_compiler()
        if "plan" in config.runtime.chosen:
            _look_for_device(config.runtime.device)
        if config.passes.encodings is not None:
            read_aimet(Path(config.passes.encodings))
        steps = steps_of(config.passes.recipe)
        if config.export.functions is not None:
            _refuse_with_functions(config, flatten(steps))
        if not workspace.load(STAGE, _key(config), bool):
            policy = Policy(config.passes.skip, config.passes.keep, config.passes.watch)
            with open_context() as context:
                check_names(flatten(steps), policy, context)
    for name in config.parts:  # those without keys of their own have the same passes
        check_settings(config.of_part(name), workspace)
    return steps


def check_train(config: RunConfig) -> TrainConfig:
    """The section `train`, whose functions are looked for without being run.

    Raises:
        UsageError: it is missing, names what is not there, or asks for what a training cannot give.
    """
    train, model = config.train, config.model
    config.refuse_parts("train")
    if train is None:
        raise ConfigError("the configuration has no section 'train'; expected one with 'batches' at least")
    if config.export.weights == "referenced":
        raise ConfigError(
            "train: found export.weights referenced, expected copied: a training changes the weights, and the files of "
            "the checkpoint keep the old ones"
        )
    if train.quantized and config.quantsim is None:
        raise ConfigError("train: found quantized without a section 'quantsim', expected one with its formats")
    for key, text in (("batches", train.batches), ("evaluate", train.evaluate), ("loss", train.loss)):
        if text is not None and ":" in text:
            check_function(text, f"train.{key}", f"train.{key} {text}")
    if model.factory is not None:
        check_function(model.factory, "model.factory", f"the factory {model.factory}")
    if model.onnx is not None:
        locate(model.onnx)
    if config.checkpoint is not None:
        locate_checkpoint(config.checkpoint)
    if train.native:
        find_compiler()
    _look_for_device(train.device)
    return train


def _look_for_device(name: str) -> None:
    """
    Raises:
        Unsupported: this machine has no such device.
    """
    if name != "cpu":
        from pipeline.runtime.devices import find_device  # loads torch, which a run on the CPU does later

        find_device(name)


def refuse_export_keys(config: RunConfig) -> None:
    """Refuse keys of `export:` and `model.inputs` that mean nothing for an ONNX file.

    Raises:
        ConfigError: one of them is set, and the source is an ONNX file.
    """
    if config.model.onnx is None:
        return
    default = ExportConfig()
    for key in ("opset", "dynamic_shapes", "input_names", "output_names", "pieces", "functions"):
        if getattr(config.export, key) != getattr(default, key):
            raise ConfigError(f"export.{key}: an ONNX file is not exported and stays as it is; leave this key out")
    for name, entry in config.model.inputs.items():
        if entry.dynamic:
            raise ConfigError(f"model.inputs.{name}.dynamic: an ONNX file keeps its dims; leave this key out")


def _refuse_with_functions(config: RunConfig, steps: Sequence[Step]) -> None:
    """Refuse what a model with layers as functions cannot take.

    Raises:
        ConfigError: encodings, or a step that changes inputs, outputs or types.
    """
    step = next((step for step in steps if step.makes_reference or step.fixes_defaults), None)
    found = {
        "passes.encodings, which belong to the weights of each layer": config.passes.encodings is not None,
        f"the step {step.name if step else ''}, which changes inputs, outputs or types": step is not None,
    }
    for what, is_there in found.items():
        if is_there:
            raise ConfigError(f"export.functions: found {what}; leave it out, or leave out export.functions")


def _check_extras(config: RunConfig) -> None:
    """Refuse what needs torch where torch is not installed: a source in torch, and a backend that is named.

    Raises:
        MissingExtra: torch is not installed.
    """
    what = [f"runtime.backends: {name}" for name in config.runtime.backends or () if name != "onnxruntime"]
    if config.model.onnx is None:
        what = ["a source in PyTorch", *what]
    if what and find_spec("torch") is None:
        raise MissingExtra("torch", what[0])


def remember_settings(config: RunConfig, workspace: Workspace) -> None:
    """Save that the names and options have been checked."""
    workspace.save(STAGE, _key(config), True)


def _key(config: RunConfig) -> str:
    return key_of(config.passes.model_dump(mode="json"), library_versions())


def _check_paths(config: RunConfig) -> None:
    model = config.model
    # The hub is asked when the model is loaded.
    if config.checkpoint is not None and not is_hub_name(config.checkpoint):
        locate_checkpoint(config.checkpoint)
    paths = [model.onnx]
    if model.transformers is not None and isinstance(model.transformers.config, str):
        paths.append(model.transformers.config)
    if model.factory is not None:
        file, _ = split_factory(model.factory)
        paths.append(file if file.endswith(".py") else None)
    for path in paths:
        if path is not None:
            locate(path)
    if model.factory is not None:
        check_function(model.factory, "model.factory", f"the factory {model.factory}")
    if config.verify.inputs:
        from pipeline.verify.user_inputs import input_files

        input_files(config.verify.inputs)
