"""`model.transformers.folder`: what `save_pretrained` wrote → the model class, its configuration, its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pipeline.config import TransformersConfig, locate
from pipeline.errors import SourceError
from pipeline.export.checkpoint import NAMES

__all__ = ["class_of_folder", "open_folder", "read_config"]

CONFIG: Final = "config.json"

FOREIGN: Final[Mapping[str, str]] = {
    "adapter_config.json": "an adapter of PEFT: call merge_and_unload() and save_pretrained, and name that folder",
    "model_index.json": "a pipeline of diffusers, whose folders hold its models: use a factory that makes one of them",
    "*.gguf": "weights of GGUF: load them with transformers' gguf_file and call save_pretrained, and name that folder",
    "tf_model.h5": "weights of TensorFlow: fetch the safetensors of the same model",
    "flax_model.msgpack": "weights of Flax: fetch the safetensors of the same model",
}
"""A file that tells what a folder is, or which weights it has, that cannot be read here."""


def open_folder(text: str) -> Path:
    """The folder, with a config.json and weights in it.

    Raises:
        SourceError: it is not there, or lacks something.
    """
    folder = _located(text)
    if folder.is_file():
        raise SourceError(f"model.transformers: {text} is a file, expected a folder that save_pretrained wrote")
    if not (folder / CONFIG).is_file():
        raise _refusal(folder, f"no {CONFIG}")
    if not any((folder / name).is_file() for name in NAMES):
        without = "for random weights name the class and its configuration: {class: …, config: …/config.json}"
        raise _refusal(folder, f"no weights ({', '.join(NAMES)})", without)
    return folder


def _located(text: str) -> Path:
    if Path(text).exists() or text.startswith("package:"):
        return locate(text)
    raise SourceError(
        f"model.transformers: no folder {text!r}; relative paths are relative to the configuration file. Nothing is "
        "downloaded: for a model of the hub call `hf download OWNER/NAME --local-dir FOLDER` and name that folder"
    )


def _refusal(folder: Path, lacks: str, advice: str = "") -> SourceError:
    kind = next((said for pattern, said in FOREIGN.items() if any(folder.glob(pattern))), "")
    found = sorted(path.name for path in folder.iterdir())
    listing = ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
    said = f"it has {kind}" if kind else advice or "expected what save_pretrained writes"
    return SourceError(f"model.transformers: {folder} has {lacks}; {said}; found {listing or 'nothing'}")


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says.

    Raises:
        SourceError: it is no JSON mapping, or says that the weights cannot be taken as they are.
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
    """The name of the model class: the one that was asked for, else the first of `architectures`.

    Raises:
        SourceError: there is neither.
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
