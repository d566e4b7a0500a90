"""A run in parts as an application runs it: what it is given, and what comes out.

A `PartsChain` reads subjects (prompts, sources, images with words) from `quantsim.calibration.data`, or draws them, and
gives one after the other to all parts, by a step for each of them: in float, recorded (chain_record.py), or quantized.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from passes.proof.draws import InputSampler
from passes.suggest import plural
from pipeline.config import CalibrationConfig, QuantSimConfig, RunConfig
from pipeline.errors import UsageError
from pipeline.export.load import read_onnx_file
from pipeline.export.source import InputSpec
from pipeline.parts import PartsResult
from pipeline.parts.folder import MODEL_ALONE
from pipeline.parts.generate import Reader, read_settings
from pipeline.parts.image_text import PIXELS, ImageTextReader, ImageTokens
from pipeline.parts.seq2seq import Seq2SeqReader
from pipeline.parts.sessions import CarriedStates, TextParts, TextReader
from pipeline.parts.slots import Step
from pipeline.quantsim.samples import KEY, Feeds, Samples, without_nan
from pipeline.verify.user_inputs import read_samples
from pipeline.workspace import stamp

LENGTH: Final = 32
"""New tokens of a text."""

PROMPT: Final = 12
"""Tokens of a random prompt, unless a chunk of prefill is longer."""

Run = Callable[[Any, int, Sequence[int]], "ChainResult"]
"""A subject, how many tokens at most, and the tokens that are read in place of the chain's own → what comes out."""


@dataclass(frozen=True, slots=True, eq=False)
class ChainResult:
    """What comes out of a chain.

    values: float: logits (tokens, vocabulary), an image, or all outputs in a row.
    tokens: greedy ones, by these logits.
    """

    values: np.ndarray
    tokens: tuple[int, ...] = ()


class PartsChain(ABC):
    """All parts of a run, one after the other.

    Args:
        models: the folder with the final models of all parts.
        parts: their names, in the order in which an application runs them.
        calibration: says the data, or the seed of random subjects.
    """

    noun: ClassVar[str] = "prompts"
    """What the random subjects are."""

    expected: ClassVar[str] = "files with an array input_ids"
    measured: ClassVar[str] = "logits"
    """What `ChainResult.values` are."""

    hands_over: ClassVar[bool] = True
    """Whether what leaves a part under one name enters the next one as it is."""

    def __init__(self, models: Path, parts: Sequence[str], calibration: CalibrationConfig) -> None:
        self.models, self.parts, self.calibration = models, tuple(parts), calibration

    @property
    def is_alike(self) -> bool:
        """Whether all parts compute the same values by the same names, at different numbers of tokens."""
        return False

    def file(self, folder: Path, part: str) -> Path:
        """The model of a part in a folder like `models`."""
        return folder / f"{part}.onnx"

    def subjects(self) -> Iterator[Any]:
        """Those of the calibration data; random ones without end where there is none.

        Raises:
            UsageError: the data cannot be read, or does not fit.
        """
        data, seed = self.calibration.data, self.calibration.seed
        return self.read() if data else self.draw(np.random.default_rng(seed))

    @abstractmethod
    def read(self) -> Iterator[Any]:
        """The subjects of the calibration data."""

    @abstractmethod
    def draw(self, generator: np.random.Generator) -> Iterator[Any]:
        """Random subjects."""

    @abstractmethod
    def open(self, steps: Mapping[str, Step]) -> Run:
        """The chain by one step for each part."""

    def draw_tokens(self, generator: np.random.Generator, size: int | Sequence[int], *others: int) -> np.ndarray:
        """Random tokens, int64 (size): neither that of padding nor `others`, unless the vocabulary has only these.

        A model has no embedding for padding, or one that no training has moved. A position whose embedding is zero
        has noise that says nothing of a text, and the ratio of a whole part is little more than that position's.
        """
        settings = read_settings(self.models)
        count = settings.get("vocab_size") or 2
        words = np.setdiff1d(np.arange(count), [token for token in (settings.get("pad"), *others) if token is not None])
        return generator.choice(words if words.size else np.arange(count), size)

    def extend(self, subject: Any, _tokens: Sequence[int]) -> Any:
        """The subject with a text after it, which a decoder reads at once; None where the chain reads no text."""
        return None

    def identity(self) -> list[object]:
        """What tells other subjects from these."""
        return [*Samples(QuantSimConfig(calibration=self.calibration), (), None).identity(), LENGTH, PROMPT]

    def read_data(self, *specs: InputSpec) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        """A name and the arrays of each sample of the data; there are tokens, and all are within the vocabulary."""
        for label, feeds in read_samples(self.calibration.data, specs, KEY, self.calibration.args):
            if TOKENS in feeds:
                self._check_tokens(label, feeds[TOKENS])
            yield label, without_nan(label, feeds)

    def _check_tokens(self, label: str, tokens: np.ndarray) -> None:
        if tokens.shape[-1] == 0:
            raise UsageError(f"{KEY}: {label}: found {TOKENS} of length 0, expected one token at least")
        size = read_settings(self.models).get("vocab_size")
        wrong = tokens[(tokens < 0) | (tokens >= (size or math.inf))]
        if wrong.size:
            what = f"0 to {size - 1}" if size else "0 or more"
            raise UsageError(f"{KEY}: {label}: found the token {wrong[0]}, expected {what}")

    def specs(self, part: str) -> tuple[InputSpec, ...]:
        """The inputs of a part, as its file declares them."""
        return read_onnx_file(str(self.file(self.models, part))).inputs


