"""A language model that sees images, as three graphs: what an image is, where a text has it, and what comes after.

    vision:    pixel_values → image_features
    embedding: input_ids, image_features → inputs_embeds
    decoder:   inputs_embeds, attention_mask, position_ids, token_type_ids, past_key_values.N.NAME
               → logits, present.N.NAME

`vision` is the tower and the projector for one image of one size: the calls that transformers' `get_image_features`
makes, recorded for such an image. `embedding` puts the features of all images, one after the other, where a text has
the token of an image. The decoder is that of a text generation, over embeddings. The names are those of
onnxruntime-genai.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.proof.draws import Draw, GivenDraw
from pipeline.config import InputConfig, VerifyConfig
from pipeline.errors import SourceError
from pipeline.export.checkpoint import is_weightless
from pipeline.export.parts.decoder import CachedDecoder
from pipeline.export.parts.draws import flat_arrays
from pipeline.export.parts.holder import TaskPart
from pipeline.export.parts.states import BATCH, TOKENS, TOTAL, States, fill_cache, is_equal, new_cache, read_states
from pipeline.export.patches import apply_patches
from pipeline.export.source import Example
from pipeline.export.transformers_defaults import IMAGE_SIZE
from pipeline.export.tree import named_arguments
from pipeline.export.user_code import first_line

FEATURES: Final = "image_tokens"
"""The dim of the features of all images."""

AXES: Final = 3
"""Rows of positions where a token has one for time, height and width."""


class VisionPart(TaskPart):
    """The part `vision`: one image of the model's own size.

    Raises:
        SourceError: the model has no images, or its tower does not run by itself.
    """

    def __init__(self, model: Any, folder: Path | None = None) -> None:
        super().__init__(model)
        self.folder = folder
        name = type(model).__name__
        if not hasattr(model, "get_image_features") or token_of_image(model.config) is None:
            raise SourceError(
                f"model.task: {name} reads no images; expected a model such as Gemma3ForConditionalGeneration"
            )
        try:
            self._record()
        except Exception as error:  # a model's forward may raise anything
            raise SourceError(f"model.task: {name} does not run on an image: {first_line(error)}") from error

    def _record(self) -> None:
        """Call the model on an image, and note which modules it calls with what."""
        self.calls: list[tuple[Any, dict[str, Any], list[Any]]] = []
        forms, result = list(images_of(self.held_model)), None
        while result is None:
            self.given = forms.pop(0)
            self.calls.clear()
            try:
                with torch.no_grad(), self._recorders():
                    result = self.held_model.get_image_features(**self.given, return_dict=True).pooler_output
            except (ValueError, RuntimeError, IndexError):
                if not forms:
                    raise
        result = torch.cat(list(result)) if isinstance(result, list | tuple) else result
        self.features = result.reshape(-1, result.shape[-1])
        self.is_wired = self._wire()
        first = self.calls[0][1] if self.is_wired else self.given
        tensors = (leaf for leaf in pytree.tree_leaves(first) if isinstance(leaf, Tensor))
        self.pixels = next(leaf for leaf in tensors if leaf.is_floating_point())

    @contextmanager
    def _recorders(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self.held_model.base_model.children():
                stack.enter_context(patch.object(module, "forward", self._recorder(module, module.forward)))
            yield

    def _recorder(self, module: Any, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = named_arguments(original, args, kwargs)
            result = original(*args, **kwargs)
            self.calls.append((module, arguments, pytree.tree_leaves(result)))  # now: a model may add to it
            return result

        return call

    def _wire(self) -> bool:
        """Whether each module takes what the modules before it returned, as it is; note where from.

        Then these modules are the graph, without what a model does around them for several images and for padding.
        """
        made: list[Tensor] = []
        for place, (module, arguments, result) in enumerate(self.calls):
            for leaf in pytree.tree_leaves(arguments) if place else ():
                is_made = any(leaf is known for known in made)
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 1 and not is_made:
                    return False
            if not place:
                from transformers.exporters.utils import precompute_export_inputs

                precompute_export_inputs(module, arguments)  # indices by the image's size, which a trace cannot compute
            made += [leaf for leaf in result if isinstance(leaf, Tensor)]
        last = enumerate(self.calls[-1][2] if self.calls else ())
        self.place = next((place for place, leaf in last if _is_same(leaf, self.features)), -1)
        return self.place >= 0

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """
        Args:
            pixel_values: float, one image as the model's tower takes it.

        Returns:
            image_features, float (tokens, width).
        """
        from transformers.exporters import exporter_dynamo  # which registers the patches
        from transformers.exporters.utils import apply_patches as apply_exporters_patches

        assert exporter_dynamo
        with apply_exporters_patches("dynamo"), apply_patches(self.held_model):
            features = self._run_modules(pixel_values) if self.is_wired else self._run_whole(pixel_values)
        return {"image_features": features.reshape(-1, self.features.shape[-1])}

    def _run_whole(self, pixel_values: Tensor) -> Tensor:
        given = {name: pixel_values if value is self.pixels else value for name, value in self.given.items()}
        result = self.held_model.get_image_features(**given, return_dict=True).pooler_output
        return torch.cat(list(result)) if isinstance(result, list | tuple) else result

    def _run_modules(self, pixel_values: Tensor) -> Tensor:
        made: list[tuple[Any, Any]] = [(self.pixels, pixel_values)]
        for module, arguments, recorded in self.calls:
            leaves, spec = pytree.tree_flatten(arguments)
            now = [next((new for old, new in made if leaf is old), leaf) for leaf in leaves]
            result = module(**pytree.tree_unflatten(now, spec))
            made += list(zip(recorded, pytree.tree_leaves(result), strict=True))
        return made[len(made) - len(self.calls[-1][2]) + self.place][1]

    def declarations(self) -> dict[str, InputConfig]:
        return {"pixel_values": InputConfig(range=(-1.0, 1.0))}

    def example(self) -> Example:
        return Example((), {"pixel_values": self.pixels})

    def draw(self, verify: VerifyConfig) -> Sequence[GivenDraw]:
        return [
            GivenDraw(Draw(seed, {}, source="an image"), flat_arrays({"pixel_values": self.draw_pixels(seed)}))
            for seed in range(verify.seed, verify.seed + 2)
        ]

    def draw_pixels(self, seed: int) -> Tensor:
        """A random image."""
        generator = torch.Generator().manual_seed(seed)
        return (torch.rand(self.pixels.shape, generator=generator) * 2 - 1).to(self.pixels)


def _is_same(leaf: Any, features: Tensor) -> bool:
    return (
        isinstance(leaf, Tensor)
        and leaf.numel() == features.numel()
        and is_equal(leaf.reshape(features.shape), features)
    )


def token_of_image(config: Any) -> int | None:
    """The token that stands for a part of an image in a text."""
    tokens = (getattr(config, key, None) for key in ("image_token_id", "image_token_index"))
    return next((token for token in tokens if token is not None), None)


def images_of(model: Any) -> Iterator[dict[str, Any]]:
    """Arguments of `get_image_features` for one image, in the forms that models have; one that does not run is no form.

    Either patches in rows, with the grid that they make, or pixels; with an axis of images or without, and with tiles.
    """
    vision = model.config.vision_config
    names = inspect.signature(model.get_image_features).parameters
    size = getattr(vision, "image_size", None) or IMAGE_SIZE
    size = size if isinstance(size, int) else size[0]
    counts = (getattr(vision, key, None) for key in ("in_channels", "in_chans", "num_channels"))
    channels = next(filter(None, counts), 3)
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    if "image_grid_thw" in names:
        side = size // vision.patch_size
        width = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
        pixels = torch.rand(side * side, width, generator=generator) * 2 - 1
        yield {"pixel_values": pixels.to(device), "image_grid_thw": torch.tensor([[1, side, side]], device=device)}
        return
    pixels = (torch.rand(1, channels, size, size, generator=generator) * 2 - 1).to(device)
    sizes = {"image_sizes": [(size, size)]} if "image_sizes" in names else {}
    yield {"pixel_values": pixels, **sizes}
    yield {"pixel_values": pixels[None], **sizes}
    yield {"pixel_values": pixels.expand(1, 2, *pixels.shape[1:]).clone(), **sizes}  # the whole image, and a tile of it


class EmbeddingPart(TaskPart):
    """The part `embedding`. Args and Raises: as `VisionPart`."""

    def __init__(self, model: Any, folder: Path | None = None) -> None:
        super().__init__(model)
        self.folder = folder
        self.features = VisionPart(model).features
        token = token_of_image(model.config)
        assert token is not None
        self.token = token

    def forward(self, input_ids: Tensor, image_features: Tensor) -> dict[str, Tensor]:
        """
        Args:
            input_ids: int64 (batch, tokens).
            image_features: float (image tokens, width), of all images in the order of the text; none has no rows.

        Returns:
            inputs_embeds, float (batch, tokens, width).
        """
        table = self.held_model.get_input_embeddings()
        words = table(input_ids.clamp(max=table.num_embeddings - 1))  # the token of an image may be beyond the table
        is_image = input_ids == self.token
        rows = is_image.reshape(-1).cumsum(0).reshape(is_image.shape) - 1
        is_shown = is_image & (rows < image_features.shape[0])  # the model may write this token too
        nothing = image_features.new_zeros(1, image_features.shape[1])  # a row to read where there is no image
        images = torch.cat((nothing, image_features))[torch.where(is_shown, rows + 1, 0)]
        return {"inputs_embeds": torch.where(is_shown[..., None], images.to(words.dtype), words)}

    @property
    def sizes(self) -> dict[str, int]:
        count = self.features.shape[0]
        return {BATCH: 2, TOKENS: count + 5, FEATURES: 2 * count}

    def declarations(self) -> dict[str, InputConfig]:
        return {
            "input_ids": InputConfig(dynamic={0: BATCH, 1: TOKENS}),
            "image_features": InputConfig(dynamic={0: FEATURES}),
        }

    def _call(self, batch: int, images: int, words: int, seed: int) -> dict[str, Tensor]:
        ids = tokens_with_image(self.held_model, batch, images * self.features.shape[0], words, seed)
        generator = torch.Generator().manual_seed(seed)
        shape = (batch * images * self.features.shape[0], self.features.shape[1])
        return {"input_ids": ids, "image_features": torch.randn(shape, generator=generator).to(self.features)}

    def example(self) -> Example:
        return Example((), self._call(2, 1, 5, seed=0))

    def draw(self, verify: VerifyConfig) -> Sequence[GivenDraw]:
        calls = {
            "an image": (1, 1, 6),
            "two images": (1, 2, 3),
            "two texts": (2, 1, 4),
            "no image": (2, 0, 5),
            "a token": (1, 0, 1),
        }
        found = []
        for seed, (title, sizes) in enumerate(calls.items(), verify.seed):
            feeds = self._call(*sizes, seed)
            known = {BATCH: sizes[0], TOKENS: feeds["input_ids"].shape[1], FEATURES: feeds["image_features"].shape[0]}
            found.append(GivenDraw(Draw(seed, known, source=title), flat_arrays(feeds)))
        return found


def tokens_with_image(model: Any, batch: int, image: int, words: int, seed: int) -> Tensor:
    """int64 (batch, image + words): random words, after the second of which the tokens of an image stand.

    The second is the token that begins an image, where the family has one.
    """
    token = token_of_image(model.config)
    assert token is not None
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(0, vocabulary, (batch, words), generator=generator)
    ids[ids == token] = 0
    known = min(2, words)
    if (begins := getattr(model.config, "vision_start_token_id", None)) is not None:
        ids[:, known - 1] = begins
    whole = torch.cat((ids[:, :known], torch.full((batch, image), token, dtype=torch.int64), ids[:, known:]), 1)
    return whole.to(next(model.parameters()).device)


@torch.no_grad()
def sees_later_words(model: Any) -> bool:
    """Whether a word of the prompt has other logits when the next word is another."""
    first = torch.ones(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    table, found = model.get_input_embeddings(), []
    for ids in (first, first.cumsum(1)):
        given = {"attention_mask": first, "token_type_ids": torch.zeros_like(first)}
        words = table(ids % table.num_embeddings)
        with apply_patches(model):
            found.append(model.forward(inputs_embeds=words, past_key_values=new_cache(model.config), **given))
    return not is_equal(*(outputs.logits[:, 0] for outputs in found))


PREFIX: Final = 5
"""Tokens of the prompt in the draws of a decoder, whose calls end within them and after them."""


class ImageTextDecoder(CachedDecoder):
    """The part `decoder`, over embeddings. Args and Raises: as `DecoderPart`."""

    def __init__(self, model: Any, folder: Path | None = None, *, last_only: bool = False) -> None:
        super().__init__(model, folder, last_only=last_only)
        self.rows = AXES if hasattr(model.base_model, "get_rope_index") else 1
        has_types = "token_type_ids" in self.parameters_of_forward
        self.has_prefix = has_types and not is_weightless(self) and sees_later_words(model)
        self.has_types = has_types and not self.has_prefix

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        prefix_mask: Tensor | None = None,
        past_key_values: States | None = None,
    ) -> dict[str, Any]:
        """
        Args:
            inputs_embeds: float (batch, tokens, width), of the tokens that are new.
            attention_mask: int64 (batch, past + tokens), 1 for each token that counts.
            position_ids: int64 (batch, tokens); or (3, batch, tokens) for time, height and width.
            token_type_ids: int64 (batch, past + tokens), 1 for a token of an image, where the model looks both ways.
            prefix_mask: int64 (batch, past + tokens), 1 for a token of the prompt, where all of these see each other.
            past_key_values: the states, as the last call returned them.

        Returns:
            logits, float (batch, tokens or 1, vocabulary), and `present`, the states after these tokens.
        """
        cache = fill_cache(new_cache(self.held_model.config), past_key_values or {})
        given: dict[str, Any] = {"attention_mask": attention_mask, "position_ids": position_ids}
        types = token_type_ids if prefix_mask is None else 1 - prefix_mask  # transformers' types of a prefix are 0
        given |= {"token_type_ids": types, "logits_to_keep": 1 if self.last_only else None}
        given = {name: value for name, value in given.items() if value is not None}
        logits = self.compute_logits(inputs_embeds, cache, **given)
        return {"logits": logits[:, -1:] if self.last_only else logits, "present": read_states(cache)}

    def declarations(self) -> dict[str, InputConfig]:
        declared = super().declarations()
        states = {name: entry for name, entry in declared.items() if name.startswith("past_key_values")}
        found = {
            "inputs_embeds": InputConfig(dynamic={0: BATCH, 1: TOKENS}),
            "attention_mask": declared["attention_mask"],
        }
        if self.has_positions:
            axis = int(self.rows > 1)
            found["position_ids"] = InputConfig(dynamic={axis: BATCH, axis + 1: TOKENS})
        for name, is_there in (("token_type_ids", self.has_types), ("prefix_mask", self.has_prefix)):
            if is_there:
                found[name] = InputConfig(dynamic={0: BATCH, 1: TOTAL}, range=(0.0, 2.0))
        return {**found, **states}

    def arguments(self, ids: Tensor, mask: Tensor, states: States) -> dict[str, Any]:
        """The keyword arguments of a call for a text whose third to fifth token, where it has them, are an image."""
        given = super().arguments(ids, mask, states)
        words = self.held_model.get_input_embeddings()(given.pop("input_ids"))
        if self.rows > 1 and self.has_positions:  # other positions in each row, as in an image
            given["position_ids"] = torch.stack([given["position_ids"] // divisor for divisor in range(1, AXES + 1)])
        if self.has_types:
            given["token_type_ids"] = torch.zeros_like(mask)
            given["token_type_ids"][:, 2:5] = 1
        if self.has_prefix:
            given["prefix_mask"] = (torch.arange(mask.shape[1], device=mask.device) < PREFIX).long().expand_as(mask)
        return {"inputs_embeds": words, **given}
