"""What can be wrong with a configuration besides the model, found before a model is opened or a file is replaced.
Needs no torch."""

from __future__ import annotations

from pathlib import Path

from passes.context import open_context
from passes.external.installed import library_versions
from passes.policy.policy import Policy
from passes.recipe.recipe import steps_of
from passes.run.apply_policy import check_names
from passes.step import Repeat, Step, flatten
from pipeline.config import ExportConfig, RunConfig, locate, split_factory
from pipeline.errors import ConfigError
from pipeline.workspace import Workspace, key_of

__all__ = ["check_settings", "default_folder", "refuse_export_keys", "remember_settings"]

STAGE = "settings"


def default_folder(config: RunConfig, out: Path | None) -> Path:
    """Where the artifacts of a run go."""
    return out or Path("runs") / config.name


def check_settings(config: RunConfig, workspace: Workspace) -> tuple[Step | Repeat, ...]:
    """The steps of the recipe, once every name, option and path is known to mean something.

    Libraries are not asked again for what an earlier run in the same folder has asked them.

    Raises:
        UsageError, PolicyError: one of them does not, with the nearest that does.
    """
    _check_paths(config)
    refuse_export_keys(config)
    steps = steps_of(config.passes.recipe)
    if not workspace.load(STAGE, _key(config), bool):
        policy = Policy(config.passes.skip, config.passes.keep, config.passes.watch)
        with open_context() as bench:
            check_names(flatten(steps), policy, bench)
    return steps


def refuse_export_keys(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: `export:` says something of an ONNX file, which is not exported.
    """
    if config.model.onnx is None:
        return
    default = ExportConfig()
    for key in ("opset", "input_names", "output_names", "pieces"):
        if getattr(config.export, key) != getattr(default, key):
            raise ConfigError(f"export.{key}: an ONNX file is not exported and stays as it is; leave this key out")


def remember_settings(config: RunConfig, workspace: Workspace) -> None:
    """Write down that the names and options are right."""
    workspace.save(STAGE, _key(config), True)


def _key(config: RunConfig) -> str:
    return key_of(config.passes.model_dump(mode="json"), library_versions())


def _check_paths(config: RunConfig) -> None:
    model = config.model
    paths = [model.onnx, config.checkpoint]
    if model.transformers is not None and isinstance(model.transformers.config, str):
        paths.append(model.transformers.config)
    if model.factory is not None:
        file, _ = split_factory(model.factory)
        paths.append(file if file.endswith(".py") else None)
    for path in paths:
        if path is not None:
            locate(path)
    if config.verify.inputs:
        from pipeline.verify.user_inputs import input_files

        input_files(config.verify.inputs)