TOKENS: Final = "input_ids"

WRITTEN: Final = "decoder_input_ids"
"""What a decoder has written already, in a subject with another prompt or source."""

PROMPTS: Final = InputSpec(TOKENS, ("batch", "length"), "int64", 0, 0)


class TextChain(PartsChain):
    """A decoder over its cache, or prefill and decode: a subject is a prompt."""

    def __init__(self, models: Path, parts: Sequence[str], calibration: CalibrationConfig) -> None:
        super().__init__(models, parts, calibration)
        self.text = TextParts.of(models)

    @property
    def is_alike(self) -> bool:
        return self.text.is_static

    def read(self) -> Iterator[list[int]]:
        for _, feeds in self.read_data(PROMPTS):
            yield from feeds[TOKENS].tolist()

    def draw(self, generator: np.random.Generator) -> Iterator[list[int]]:
        size = max(PROMPT, self.text.chunk + 1) if self.text.is_static else PROMPT
        while True:
            yield self.draw_tokens(generator, size).tolist()

    def extend(self, subject: list[int], tokens: Sequence[int]) -> list[int]:
        return [*subject, *tokens]

    def open(self, steps: Mapping[str, Step]) -> Run:
        return partial(self._read, TextReader(self.text, CarriedStates(self.text, lambda path: steps[path.stem])))

    def _read(self, reader: TextReader, prompt: Sequence[int], most: int, text: Sequence[int]) -> ChainResult:
        room = self.text.length or read_settings(self.models).get("positions") or len(prompt) + most
        prompt = prompt[:room]
        return read_greedily(reader, prompt, min(most, room - len(prompt) + 1), text)


class Seq2SeqChain(PartsChain):
    """An encoder, and a decoder after it: a subject is a source, tokens or features."""

    noun, expected = "sources", "files with an array of the encoder's input"

    @property
    def source(self) -> InputSpec:
        return next(spec for spec in self.specs("encoder") if spec.name != "attention_mask")

    def read(self) -> Iterator[Feeds]:
        name = self.source.name
        for _, feeds in self.read_data(self.source):
            yield from ({name: row[None]} for row in feeds[name])

    def draw(self, generator: np.random.Generator) -> Iterator[Feeds]:
        spec = self.source
        shape = [1, *(size if isinstance(size, int) else PROMPT for size in spec.shape[1:])]
        while True:
            if spec.name == TOKENS:
                yield {TOKENS: self.draw_tokens(generator, shape)}
            else:
                yield {spec.name: generator.standard_normal(shape, np.float32)}

    def extend(self, subject: Feeds, tokens: Sequence[int]) -> Feeds:
        return {**subject, WRITTEN: np.array(tokens, np.int64)}

    def open(self, steps: Mapping[str, Step]) -> Run:
        start = read_settings(self.models).get("start", 0)
        return partial(self._read, Seq2SeqReader(self.models, lambda path: steps[path.stem]), start)

    def _read(self, reader: Seq2SeqReader, start: int, source: Feeds, most: int, text: Sequence[int]) -> ChainResult:
        reader.encode(source)
        first = [start, *source.get(WRITTEN, ())]
        room = read_settings(self.models).get("positions") or len(first) + most
        return read_greedily(reader, first[:room], max(1, min(most, room - len(first) + 1)), text)


