"""Weights of 4 bits to the nearest, by GPTQ and by distillation, on two language models.

    python -m benchmarks.quant_algorithms [--folder DIR] [--steps 700] [--models llama gpt] [--formats …] [--chains …]

Activations are in float, and in 16 bits. The Llama is that of the case study, whose weights are random: judged by its
logits over prompts and steps of decoding that no step has seen. A GPT of four layers is trained by `onnxline train` on
nine tenths of the pages of docs/, and judged by its perplexity on the rest.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn

from benchmarks.case_studies import llama
from benchmarks.measure import machine, run_child, versions_line
from examples.train_characters import CharacterGPT, draw_batch, mean_loss
from passes.weights.detached import DetachedModel, read_model
from passes.weights.sessions import Session
from pipeline.config import RunConfig
from pipeline.config.quantsim import parse_precision
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.noise import Feeds, sqnr_db
from pipeline.quantsim.optimize import Chosen, Optimization, select_weights
from pipeline.quantsim.optimizers import optimizers_of
from pipeline.quantsim.placement import PlacementRule, place
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.simulation import compare_outputs
from pipeline.run import Pipeline

PAGES: Final = Path(__file__).resolve().parents[1] / "docs"

FIRST, LAST = " ", "~"
"""The characters that are read; all others, such as the end of a line, are one."""

LAYERS: Final = 4

FITTED, PROMPTS, HELD, JUDGED = 12, 128, 4, 24
"""Batches of text or prompts that a step sees, batches or prompts that it is judged on, and those of the table."""

FORMATS: Final = ("int4/channel", "int4/block32", "uint4/block32")

GPTQ: Final = {"gptq": {"act_order": True}}

FITTED_SCALES: Final = {"gptq": {"act_order": True, "mse": True}}

CHAINS: Final[dict[str, tuple[object, ...]]] = {
    "nearest": (),
    "gptq": ("gptq",),
    "act-order": (GPTQ,),
    "mse": (FITTED_SCALES,),
    "distill": (GPTQ, "distill"),
    "mse-distill": (FITTED_SCALES, "distill"),
}
"""What `--chains` chooses from; `distill` has as many iterations as its model needs."""


def read_pages() -> tuple[torch.Tensor, torch.Tensor]:
    """The text to train on and the text to judge by, as numbers of characters."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(PAGES.rglob("*.md")))
    numbers = torch.tensor([ord(character) - ord(FIRST) for character in text])
    count = ord(LAST) - ord(FIRST) + 1
    numbers[(numbers < 0) | (numbers >= count)] = count
    split = len(numbers) * 9 // 10
    return numbers[:split], numbers[split:]


def make() -> nn.Module:
    """The GPT; what `onnxline train` calls."""
    return CharacterGPT(ord(LAST) - ord(FIRST) + 2, layers=LAYERS)


def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches without an end."""
    data, draw = read_pages()[0], torch.Generator().manual_seed(epoch)
    while True:
        yield draw_batch(data, draw)


loss = mean_loss

CONFIG: Final = """
name: pages_gpt
model:
  factory: benchmarks.quant_algorithms:make
  inputs:
    text: {shape: [batch, 64], dtype: int64, range: [0, 96]}
export: {opset: 21}
runtime: {backends: [onnxruntime]}
train:
  batches: benchmarks.quant_algorithms:batches
  loss: benchmarks.quant_algorithms:loss
  optimizer: {name: adamw, lr: 1e-3}
  max_norm: 1.0
"""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, with the samples that a step sees, those that it is judged on, and those of the table.

    rate: outputs of the float model and of the quantized one, on the samples of the table → what the table says.
    iterations: of distillation.
    """

    name: str
    model: DetachedModel
    seen: Sequence[Feeds]
    held: Sequence[Feeds]
    judged: Sequence[Feeds]
    rate: Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], str]
    iterations: int


