"""The simulation of a quantized model in torch, by torchao, next to that of onnxruntime by the specification.

    TORCHAO_PYTHON -m benchmarks.quantsim_torch [--folder DIR] [--minilm]

By the interpreter of an environment that has torchao. An attention block in several formats; with --minilm the trained
MiniLM, prepared, one batch.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx

from benchmarks.handoff import minilm
from benchmarks.handoff.harness import Feeds, detach_copy
from benchmarks.handoff.models import block_samples, export_block, export_minilm
from benchmarks.handoff.ours import W8A16
from benchmarks.measure import machine, versions_line
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.config.quantsim import parse_precision
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.placement import PlacementRule, place
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.torch_nodes import TorchRun

RULES = {
    "W8 per channel, A16": W8A16,
    "W8 per channel, A8": PlacementRule("op:*", parse_precision("int8/channel"), parse_precision("uint8")),
    "W4 in blocks of 32, A16": PlacementRule("op:*", parse_precision("int4/block32"), parse_precision("uint16")),
}

OPSET = 21


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "onnxline-handoff")
    parser.add_argument("--minilm", action="store_true")
    chosen = parser.parse_args()
    print(f"{machine()}; {versions_line()}, torchao {version('torchao')}\n")
    print("| model | formats | onnxruntime | torchao | of each other | numbers equal in every bit |")
    print("| --- | --- | --- | --- | --- | --- |")
    block = detach_copy(onnx.load(export_block(OPSET, chosen.folder, "separate")))
    for title, rule in RULES.items():
        show(f"attention block | {title}", block, rule, block_samples(8, 1), block_samples(8, 2))
    if chosen.minilm:
        model = detach_copy(onnx.load(export_minilm(OPSET, chosen.folder, prepared=True)))
        title, rule = next(iter(RULES.items()))
        show(f"MiniLM, prepared | {title}", model, rule, minilm.calibration_samples(), minilm.evaluation_samples()[:1])


def show(
    title: str, model: DetachedModel, rule: PlacementRule, calibration: Sequence[Feeds], evaluation: Sequence[Feeds]
) -> None:
    """SQNR of the first output against the float model, in both, and of one against the other."""
    placement = place(model, [rule])
    quantized = insert_qdq(model, encode(placement, calibrate(model, placement, calibration), model))
    first = model.proto.graph.output[0].name
    ours, theirs, floats = (
        np.concatenate([outputs.ravel() for outputs in run(runner, evaluation, first)])
        for runner in (Session.of(quantized), TorchRun(quantized), Session.of(model))
    )
    ratios = [f"{minilm.sqnr_db(*pair):.2f} dB" for pair in ((floats, ours), (floats, theirs), (ours, theirs))]
    print(f"| {title} | {' | '.join(ratios)} | {int((ours == theirs).sum())} of {ours.size} |", flush=True)


def run(runner: Session | TorchRun, samples: Sequence[Feeds], output: str) -> Iterator[np.ndarray]:
    return (runner.run(sample)[output] for sample in samples)


if __name__ == "__main__":
    main()
