"""Quantization-aware training of a small CNN on scikit-learn's images of digits: weights of 4 bits, activations of 8.

    python examples/train_digits_qat.py --splits 5

Trains the CNN in float, quantizes it with `onnxline quantsim`, trains the quantized model, and puts its weights and
scales back into the quantized ONNX file. Prints the accuracy of each on onnxruntime, for each of the fixed stratified
splits that `train_digits.py` has, and their means. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from onnxline import RunConfig
from onnxline.quantsim import QuantSim
from onnxline.training import TrainProgram, as_module, record_step, with_weights
from train_digits import SPLITS, read_splits

BATCH = 64


@dataclass(frozen=True)
class Digits:
    """Images (n, 1, 8, 8) from 0 to 1, and their digits; a fifth of each digit is for the test."""

    x: torch.Tensor
    y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor


@dataclass(frozen=True)
class Accuracies:
    in_float: float
    quantized: float
    """Before it is trained."""
    trained: float


def read_digits(split: int = 0) -> Digits:
    (x, y), (test_x, test_y) = read_splits()[split]
    return Digits(x, y, test_x, test_y)


def make_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )


def train(module: nn.Module, digits: Digits, epochs: int, rate: float) -> TrainProgram:
    """The same for the module in float and the quantized model."""
    torch.manual_seed(0)
    optimizer = AdamW(module.parameters(), lr=rate)
    batch = digits.x[:BATCH], digits.y[:BATCH]
    program = record_step(module, nn.CrossEntropyLoss(label_smoothing=0.05), optimizer, batch)
    steps = len(digits.x) // BATCH
    schedule = OneCycleLR(optimizer, max_lr=rate, total_steps=epochs * steps, cycle_momentum=False)
    for _ in range(epochs):
        order = torch.randperm(len(digits.x))
        for number in range(steps):
            chosen = order[number * BATCH : (number + 1) * BATCH]
            program.step((digits.x[chosen], digits.y[chosen]))
            schedule.step()
    return program


def export(module: nn.Module, path: Path) -> None:
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.onnx.export(
            module, (torch.zeros(2, 1, 8, 8),), dynamo=True, optimize=False, verbose=False, opset_version=21,
            input_names=["x"], dynamic_shapes=({0: batch},),
        )  # fmt: skip
    assert found is not None
    onnx.save(found.model_proto, path)


def quantize(path: Path, digits: Digits, folder: Path, weights: str) -> Path:
    """The quantized model; ranges of activations are those of 256 images of the training."""
    np.savez(folder / "images.npz", x=digits.x[:256].numpy())
    settings = {
        "name": "digits",
        "model": {"onnx": str(path)},
        "passes": {"recipe": ["default"]},
        "quantsim": {
            "rules": {"op:*": {"weights": weights, "activations": "uint8"}},
            "calibration": {"data": str(folder / "images.npz")},
        },
    }
    return QuantSim(RunConfig.from_mapping(settings), folder / "run").run().folder / "model.qdq.onnx"


def measure(model: onnx.ModelProto, digits: Digits) -> float:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = np.asarray(session.run(None, {"x": digits.test_x.numpy()})[0])
    return float((found.argmax(1) == digits.test_y.numpy()).mean())


def run(folder: Path, epochs: int, tuning_epochs: int, weights: str = "int4/channel", split: int = 0) -> Accuracies:
    """Leaves `digits.onnx` and `digits.qat.onnx` in the folder."""
    digits = read_digits(split)
    cnn = make_cnn().train()
    train(cnn, digits, epochs, rate=3e-3).write_back()
    export(cnn.eval(), folder / "digits.onnx")
    path = quantize(folder / "digits.onnx", digits, folder, weights)
    program = train(as_module(path, shapes={"x": (BATCH, 1, 8, 8)}), digits, tuning_epochs, rate=1e-3)
    trained = with_weights(path, program)
    onnx.save(trained, folder / "digits.qat.onnx")
    return Accuracies(
        measure(onnx.load(folder / "digits.onnx"), digits), measure(onnx.load(path), digits), measure(trained, digits)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Quantization-aware training of a small CNN on digits")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--tuning-epochs", type=int, default=10)
    parser.add_argument("--weights", default="int4/channel", help="their format, such as int3/channel")
    parser.add_argument("--splits", type=int, choices=range(1, SPLITS + 1), default=1, help="how many of the splits")
    parser.add_argument("--out", type=Path, default=Path("runs/digits_qat"))
    options = parser.parse_args()
    found = []
    for split in range(options.splits):
        folder = options.out / f"split{split}" if options.splits > 1 else options.out
        folder.mkdir(parents=True, exist_ok=True)
        found.append(run(folder, options.epochs, options.tuning_epochs, options.weights, split))
        print(f"split {split}: {describe(found[-1])}", flush=True)
    if options.splits > 1:
        means = (np.mean(column) for column in zip(*map(astuple, found), strict=True))
        print(f"mean of {options.splits} splits: {describe(Accuracies(*map(float, means)))}")


def describe(found: Accuracies) -> str:
    return f"float {found.in_float:.2%}, quantized {found.quantized:.2%}, trained quantized {found.trained:.2%}"


if __name__ == "__main__":
    main()