def train_gpt(folder: Path, steps: int) -> Subject:
    config, out = folder / "pages_gpt.yaml", folder / "pages_gpt-train"
    config.write_text(CONFIG)
    if not (out / "weights.safetensors").exists():
        command = ["-m", "onnxline", "train", str(config), "--set", f"train.steps={steps}", "--out", str(out)]
        run_child(command, memory=False)
    settings = [f"model.checkpoint={out / 'weights.safetensors'}", "train=null", "passes.recipe=[default, clamp-mask]"]
    path = Pipeline(RunConfig.from_yaml(config, settings), folder / "pages_gpt").run().model
    draw = torch.Generator().manual_seed(0)
    training, held_out = read_pages()
    pieces = [draw_batch(training, draw) for _ in range(FITTED + HELD)]
    judged = [draw_batch(held_out, draw) for _ in range(JUDGED)]
    following = [labels.numpy() for _, labels in judged]

    def rate(expected: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> str:
        floats, ours = (_perplexity(outputs, following) for outputs in (expected, found))
        more = 100 * (ours / floats - 1)
        return f"{_ratio(expected, found)}; perplexity {floats:.3f} → {ours:.3f} ({more:+.2f} %)"

    samples = [{"text": text.numpy()} for text, _ in (*pieces, *judged)]
    parts = samples[:FITTED], samples[FITTED : FITTED + HELD], samples[FITTED + HELD :]
    return Subject(f"GPT of {LAYERS} layers", read_model(path), *parts, rate, 200)


def _perplexity(outputs: Sequence[np.ndarray], following: Sequence[np.ndarray]) -> float:
    losses = [
        nn.functional.cross_entropy(torch.from_numpy(logits).flatten(0, 1), torch.from_numpy(labels).flatten()).item()
        for logits, labels in zip(outputs, following, strict=True)
    ]
    return float(np.exp(np.mean(losses)))


def _ratio(expected: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> str:
    signal = sum(float(np.square(array, dtype=np.float64).sum()) for array in expected)
    noise = sum(
        float(np.square(array - other, dtype=np.float64).sum()) for array, other in zip(expected, found, strict=True)
    )
    return f"{sqnr_db(signal, noise):.2f} dB"


def load_llama() -> Subject:
    path = Pipeline(RunConfig.from_yaml(llama.CONFIG, ["export.opset=21"]), llama.FLOAT.parent).run().model
    samples, calls = list(llama.calibrate_both(PROMPTS + HELD + JUDGED)), llama.STEPS + 1
    fitted, held = PROMPTS * calls, (PROMPTS + HELD) * calls
    parts = samples[:fitted], samples[fitted:held], samples[held:]
    return Subject("Llama of the case study", read_model(path), *parts, _ratio, 1500)


def round_weights(subject: Subject, weights: str, steps: Sequence[object]) -> Chosen:
    model = subject.model
    placement = place(model, [PlacementRule("op:*", parse_precision(weights), "float")])
    output = model.proto.graph.output[0].name

    def rate(chosen: Chosen) -> float:
        quantized = insert_qdq(chosen.tune(model), encode(placement, {}, model, chosen.encodings))
        return compare_outputs(model, quantized, subject.held)[output].sqnr_db

    encodings = select_weights(placement, encode(placement, {}, model))
    with tempfile.TemporaryDirectory() as folder:
        optimization = Optimization(model, placement, encodings, lambda: subject.held, rate, Path(folder))
        return optimization.run(optimizers_of(steps), subject.seen)[0]


def quantize(subject: Subject, weights: str, activations: str, chosen: Chosen) -> DetachedModel:
    model, is_float = subject.model, activations == "float"
    rule = PlacementRule("op:*", parse_precision(weights), "float" if is_float else parse_precision(activations))
    placement = place(model, [rule])
    ranges = {} if is_float else calibrate(model, placement, subject.seen[:RANGED])
    return insert_qdq(chosen.tune(model), encode(placement, ranges, model, chosen.encodings))


RANGED: Final = 204
"""Samples that the ranges of activations are measured on, at most."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "onnxline-algorithms")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--models", nargs="*", choices=("llama", "gpt"), default=("llama", "gpt"))
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--chains", nargs="*", choices=CHAINS, default=tuple(CHAINS))
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    print(f"{machine()}; {versions_line()}\n\n| model | activations | weights | steps | held out | s |")
    print("| --- | --- | --- | --- | --- | --- |")
    subjects = {"llama": load_llama, "gpt": lambda: train_gpt(chosen.folder, chosen.steps)}
    for subject in (subjects[name]() for name in chosen.models):
        output = subject.model.proto.graph.output[0].name
        session = Session.of(subject.model)
        expected = [session.run(sample)[output] for sample in subject.judged]
        distill = {"distill": {"iterations": subject.iterations}}
        for weights in chosen.formats:
            for chain in (CHAINS[name] for name in chosen.chains):
                steps = tuple(distill if step == "distill" else step for step in chain)
                begun = time.perf_counter()
                rounded = round_weights(subject, weights, steps) if steps else Chosen()
                seconds = time.perf_counter() - begun
                for activations in ("float", "uint16"):
                    session = Session.of(quantize(subject, weights, activations, rounded))
                    found = [session.run(sample)[output] for sample in subject.judged]
                    row = activations, f"`{weights}`", ", ".join(map(str, steps)) or "to the nearest"
                    said = subject.rate(expected, found)
                    print(f"| {subject.name} | {' | '.join(row)} | {said} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