class ImageTextChain(PartsChain):
    """Vision, embedding and decoder: a subject is an image and a prompt with its tokens."""

    noun, expected = "images and prompts", f"files with the arrays {PIXELS} and input_ids"

    def read(self) -> Iterator[Feeds]:
        pixels, image = next(spec for spec in self.specs("vision") if spec.name == PIXELS), ImageTokens.of(self.models)
        for label, feeds in self.read_data(pixels, PROMPTS):
            if len(feeds[TOKENS]) != 1:
                raise UsageError(f"{KEY}: {label}: found {len(feeds[TOKENS])} prompts, expected one for each image")
            shown = int((feeds[TOKENS] == image.token).sum())
            if shown != image.count:
                raise UsageError(
                    f"{KEY}: {label}: found {plural(shown, 'token')} {image.token}, which stands for an image, "
                    f"expected {image.count}"
                )
            yield feeds

    def draw(self, generator: np.random.Generator) -> Iterator[Feeds]:
        image = ImageTokens.of(self.models)
        [pixels] = (spec.shape_at({}) for spec in self.specs("vision") if spec.name == PIXELS)
        while True:
            words = self.draw_tokens(generator, PROMPT, image.token)
            ids = np.insert(words, 2, [image.token] * image.count)[None]
            yield {PIXELS: generator.standard_normal(pixels, np.float32), TOKENS: ids.astype(np.int64)}

    def extend(self, subject: Feeds, tokens: Sequence[int]) -> Feeds:
        image = ImageTokens.of(self.models).token  # a written one has no image
        words = list(takewhile(lambda token: token != image, tokens))
        return {**subject, WRITTEN: np.array(words, np.int64)}

    def open(self, steps: Mapping[str, Step]) -> Run:
        return partial(self._read, ImageTextReader(self.models, lambda path: steps[path.stem]))

    def _read(self, reader: ImageTextReader, subject: Feeds, most: int, text: Sequence[int]) -> ChainResult:
        prompt = subject[TOKENS][0].tolist()
        reader.encode({PIXELS: subject[PIXELS]}, len(prompt))
        prompt += subject.get(WRITTEN, np.zeros(0, np.int64)).tolist()
        room = read_settings(self.models).get("positions") or len(prompt) + most
        return read_greedily(reader, prompt, max(1, min(most, room - len(prompt) + 1)), text)


class FeatureChain(PartsChain):
    """One part: a subject is a call of it."""

    noun, expected, measured = "calls", "files with its inputs", "outputs"
    sampler: InputSampler | None = None

    def read(self) -> Iterator[Feeds]:
        return (feeds for _, feeds in self.read_data(*self.specs(*self.parts)))

    def draw(self, generator: np.random.Generator) -> Iterator[Feeds]:
        if self.sampler is None:
            raise UsageError(f"found neither {KEY} nor draws of the run; expected one of them to measure ranges on")
        return map(self.sampler.draw, count(self.calibration.seed))

    def open(self, steps: Mapping[str, Step]) -> Run:
        [part] = self.parts
        return partial(self._call, steps[part])

    def _call(self, step: Step, feeds: Feeds, _most: int, _text: Sequence[int]) -> ChainResult:
        outputs = (array for array in step(feeds).values() if array.dtype.kind == "f")
        return ChainResult(np.concatenate([array.ravel() for array in outputs]))


