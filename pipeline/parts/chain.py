"""The proof across parts: greedy tokens of the parts are those of torch's `generate`, token for token."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from passes.errors import StepFailed
from passes.proof.numbers import STEPS, TOLERANCES
from passes.weights.sessions import lacks_kernel
from pipeline.config import ModelConfig, RunConfig
from pipeline.errors import CheckFailed, SourceError
from pipeline.export.call_watch import capture_output
from pipeline.export.parts.holder import TaskPart
from pipeline.export.parts.states import KEPT
from pipeline.export.parts.static import StaticDecoder
from pipeline.export.user_code import first_line
from pipeline.parts import image_text
from pipeline.parts.first_call import prove_first_call
from pipeline.parts.generate import Reader, continue_text, open_reader, take_largest
from pipeline.parts.seq2seq import PARTS, models_with
from pipeline.parts.sessions import TextParts, TextReader, backends_of, step_opener
from pipeline.report import ChainReport
from pipeline.runtime.tensors import to_numpy

TOKENS: Final = 32
"""New tokens of each prompt."""

PROMPTS: Final = (7, 3)
"""Tokens of each prompt."""


def prompts_of(parts: TextParts) -> tuple[int, ...]:
    """The tokens of each prompt; of a static cache one is longer than a chunk, where the cache has room for it."""
    if parts.length is None:
        return PROMPTS
    return tuple(min(count, parts.length) for count in (parts.chunk + 3, PROMPTS[1]))


@dataclass(frozen=True, slots=True, eq=False)
class TorchText:
    """A random prompt, the tokens by which torch's greedy `generate` goes on, and the logits that each was chosen from.

    logits: float (tokens, vocabulary).
    inputs: of the encoder, if there is one.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: np.ndarray
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)


def prove_chain(
    open_part: Callable[[], TaskPart],
    models: Path,
    config: RunConfig,
    observe: Callable[[str, int, int], object] = lambda *_: None,
) -> tuple[ChainReport, ...]:
    """Compare the texts of the folder `models` with those of torch, on each backend.

    A cache in int8 rounds, and its text may be another than that of `generate`: there torch generates over such a cache
    too, and the report says how many tokens are still those of `generate`. The decoder's first call as optimum-onnx
    makes it is run once.

    Args:
        open_part: makes the module of any part of `models`; it goes, with its weights, before a backend is opened.
        observe: called with each backend before it runs, its place and how many there are.
    """
    names, found = [*backends_of(config)], list[ChainReport]()
    texts, judged_as, note = _generate_texts(open_part(), models, config)
    gc.collect()
    for place, name in enumerate(names):
        observe(name, place, len(names))
        _, reader = open_reader(models, name, config.runtime, optimized=False)
        try:
            report = compare_texts(texts, reader, name, judged_as)
        except StepFailed as error:
            if config.runtime.backends is not None or not lacks_kernel(error):
                raise CheckFailed(f"the chain does not run on {name}: {error}") from error
            names.append("plan")  # as for a part: onnxruntime is no error unless somebody named it
            note = "; ".join(filter(None, (note, f"not on {name}: {error}")))
            continue
        found.append(_with_note(report, note))
    if models_with(models, PARTS):
        open_step = step_opener(models, found[0].backend, config.runtime, optimized=False)
        first = prove_first_call(models, open_step, texts[0].inputs, texts[0].prompt[0])
        found[0] = found[0] if first is None else _with_note(found[0], *first)
    return tuple(found)


def _with_note(report: ChainReport, note: str, is_right: bool = True) -> ChainReport:
    return replace(report, why="; ".join(filter(None, (report.why, note))), is_right=report.is_right and is_right)


def _generate_texts(part: TaskPart, models: Path, config: RunConfig) -> tuple[Sequence[TorchText], str, str]:
    """The texts by torch, the dtype whose tolerance they are compared within, and a note."""
    seed, model = config.verify.seed, part.held_model
    if models_with(models, image_text.PARTS):
        texts = [generate_after_image(model, length, seed + length) for length in PROMPTS]
    elif models_with(models, PARTS):
        texts = [generate_after_encoder(model, config.model, length, seed + length) for length in PROMPTS]
    else:
        parts = TextParts.of(models)
        texts = [
            generate_by_torch(model, length, seed + place, parts.length)
            for place, length in enumerate(prompts_of(parts))
        ]
    judged_as, note = "float32", ""
    if isinstance(part, StaticDecoder) and part.is_rounded:
        exact, texts = texts, [generate_by_part(part, text) for text in texts]
        same = sum(_first_difference(text, other.tokens) for text, other in zip(exact, texts, strict=True))
        note = f"{same} of {sum(len(text.tokens) for text in exact)} tokens are those of a cache that is not rounded"
        judged_as = STEPS[KEPT]
    return texts, judged_as, note


def generate_by_torch(model: Any, length: int, seed: int, room: int | None = None) -> TorchText:
    """A random prompt of `length` tokens, continued by `model.generate`; settings of the model's own are left aside.

    Args:
        room: the tokens that a cache holds, if it has a limit; the last new token is not read.
    """
    limits = (
        TOKENS + length,
        getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None),
        None if room is None else room + 1,
    )
    count = max(1, min(limit for limit in limits if limit is not None) - length)
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(0, vocabulary, (1, length), generator=generator)
    tokens, logits = generate_greedily(model, count, input_ids=ids, attention_mask=torch.ones_like(ids))
    return TorchText(tuple(ids[0].tolist()), tokens, logits)


