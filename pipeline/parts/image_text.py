"""A text after images: the tower runs once an image, the embedding and the decoder for each token. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from passes.weights.detached import read_model
from pipeline.errors import UsageError
from pipeline.parts.slots import Step, state_slots
from pipeline.verify.backends import Feeds

PARTS: Final = ("vision", "embedding", "decoder")

PIXELS: Final = "pixel_values"


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """How an image stands in a text: `count` tokens `token`, which are `rows` by `columns` of it."""

    token: int
    count: int
    rows: int
    columns: int

    @staticmethod
    def of(models: Path) -> ImageTokens:
        """By the configuration of the source.

        Raises:
            UsageError: the folder has none that can be read.
        """
        try:
            config = json.loads((models / "config.json").read_text(encoding="utf-8"))
            token = config.get("image_token_id", config.get("image_token_index"))
            graph = read_model(models / "vision.onnx", unread=True).proto.graph
            [count, *_] = (dim.dim_value for dim in graph.output[0].type.tensor_type.shape.dim)
            side = round(count**0.5)
            return ImageTokens(token, count, side, count // side)
        except (OSError, ValueError, LookupError) as error:
            raise UsageError(f"generate: no config.json in {models} says the token of an image: {error}") from error


class ImageTextReader:
    """Reads images, and then a text with the tokens of these images in it.

    Args:
        models: the folder with all parts.
        open_step: a file of a model → a call of it.
    """

    def __init__(self, models: Path, open_step: Callable[[Path], Step]) -> None:
        graphs = {part: read_model(models / f"{part}.onnx", unread=True).proto.graph for part in PARTS}
        self._see, self._embed, self._decode = (open_step(models / f"{part}.onnx") for part in PARTS)
        self.image = ImageTokens.of(models)
        self._pixels = [dim.dim_value for dim in graphs["vision"].input[0].type.tensor_type.shape.dim]
        ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in graphs["decoder"].input}
        self._ranks, self._slots = ranks, state_slots(graphs["decoder"])
        width = graphs["vision"].output[0].type.tensor_type.shape.dim[1].dim_value
        self._nothing = np.zeros((0, width), np.float32)
        self._features = self._nothing
        self._states: dict[str, np.ndarray] = {}
        self._types: list[int] = []
        self._prompt: int | None = None
        self._prefix: list[int] = []
        """1 for each token of the prompt."""
        self._next = 0

    def encode(self, inputs: Feeds, prompt: int | None = None) -> None:
        """Look at the images of the next text.

        Args:
            inputs: `pixel_values`, of one image or several in a row; nothing is a text without images.
            prompt: how many of the tokens that are read first are the prompt, where others were written after it; all
                by default.

        Raises:
            UsageError: the pixels are no images of the size that the tower takes.
        """
        pixels = np.asarray(inputs.get(PIXELS, np.zeros((0, *self._pixels[1:]))), np.float32)
        size = int(np.prod(self._pixels))
        if pixels.size % size or pixels.shape[-1:] != tuple(self._pixels[-1:]):
            raise UsageError(f"generate: {PIXELS} has the shape {list(pixels.shape)}, expected {self._pixels} an image")
        images = pixels.reshape(-1, *self._pixels)
        found = [self._see({PIXELS: image})["image_features"] for image in images]
        self._features, self._prompt = np.concatenate(found) if found else self._nothing, prompt

    def begin(self, count: int) -> None:
        """Begin a new text over the images that were looked at last."""
        self._states = {slot.before: np.zeros(slot.shape, slot.dtype) for slot in self._slots}
        self._types, self._prefix, self._next = [], [], 0

    def read(self, tokens: Sequence[int]) -> np.ndarray:
        """Read the next tokens.

        Returns:
            The logits after the last one, float32 (vocabulary,).

        Raises:
            UsageError: the text has not as many tokens of images as there are features.
        """
        ids = np.array([tokens], np.int64)
        is_first = not self._types  # later tokens are the model's own, and no images
        features = self._features if is_first else self._nothing
        shown = int((ids == self.image.token).sum())
        if is_first and shown != len(features):
            raise UsageError(
                f"generate: the text has {shown} tokens of images ({self.image.token}), and the images have "
                f"{len(features)}: {self.image.count} each"
            )
        self._types += (ids[0] == self.image.token).astype(int).tolist() if is_first else [0] * len(tokens)
        prompt = 0 if not is_first else len(tokens) if self._prompt is None else self._prompt
        self._prefix += [int(place < prompt) for place in range(len(tokens))]
        feeds = {
            "inputs_embeds": self._embed({"input_ids": ids, "image_features": features})["inputs_embeds"],
            "attention_mask": np.ones((1, len(self._types)), np.int64),
            "position_ids": self._positions(ids[0].tolist(), has_images=len(features) > 0),
            "token_type_ids": np.array([self._types], np.int64),
            "prefix_mask": np.array([self._prefix], np.int64),
        }
        known = {name: array for name, array in feeds.items() if name in self._ranks}
        outputs: Mapping[str, np.ndarray] = self._decode({**known, **self._states})
        self._states = {slot.before: outputs[slot.after] for slot in self._slots}
        return np.asarray(outputs["logits"][0, -1], np.float32)

    def _positions(self, tokens: Sequence[int], *, has_images: bool) -> np.ndarray:
        """int64 (1, tokens); or (3, 1, tokens), where the tokens of an image have a row and a column of their own."""
        if self._ranks.get("position_ids") != 3:
            found = np.arange(self._next, self._next + len(tokens))
            self._next += len(tokens)
            return found[None].astype(np.int64)
        columns: list[tuple[int, int, int]] = []
        place = 0
        while place < len(tokens):
            if tokens[place] != self.image.token or not has_images:
                columns.append((self._next, self._next, self._next))
                self._next, place = self._next + 1, place + 1
                continue
            rows = range(self._next, self._next + self.image.rows)
            columns += [(self._next, row, self._next + column) for row in rows for column in range(self.image.columns)]
            self._next, place = self._next + max(self.image.rows, self.image.columns), place + self.image.count
        return np.array(columns, np.int64).T[:, None]
