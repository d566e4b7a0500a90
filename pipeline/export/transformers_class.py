"""`model.transformers`: a model from a class of `transformers`, a configuration or folder, and weights or a seed."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from passes.suggest import join_first, nearest, plural
from pipeline.config import ModelConfig, TransformersConfig, is_hub_name, locate
from pipeline.errors import OnnxlineError, SourceError
from pipeline.export.build_source import assemble, draw_biases
from pipeline.export.call_watch import capture_output
from pipeline.export.checkpoint import NAMES, float_dtype_of, open_safetensors, read_checkpoint, without_weights
from pipeline.export.source import TorchSource, named_dims
from pipeline.export.transformers_defaults import notes_on_experts, set_experts, sub_configs, with_derived_inputs
from pipeline.export.user_code import first_line


def make_from_transformers(
    section: TransformersConfig, model: ModelConfig, *, weightless: bool = False, keep_mode: bool = False
) -> TorchSource:
    """Make the model: random weights from `model.seed`, or those of the checkpoint or the folder; or none at all.

    Raises:
        SourceError: no such class, an unknown or wrong configuration key, a checkpoint that does not fit.
    """
    with capture_output(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        loaded = load_model(section, model, weightless=weightless)
        filled = with_derived_inputs(model, loaded.module)
        source = assemble(loaded.module, None, filled, keep_mode=keep_mode)
    return replace(
        source,
        notes=(*loaded.notes, *source.notes),
        weights=loaded.weights,
        dims={dim: sizes for dim in named_dims(source.inputs) if (sizes := filled.dims.get(dim))},
    )


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model of transformers. `weights` says where they come from, `notes` what was set: both for the report."""

    module: Any
    notes: tuple[str, ...]
    weights: str
    folder: Path | None
    """With config.json, and perhaps a tokenizer; None where the configuration is in the YAML."""


def load_model(section: TransformersConfig, model: ModelConfig, *, weightless: bool = False) -> LoadedModel:
    """Make the model without calling it; torch's random state is the caller's.

    Raises:
        SourceError: as for `make_from_transformers`.
    """
    notes: list[str] = []
    folder = open_folder(section.folder, fetch=model.task is not None) if section.folder else None
    name, checkpoint = section.class_name or "", folder
    if folder is not None:
        name = class_of_folder(folder, read_config(folder), section)
    elif section.checkpoint is not None:
        checkpoint = locate(section.checkpoint)
    cls = _model_class(name, "model.transformers.class" if section.class_name else f"model.transformers: {folder}")
    config = _config(cls, section, folder)
    _refuse_negative_layers(config)
    is_set = set_experts(config)
    if folder is not None:
        notes += _set_for_folder(cls, config, section, weightless=weightless, keep_cache=model.task is not None)
    if checkpoint is None or weightless:
        # A private name, but the only constructor that heeds dtype and attn_implementation of the configuration.
        with without_weights() if weightless else nullcontext():
            module = _attempt(lambda: cls._from_config(config), f"{name} cannot be made")
        if weightless:
            _keep_in_float32(module)
    else:
        module, extra = _with_weights(cls, config, checkpoint, allow_extra=folder is not None)
        notes += extra
    if model.random_biases:
        draw_biases(module, model.seed)
    biases = ", random biases" if model.random_biases else ""
    weights = f"from {checkpoint}" if checkpoint else f"random, seed {model.seed}{biases}"
    return LoadedModel(module, (*(notes_on_experts(module) if is_set else ()), *notes), weights, folder)


def _keep_in_float32(module: Any) -> None:
    """Give the tensors that the class keeps in float32 that type, as loading does and making a model does not."""
    kept = module._keep_in_fp32_modules_strict or ()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and any(part in kept for part in name.split(".")):
            tensor.data = tensor.data.float()


def _set_for_folder(
    cls: Any, config: Any, section: TransformersConfig, *, weightless: bool, keep_cache: bool
) -> list[str]:
    """Turn the cache and bfloat16 of a folder's model off, unless `model.transformers.config` sets these keys."""
    notes = []
    parts = (config, *sub_configs(config))
    if "use_cache" not in section.config and not keep_cache:
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
    cls = getattr(transformers, name, None)
    if isinstance(cls, type):
        return cls
    hint = nearest(name, (known for known in dir(transformers) if known[:1].isupper()))
    raise SourceError(f"{key}: transformers {transformers.__version__} has no class {name!r}{hint}")


