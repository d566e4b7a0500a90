"""Text by the parts of a folder of models: tokens in, tokens out, on any backend. Needs no torch on onnxruntime.

A decoder alone goes on with the prompt. After an encoder, which reads the prompt or features, a decoder begins anew.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from passes.visible import Table, TableResult
from passes.weights.sessions import first_words
from pipeline.argument_checks import MAPPING, NUMBER, PATH, SEED, TEXT, TOKENS, WHOLE, expects
from pipeline.config import RuntimeConfig
from pipeline.config.yaml_source import read_yaml
from pipeline.errors import OnnxlineError, UsageError
from pipeline.parts import image_text
from pipeline.parts.seq2seq import PARTS, Seq2SeqReader, models_with
from pipeline.parts.sessions import TextParts, TextReader, open_calls, step_opener
from pipeline.verify.backends import Feeds

SETTINGS: Final = "genai_config.json"
CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"

POSITIONS: Final = ("max_target_positions", "max_position_embeddings", "n_positions", "context_length")
"""Names of the number of positions in configurations: Whisper, most of transformers, GPT-2, onnxruntime-genai."""

Reader = TextReader | Seq2SeqReader | image_text.ImageTextReader


@dataclass(frozen=True, slots=True)
class Generation(TableResult):
    """New tokens of one prompt.

    seconds: until the last token.
    first_seconds: until the first one, with the prompt, and with what a backend compiles for it.
    tokens_per_second: by the median time of the tokens after the first, since a plan over a cache that grows is made
        anew for every 64 of them; of a single token, by its own time.
    text: empty where there is no tokenizer.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: float
    first_seconds: float
    tokens_per_second: float
    backend: str
    text: str = ""

    def tables(self) -> Iterator[Table]:
        tokens = " ".join(map(str, self.tokens[:SHOWN])) + (" …" if len(self.tokens) > SHOWN else "")
        speed = f"{self.first_seconds:.3f} s to the first, then {self.tokens_per_second:.1f} a second"
        rows = [("text", self.text)] if self.text else []
        yield Table(f"{len(self.tokens)} tokens by {self.backend}", [*rows, ("tokens", tokens), ("time", speed)])


SHOWN: Final = 32
"""Tokens that a result shows."""


