"""`onnxline.optimize` and `onnxline.run`: what the commands of these names do, called from Python."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import onnx

from passes.policy.policy import check_lists
from passes.recipe.recipe import RecipeItem
from passes.run.result import OptimizeResult, PassRow, PassRun
from passes.suggest import nearest, plural
from pipeline.argument_checks import FUNCTION, expects
from pipeline.config import RunConfig, check_passes
from pipeline.errors import ConfigError, SourceError, UsageError
from pipeline.events import Observer, PassEnded, Progress, StageEnded, StageStarted, show_progress
from pipeline.result import RunResult

if TYPE_CHECKING:  # torch takes seconds to import, and an ONNX file does not need it
    import torch
    from torch import nn

    from pipeline.export import TorchSource


@overload
def optimize(
    model: nn.Module,
    args: tuple[Any, ...] | torch.Tensor | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    recipe: Sequence[RecipeItem] | None = None,
    skip: Sequence[str] = (),
    keep: Sequence[str] = (),
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
    progress: bool | None = None,
    **options: Any,
) -> RunResult: ...


@overload
def optimize(
    model: onnx.ModelProto | str | PathLike[str],
    *,
    recipe: Sequence[RecipeItem] | None = None,
    skip: Sequence[str] = (),
    keep: Sequence[str] = (),
    progress: bool | None = None,
    **options: Any,
) -> PassRun: ...


def optimize(
    model: nn.Module | onnx.ModelProto | str | PathLike[str],
    args: tuple[Any, ...] | torch.Tensor | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    recipe: Sequence[RecipeItem] | None = None,
    skip: Sequence[str] = (),
    keep: Sequence[str] = (),
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
    progress: bool | None = None,
    **options: Any,
) -> OptimizeResult:
    """Run a recipe over a model; prove after every pass that it computes the same and has the structures to keep.

    Args:
        model: a torch module, which is exported first and left as it was; or an ONNX model or the path of one, for
            which torch is not needed. An ONNX model is its own reference.
        args: the arguments of the call that exports the module; a single tensor is taken as a tuple of one.
        kwargs: keyword arguments of that call.
        recipe: the passes, in order; without it, the default recipe.
        skip: passes to leave out: docs/reference/configuration.md.
        keep: structures to keep, such as `qkv`.
        out: the folder of the artifacts of a module's run; by default `runs/` and the name of its class.
        settings: further sections of a configuration, such as `{"export": {"dynamic_shapes": {"x": {0: "batch"}}}}`.
        observer: called with each event of a module's run.
        progress: None shows a progress bar in a notebook and on a terminal, True shows lines elsewhere too, and False
            shows nothing.
        options: for a module, further keys of `passes:` such as `strict`; for ONNX, those of `passes.optimize`.

    Returns:
        An `OptimizeResult`: `passes`, `structures`, `reverted`, `save(path)` and `to_proto()`. For a module this is the
        `RunResult` of `Pipeline.run`, which has the stages and the files too; for ONNX the `PassRun` of
        `passes.optimize`, which has the coverage of the proof and the encodings too.

    Raises:
        OnnxlineError: its kinds are drawn in `passes.errors`.

    Example:
        >>> import onnxline
        >>> run = onnxline.optimize("model.onnx", recipe=["fuse_qkv"], keep=["qkv"], progress=False)
        >>> [structure.kept for structure in run.structures]
        [True]
    """
    check_observer(observer)
    check_lists(skip=skip, keep=keep, **({} if recipe is None else {"recipe": recipe}))
    policy = {"skip": skip, "keep": keep, **({} if recipe is None else {"recipe": recipe}), **options}
    if isinstance(model, onnx.ModelProto | str | PathLike):
        from passes.optimize import optimize as optimize_onnx

        for_modules = {"args": args, "kwargs": kwargs, "out": out, "settings": settings, "observer": observer}
        misplaced = [name for name, value in for_modules.items() if value is not None]
        if misplaced:
            raise UsageError(
                f"optimize: found {misplaced[0]!r} with an ONNX model, expected it with a torch module only"
            )
        known = inspect.signature(optimize_onnx).parameters
        unknown = [name for name in options if name not in known]
        if unknown:
            hint = nearest(unknown[0], known) or "; docs/reference/python.md has those that it takes"
            raise UsageError(f"optimize: found {unknown[0]!r}, which is no option for an ONNX model{hint}")
        with show_progress(progress) as show:
            show(StageStarted("passes"))
            begun = time.perf_counter()
            own = policy.pop("observer", None)

            def observe(name: str, index: int, total: int, row: PassRow | None) -> None:
                show(Progress("passes", name, index, total) if row is None else PassEnded(row))
                if own is not None:
                    own(name, index, total, row)

            found = optimize_onnx(
                model if isinstance(model, onnx.ModelProto) else Path(model), observer=observe, **policy
            )
            show(StageEnded("passes", time.perf_counter() - begun, False, plural(len(found.rows), "step")))
            return found
    with show_progress(progress, observer) as show:
        return _optimize_module(model, args, kwargs, policy, settings or {}, out, show)


def run(
    config: RunConfig | Mapping[str, Any] | str | PathLike[str],
    out: str | PathLike[str] | None = None,
    *,
    progress: bool | None = None,
    observer: Observer | None = None,
) -> RunResult:
    """Run a configuration: export, passes with proof, IR, plan and backends.

    Args:
        config: the path of a YAML file, or of an ONNX file, which then has all settings by default; or a configuration
            as a mapping or as a `RunConfig`.
        out: the folder of the artifacts; by default `runs/` and the name of the configuration.
        progress: None shows a progress bar in a notebook and on a terminal, True shows lines elsewhere too, and False
            shows nothing.
        observer: called with each event of the run.

    Returns:
        A RunResult: the passes, the structures, the files in `folder`, and what each backend computes.

    Raises:
        OnnxlineError: its kinds are drawn in `passes.errors`.

    Example:
        >>> import onnxline
        >>> config = {"name": "tiny", "model": {"onnx": "model.onnx"}, "passes": {"recipe": ["nop"]}}
        >>> result = onnxline.run({**config, "runtime": {"backends": ["plan"]}}, "run", progress=False)
        >>> result.model.as_posix()
        'run/model.onnx'
    """
    from pipeline.run import Pipeline

    check_observer(observer)
    if out is not None and not isinstance(out, str | PathLike):
        raise UsageError(f"run: out is {type(out).__name__}, expected the path of a folder")
    if isinstance(config, str | PathLike):
        config = RunConfig.from_source(Path(config))
    elif not isinstance(config, RunConfig):
        config = RunConfig.from_mapping(config)
    with show_progress(progress, observer) as show:
        return Pipeline(config, None if out is None else Path(out), show).run()


@expects(observer=FUNCTION.or_none())
def check_observer(observer: object) -> None:
    """Refuse an observer that cannot be called."""


def _optimize_module(
    module: Any,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    policy: Mapping[str, Any],
    settings: Mapping[str, Any],
    out: str | Path | None,
    observer: Observer,
) -> RunResult:
    from torch import nn

    from pipeline.export.build_source import describe_eval_mode
    from pipeline.export.factory import plain_module
    from pipeline.run import Pipeline

    if not isinstance(module, nn.Module):
        found = type(module).__name__
        raise SourceError(
            f"optimize: found {found}, expected a torch module, an onnx.ModelProto or an ONNX file's path"
        )
    for name, value, expected in (
        ("kwargs", kwargs, "a mapping of the call's keyword arguments"),
        ("settings", settings, "a mapping of sections of a configuration, such as {'export': {'opset': 18}}"),
    ):
        if value is not None and not isinstance(value, Mapping):
            raise UsageError(f"optimize: {name} is {type(value).__name__}, expected {expected}")
    if out is not None and not isinstance(out, str | PathLike):
        raise UsageError(f"optimize: out is {type(out).__name__}, expected the path of a folder")
    module, notes = plain_module(module, "optimize is given")
    config = _config_of(module, policy, settings)
    with _restore_mode(module):
        source = _source_of(module, args, kwargs, config)
        source = replace(source, notes=(*notes, *describe_eval_mode(source), *source.notes))
        return Pipeline(config, None if out is None else Path(out), observer, source).run()


def _config_of(module: nn.Module, policy: Mapping[str, Any], settings: Mapping[str, Any]) -> RunConfig:
    """The configuration of the run; `model.factory` names the class for reports, since the module is given."""
    kind = type(module)
    for key in ("model", "passes"):
        if not isinstance(settings.get(key, {}), Mapping):
            raise ConfigError(f"settings: {key} is {settings[key]!r}, expected a mapping")
    section = settings.get("model", {})
    taken = {"factory", "transformers", "onnx"} & set(section)
    if taken:
        raise ConfigError(f"settings: found model.{min(taken)}, but the module was given")
    both = [f"passes.{key}" for key in settings.get("passes", {}) if policy.get(key)]
    if both:
        raise ConfigError(f"settings: found {both[0]}, which was given as an argument too; leave one of them out")
    check_passes(policy, "optimize")
    data = {
        "name": kind.__name__ if kind.__name__.isascii() else "module",
        **settings,
        "model": {**section, "factory": f"{kind.__module__}:{kind.__name__}"},
        "passes": {**policy, **settings.get("passes", {})},
    }
    return RunConfig.from_mapping(data, title="settings")


def _source_of(module: nn.Module, args: Any, kwargs: Mapping[str, Any] | None, config: RunConfig) -> TorchSource:
    import torch

    from pipeline.export import Example, as_configured
    from pipeline.export.build_source import assemble
    from pipeline.export.load import check_dims
    from pipeline.export.source import with_dynamic_shapes

    if isinstance(args, torch.Tensor):
        args = (args,)
    if args is not None and not isinstance(args, tuple):
        raise SourceError(f"args: found {type(args).__name__}, expected a tuple of what the module is called with")
    tensors = (*module.parameters(), *module.buffers())
    device = next((tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), None)
    if device is not None:
        raise SourceError(f"the module is on {device}, and onnxline runs it on the CPU; give module.cpu()")
    example = None if args is None and kwargs is None else Example(args or (), dict(kwargs or {}))
    if example is None and not config.model.inputs:
        kind = type(module).__name__
        raise SourceError(f"optimize: found no args, expected a tuple of what {kind} is called with, such as (x,)")
    model = with_dynamic_shapes(config.model, config.export)
    given_in = "model.inputs of settings" if example is None else "args and kwargs"
    source = assemble(module, example, model, given_in=given_in)
    check_dims(model, source)
    return as_configured(source, config.export)


@contextmanager
def _restore_mode(module: nn.Module) -> Iterator[None]:
    """Put each part of the module back into its mode: the run needs eval mode, and the module is the user's."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
