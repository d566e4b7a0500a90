"""`model.diffusers`: a pipeline from a folder or from classes, with tokens in the place of its tokenizers."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from pipeline.config import DiffusersConfig, ModelConfig
from pipeline.errors import MissingExtra, SourceError
from pipeline.export.parts.diffusion import CallFile, DiffusionModels
from pipeline.export.transformers_class import LoadedModel
from pipeline.export.user_code import first_line


def load_pipeline(section: DiffusersConfig, model: ModelConfig, calls: CallFile | None = None) -> LoadedModel:
    """Load or make the pipeline, and record the calls of its models.

    Args:
        calls: keeps the calls for a later run.

    Raises:
        MissingExtra: diffusers is not installed.
        SourceError: a component is missing or cannot be made, or the pipeline does not run.
    """
    try:
        importlib.import_module("diffusers")
    except ImportError as error:
        raise MissingExtra("diffusers", "model.diffusers") from error
    folder = Path(section.folder) if section.folder is not None else None
    pipe = _pipeline_of_folder(folder) if folder is not None else _pipeline_of_classes(section)
    for name in pipe.components:
        if name.startswith("tokenizer"):
            encoder = pipe.components.get(name.replace("tokenizer", "text_encoder"))
            if encoder is not None:
                length = getattr(encoder.config, "max_position_embeddings", None) or DEFAULT_LENGTH
                setattr(pipe, name, WordTokens(encoder.config.vocab_size, length))
                if hasattr(pipe, "tokenizer_max_length") and name == "tokenizer":
                    pipe.tokenizer_max_length = length
    models = DiffusionModels(pipe, section, model.seed).eval()
    models.record(calls)
    return LoadedModel(models, (), f"from {folder}" if folder else f"random, seed {model.seed}", folder)


DEFAULT_LENGTH: Final = 77
"""Tokens of a prompt for a text encoder whose configuration names no limit, as CLIP has it."""


def _pipeline_of_folder(folder: Path) -> Any:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    components = {name: entry for name, entry in index.items() if isinstance(entry, list) and entry[0] is not None}
    tokenizers = {name: None for name in components if name.startswith("tokenizer")}
    missing = next((name for name in components if name not in tokenizers and not (folder / name).is_dir()), None)
    if missing is not None:
        raise SourceError(
            f"model.diffusers: {folder} has no folder {missing!r}, which its model_index.json names; fetch the whole "
            "pipeline, or write it again by save_pretrained"
        )
    try:
        return DiffusionPipeline.from_pretrained(
            str(folder), local_files_only=True, torch_dtype=torch.float32, low_cpu_mem_usage=False, **tokenizers
        )
    except Exception as error:  # errors of diffusers, transformers and safetensors have no common type
        raise SourceError(f"model.diffusers: {folder} does not load: {first_line(error)}") from error


def _pipeline_of_classes(section: DiffusersConfig) -> Any:
    import diffusers
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    cls = getattr(diffusers, section.class_name or "", None)
    if not isinstance(cls, type) or not issubclass(cls, DiffusionPipeline):
        raise SourceError(
            f"model.diffusers.class: diffusers {diffusers.__version__} has no pipeline {section.class_name!r}; "
            "expected a name such as StableDiffusionPipeline"
        )
    made = {
        name: _make_component(name, component.class_name, component.config)
        for name, component in section.components.items()
    }
    parameters = inspect.signature(cls.__init__).parameters
    unknown = next((name for name in made if name not in parameters), None)
    if unknown is not None:
        raise SourceError(f"model.diffusers.components: {section.class_name} takes no {unknown!r}")
    needed = [
        name
        for name, parameter in parameters.items()
        if name not in ("self", *made)
        and parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    optional = ("tokenizer", "safety_checker", "feature_extractor", "image_encoder")
    missing = next((name for name in needed if not name.startswith(optional)), None)
    if missing is not None:
        raise SourceError(f"model.diffusers.components: {section.class_name} needs {missing!r}, which is not there")
    extra = {"requires_safety_checker": False} if "requires_safety_checker" in parameters else {}
    try:
        return cls(**made, **dict.fromkeys(needed), **extra)
    except Exception as error:  # a pipeline's own checks
        raise SourceError(f"model.diffusers: {section.class_name} cannot be made: {first_line(error)}") from error


def _make_component(name: str, class_name: str, config: Mapping[str, Any]) -> Any:
    import diffusers
    import transformers

    cls: Any = getattr(diffusers, class_name, None) or getattr(transformers, class_name, None)
    if not isinstance(cls, type):
        raise SourceError(
            f"model.diffusers.components.{name}.class: neither diffusers nor transformers has {class_name!r}"
        )
    try:
        settings = getattr(cls, "config_class", None)
        return cls(settings(**config)) if settings is not None else cls(**config)
    except Exception as error:  # a class's own checks
        raise SourceError(
            f"model.diffusers.components.{name}: {class_name} cannot be made: {first_line(error)}"
        ) from error


class WordTokens:
    """Stands for a tokenizer: tokens by a text's own letters, of the whole length, with a mask that leaves some out.

    So that a pipeline runs without the files of a tokenizer, and a proof needs no words.
    """

    added_tokens_encoder: Mapping[str, int] = {}

    def __init__(self, vocabulary: int, length: int) -> None:
        self._vocabulary, self.model_max_length = vocabulary, length

    def tokenize(self, text: str) -> list[str]:
        return text.split()

    def batch_decode(self, ids: Any, **_: Any) -> list[str]:
        return [""] * len(ids)

    def __call__(self, text: str | Sequence[str], max_length: int | None = None, **_: Any) -> Any:
        from transformers import BatchEncoding

        length = max_length or self.model_max_length
        texts = [text] if isinstance(text, str) else list(text)
        rows = []
        for row in texts:
            generator = torch.Generator().manual_seed(sum(map(ord, row)) + len(row))
            rows.append(torch.randint(0, self._vocabulary, (length,), generator=generator))
        mask = torch.ones(len(texts), length, dtype=torch.int64)
        for place, row in enumerate(texts):
            mask[place, 1 + len(row) :] = 0
        return BatchEncoding({"input_ids": torch.stack(rows), "attention_mask": mask})
