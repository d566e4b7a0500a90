"""Train an MLP and a small CNN on scikit-learn's images of digits, each step one recorded program.

    python examples/train_digits.py --model cnn

Prints the accuracy on each of five fixed stratified splits, and their mean. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from onnxline.training import record_step

BATCH = 64

SPLITS = 5


def make_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def make_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(1024, 10)),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": make_mlp, "cnn": make_cnn}


def read_splits() -> list[tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]:
    """Images (n, 1, 8, 8) of float32 from 0 to 1 with their digits, for training and for the test, of each split."""
    images, digits = load_digits(return_X_y=True)
    x = torch.from_numpy((images / 16).astype(np.float32).reshape(-1, 1, 8, 8))
    y = torch.from_numpy(digits.astype(np.int64))
    folds = StratifiedKFold(SPLITS, shuffle=True, random_state=0).split(images, digits)
    return [((x[train], y[train]), (x[test], y[test])) for train, test in folds]


def batches(epoch: int, split: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of an epoch in an order of its own: `train.batches` of configs/digits_mlp.yaml."""
    (x, y), _ = read_splits()[split]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    for number in range(len(x) // BATCH):
        chosen = order[number * BATCH : (number + 1) * BATCH]
        yield x[chosen], y[chosen]


def samples(split: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Images of the training, for ranges of activations: `quantsim.calibration.data` of configs/digits_qat.yaml."""
    (x, _), _ = read_splits()[split]
    for image in x:
        yield {"input": image[None].numpy()}


def evaluate(module: nn.Module, split: int = 0) -> dict[str, float]:
    """The share of digits of the test that are known: `train.evaluate` of configs/digits_mlp.yaml."""
    _, (x, y) = read_splits()[split]
    return {"accuracy": (module(x).argmax(1) == y).float().mean().item()}


def train(
    make: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor, epochs: int
) -> tuple[nn.Module, list[float]]:
    """The trained module, in evaluation mode, and the loss of each step."""
    torch.manual_seed(0)
    module = make().train()
    optimizer = AdamW(module.parameters(), lr=3e-3, weight_decay=1e-2)
    program = record_step(module, nn.CrossEntropyLoss(label_smoothing=0.05), optimizer, (x[:BATCH], y[:BATCH]))
    steps = len(x) // BATCH
    schedule = OneCycleLR(optimizer, max_lr=3e-3, total_steps=epochs * steps, cycle_momentum=False)
    losses = []
    for _ in range(epochs):
        order = torch.randperm(len(x))
        for number in range(steps):
            chosen = order[number * BATCH : (number + 1) * BATCH]
            losses.append(program.step((x[chosen], y[chosen])).item())
            schedule.step()
    program.write_back()
    return module.eval(), losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--losses", type=Path, help="write the loss of each step of each split here, as JSON")
    options = parser.parse_args()
    found, curves = [], []
    for number, ((x, y), (test_x, test_y)) in enumerate(read_splits()):
        start = time.perf_counter()
        module, losses = train(MODELS[options.model], x, y, options.epochs)
        with torch.no_grad():
            accuracy = (module(test_x).argmax(1) == test_y).float().mean().item()
        seconds = time.perf_counter() - start
        print(f"split {number}: {accuracy:.2%} after {len(losses)} steps, {seconds:.1f} s, last loss {losses[-1]:.3f}")
        found.append(accuracy)
        curves.append(losses)
    print(f"{options.model}: mean of {SPLITS} splits {np.mean(found):.2%}")
    if options.losses:
        options.losses.write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
