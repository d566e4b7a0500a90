"""Two towers of a search: one embeds questions, the other passages, over one embedding of words.

Each is a part of its own in `configs/own_parts.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

WORDS, WIDTH, LAYERS = 500, 64, {"question": 1, "passage": 2}


class Tower(nn.Module):
    """Embeds texts: the mean over their words, of length one."""

    def __init__(self, words: nn.Embedding, layers: int) -> None:
        super().__init__()
        self.words = words
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(self.layers(self.words(ids)).mean(1), dim=-1)


def make(tower: str) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The tower of this name; both have the embedding that the seed says."""
    words = nn.Embedding(WORDS, WIDTH)
    return Tower(words, LAYERS[tower]), (torch.arange(12).reshape(2, 6),)


def search(
    parts: Mapping[str, Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]], generator: np.random.Generator
) -> np.ndarray:
    """The chain: how well each of five passages fits each of three questions."""
    questions = parts["question"]({"ids": generator.integers(0, WORDS, (3, 6))})["output"]
    passages = parts["passage"]({"ids": generator.integers(0, WORDS, (5, 6))})["output"]
    return questions @ passages.T