class PipelineChain(PartsChain):
    """A pipeline of diffusers with its own scheduler: a subject is a prompt and the seed of its noise.

    The tokenizers are those of its folder, where it has them. An encoder of images gets those that come out.
    """

    noun, expected, measured, hands_over = "words", "files .txt with a prompt in each line", "image", False

    def __init__(self, models: Path, parts: Sequence[str], calibration: CalibrationConfig, pipeline: Any) -> None:
        super().__init__(models, parts, calibration)
        self._pipeline = pipeline
        for folder in models.glob("tokenizer*/"):
            from transformers import AutoTokenizer

            setattr(pipeline.pipe, folder.name, AutoTokenizer.from_pretrained(str(folder), local_files_only=True))

    def file(self, folder: Path, part: str) -> Path:
        return folder / part / MODEL_ALONE

    def read(self) -> Iterator[tuple[str, int]]:
        lines = (line for file in self._files() for line in _read_text(file).splitlines())
        return zip(filter(str.strip, lines), count(self.calibration.seed), strict=False)

    def _files(self) -> list[Path]:
        files = [Path(entry) for entry in self.calibration.data]
        wrong = next((file for file in files if file.suffix != ".txt" or not file.is_file()), None)
        if wrong is not None:
            raise UsageError(f"{KEY}: found {wrong}, expected {self.expected}")
        return files

    def draw(self, generator: np.random.Generator) -> Iterator[tuple[str, int]]:
        for seed in count(self.calibration.seed):
            yield " ".join(generator.choice(words) for words in WORDS), seed

    def identity(self) -> list[object]:
        return [*map(stamp, self._files())]

    def open(self, steps: Mapping[str, Step]) -> Run:
        return partial(self._make_image, steps)

    def _make_image(
        self, steps: Mapping[str, Step], subject: tuple[str, int], _most: int, _text: Sequence[int]
    ) -> ChainResult:
        prompt, seed = subject
        encoders = {name for name in self.parts if name.endswith("vae_encoder")}
        with self._pipeline.replace_models({name: steps[name] for name in self.parts if name not in encoders}):
            image = self._pipeline.make_image((prompt,), seed=seed).numpy()
        for name in encoders:
            [source] = (value.name for value in self.specs(name))
            steps[name]({source: 2 * image - 1})
        return ChainResult(image)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{KEY}: {file}: {error}; expected a text in UTF-8") from error


WORDS: Final = (("a red", "a blue", "two green", "an old"), ("house", "cats", "circle", "tree"), ("on grey", "at sea"))


def read_greedily(reader: Reader, prompt: Sequence[int], most: int, text: Sequence[int]) -> ChainResult:
    """`most` greedy tokens after a prompt, and the logits that each was chosen from; `text` is read in their place."""
    reader.begin(len(prompt) + most - 1)
    new, rows = list(prompt), list[np.ndarray]()
    for place in range(most):
        rows.append(reader.read(new))
        new = [text[place] if text else int(rows[-1].argmax())]
    logits = np.stack(rows)
    return ChainResult(logits, tuple(logits.argmax(-1).tolist()))


def open_chain(config: RunConfig, before: PartsResult) -> PartsChain:
    """The chain of a run in parts that ended well."""
    settings, names = (config.quantsim or QuantSimConfig()).calibration, tuple(before.parts)
    if config.model.diffusers is not None:
        from pipeline.export.parts import load_for_parts  # loads torch

        return PipelineChain(before.models, names, settings, load_for_parts(config.model).module)
    chain = CHAINS[config.model.task](before.models, names, settings)
    if isinstance(chain, FeatureChain):
        chain.sampler = next(iter(before.parts.values())).sampler
    return chain


CHAINS: Final[Mapping[str | None, type[PartsChain]]] = {
    "text-generation": TextChain,
    "text2text-generation": Seq2SeqChain,
    "automatic-speech-recognition": Seq2SeqChain,
    "image-text-to-text": ImageTextChain,
    "feature-extraction": FeatureChain,
}
"""Task → the chain of its parts."""
