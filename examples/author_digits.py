"""Write a small CNN by hand, layer by layer, and train it on scikit-learn's images of digits.

    python examples/author_digits.py --epochs 12

Prints the graph that the layers emit, the phases, a line for each epoch, and the accuracy. With `--save` the states are
kept in a file: after Ctrl-C the same command goes on. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from onnxline.authoring import (
    AdamW,
    BatchNorm2d,
    Conv2d,
    CrossEntropyLoss,
    Dropout,
    Evaluation,
    Flatten,
    IRTensor,
    Linear,
    MaxPool2d,
    Model,
    Module,
    ReLU,
    functional,
)
from onnxline.ir import to_text
from train_digits import BATCH, batches, read_splits


class Residual(Module):
    """A convolution whose result is added to what it read."""

    def __init__(self, channels: int) -> None:
        self.conv = Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = BatchNorm2d(channels)

    def forward(self, x: IRTensor) -> IRTensor:
        return functional.relu(x + self.norm(self.conv(x)))


def make_model() -> Model:
    model = Model((BATCH, 1, 8, 8), name="digits")
    model.add(Conv2d(1, 16, 3, padding=1, bias=False)).add(BatchNorm2d(16)).add(ReLU())
    model.add(Residual(16)).add(MaxPool2d(2))
    model.add(Flatten()).add(Dropout(0.3)).add(Linear(256, 10))
    return model


def run(epochs: int, path: Path | None = None, *, quiet: bool = False) -> Evaluation:
    """Train the model on the first split, and judge it on the images of its test."""
    torch.manual_seed(0)
    model = make_model()
    if not quiet:
        print(to_text(model.graph()))
    model.compile(AdamW(lr=3e-3, weight_decay=1e-2), CrossEntropyLoss(label_smoothing=0.05), quiet=quiet)
    model.fit(batches, epochs, path=path, resume=path is not None, quiet=quiet)
    _, test = read_splits()[0]
    return model.evaluate([test], accuracy=lambda output, digit: (output.argmax(1) == digit).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--save", type=Path, help="a safetensors file for the states")
    options = parser.parse_args()
    found = run(options.epochs, options.save)
    print(f"accuracy {found.metrics['accuracy']:.2%} on {found.samples} images, loss {found.loss:.4f}")


if __name__ == "__main__":
    main()
