"""Sources of parts: the model of `model.transformers`, loaded once, as the module of each part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from pipeline.config import InputConfig, ModelConfig, TransformersConfig
from pipeline.export.build_source import assemble
from pipeline.export.call_watch import capture_output
from pipeline.export.parts.decoder import CachedDecoder
from pipeline.export.parts.draws import draw_calls
from pipeline.export.source import Source, TorchSource
from pipeline.export.transformers_class import load_model


def make_decoder(section: TransformersConfig, model: ModelConfig, *, weightless: bool = False) -> TorchSource:
    """Make the source of the part `decoder`, with draws of its own.

    Raises:
        SourceError: the model cannot be made, or is no causal LM with a cache.
    """
    with capture_output(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        loaded = load_model(section, model, weightless=weightless)
        loaded.module.eval()
        decoder = CachedDecoder(loaded.module, loaded.folder, last_only=model.logits == "last")
        example = decoder.example()
        inputs = {name: _declaration(name, axes, decoder.vocabulary) for name, axes in decoder.named_axes().items()}
        dims = {dim: (size,) for dim, size in decoder.sizes.items()}
        source = assemble(decoder, example, model.model_copy(update={"inputs": inputs, "dims": dims}))
    return replace(
        source,
        notes=(*loaded.notes, *source.notes),
        weights=loaded.weights,
        draws=partial(draw_calls, decoder),
    )


def _declaration(name: str, axes: Mapping[int, str], vocabulary: int) -> InputConfig:
    known = {"input_ids": (0.0, float(vocabulary)), "attention_mask": (0.0, 2.0)}
    return InputConfig(dynamic=dict(axes), range=known.get(name), padding=name == "attention_mask")


def decoder_of(source: Source | None) -> CachedDecoder:
    """The module of the source of a part."""
    assert isinstance(source, TorchSource) and isinstance(source.module, CachedDecoder)
    return source.module