class TextGenerator:
    """Generates with the parts of a folder of models.

    Args:
        folder: of a run in parts, or its folder `models`.
        backend: onnxruntime, with its own optimizations, as an application opens the files; or plan or torch.

    Raises:
        UsageError: the folder has no parts of a task, the backend is unknown, or onnxruntime refuses a file.
    """

    @expects("TextGenerator: ", folder=PATH, backend=TEXT)
    def __init__(self, folder: str | PathLike[str], backend: str = "onnxruntime") -> None:
        folder = Path(folder)
        _refuse_own_parts(folder)
        self.models, self._reader = open_reader(folder, backend)
        self.backend = backend

    @expects(
        "generate: ",
        ids=TOKENS.or_none(),
        prompt=TEXT.or_none(),
        inputs=MAPPING.or_none(),
        start=TOKENS.or_none(),
        max_new_tokens=WHOLE,
        temperature=NUMBER,
        seed=SEED,
        stop=TOKENS.or_none(),
    )
    def generate(
        self,
        ids: Iterable[int] | None = None,
        *,
        prompt: str | None = None,
        inputs: Feeds | None = None,
        start: Sequence[int] | None = None,
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Sequence[int] | None = None,
    ) -> Generation:
        """Generate after a prompt, which is given as tokens or as text.

        Args:
            ids: the prompt as tokens.
            prompt: the prompt as text, which the tokenizer next to the models turns into tokens.
            inputs: of an encoder that reads no tokens, such as `input_features`, by name.
            start: tokens that a decoder after an encoder begins with; by default that of the model's configuration.
            max_new_tokens: the most tokens that are added.
            temperature: 0 takes the most likely token; above it tokens are drawn.
            seed: of the draws.
            stop: tokens that end the text; by default those of the model's configuration.

        Returns:
            The new tokens, their text where there is a tokenizer, and the seconds that they took.

        Raises:
            UsageError: there is no prompt or no tokenizer, a token is outside of the vocabulary, or the cache or the
                model's table of positions is shorter than the text.
            OnnxlineError: a part fails on its backend.
        """
        tokenizer = load_tokenizer(self.models) if prompt is not None else None
        if tokenizer is not None:
            ids = [int(token) for token in tokenizer(prompt)["input_ids"]]
        ids = [] if ids is None else [int(token) for token in ids]
        if not ids and not inputs:
            raise UsageError("generate: the prompt has no token; give --ids 1,2,3 or a --prompt")
        if max_new_tokens < 1:
            raise UsageError(f"generate: found max_new_tokens {max_new_tokens}, expected 1 or more")
        known = read_settings(self.models)
        first = self._first_tokens(ids, start, inputs, known)
        vocabulary = known.get("vocab_size") or 2**63
        wrong = next((token for token in (*ids, *first) if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise UsageError(f"generate: found the token {wrong}, expected 0 to {vocabulary - 1}")
        ends = frozenset(stop if stop is not None else known.get("eos", ()))
        choose = _Sampler(temperature, seed)
        tokens, times = [], [time.perf_counter()]
        try:
            if isinstance(self._reader, Seq2SeqReader):
                self._reader.encode(inputs or {"input_ids": np.array([ids], np.int64)})
            elif isinstance(self._reader, image_text.ImageTextReader):
                self._reader.encode(inputs or {})
            for token in continue_text(self._reader, first, max_new_tokens, choose, ends):
                tokens.append(token)
                times.append(time.perf_counter())
        except OnnxlineError as error:
            _refuse_beyond_positions(max(len(ids), len(first) + len(tokens)), known.get("positions"), error)
            raise
        seconds = [after - before for before, after in pairwise(times)]
        rate = 1 / max(median(seconds[1:] or seconds), sys.float_info.epsilon)
        text = tokenizer.decode(tokens) if tokenizer is not None else ""
        return Generation(tuple(ids), tuple(tokens), sum(seconds), seconds[0], rate, self.backend, text)

    def _first_tokens(
        self, ids: Sequence[int], start: Sequence[int] | None, inputs: Feeds | None, known: Mapping[str, Any]
    ) -> Sequence[int]:
        """The tokens that the decoder reads first.

        Raises:
            UsageError: `start` or `inputs` are given to a decoder without an encoder.
        """
        if isinstance(self._reader, Seq2SeqReader):
            return [known.get("start", 0)] if start is None else start
        if not ids:
            raise UsageError(
                "generate: the prompt has no token; give --ids or a --prompt, with the tokens of the image"
            )
        if start is not None:
            raise UsageError(f"generate: found start tokens, but {self.models} has no encoder; give them as the prompt")
        if inputs and not isinstance(self._reader, image_text.ImageTextReader):
            raise UsageError(
                f"generate: found inputs ({', '.join(inputs)}), but {self.models} has no encoder, which would read "
                "them; give the prompt alone"
            )
        return ids


def _refuse_own_parts(folder: Path) -> None:
    """Refuse the folder of a run with `model.parts`, or its folder `models`: a name such as `decoder` says no chain."""
    file = next((path for path in (folder / "run.yaml", folder.parent / "run.yaml") if path.is_file()), None)
    match read_yaml(file)[0] if file is not None else None:
        case {"model": {"parts": Mapping() as parts}}:
            raise UsageError(
                f"generate: found the parts {', '.join(parts)} of model.parts, which are no chain that writes text; "
                "expected a run with model.task: text-generation or another task that writes text, or call the models "
                f"in {folder} in an order of your own"
            )


def _refuse_beyond_positions(count: int, positions: int | None, error: OnnxlineError) -> None:
    """Raise UsageError where a call failed since a model that has a table of positions got more tokens than these."""
    if positions is not None and count > positions and type(error) is not UsageError:  # of the arguments
        raise UsageError(
            f"generate: the model has {positions} positions, and the text needs more: it failed at token {count}; "
            "shorten the prompt, or ask for fewer tokens"
        ) from error


def open_reader(
    folder: Path, backend: str, runtime: RuntimeConfig | None = None, *, optimized: bool = True
) -> tuple[Path, Reader]:
    """The folder of the models, and what reads a text by them. Arguments and errors as for `open_calls`."""
    for parts, reader in ((image_text.PARTS, image_text.ImageTextReader), (PARTS, Seq2SeqReader)):
        models = models_with(folder, parts)
        if models is not None:
            return models, reader(models, step_opener(models, backend, runtime, optimized=optimized))
    parts = TextParts.of(folder)
    return parts.folder, TextReader(parts, open_calls(parts, backend, runtime, optimized=optimized))


def read_settings(models: Path) -> dict[str, Any]:
    """What the folder says of tokens: `vocab_size`, `pad`, `eos`, which end a text, `start`, a decoder's first, and
    `positions`, of which a model may have a table."""
    try:
        if (models / CONFIG).is_file():
            section = json.loads((models / CONFIG).read_text(encoding="utf-8"))
            section |= section.get("text_config") or section.get("decoder") or {}
        else:
            section = json.loads((models / SETTINGS).read_text(encoding="utf-8"))["model"]
        if (models / GENERATION).is_file():
            section |= json.loads((models / GENERATION).read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    eos = section.get("eos_token_id")
    starts = (section.get(key) for key in ("decoder_start_token_id", "bos_token_id"))
    return {
        "vocab_size": section.get("vocab_size"),
        "positions": next((section[key] for key in POSITIONS if section.get(key)), None),
        "pad": section.get("pad_token_id"),
        "eos": [eos] if isinstance(eos, int) else list(eos or ()),
        "start": next((start for start in starts if start is not None), 0),
    }


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
    reader: Reader,
    ids: Sequence[int],
    count: int,
    choose: Callable[[np.ndarray], int],
    ends: frozenset[int] = frozenset(),
) -> Iterator[int]:
    """Yield up to `count` new tokens; a token of `ends` is the last.

    Args:
        reader: reads tokens, and returns the logits of the last of them.
        ids: the tokens of the prompt.
        count: the most new tokens.
        choose: from the logits of the last token, float (vocabulary,), the next token.
        ends: tokens after which nothing follows.

    Raises:
        UsageError: the cache does not hold the prompt and the new tokens.
    """
    reader.begin(len(ids) + count - 1)
    new = ids
    if isinstance(
        reader, Seq2SeqReader
    ):  # the ranges of a quantized decoder are of calls with one token, without masks
        for token in ids[:-1]:
            reader.read([token])
        new = ids[-1:]
    for _ in range(count):
        token = choose(reader.read(new))
        yield token
        if token in ends:
            return
        new = [token]


def take_largest(logits: np.ndarray) -> int:
    """The most likely token; of equal logits the first, as in torch."""
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
