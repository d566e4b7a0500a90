"""A model with an encoder and a decoder as two graphs, of which the first computes the cache of cross attention.

    encoder: input_ids, attention_mask → last_hidden_state, present.N.encoder.key, present.N.encoder.value
    decoder: input_ids, encoder_attention_mask, past_key_values.N.SIDE.NAME → logits, present.N.decoder.NAME

Keys and values of cross attention follow from the encoder alone, so they are computed once a text, and the decoder
reads them in each call; its own cache grows. One graph of the decoder does the first token and each further one. The
caches are transformers' own. What is cached, and whether a mask of the source changes the result, is found by calling
the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from passes.proof.draws import Draw, GivenDraw
from pipeline.config import InputConfig, ModelConfig, VerifyConfig
from pipeline.errors import SourceError
from pipeline.export.checkpoint import is_weightless
from pipeline.export.parts.draws import flat_arrays
from pipeline.export.parts.holder import TaskPart
from pipeline.export.parts.states import BATCH, PAST, States, fill_cache, is_equal, new_cache, read_states, specs_of
from pipeline.export.patches import apply_patches
from pipeline.export.source import Example
from pipeline.export.transformers_defaults import with_derived_inputs
from pipeline.export.user_code import first_line

SOURCE: Final = "encoder_sequence_length"
TOKENS: Final = "decoder_sequence_length"
PAST_TOKENS: Final = "past_decoder_sequence_length"
"""Names of dims, in the words of optimum-onnx."""

OWN: Final = "decoder"
CROSS: Final = "encoder"
"""Which cache a state belongs to: that of the decoder's own tokens, or that of the encoder's."""

Sides = Mapping[str, Mapping[str, Mapping[str, Tensor]]]
"""Index of the layer → OWN or CROSS → name of the state → tensor."""


@dataclass(frozen=True, slots=True)
class Seq2SeqCall:
    """One call: rows, tokens of the source, and tokens of the decoder that are cached and new.

    In a padded call each row but the last ends with hidden tokens.
    """

    title: str
    batch: int
    source: int
    past: int = 0
    tokens: int = 1
    is_padded: bool = False


class Seq2SeqPart(TaskPart):
    """What both parts share.

    Args:
        model: of transformers with an encoder and a decoder, in eval mode; it is not copied.
        section: with what is known of the encoder's input, where that is no text.
        folder: that the model was loaded from, if any.

    Raises:
        SourceError: the model has no encoder and decoder, or does not run with a cache.
    """

    def __init__(self, model: Any, section: ModelConfig, folder: Path | None = None) -> None:
        super().__init__(model)
        self.folder, self.last_only = folder, section.logits == "last"
        name, parameters = type(model).__name__, inspect.signature(model.forward).parameters
        needed = ("encoder_outputs", "decoder_input_ids", "past_key_values")
        if not getattr(model.config, "is_encoder_decoder", False) or any(key not in parameters for key in needed):
            raise SourceError(
                f"model.task: {name} has no encoder and decoder with a cache; expected a model such as "
                "T5ForConditionalGeneration or WhisperForConditionalGeneration"
            )
        self.main: str = model.main_input_name
        derived = with_derived_inputs(section.model_copy(update={"inputs": {}, "dims": {}}), model)
        self.input = derived.inputs.get(self.main)
        if self.input is None or self.main not in inspect.signature(Encoder.forward).parameters:
            raise SourceError(
                f"model.task: the input {self.main!r} of {name} is not known; expected tokens or features"
            )
        try:
            self._learn()
        except Exception as error:  # a model's forward may raise anything
            raise SourceError(
                f"model.task: {name} does not run over a cache of transformers as a part has to, which takes one token "
                f"or several: {first_line(error)}; leave out model.task, and the model is one graph that takes no "
                "cache, or write a factory of your own"
            ) from error
        if not self.own_states or not self.cross_states:
            raise SourceError(
                f"model.task: {name} writes nothing into its cache; is use_cache honoured by its forward?"
            )

    @property
    def vocabulary(self) -> int:
        """How many tokens the decoder knows."""
        decoder = self.held_model.get_decoder()
        return decoder.get_input_embeddings().num_embeddings

    @property
    def start(self) -> int:
        """The token that a text of the decoder begins with."""
        return start_of(self.held_model)

    @property
    def is_text(self) -> bool:
        """Whether the encoder reads tokens, of any number."""
        return self.main == "input_ids"

    @torch.no_grad()
    def _learn(self) -> None:
        """Call the model a few times, and note what its caches hold and whether it reads the mask of its input."""
        self.has_mask, self.layers = True, 0
        self.output_class: Any = BaseModelOutput
        inputs = self.draw_inputs(2, 3, seed=0)
        hidden, cache = self._call(inputs, self._first_tokens(2), None)
        self.layers, self.width = len(cache.self_attention_cache.layers), hidden.shape[-1]
        self.own_states = specs_of(read_states(cache.self_attention_cache))
        self.cross_states = specs_of(read_states(cache.cross_attention_cache))
        self._call(inputs, self._first_tokens(2).repeat(1, 2), cache)  # several tokens, which ProphetNet refuses
        self.has_mask = self.is_text and (is_weightless(self) or self._reads_mask(inputs))

    def _reads_mask(self, inputs: Mapping[str, Tensor]) -> bool:
        mask = inputs["attention_mask"].clone()
        mask[:, -1] = 0
        found = [
            self._call({**inputs, "attention_mask": given}, self._first_tokens(2), None)[0]
            for given in (mask, mask | 1)
        ]
        return not is_equal(found[0][:, 0], found[1][:, 0])

    def _first_tokens(self, batch: int) -> Tensor:
        return torch.full((batch, 1), self.start, dtype=torch.int64, device=self.device)

    def _call(self, inputs: Mapping[str, Tensor], ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """The hidden states of the encoder, and the caches after the tokens `ids`; those of cross attention too."""
        mask = inputs.get("attention_mask")
        hidden = self.encode(inputs)
        cache = cache or (self.new_caches() if self.layers else None)
        _, cache = self.decode(ids, hidden, mask, cache)
        return hidden, cache

    def encode(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The hidden states of the encoder, float (batch, source, width)."""
        encoder = self.held_model.get_encoder()
        known = inspect.signature(encoder.forward).parameters
        given = {name: tensor for name, tensor in inputs.items() if name == self.main or name in known}
        with apply_patches(self.held_model):
            outputs = encoder(**given, return_dict=True)
        self.output_class = type(outputs)
        return outputs[0]

    def decode(self, ids: Tensor, hidden: Tensor, mask: Tensor | None, cache: Any) -> tuple[Tensor, Any]:
        """The logits, float (batch, tokens, vocabulary), and the caches after `ids`."""
        with apply_patches(self.held_model):
            # not `model(…)`: the tracer would look for the model among the modules of the holder
            result = self.held_model.forward(
                encoder_outputs=self.output_class(last_hidden_state=hidden),
                attention_mask=mask,
                decoder_input_ids=ids,
                past_key_values=cache,
                use_cache=True,
            )
        return result.logits, result.past_key_values

    def new_caches(self) -> Any:
        """Empty caches: of the decoder's own tokens, and of the encoder's."""
        caches = EncoderDecoderCache(self._new_cache(), self._new_cache())
        caches.is_updated = {}
        return caches

    def _new_cache(self) -> DynamicCache:
        """With as many layers as the model itself makes: of Whisper the configuration counts those of the encoder."""
        cache = new_cache(self.held_model.config)
        more = [DynamicLayer() for _ in range(self.layers - len(cache.layers))]
        cache.layers = [*cache.layers, *more][: self.layers]
        return cache

    def cross_cache(self, hidden: Tensor, mask: Tensor | None) -> States:
        """The states of cross attention: a call of the decoder for one token writes them, whatever the token is."""
        _, cache = self.decode(self._first_tokens(hidden.shape[0]), hidden, mask, self.new_caches())
        return read_states(cache.cross_attention_cache)

    def draw_inputs(self, batch: int, length: int, seed: int, *, padded: bool = False) -> dict[str, Tensor]:
        """Inputs of the encoder: `length` tokens, or features of the model's own length."""
        generator = torch.Generator().manual_seed(seed)
        assert self.input is not None and self.input.shape is not None
        if not self.is_text:
            low, high = self.input.range or (-1.0, 1.0)
            shape = [batch if isinstance(dim, str) else dim for dim in self.input.shape]
            features = torch.rand(shape, generator=generator) * (high - low) + low
            return {self.main: features.to(self.device)}
        vocabulary = self.held_model.get_encoder().get_input_embeddings().num_embeddings
        ids = torch.randint(0, vocabulary, (batch, length), generator=generator)
        ids[0, 0], ids[-1, -1] = vocabulary - 1, 0
        mask = torch.ones_like(ids)
        for row in range(batch - 1 if padded else 0):
            mask[row, max(1, length - 1 - row) :] = 0
        inputs = {"input_ids": ids.to(self.device)}
        return {**inputs, **({"attention_mask": mask.to(self.device)} if self.has_mask else {})}

    def draw(self, verify: VerifyConfig) -> Sequence[GivenDraw]:
        calls = self.calls * max(1, verify.draws // 2)
        return [
            GivenDraw(Draw(seed, self.sizes_of(call), source=call.title), flat_arrays(self.make_arguments(call, seed)))
            for seed, call in enumerate(calls, verify.seed)
        ]

    calls: tuple[Seq2SeqCall, ...] = ()

    def sizes_of(self, call: Seq2SeqCall) -> dict[str, int]:
        source = {SOURCE: call.source} if self.is_text else {}
        return {BATCH: call.batch, **source}

    def make_arguments(self, call: Seq2SeqCall, seed: int) -> dict[str, Any]:
        """The keyword arguments of a call."""
        raise NotImplementedError

    @property
    def sizes(self) -> dict[str, int]:
        return self.sizes_of(TRACED)

    @torch.no_grad()
    def example(self) -> Example:
        return Example((), self.make_arguments(TRACED, seed=0))

    def source_axes(self) -> dict[int, str]:
        """The open axes of the encoder's tokens."""
        return {0: BATCH, **({1: SOURCE} if self.is_text else {})}


class Encoder(Seq2SeqPart):
    """The part `encoder`. Args and Raises: as `Seq2SeqPart`."""

    calls = (
        Seq2SeqCall("a source", 2, 8),
        Seq2SeqCall("a padded source", 3, 5, is_padded=True),
        Seq2SeqCall("a source of one token", 1, 1),
        Seq2SeqCall("a source of thirteen", 1, 13),
    )

    def forward(
        self,
        input_ids: Tensor | None = None,
        input_features: Tensor | None = None,
        input_values: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> dict[str, Any]:
        """
        Args:
            input_ids: int64 (batch, source), or in its place what the model takes of a sound or an image.
            attention_mask: int64 (batch, source), 1 for each token that counts; where the model reads it.

        Returns:
            last_hidden_state, float (batch, source, width), and `present`, the states of cross attention.
        """
        given = {"input_ids": input_ids, "input_features": input_features, "input_values": input_values}
        given |= {"pixel_values": pixel_values, "attention_mask": attention_mask}
        inputs = {name: tensor for name, tensor in given.items() if tensor is not None}
        hidden = self.encode(inputs)
        states = self.cross_cache(hidden, attention_mask)
        return {"last_hidden_state": hidden, "present": {layer: {CROSS: named} for layer, named in states.items()}}

    def declarations(self) -> dict[str, InputConfig]:
        assert self.input is not None
        axes = {self.main: self.input.range, **({"attention_mask": (0.0, 2.0)} if self.has_mask else {})}
        return {
            name: InputConfig(dynamic=self.source_axes(), range=known, padding=name == "attention_mask")
            for name, known in axes.items()
        }

    @torch.no_grad()
    def make_arguments(self, call: Seq2SeqCall, seed: int) -> dict[str, Any]:
        return self.draw_inputs(call.batch, call.source, seed, padded=call.is_padded)


class Decoder(Seq2SeqPart):
    """The part `decoder`. Args and Raises: as `Seq2SeqPart`."""

    calls = (
        Seq2SeqCall("the first token", 2, 8),
        Seq2SeqCall("four tokens to begin with", 1, 5, 0, 4),
        Seq2SeqCall("the first token, of a padded source", 3, 6, is_padded=True),
        Seq2SeqCall("the next token", 1, 7, 5),
        Seq2SeqCall("the next token, of a padded source", 2, 4, 9, is_padded=True),
        Seq2SeqCall("three tokens after eleven", 1, 1, 11, 3),
    )

    def forward(
        self, input_ids: Tensor, encoder_attention_mask: Tensor | None = None, past_key_values: Sides | None = None
    ) -> dict[str, Any]:
        """
        Args:
            input_ids: int64 (batch, tokens), the decoder's tokens that are new.
            encoder_attention_mask: int64 (batch, source), the mask that the encoder had.
            past_key_values: the states: those of the decoder as the last call returned them, and those of the encoder.

        Returns:
            logits, float (batch, tokens or 1, vocabulary), and `present`, the decoder's states after these tokens.
        """
        sides = past_key_values or {}
        caches = self.new_caches()
        fill_cache(caches.self_attention_cache, _side(sides, OWN))
        fill_cache(caches.cross_attention_cache, _side(sides, CROSS))
        caches.is_updated = dict.fromkeys(range(self.layers), True)
        keys = next(iter(_side(sides, CROSS)[self.cross_states[0].layer].values()))
        # Only its sizes are read: keys and values are there already.
        hidden = keys.new_zeros(1).expand(keys.shape[0], keys.shape[2], self.width)
        logits, caches = self.decode(input_ids, hidden, encoder_attention_mask, caches)
        states = read_states(caches.self_attention_cache)
        present = {layer: {OWN: named} for layer, named in states.items()}
        return {"logits": logits[:, -1:] if self.last_only else logits, "present": present}

    def declarations(self) -> dict[str, InputConfig]:
        known = InputConfig(dynamic={0: BATCH, 1: TOKENS}, range=(0.0, float(self.vocabulary)))
        declared = {"input_ids": known}
        if self.has_mask:
            mask = InputConfig(dynamic=self.source_axes(), range=(0.0, 2.0), padding=True)
            declared["encoder_attention_mask"] = mask
        for side, states, length in ((OWN, self.own_states, PAST_TOKENS), (CROSS, self.cross_states, SOURCE)):
            for state in states:
                is_open = side == OWN or self.is_text
                axes = {
                    axis: length if dim == PAST else dim
                    for axis, dim in enumerate(state.shape)
                    if dim == BATCH or (dim == PAST and is_open)
                }
                declared[f"past_key_values.{state.layer}.{side}.{state.name}"] = InputConfig(dynamic=axes)  # type: ignore[arg-type]
        return declared

    def sizes_of(self, call: Seq2SeqCall) -> dict[str, int]:
        return {**super().sizes_of(call), TOKENS: call.tokens, PAST_TOKENS: call.past}

    @torch.no_grad()
    def make_arguments(self, call: Seq2SeqCall, seed: int) -> dict[str, Any]:
        inputs = self.draw_inputs(call.batch, call.source, seed, padded=call.is_padded)
        mask = inputs.get("attention_mask")
        cross = self.cross_cache(self.encode(inputs), mask)
        own: dict[str, dict[str, Tensor]] = {}
        for state in self.own_states:
            own.setdefault(state.layer, {})[state.name] = state.empty(call.batch).to(self.device)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.vocabulary, (call.batch, call.past + call.tokens), generator=generator)
        ids = ids.to(self.device)
        arguments = self.arguments(ids[:, : call.past], mask, own, cross)
        if call.past:
            present = self(**arguments)["present"]
            own = {layer: sides[OWN] for layer, sides in present.items()}
        return self.arguments(ids[:, call.past :], mask, own, cross)

    def arguments(self, ids: Tensor, mask: Tensor | None, own: States, cross: States) -> dict[str, Any]:
        """The keyword arguments of a call over these states."""
        layers = dict.fromkeys((*own, *cross))
        states = {
            layer: {side: named[layer] for side, named in ((OWN, own), (CROSS, cross)) if layer in named}
            for layer in layers
        }
        masks = {} if mask is None else {"encoder_attention_mask": mask}
        return {"input_ids": ids, **masks, "past_key_values": states}


TRACED: Final = Seq2SeqCall("a trace", 2, 6, 7, 3)
"""The call of a trace: no two sizes are equal, and none is 1, which torch would hold fast."""


def _side(sides: Sides, name: str) -> dict[str, Mapping[str, Tensor]]:
    return {layer: named[name] for layer, named in sides.items() if name in named}


def start_of(model: Any) -> int:
    """The token that a text of the decoder begins with, by the model's settings; 0 where these name none."""
    places = (getattr(model, "generation_config", None), model.config, model.config.get_text_config(decoder=True))
    values = (getattr(place, key, None) for key in ("decoder_start_token_id", "bos_token_id") for place in places)
    found = next((value for value in values if value is not None), 0)
    return int(np.ravel(found)[0])
