"""Sources of parts: the model of `model.transformers`, loaded once, as the module of each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from passes.proof.draws import GivenDraw
from passes.suggest import plural
from pipeline.config import CacheConfig, ModelConfig, VerifyConfig
from pipeline.errors import ConfigError
from pipeline.export.build_source import assemble
from pipeline.export.call_watch import capture_output
from pipeline.export.parts.decoder import CachedDecoder, switch_of_rotation
from pipeline.export.parts.diffusion import CallFile
from pipeline.export.parts.draws import draw_calls
from pipeline.export.parts.features import FeaturesPart
from pipeline.export.parts.holder import TaskPart
from pipeline.export.parts.image_text import EmbeddingPart, ImageTextDecoder, VisionPart
from pipeline.export.parts.seq2seq import Decoder, Encoder
from pipeline.export.parts.states import KEPT
from pipeline.export.parts.static import StaticDecoder
from pipeline.export.source import Source, TorchSource, named_dims
from pipeline.export.transformers_class import LoadedModel, load_model


def load_for_parts(model: ModelConfig, *, weightless: bool = False, calls: CallFile | None = None) -> LoadedModel:
    """Load the model, or the pipeline of diffusers, in eval mode.

    Args:
        calls: keeps the calls of a pipeline's models for a later run.

    Raises:
        SourceError: it cannot be made.
    """
    with capture_output(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        if model.diffusers is not None:
            from pipeline.export.parts.diffusers_pipeline import load_pipeline

            return load_pipeline(model.diffusers, model, calls)
        assert model.transformers is not None
        loaded = load_model(model.transformers, model, weightless=weightless)
        loaded.module.eval()
    return loaded


def make_part(model: ModelConfig, loaded: LoadedModel) -> TorchSource:
    """Make the source of `model.part`, with draws of its own.

    Raises:
        ConfigError: the task has several parts, and none of them is named.
        SourceError: the model is none for the task.
    """
    if len(model.part_names) > 1:
        listing = " or ".join(f"--set model.part={name}" for name in model.part_names)
        raise ConfigError(
            f"model.task: found {plural(len(model.part_names), 'part')}, expected one of them here: {listing}"
        )
    with capture_output(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        part = PARTS_OF_TASKS[model.task](model, loaded)
        is_free = isinstance(part, FeaturesPart)  # whose inputs are drawn as those of any model
        dims = part.derived.dims if is_free else {dim: (size,) for dim, size in part.sizes.items()}
        known = model.model_copy(update={"inputs": part.declarations(), "dims": dims})
        way_out = STATIC if model.task == "text-generation" else OWN_FACTORY
        source = assemble(part, part.example(), known, given_in=f"the model's code; or try this: {way_out}")
    cache = model.cache or CacheConfig()
    random = (RANDOM_SCALES,) if cache.dtype == KEPT and cache.scales != "token" and not cache.data else ()
    switch = switch_of_rotation(part.held_model.config) if isinstance(part, CachedDecoder) else None
    rotation = (SWITCH.format(kind=switch[0], limit=switch[1]),) if switch is not None else ()
    return replace(
        source,
        notes=(*loaded.notes, *source.notes, *random, *rotation),
        weights=loaded.weights,
        draws=None if is_free else _draws_of(part),
        dims={dim: dims[dim] for dim in named_dims(source.inputs) if dim in dims} if is_free else {},
        way_out=way_out,
    )


OWN_FACTORY: Final = "export it without a task, by a factory of your own with inputs of fixed shapes"
STATIC: Final = (
    "prefill and decode over a cache of fixed length, whose inputs have no dim that is open: model.cache: {kind: "
    f"static, length: 2048}}; or {OWN_FACTORY}"
)


RANDOM_SCALES: Final = (
    "model.cache.data names no prompts, so the scales of the cache are those of random tokens, and say nothing of the "
    "model in use; give files .npz with an array input_ids"
)


SWITCH: Final = (
    "RoPE of the kind {kind} takes other frequencies for a text of more than {limit} tokens: keys that are in the "
    "cache when a text grows beyond them keep the earlier ones, as in torch; transformers' generate of Phi-3 computes "
    "the cache anew there, for which an application reads the whole text in one call"
)


def _draws_of(part: TaskPart) -> Callable[[VerifyConfig], Sequence[GivenDraw]]:
    return partial(draw_calls, part) if isinstance(part, CachedDecoder | StaticDecoder) else part.draw


def _make_features(model: ModelConfig, loaded: LoadedModel) -> TaskPart:
    return FeaturesPart(loaded.module, model, loaded.folder)


def _make_decoder(model: ModelConfig, loaded: LoadedModel) -> TaskPart:
    cache = model.cache or CacheConfig()
    settings: dict[str, Any] = {"folder": loaded.folder, "last_only": model.logits == "last"}
    if cache.kind == "dynamic":
        return CachedDecoder(loaded.module, **settings)
    return StaticDecoder(loaded.module, cache, cache.tokens if model.part == "prefill" else 1, **settings)


def _make_seq2seq(model: ModelConfig, loaded: LoadedModel) -> TaskPart:
    kind = Encoder if model.part == "encoder" else Decoder
    return kind(loaded.module, model, loaded.folder)


def _make_image_text(model: ModelConfig, loaded: LoadedModel) -> TaskPart:
    if model.part == "decoder":
        return ImageTextDecoder(loaded.module, loaded.folder, last_only=model.logits == "last")
    return (VisionPart if model.part == "vision" else EmbeddingPart)(loaded.module, loaded.folder)


def _component(model: ModelConfig, loaded: LoadedModel) -> TaskPart:
    return loaded.module.part(model.part)


PARTS_OF_TASKS: Final[Mapping[str | None, Callable[[ModelConfig, LoadedModel], TaskPart]]] = {
    "text-generation": _make_decoder,
    "text2text-generation": _make_seq2seq,
    "automatic-speech-recognition": _make_seq2seq,
    "feature-extraction": _make_features,
    "image-text-to-text": _make_image_text,
    None: _component,
}
"""Task, or None for a pipeline of diffusers → makes the module of `model.part`."""


def part_of(source: Source | None) -> TaskPart:
    """The module of the source of a part."""
    assert isinstance(source, TorchSource) and isinstance(source.module, TaskPart)
    return source.module
