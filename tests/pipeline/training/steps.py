"""Small models with their batches, and a train loop of plain torch beside which a recorded step is put."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.training import TrainProgram, record_step

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Model:
    """A module by a function that makes it, and the shapes of its batch."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: int = 0
    """Inputs are numbers below it; 0 for inputs of normal numbers."""
    targets: tuple[int, ...] | None = None
    """The shape of the targets; one for each sample by default."""
    classes: int = 10

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(number)
        x = (
            torch.randint(self.words, self.shape, generator=draw)
            if self.words
            else torch.randn(self.shape, generator=draw)
        )
        return x, torch.randint(self.classes, self.targets or self.shape[:1], generator=draw)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


def cnn() -> nn.Module:
    """A convolution in front of a BatchNorm has no bias: its gradient would be rounding noise, which Adam scales up."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class Transformer(nn.Module):
    """A layer with dropout, whose last product has the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(x))).flatten(0, 1)


class Logits(nn.Module):
    """A model of transformers, of which the loss reads the logits alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).logits.flatten(0, -2)


def vit_tiny() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=10, hidden_dropout_prob=0.1)
    return Logits(ViTForImageClassification(config)).train()


def gpt2_tiny() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=2, use_cache=False)
    return Logits(GPT2LMHeadModel(config)).train()


MODELS = {
    "mlp": Model(mlp, (8, 16)),
    "cnn with BatchNorm": Model(cnn, (8, 1, 8, 8)),
    "transformer with dropout": Model(Transformer, (2, 7), words=50, targets=(14,), classes=50),
    "ViT-tiny": Model(vit_tiny, (4, 3, 16, 16)),
    "GPT-2-tiny": Model(gpt2_tiny, (2, 7), words=50, targets=(14,), classes=50),
}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The same module at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def record(model: Model, make_optimizer: MakeOptimizer, **options: Any) -> tuple[TrainProgram, nn.Module, Optimizer]:
    """A recorded step, and a twin of its module with a twin of its optimizer, for plain torch."""
    module, twin = seeded(model.make), seeded(model.make)
    program = record_step(module, LOSS, make_optimizer(module.parameters()), model.batch(0), **options)
    return program, twin, make_optimizer(twin.parameters())


def step_of_torch(
    module: nn.Module,
    optimizer: Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    clip: Callable[[nn.Module], object] = lambda _: None,
) -> float:
    optimizer.zero_grad()
    loss = LOSS(module(batch[0]), batch[1])
    loss.backward()
    clip(module)
    optimizer.step()
    return loss.item()


LOSS = nn.CrossEntropyLoss()
KEY_BIASES = ("in_proj_bias", "key.bias", "k_proj.bias", "c_attn.bias")
"""The ends of the names of biases of K, alone or in one tensor with Q and V. A bias of K moves no loss: its gradient is
noise, which Adam scales up."""
