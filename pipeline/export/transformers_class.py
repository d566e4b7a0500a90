"""`model.transformers`: a class of the `transformers` library, a configuration, and weights or a seed."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from pipeline.config import ModelConfig, TransformersConfig, locate
from pipeline.errors import OnnxlineError, SourceMistake
from pipeline.export.assemble import assemble
from pipeline.export.blame import first_line
from pipeline.export.checkpoint import read_checkpoint
from pipeline.export.model_defaults import notes_on_defaults, set_defaults
from pipeline.export.quiet import quiet
from pipeline.export.source import TorchSource
from pipeline.export.weightless import without_weights

__all__ = ["make_from_transformers"]


def make_from_transformers(
    section: TransformersConfig, model: ModelConfig, *, weightless: bool = False, keep_mode: bool = False
) -> TorchSource:
    """Make the model: random weights from `model.seed`, or those of the checkpoint; or none at all.

    Raises:
        SourceMistake: no such class, an unknown or wrong configuration key, a checkpoint that does not fit.
    """
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        cls = _class(section.class_name, "model.transformers.class")
        config = _config(cls, section)
        defaults = set_defaults(config)
        if section.checkpoint is None or weightless:
            # A private name, but the only constructor that heeds dtype and attn_implementation of the configuration.
            with without_weights() if weightless else nullcontext():
                made = _attempt(lambda: cls._from_config(config), f"{section.class_name} cannot be made")
        else:
            made = _with_weights(cls, config, section.checkpoint)
    return replace(assemble(made, None, model, keep_mode=keep_mode), notes=notes_on_defaults(made, defaults))


def _class(name: str, key: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise SourceMistake(f"{key}: transformers is not installed: pip install 'onnxline[torch]'") from error
    found = getattr(transformers, name, None)
    if isinstance(found, type):
        return found
    near = difflib.get_close_matches(name, [one for one in dir(transformers) if one[:1].isupper()], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise SourceMistake(f"{key}: transformers {transformers.__version__} has no class {name!r}{hint}")


def _config(cls: Any, section: TransformersConfig) -> Any:
    name = section.config_class
    config_class = cls.config_class if name is None else _class(name, "model.transformers.config_class")
    if config_class is None:
        raise SourceMistake(
            f"{section.class_name} has no configuration of its own; set model.transformers.config_class"
        )
    title = f"model.transformers.config: {config_class.__name__} refuses it"
    if isinstance(section.config, str):
        path = locate(section.config)
        return _attempt(lambda: config_class.from_json_file(path), title)
    _refuse_unknown(config_class, section.config)
    keys = dict(section.config)
    return _attempt(lambda: config_class(**keys), title)


def _refuse_unknown(config_class: Any, config: Mapping[str, Any]) -> None:
    """transformers takes any key and forgets it; a misspelt one would silently leave the default.

    A config.json is not held to this: published ones carry keys of releases long past.
    """
    known = {*inspect.signature(config_class.__init__).parameters, *config_class.attribute_map, *ALWAYS}
    known -= {"self", "kwargs"}
    for key in config:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it knows: {', '.join(sorted(known))}"
            raise SourceMistake(f"model.transformers.config: {config_class.__name__} has no key {key!r}{hint}")


def _with_weights(cls: Any, config: Any, checkpoint: str) -> Any:
    """`from_pretrained` on tensors in memory: it knows old names, prefixes and tied weights. Nothing is fetched."""
    state = read_checkpoint(locate(checkpoint))
    made, info = _attempt(
        lambda: cls.from_pretrained(
            None, config=config, state_dict=state, output_loading_info=True, ignore_mismatched_sizes=True
        ),
        f"checkpoint {checkpoint} does not load",
    )
    problems = [
        f"{len(names)} {title}: {', '.join(sorted(map(_shown, names))[:3])}{', …' if len(names) > 3 else ''}"
        for title, names in (
            ("missing", info["missing_keys"]),
            ("unexpected", info["unexpected_keys"]),
            ("of another shape", info["mismatched_keys"]),
        )
        if names
    ]
    if problems:
        raise SourceMistake(
            f"checkpoint {checkpoint} does not fit {cls.__name__}: {'; '.join(problems)}; "
            "check the class and its configuration"
        )
    return made


def _shown(key: Any) -> str:
    return key if isinstance(key, str) else f"{key[0]} ({list(key[1])}, expected {list(key[2])})"


def _attempt(make: Any, title: str) -> Any:
    try:
        return make()
    except OnnxlineError:
        raise
    except Exception as error:  # transformers raises its validators' errors, torch's and plain ones
        said = " ".join(str(error).split())
        raise SourceMistake(f"{title}: {said or first_line(error)}") from error


# Taken by every configuration through **kwargs.
ALWAYS = (
    *("attn_implementation", "experts_implementation", "dtype", "torch_dtype"),
    *("name_or_path", "num_labels", "output_attentions"),
)
