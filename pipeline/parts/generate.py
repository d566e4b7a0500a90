"""Text by a decoder with a cache: each call reads the states that the last one has written.

Needs no torch on onnxruntime. The names of inputs and outputs are those of the model, and their shapes say which states
grow with each token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from passes.weights.detached import read_model
from passes.weights.sessions import as_array, first_words
from pipeline.errors import UsageError
from pipeline.verify.backends import BACKENDS, Feeds, OnnxFile

DECODER: Final = "decoder.onnx"
SETTINGS: Final = "genai_config.json"
MODELS: Final = "models"

PAST_PREFIX: Final = "past_key_values."
PRESENT_PREFIX: Final = "present."

Step = Callable[[Feeds], Mapping[str, np.ndarray]]
"""One call of the decoder: inputs by name → outputs by name."""


@dataclass(frozen=True, slots=True)
class Generation:
    """New tokens of one prompt. `text` is empty where there is no tokenizer."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: float
    backend: str
    text: str = ""

    @property
    def tokens_per_second(self) -> float:
        """New tokens, the first one with the prompt included, by all seconds."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class StateSlot:
    """A state as input and output of the decoder; `shape` has 0 along the axis that grows, and 1 for the batch."""

    before: str
    after: str
    shape: tuple[int, ...]
    dtype: np.dtype


class TextGenerator:
    """Generates with the decoder of a folder of models.

    Args:
        folder: of a run in parts, or its folder `models`.
        backend: onnxruntime, with its own optimizations, as an application opens the file; or plan or torch.

    Raises:
        UsageError: the folder has no decoder, the backend is unknown, or onnxruntime refuses the file.
    """

    def __init__(self, folder: Path, backend: str = "onnxruntime") -> None:
        if backend not in BACKENDS:
            raise UsageError(f"backend: found {backend!r}, expected one of {', '.join(BACKENDS)}")
        self.models = find_models(folder)
        self.backend = backend
        self._graph = read_model(self.models / DECODER, unread=True).proto.graph
        self._step = (
            _open_session(self.models / DECODER)
            if backend == "onnxruntime"
            else open_backend(self.models / DECODER, backend)
        )

    def generate(
        self,
        ids: Sequence[int] | None = None,
        *,
        prompt: str | None = None,
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Sequence[int] | None = None,
    ) -> Generation:
        """Generate after a prompt, which is given as tokens or as text.

        Args:
            temperature: 0 takes the most likely token; above it tokens are drawn, by `seed`.
            stop: tokens that end the text; None: those of the model's configuration.

        Raises:
            UsageError: there is no prompt or no tokenizer, or a token is outside of the vocabulary.
        """
        tokenizer = load_tokenizer(self.models) if prompt is not None else None
        if tokenizer is not None:
            ids = [int(token) for token in tokenizer(prompt)["input_ids"]]
        if not ids:
            raise UsageError("generate: the prompt has no token; give --ids 1,2,3 or a --prompt")
        if max_new_tokens < 1:
            raise UsageError(f"generate: found max_new_tokens {max_new_tokens}, expected 1 or more")
        known = read_settings(self.models)
        vocabulary = known.get("vocab_size") or max(ids) + 1
        wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise UsageError(f"generate: found the token {wrong}, expected 0 to {vocabulary - 1}")
        ends = frozenset(stop if stop is not None else known.get("eos", ()))
        choose = _Sampler(temperature, seed)
        begun = time.perf_counter()
        tokens = list(continue_text(self._step, self._graph, ids, max_new_tokens, choose, ends))
        seconds = time.perf_counter() - begun
        text = tokenizer.decode(tokens) if tokenizer is not None else ""
        return Generation(tuple(ids), tuple(tokens), seconds, self.backend, text)


def find_models(folder: Path) -> Path:
    """The folder with the decoder: `folder` itself, or `models` in it.

    Raises:
        UsageError: neither has one.
    """
    found = next((place for place in (folder / MODELS, folder) if (place / DECODER).is_file()), None)
    if found is None:
        raise UsageError(
            f"{folder} has no {MODELS}/{DECODER}; expected the folder of a run with model.task: text-generation"
        )
    return found


def read_settings(models: Path) -> dict[str, Any]:
    """What the folder's genai_config.json says of tokens: `vocab_size`, and `eos`, the tokens that end a text."""
    try:
        section = json.loads((models / SETTINGS).read_text(encoding="utf-8"))["model"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    eos = section.get("eos_token_id")
    return {"vocab_size": section.get("vocab_size"), "eos": [eos] if isinstance(eos, int) else list(eos or ())}


def load_tokenizer(models: Path) -> Any:
    """The tokenizer that the source came with.

    Raises:
        UsageError: there is none, or transformers is not installed.
    """
    if not any((models / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        raise UsageError(f"--prompt: {models} has no tokenizer, since its source had none; give tokens: --ids 1,2,3")
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(models), local_files_only=True)
    except ImportError as error:
        raise UsageError("--prompt needs transformers: pip install 'onnxline[torch]'; or give --ids 1,2,3") from error
    except Exception as error:  # a tokenizer of code of its own, or a broken file
        raise UsageError(f"--prompt: the tokenizer in {models} does not load: {first_words(error)}") from error


def continue_text(
    step: Step,
    graph: onnx.GraphProto,
    ids: Sequence[int],
    count: int,
    choose: Callable[[np.ndarray], int],
    ends: frozenset[int] = frozenset(),
) -> Iterator[int]:
    """Yield up to `count` new tokens; a token of `ends` is the last.

    Args:
        step: runs the model of `graph`.
        choose: from the logits of the last token, float (vocabulary,), the next token.
    """
    slots = state_slots(graph)
    inputs = {value.name for value in graph.input}
    states = {slot.before: np.zeros(slot.shape, slot.dtype) for slot in slots}
    new, seen = np.array([ids], np.int64), 0
    for _ in range(count):
        seen += new.shape[1]
        feeds = {"input_ids": new, "attention_mask": np.ones((1, seen), np.int64), **states}
        if "position_ids" in inputs:
            feeds["position_ids"] = np.arange(seen - new.shape[1], seen, dtype=np.int64)[None]
        outputs = step({name: array for name, array in feeds.items() if name in inputs})
        token = choose(np.asarray(outputs["logits"][0, -1], np.float32))
        yield token
        if token in ends:
            return
        states = {slot.before: outputs[slot.after] for slot in slots}
        new = np.array([[token]], np.int64)


def state_slots(graph: onnx.GraphProto) -> tuple[StateSlot, ...]:
    """The states of a decoder, from its inputs: the first named dim is the batch, and any other grows."""
    slots = []
    for value in graph.input:
        if value.name.startswith(PAST_PREFIX):
            tensor = value.type.tensor_type
            sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
            shape = tuple(int(axis == 0) if size is None else size for axis, size in enumerate(sizes))
            after = PRESENT_PREFIX + value.name.removeprefix(PAST_PREFIX)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            slots.append(StateSlot(value.name, after, shape, np.dtype(dtype)))
    return tuple(slots)


def take_largest(logits: np.ndarray) -> int:
    """The most likely token; the first one of equals, as torch has it."""
    return int(logits.argmax())


class _Sampler:
    """Chooses the most likely token, or draws one by its probability."""

    def __init__(self, temperature: float, seed: int) -> None:
        if not 0 <= temperature < float("inf"):
            raise UsageError(f"generate: found the temperature {temperature}, expected 0 or more")
        self._temperature, self._generator = temperature, np.random.default_rng(seed)

    def __call__(self, logits: np.ndarray) -> int:
        if not self._temperature:
            return take_largest(logits)
        scaled = (logits.astype(np.float64) - logits.max()) / self._temperature
        weights = np.exp(scaled)
        return int(self._generator.choice(len(weights), p=weights / weights.sum()))


def _open_session(path: Path) -> Step:
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common type of its own
        raise UsageError(f"onnxruntime does not open {path}: {first_words(error)}") from error
    names = [output.name for output in session.get_outputs()]

    def run(feeds: Feeds) -> dict[str, np.ndarray]:
        results = session.run(names, dict(feeds))
        return {name: as_array(name, result) for name, result in zip(names, results, strict=True)}

    return run


def open_backend(path: Path, backend: str) -> Step:
    """The calls of a model on a backend of ours; onnxruntime with its optimizations off."""
    return BACKENDS[backend](OnnxFile(path)).run