def generate_after_encoder(model: Any, section: ModelConfig, length: int, seed: int) -> TorchText:
    """A text that the decoder writes to a random source of `length` tokens, or to random features."""
    from pipeline.export.parts.seq2seq import Encoder

    encoder = Encoder(model, section)
    inputs = encoder.draw_inputs(1, length, seed)
    limit = getattr(model.config, "max_target_positions", None) or getattr(
        model.config, "max_position_embeddings", None
    )
    count = max(1, min(TOKENS, (limit or TOKENS + 1) - 1))
    tokens, logits = generate_greedily(model, count, start=encoder.start, **inputs)
    arrays = {name: to_numpy(tensor) for name, tensor in inputs.items()}
    return TorchText((encoder.start,), tokens, logits, arrays)


def generate_after_image(model: Any, words: int, seed: int) -> TorchText:
    """A text that the model writes after a random image with random words around it."""
    from pipeline.export.parts.image_text import VisionPart, sees_later_words, token_of_image, tokens_with_image

    vision = VisionPart(model)
    pixels = vision.draw_pixels(seed)
    ids = tokens_with_image(model, 1, len(vision.features), words, seed)
    types = (ids == token_of_image(model.config)).long()
    given = {**vision.given, "pixel_values": pixels.reshape(vision.given["pixel_values"].shape)}
    known = inspect.signature(model.forward).parameters
    given |= {name: types for name in ("token_type_ids", "mm_token_type_ids") if name in known}
    if "token_type_ids" in given and sees_later_words(model):  # by the types of a prompt, which are 0
        given["token_type_ids"] = torch.zeros_like(ids)
    tokens, logits = generate_greedily(model, TOKENS, input_ids=ids, attention_mask=torch.ones_like(ids), **given)
    return TorchText(tuple(ids[0].tolist()), tokens, logits, {"pixel_values": to_numpy(pixels)})


def generate_greedily(
    model: Any, count: int, start: int | None = None, **inputs: Any
) -> tuple[tuple[int, ...], np.ndarray]:
    """The new tokens of transformers' `generate`, and the logits of each, float (tokens, vocabulary).

    Settings of the model's own are left aside, and so is what a class has in place of the common method: Whisper's cuts
    the sound into pieces, and calls that method for each.

    Raises:
        SourceError: the model raises.
    """
    from transformers import GenerationConfig, GenerationMixin

    known = {} if start is None else {"decoder_start_token_id": start}
    settings = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None, **known)
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with capture_output(), torch.no_grad():
            common: Any = GenerationMixin
            result = common.generate(
                model, **inputs, generation_config=settings, return_dict_in_generate=True, output_logits=True
            )
    except Exception as error:  # a model's forward may raise anything
        is_lookup = "out of range in self" in str(error)  # torch's words on a row that a table of embeddings lacks
        expected = "a configuration whose tokens are in the vocabulary" if is_lookup else "a model whose generate runs"
        raise SourceError(
            f"model.task: transformers' own generate of {type(model).__name__} raises {first_line(error)}, so there is "
            f"no text to compare the chain with; expected {expected}"
        ) from error
    finally:
        model.generation_config = own
    return tuple(result.sequences[0, -count:].tolist()), torch.cat(result.logits).float().numpy()


@torch.no_grad()
def generate_by_part(part: StaticDecoder, text: TorchText) -> TorchText:
    """The prompt of `text`, continued by the module of a part as far as `text` goes."""
    states, new, seen = part.empty_states(1, part.length), torch.tensor([text.prompt], device=part.device), 0
    rows = []
    for _ in text.tokens:
        found = part.forward(new, torch.arange(seen, seen + new.shape[1], device=part.device), past_key_values=states)
        states, seen = found["present"], seen + new.shape[1]
        rows.append(found["logits"][0, -1].float())
        new = rows[-1].argmax().view(1, 1)
    logits = torch.stack(rows).cpu().numpy()
    return TorchText(text.prompt, tuple(logits.argmax(-1).tolist()), logits)


def _first_difference(text: TorchText, tokens: Sequence[int]) -> int:
    """How many of `tokens` come before the first that differs from those of `text`."""
    pairs = enumerate(zip(tokens, text.tokens, strict=True))
    return next((at for at, pair in pairs if len(set(pair)) > 1), len(tokens))


def compare_texts(texts: Sequence[TorchText], reader: Reader, backend: str, judged_as: str) -> ChainReport:
    """Continue each prompt by `reader`, and compare up to the first token that differs: that one is right where torch's
    logits of the two tokens differ by rounding alone, and what follows it is another text.

    Args:
        texts: the texts by torch.
        reader: reads tokens by the parts.
        backend: its name, for the report.
        judged_as: the dtype whose tolerance says what rounding is.
    """
    equal, whys, is_right = 0, [], True
    for place, text in enumerate(texts, 1):
        if not isinstance(reader, TextReader):
            reader.encode(text.inputs)
        tokens = tuple(continue_text(reader, text.prompt, len(text.tokens), take_largest))
        same = _first_difference(text, tokens)
        equal += same
        if same < len(tokens):
            row, wanted, found = text.logits[same], text.tokens[same], tokens[same]
            gap, limit = float(row[wanted] - row[found]), _limit(row, judged_as)
            is_right &= gap <= limit
            whys.append(
                f"token {same + 1} of prompt {place} is {found}, torch has {wanted}; torch's logits of the two differ "
                f"by {gap:.1e}, and {limit:.1e} is rounding"
            )
    return ChainReport(backend, len(texts), sum(len(text.tokens) for text in texts), equal, is_right, "; ".join(whys))


def _limit(logits: np.ndarray, judged_as: str) -> float:
    """What two right results may differ by, twice: each of two logits is rounded."""
    tolerance = TOLERANCES[judged_as]
    return 2 * (tolerance.atol + tolerance.rtol * float(np.abs(logits).max()))
