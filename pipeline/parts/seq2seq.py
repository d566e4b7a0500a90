"""A text through an encoder and a decoder: the encoder runs once a text, the decoder for each token. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnx

from passes.weights.detached import read_model
from pipeline.errors import UsageError
from pipeline.parts.sessions import MODELS
from pipeline.parts.slots import Step, state_slots
from pipeline.verify.backends import Feeds

PARTS: Final = ("encoder", "decoder")

MASK: Final = "attention_mask"
CROSS_MASK: Final = "encoder_attention_mask"


def models_with(folder: Path, parts: Sequence[str]) -> Path | None:
    """The folder, or `models` in it, that has all these parts; None where neither has."""
    places = (folder / MODELS, folder)
    return next((place for place in places if all((place / f"{part}.onnx").is_file() for part in parts)), None)


class Seq2SeqReader:
    """Encodes a source, and reads the decoder's tokens after it.

    Args:
        models: the folder with both parts.
        open_step: a file of a model → a call of it.
    """

    def __init__(self, models: Path, open_step: Callable[[Path], Step]) -> None:
        graphs = {part: read_model(models / f"{part}.onnx", unread=True).proto.graph for part in PARTS}
        self._encode, self._decode = (open_step(models / f"{part}.onnx") for part in PARTS)
        types = {value.name: value.type.tensor_type for value in graphs["encoder"].input}
        self.inputs = tuple(types)
        self.shapes = {name: [dim.dim_value for dim in kind.shape.dim] for name, kind in types.items()}
        """Sizes of each input; 0 is any."""
        self.dtypes = {name: onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type) for name, kind in types.items()}
        computed = {value.name for value in graphs["encoder"].output}
        slots = state_slots(graphs["decoder"])
        self._own = tuple(slot for slot in slots if slot.after not in computed)
        self._cross = tuple(slot for slot in slots if slot.after in computed)
        self._has_mask = any(value.name == CROSS_MASK for value in graphs["decoder"].input)
        self._kept: dict[str, np.ndarray] = {}
        self._states: dict[str, np.ndarray] = {}

    @property
    def main(self) -> str:
        """The input of the encoder: `input_ids`, or features."""
        return next(name for name in self.inputs if name != MASK)

    def encode(self, inputs: Feeds) -> None:
        """Run the encoder; what it computes is kept for all tokens of the text.

        Args:
            inputs: by the encoder's names; a mask of ones is added where it takes one.

        Raises:
            UsageError: an input is missing, or has another shape.
        """
        if self.main not in inputs:
            raise UsageError(f"generate: the encoder reads {self.main}; found {', '.join(inputs) or 'nothing'}")
        feeds = {
            name: array.astype(self.dtypes[name], copy=False) for name, array in inputs.items() if name in self.dtypes
        }
        shape, found = self.shapes[self.main], feeds[self.main].shape
        if len(shape) != len(found) or any(size not in (0, given) for size, given in zip(shape, found, strict=True)):
            expected = ", ".join(str(size or "any") for size in shape)
            raise UsageError(f"generate: {self.main} has the shape {list(found)}, expected [{expected}]")
        if MASK in self.inputs and MASK not in feeds:
            feeds[MASK] = np.ones(feeds[self.main].shape[:2], np.int64)
        found = self._encode({name: feeds[name] for name in self.inputs})
        self._kept = {slot.before: found[slot.after] for slot in self._cross}
        if self._has_mask:
            self._kept[CROSS_MASK] = feeds[MASK]

    def begin(self, count: int) -> None:
        """Begin a new text of the decoder, over the source that was encoded last."""
        self._states = {slot.before: np.zeros(slot.shape, slot.dtype) for slot in self._own}

    def read(self, tokens: Sequence[int]) -> np.ndarray:
        """Read the next tokens of the decoder.

        Returns:
            The logits after the last one, float32 (vocabulary,).
        """
        feeds = {"input_ids": np.array([tokens], np.int64), **self._kept, **self._states}
        outputs: Mapping[str, np.ndarray] = self._decode(feeds)
        self._states = {slot.before: outputs[slot.after] for slot in self._own}
        return np.asarray(outputs["logits"][0, -1], np.float32)