def _model_class(name: str, key: str) -> Any:
    """The model class `name`; tokenizers and Auto classes are refused."""
    cls = _class(name, key)
    from transformers import PreTrainedModel

    if not issubclass(cls, PreTrainedModel):
        kind = "chooses a class by itself" if name.startswith("Auto") else "is no class of models"
        raise SourceError(f"{key}: {name} {kind}; expected the class of the model, such as BertModel")
    return cls


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
    """Refuse unknown keys: transformers ignores them, so a misspelt one would silently leave the default.

    A config.json is not checked: published ones carry keys of old releases.
    """
    known = {*inspect.signature(config_class.__init__).parameters, *config_class.attribute_map, *ALWAYS}
    known -= {"self", "kwargs"}
    for key in config:
        if key not in known:
            hint = nearest(key, sorted(known)) or f"; it knows: {', '.join(sorted(known))}"
            raise SourceError(f"model.transformers.config: {config_class.__name__} has no key {key!r}{hint}")


def _refuse_negative_layers(config: Any) -> None:
    """Refuse negative counts of layers, of which transformers makes a model without layers."""
    for part in (config, *sub_configs(config)):
        for key, value in vars(part).items():
            if LAYERS.fullmatch(key) and type(value) is int and value < 0:
                raise SourceError(f"model.transformers.config: found {key} {value}, expected 0 or more")


