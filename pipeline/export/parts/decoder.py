"""A causal LM with its cache as inputs and outputs: what all parts of a text generation share, and the part `decoder`.

    decoder: input_ids, attention_mask, position_ids, past_key_values.N.NAME → logits, present.N.NAME

The part `decoder` does the prompt and each further token, over a cache that grows. The cache is transformers' own, so
no model's code is repeated here. What the states are, and whether the model reads positions, is found by calling it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from pipeline.config import InputConfig
from pipeline.errors import SourceError
from pipeline.export.checkpoint import is_weightless, without_values
from pipeline.export.parts.holder import TaskPart
from pipeline.export.parts.states import (
    BATCH,
    PAST,
    TOKENS,
    TOTAL,
    States,
    fill_cache,
    is_equal,
    new_cache,
    read_states,
    specs_of,
)
from pipeline.export.patches import apply_patches
from pipeline.export.source import Example
from pipeline.export.user_code import first_line

CACHES: Final = ("past_key_values", "cache_params")
"""Parameters of forward that take a cache of transformers."""

CHUNKS: Final = ("mamba_chunk_size", "chunk_size")
"""Keys of configurations for the tokens that a state space layer computes at once."""


def sizes_of_trace(config: Any) -> dict[str, int]:
    """The sizes that a trace is made with: no two are equal, and none is 1, which torch would hold fast.

    The tokens are more than one chunk of a state space layer, for the same reason.
    """
    tokens = 2 * chunk_of(config) + 5
    return {BATCH: 2, TOKENS: tokens, PAST: 7, TOTAL: tokens + 7}


def chunk_of(config: Any) -> int:
    """The tokens that a state space layer of the model computes at once; 0 where there is none."""
    text = config.get_text_config(decoder=True)
    return next((size for key in CHUNKS if (size := getattr(text, key, None))), 0)


def switch_of_rotation(config: Any) -> tuple[str, int] | None:
    """The kind of RoPE that takes other frequencies for a longer text, and the tokens up to which it does not."""
    text = config.get_text_config(decoder=True)
    found = getattr(text, "rope_parameters", None) or {}
    switches: list[tuple[str, int]] = []
    for entry in [entry for entry in found.values() if isinstance(entry, Mapping)] or [found]:
        kind = entry.get("rope_type")
        limit = text.max_position_embeddings if kind == "dynamic" else entry.get("original_max_position_embeddings")
        if kind in ROTATIONS and limit is not None:
            switches.append((kind, int(limit)))
    return min(switches, key=lambda switch: switch[1], default=None)


ROTATIONS: Final = ("dynamic", "longrope")
"""Kinds of RoPE whose frequencies depend on the length of the text."""


WITHOUT_TASK: Final = "such a model is exported without a task, by a factory of your own"


class DecoderPart(TaskPart):
    """The module of a part: a causal LM that reads a cache and writes it.

    Args:
        model: a causal LM of transformers in eval mode; it is not copied.
        folder: that the model was loaded from, if any.
        last_only: return the logits of the last token only.

    Raises:
        SourceError: the model takes no cache, or keeps nothing in it; the message says which.
    """

    def __init__(self, model: Any, folder: Path | None = None, *, last_only: bool = False) -> None:
        super().__init__(model)
        self.folder, self.last_only = folder, last_only
        self.parameters_of_forward = inspect.signature(model.forward).parameters
        name = type(model).__name__
        self.cache_name = next((cache for cache in CACHES if cache in self.parameters_of_forward), "")
        if getattr(model.config, "is_encoder_decoder", False):
            raise SourceError(
                f"model.task: {name} has an encoder and a decoder, and this task is for decoders alone; expected "
                "text2text-generation, or no task and a factory of your own"
            )
        if not self.cache_name or "input_ids" not in self.parameters_of_forward or not model.can_generate():
            raise SourceError(
                f"model.task: {name} generates no text with a cache ({' or '.join(CACHES)}); expected a causal LM of "
                f"transformers, such as LlamaForCausalLM; {WITHOUT_TASK}"
            )
        try:
            self.states = specs_of(self._call_once())
            self.has_positions = "position_ids" in self.parameters_of_forward and self._reads_positions()
            is_outside = bool(self.states) and self._keeps_states_outside()
        except Exception as error:  # a model's forward may raise anything
            raise SourceError(
                f"model.task: {name} does not run with a cache of transformers: {first_line(error)}; {WITHOUT_TASK}"
            ) from error
        if not self.states:
            raise SourceError(
                f"model.task: {name} writes nothing into its cache; is use_cache honoured by its forward?"
            )
        if is_outside:
            raise SourceError(
                f"model.task: {name} keeps what it has read in its modules, outside of its cache of transformers, so a "
                f"part that is given the cache goes on with another text; {WITHOUT_TASK}"
            )

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return self.held_model.get_input_embeddings().num_embeddings

    def compute_logits(self, tokens: Tensor, cache: Any, **given: Any) -> Tensor:
        """The logits of the tokens, float (batch, tokens, vocabulary), while the model reads and writes `cache`.

        Args:
            tokens: int64 (batch, tokens), or their embeddings, float (batch, tokens, width).
        """
        given["inputs_embeds" if tokens.is_floating_point() else "input_ids"] = tokens
        given = {name: value for name, value in given.items() if name in self.parameters_of_forward}
        with apply_patches(self.held_model):
            # not `model(…)`: the tracer would look for the model among the modules of the holder
            result = self.held_model.forward(use_cache=True, **{self.cache_name: cache}, **given)
        return result.logits

    def empty_states(self, batch: int, length: int = 0) -> dict[str, dict[str, Tensor]]:
        """The states before the first token, with `length` rows where they grow."""
        states: dict[str, dict[str, Tensor]] = {}
        for state in self.states:
            states.setdefault(state.layer, {})[state.name] = state.empty(batch, length).to(self.device)
        return states

    @torch.no_grad()
    def _call_once(self) -> dict[str, dict[str, Tensor]]:
        """The states after a call without any."""
        with without_values(self.held_model):
            ids, cache = torch.zeros(2, 3, dtype=torch.int64, device=self.device), new_cache(self.held_model.config)
            self.compute_logits(ids, cache, attention_mask=torch.ones_like(ids))
            return read_states(cache)

    @torch.no_grad()
    def _keeps_states_outside(self) -> bool:
        """Whether a token after the same cache has other logits once the model has read another text."""
        if is_weightless(self):
            return False
        text, other = torch.arange(16, device=self.device).remainder(self.vocabulary).view(2, 4, 2)
        config, found = self.held_model.config, []
        self.compute_logits(text, cache := new_cache(config))
        states = read_states(cache)
        for _ in range(2):
            copies = {layer: {name: state.clone() for name, state in own.items()} for layer, own in states.items()}
            cache = fill_cache(new_cache(config), copies)
            found.append(self.compute_logits(text[:, :1], cache, position_ids=text.new_tensor([[2]])))
            self.compute_logits(other, new_cache(config))
        return not is_equal(*found)

    @torch.no_grad()
    def _reads_positions(self) -> bool:
        """Whether other positions change the logits; a model without weights is taken by its word."""
        if is_weightless(self):
            return True
        ids = torch.arange(3, device=self.device).remainder(self.vocabulary)[None]
        found = []
        for positions in (ids.new_tensor([[0, 1, 2]]), ids.new_tensor([[0, 2, 5]])):
            cache = new_cache(self.held_model.config)
            found.append(self.compute_logits(ids, cache, attention_mask=torch.ones_like(ids), position_ids=positions))
        return not is_equal(*found)


class CachedDecoder(DecoderPart):
    """The part `decoder`, over a cache that grows. Args and Raises: as `DecoderPart`."""

    @property
    def sizes(self) -> dict[str, int]:
        return sizes_of_trace(self.held_model.config)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: States | None = None,
    ) -> dict[str, Any]:
        """
        Args:
            input_ids: int64 (batch, tokens), the tokens that are new.
            attention_mask: int64 (batch, past + tokens), 1 for each token that counts.
            position_ids: int64 (batch, tokens), where the model reads them.
            past_key_values: the states, as the last call returned them.

        Returns:
            logits, float (batch, tokens or 1, vocabulary), and `present`, the states after these tokens.
        """
        cache = fill_cache(new_cache(self.held_model.config), past_key_values or {})
        given: dict[str, Any] = {"attention_mask": attention_mask}
        if position_ids is not None:
            given["position_ids"] = position_ids
        if self.last_only:
            given["logits_to_keep"] = 1
        logits = self.compute_logits(input_ids, cache, **given)
        return {"logits": logits[:, -1:] if self.last_only else logits, "present": read_states(cache)}

    def declarations(self) -> dict[str, InputConfig]:
        """Name of each input → its open axes, and the values that it takes."""
        axes: dict[str, dict[int, str]] = {"input_ids": {0: BATCH, 1: TOKENS}, "attention_mask": {0: BATCH, 1: TOTAL}}
        if self.has_positions:
            axes["position_ids"] = {0: BATCH, 1: TOKENS}
        for state in self.states:
            named = {axis: dim for axis, dim in enumerate(state.shape) if isinstance(dim, str)}
            axes[f"past_key_values.{state.layer}.{state.name}"] = named
        known = {"input_ids": (0.0, float(self.vocabulary)), "attention_mask": (0.0, 2.0)}
        return {
            name: InputConfig(dynamic=dynamic, range=known.get(name), padding=name == "attention_mask")
            for name, dynamic in axes.items()
        }

    @torch.no_grad()
    def example(self) -> Example:
        """A call for a trace, whose cache the model has written; without weights it is zeros."""
        sizes = self.sizes
        whole = random_tokens(self, sizes[BATCH], sizes[TOTAL], seed=0)
        before, new = whole.split([sizes[PAST], sizes[TOKENS]], dim=1)
        if is_weightless(self):
            return Example(
                (), self.arguments(new, torch.ones_like(whole), self.empty_states(sizes[BATCH], sizes[PAST]))
            )
        first = self(**self.arguments(before, torch.ones_like(before), self.empty_states(sizes[BATCH])))
        return Example((), self.arguments(new, torch.ones_like(whole), first["present"]))

    def arguments(self, ids: Tensor, mask: Tensor, states: States) -> dict[str, Any]:
        """The keyword arguments of a call; each token's position counts those before it that the mask shows."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        named = {"position_ids": positions} if self.has_positions else {}
        return {"input_ids": ids, "attention_mask": mask, **named, "past_key_values": states}


def random_tokens(part: DecoderPart, batch: int, count: int, seed: int) -> Tensor:
    """int64 (batch, count); the first and the last token of the vocabulary are among them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, part.vocabulary, (batch, count), generator=generator)
    tokens[0, -1], tokens[-1, 0] = part.vocabulary - 1, 0
    return tokens.to(part.device)
