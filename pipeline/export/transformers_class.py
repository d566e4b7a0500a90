"""`model.transformers`: a class of the `transformers` library, a configuration, and weights or a seed."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipeline.config import ModelConfig, TransformersConfig, locate
from pipeline.errors import OnnxlineError, SourceError
from pipeline.export.assemble import assemble
from pipeline.export.blame import first_line
from pipeline.export.checkpoint import read_checkpoint
from pipeline.export.inputs import named_dims
from pipeline.export.model_defaults import notes_on_defaults, set_defaults, sub_configs
from pipeline.export.model_inputs import with_derived_inputs
from pipeline.export.pretrained import class_of_folder, open_folder, read_config
from pipeline.export.quiet import quiet
from pipeline.export.source import TorchSource
from pipeline.export.weightless import without_weights

__all__ = ["make_from_transformers"]


def make_from_transformers(
    section: TransformersConfig, model: ModelConfig, *, weightless: bool = False, keep_mode: bool = False
) -> TorchSource:
    """Make the model: random weights from `model.seed`, or those of the checkpoint or the folder; or none at all.

    Raises:
        SourceError: no such class, an unknown or wrong configuration key, a checkpoint that does not fit.
    """
    notes: list[str] = []
    folder = open_folder(section.folder) if section.folder else None
    name, checkpoint = section.class_name or "", folder
    if folder is not None:
        name = class_of_folder(folder, read_config(folder), section)
    elif section.checkpoint is not None:
        checkpoint = locate(section.checkpoint)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        cls = _model_class(name, "model.transformers.class" if section.class_name else f"model.transformers: {folder}")
        config = _config(cls, section, folder)
        defaults = set_defaults(config)
        if folder is not None:
            notes += _set_for_folder(cls, config, section, weightless=weightless)
        if checkpoint is None or weightless:
            # A private name, but the only constructor that heeds dtype and attn_implementation of the configuration.
            with without_weights() if weightless else nullcontext():
                module = _attempt(lambda: cls._from_config(config), f"{name} cannot be made")
        else:
            module, extra = _with_weights(cls, config, checkpoint, allow_extra=folder is not None)
            notes += extra
        filled = with_derived_inputs(model, module)
        source = assemble(module, None, filled, keep_mode=keep_mode)
    return replace(
        source,
        notes=(*notes_on_defaults(module, defaults), *notes),
        weights=f"from {checkpoint}" if checkpoint else f"random, seed {model.seed}",
        dims={dim: sizes for dim in named_dims(source.inputs) if (sizes := filled.dims.get(dim))},
    )


def _set_for_folder(cls: Any, config: Any, section: TransformersConfig, *, weightless: bool) -> list[str]:
    """Set what makes the model of a folder run as one graph here, unless `model.transformers.config` says otherwise."""
    notes = []
    parts = (config, *sub_configs(config))
    if "use_cache" not in section.config:
        cached = [part for part in parts if getattr(part, "use_cache", None)]
        for part in cached:
            part.use_cache = False
        if cached and cls.can_generate():
            notes.append(
                "model.transformers.config: use_cache is set to false, so the cache is no output; true keeps it"
            )
    if "dtype" not in section.config and config.dtype == torch.bfloat16 and not weightless:
        for part in parts:
            part.dtype = torch.float32
        notes.append(
            "model.transformers.config: dtype bfloat16 is set to float32, which holds the same weights: onnxruntime's "
            "CPU kernels lack bfloat16; {dtype: bfloat16} keeps it"
        )
    return notes


def _class(name: str, key: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise SourceError(f"{key}: transformers is not installed: pip install 'onnxline[torch]'") from error
    found = getattr(transformers, name, None)
    if isinstance(found, type):
        return found
    near = difflib.get_close_matches(name, [one for one in dir(transformers) if one[:1].isupper()], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise SourceError(f"{key}: transformers {transformers.__version__} has no class {name!r}{hint}")


def _model_class(name: str, key: str) -> Any:
    """A class of models: not a tokenizer's, nor one that chooses among models."""
    found = _class(name, key)
    from transformers import PreTrainedModel

    if not issubclass(found, PreTrainedModel):
        kind = "chooses a class by itself" if name.startswith("Auto") else "is no class of models"
        raise SourceError(f"{key}: {name} {kind}; expected the class of the model, such as BertModel")
    return found


def _config(cls: Any, section: TransformersConfig, folder: Path | None) -> Any:
    name = section.config_class
    config_class = cls.config_class if name is None else _class(name, "model.transformers.config_class")
    if config_class is None:
        raise SourceError(f"{cls.__name__} has no configuration of its own; set model.transformers.config_class")
    title = f"model.transformers.config: {config_class.__name__} refuses it"
    if isinstance(section.config, str):
        path = locate(section.config)
        return _attempt(lambda: config_class.from_json_file(path), title)
    _refuse_unknown(config_class, section.config)
    keys = dict(section.config)
    if folder is not None:
        return _attempt(lambda: config_class.from_pretrained(str(folder), local_files_only=True, **keys), title)
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
            raise SourceError(f"model.transformers.config: {config_class.__name__} has no key {key!r}{hint}")


def _with_weights(cls: Any, config: Any, checkpoint: Path, *, allow_extra: bool) -> tuple[Any, list[str]]:
    """`from_pretrained` on tensors in memory: it knows old names, prefixes and tied weights. Nothing is fetched.

    Args:
        allow_extra: tensors that the class has not are a note and no mistake: folders of the hub have heads of others.
    """
    state = read_checkpoint(checkpoint)
    module, info = _attempt(
        lambda: cls.from_pretrained(
            None, config=config, state_dict=state, output_loading_info=True, ignore_mismatched_sizes=True
        ),
        f"checkpoint {checkpoint} does not load",
    )
    unused = info["unexpected_keys"]
    extra = [f"{len(unused)} tensors of {checkpoint} are not in {cls.__name__}: {_listed(unused)}"]
    problems = [
        f"{len(names)} {title}: {_listed(names)}"
        for title, names in (
            ("missing", info["missing_keys"]),
            ("unexpected", [] if allow_extra else unused),
            ("of another shape", info["mismatched_keys"]),
        )
        if names
    ]
    if problems:
        raise SourceError(
            f"checkpoint {checkpoint} does not fit {cls.__name__}: {'; '.join(problems)}; "
            "check the class and its configuration"
        )
    return module, extra if unused else []


def _listed(names: Collection[Any]) -> str:
    return f"{', '.join(sorted(map(_shown, names))[:3])}{', …' if len(names) > 3 else ''}"


def _shown(key: Any) -> str:
    return key if isinstance(key, str) else f"{key[0]} ({list(key[1])}, expected {list(key[2])})"


def _attempt(make: Any, title: str) -> Any:
    try:
        return make()
    except OnnxlineError:
        raise
    except Exception as error:  # transformers raises its validators' errors, torch's and plain ones
        said = " ".join(str(error).split())
        raise SourceError(f"{title}: {said or first_line(error)}") from error


# Taken by every configuration through **kwargs.
ALWAYS = (
    *("attn_implementation", "experts_implementation", "dtype", "torch_dtype"),
    *("name_or_path", "num_labels", "output_attentions"),
)
