"""Train a GPT on the characters of a text, by default the Apache licence of this project, until its loss is low enough.

    python examples/train_characters.py --until 0.5

Each step is one recorded program; `--save` keeps its states every 100 steps and goes on from them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW

from onnxline.training import record_step

TEXT = Path(__file__).resolve().parents[1] / "LICENSE"

PLACES, BATCH = 64, 32


class CharacterGPT(nn.Module):
    """A transformer that says of each place which character comes next."""

    def __init__(self, characters: int, width: int = 128, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Parameter(torch.randn(PLACES, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)
        self.register_buffer("mask", torch.full((PLACES, PLACES), -30.0).triu(1))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits (batch, places, characters) for text (batch, places) of int64."""
        hidden = self.layers(self.characters(text) + self.places, mask=self.mask, is_causal=True)
        return self.head(self.norm(hidden))


def mean_loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def read_text(path: Path) -> tuple[torch.Tensor, list[str]]:
    """The text as numbers of its characters, and these."""
    text = path.read_text(encoding="utf-8")
    names = sorted(set(text))
    return torch.tensor([names.index(character) for character in text]), names


def make() -> nn.Module:
    """The model for the characters of the licence: `model.factory` of configs/characters_gpt.yaml."""
    return CharacterGPT(len(read_text(TEXT)[1]))


def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches without an end: `train.batches` of configs/characters_gpt.yaml."""
    data, _ = read_text(TEXT)
    draw = torch.Generator().manual_seed(epoch)
    while True:
        yield draw_batch(data, draw)


def draw_batch(data: torch.Tensor, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of the text, and the characters that follow theirs."""
    starts = torch.randint(len(data) - PLACES - 1, (BATCH,), generator=draw)
    rows = starts[:, None] + torch.arange(PLACES + 1)
    return data[rows[:, :-1]], data[rows[:, 1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--until", type=float, default=0.5, help="stop when the mean loss of 50 steps is below it")
    parser.add_argument("--steps", type=int, default=4000, help="the most steps")
    parser.add_argument("--save", type=Path, help="a safetensors file for the states")
    options = parser.parse_args()
    data, names = read_text(options.text)
    torch.manual_seed(0)
    module = CharacterGPT(len(names)).train()
    draw = torch.Generator().manual_seed(0)

    optimizer = AdamW(module.parameters(), lr=1e-3)
    program = record_step(module, mean_loss, optimizer, draw_batch(data, draw), max_norm=1.0)
    if options.save and options.save.exists():
        program.load(options.save)
    losses: list[float] = []
    start = time.perf_counter()
    while program.steps_done < options.steps and not (len(losses) >= 50 and sum(losses[-50:]) / 50 < options.until):
        losses.append(program.step(draw_batch(data, draw)).item())
        if len(losses) % 100 == 0:
            print(
                f"step {program.steps_done}: {sum(losses[-50:]) / 50:.3f}, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
            if options.save:
                program.save(options.save)
    print(f"loss {sum(losses[-50:]) / min(len(losses), 50):.3f} after {program.steps_done} steps")


if __name__ == "__main__":
    main()