def _with_weights(cls: Any, config: Any, checkpoint: Path, *, allow_extra: bool) -> tuple[Any, list[str]]:
    """Load weights by `from_pretrained` on tensors in memory, which knows old names and tied weights; offline.

    Args:
        allow_extra: unknown tensors are a note and no mistake: folders of the hub may hold other heads.
    """
    state = read_checkpoint(checkpoint, open_safetensors)
    # Without a dtype in its configuration transformers asks each tensor, and these are not read yet.
    dtype = "auto" if config.dtype is not None else float_dtype_of(state)
    module, info = _attempt(
        lambda: cls.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        ),
        f"checkpoint {checkpoint} does not load",
    )
    unused = info["unexpected_keys"]
    extra = [f"{cls.__name__} lacks {plural(len(unused), 'tensor')} of {checkpoint}: {_names_text(unused)}"]
    problems = [
        f"{len(names)} {title}: {_names_text(names)}"
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


def _names_text(names: Collection[Any]) -> str:
    return join_first(sorted(map(_key_text, names)), 3, ", …")


def _key_text(key: Any) -> str:
    return key if isinstance(key, str) else f"{key[0]} ({list(key[1])}, expected {list(key[2])})"


def _attempt(make: Any, title: str) -> Any:
    try:
        return make()
    except OnnxlineError:
        raise
    except Exception as error:  # transformers raises its validators' errors, torch's and plain ones
        said = " ".join(str(error).split())
        raise SourceError(f"{title}: {said or first_line(error)}") from error


LAYERS = re.compile(r"(n|num|encoder|decoder)_(\w+_)?layers?")
"""Keys for numbers of layers; `vision_feature_layer: -2` is an index and does not match."""

# Taken by every configuration through **kwargs.
ALWAYS = (
    *("attn_implementation", "experts_implementation", "dtype", "torch_dtype"),
    *("name_or_path", "num_labels", "output_attentions"),
)


CONFIG: Final = "config.json"

FOREIGN: Final[Mapping[str, str]] = {
    "adapter_config.json": "an adapter of PEFT: call merge_and_unload() and save_pretrained, and name that folder",
    "model_index.json": "a pipeline of diffusers, whose folders hold its models: use a factory that makes one of them",
    "*.gguf": "weights of GGUF: load them with transformers' gguf_file and call save_pretrained, and name that folder",
    "tf_model.h5": "weights of TensorFlow: fetch the safetensors of the same model",
    "flax_model.msgpack": "weights of Flax: fetch the safetensors of the same model",
}
"""Files of folders that cannot be read here → what the folder is, and what to do."""


def open_folder(text: str, *, fetch: bool = False) -> Path:
    """Check that a folder has a config.json and weights.

    Args:
        fetch: take `text` for a name of the hub where there is no such folder.

    Raises:
        SourceError: the folder is missing, or lacks one of them; the hub does not have it, or cannot be reached.
    """
    folder = _find_folder(text, fetch=fetch)
    if folder.is_file():
        raise SourceError(f"model.transformers: {text} is a file, expected a folder that save_pretrained wrote")
    if not (folder / CONFIG).is_file():
        raise _refusal(folder, f"no {CONFIG}")
    if not any((folder / name).is_file() for name in NAMES):
        without = "for random weights name the class and its configuration: {class: …, config: …/config.json}"
        raise _refusal(folder, f"no weights ({', '.join(NAMES)})", without)
    return folder


def _find_folder(text: str, *, fetch: bool = False) -> Path:
    if Path(text).exists() or text.startswith("package:"):
        return locate(text)
    if fetch and is_hub_name(text):
        return _fetch_from_hub(text)
    raise SourceError(
        f"model.transformers: no folder {text!r}; relative paths are relative to the configuration file. Nothing is "
        "downloaded: for a model of the hub call `hf download OWNER/NAME --local-dir FOLDER` and name that folder"
    )


def _fetch_from_hub(name: str) -> Path:
    """The folder of a model of Hugging Face's hub in huggingface_hub's cache; files there are not fetched again."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except LocalEntryNotFoundError as error:
        raise SourceError(
            f"model.transformers: no folder {name!r}, nor has huggingface_hub's cache this model, and the hub cannot "
            f"be reached ({first_line(error).rstrip('.')}); call `hf download {name} --local-dir FOLDER` where there "
            "is a network, and name that folder"
        ) from error
    except Exception as error:  # errors of the hub, of its library and of the network have no common type
        raise SourceError(
            f"model.transformers: no folder {name!r}, and the hub gives no model of this name: {first_line(error)}; "
            "check the name, or where there is no network, name a folder that `hf download` or save_pretrained wrote"
        ) from error


HUB_FILES: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""What is fetched of a model: configuration, weights and tokenizer."""


def _refusal(folder: Path, lacks: str, advice: str = "") -> SourceError:
    kind = next((said for pattern, said in FOREIGN.items() if any(folder.glob(pattern))), "")
    files = sorted(path.name for path in folder.iterdir())
    said = f"it has {kind}" if kind else advice or "expected what save_pretrained writes"
    return SourceError(f"model.transformers: {folder} has {lacks}; {said}; found {join_first(files, 8) or 'nothing'}")


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        SourceError: it is no JSON mapping, or declares quantized weights.
    """
    path = folder / CONFIG
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"model.transformers: {path} is not JSON ({error})") from error
    if not isinstance(data, dict):
        raise SourceError(f"model.transformers: {path} holds {type(data).__name__}, expected a mapping")
    method = data.get("quantization_config")
    if method:
        name = method.get("quant_method", "unknown") if isinstance(method, dict) else "unknown"
        raise SourceError(
            f"model.transformers: the weights of {folder} are quantized ({name}), and no operator of ONNX reads that "
            "form; take the checkpoint from before quantization"
        )
    return data


def class_of_folder(folder: Path, data: Mapping[str, Any], section: TransformersConfig) -> str:
    """The name of the model class: the configured one, else the first of `architectures`.

    Raises:
        SourceError: neither exists.
    """
    if section.class_name is not None:
        return section.class_name
    names = data.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        if data.get("auto_map"):
            raise SourceError(
                f"model.transformers: {folder} has code of its own (auto_map), which is not run; if transformers has "
                f"the class too, name it: {{folder: …, class: {names[0]}}}; else use a factory"
            )
        return names[0]
    raise SourceError(
        f"model.transformers: {folder / CONFIG} has no 'architectures'; name the class: {{folder: …, class: …}}"
    )
