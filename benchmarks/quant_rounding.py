"""MiniLM with weights of 4 bits alone: the steps of `quantsim.optimize` and `prepare` against rounding to the nearest.

    python -m benchmarks.quant_rounding --aimet PYTHON [--nncf PYTHON] [--folder DIR] [--only STEP]

The steps see 6 of 8 batches of calibration and keep what is better on the other 2; the ratio is that of the embeddings
of 200 other sentences. `benchmarks.quant_adapters` holds each step against its library's own call.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.handoff import minilm
from benchmarks.handoff.harness import Feeds, detach_copy, interpreter_options, runner_of
from benchmarks.handoff.models import export_minilm
from benchmarks.handoff.ours import simulate_encodings
from benchmarks.measure import machine, versions_line
from passes.weights.detached import DetachedModel
from pipeline.config.quantsim import parse_precision
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.optimize import Chosen, Optimization, OptimizedStep
from pipeline.quantsim.optimizers import optimizers_of
from pipeline.quantsim.placement import Placement, PlacementRule, place
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.simulation import compare_outputs

OPSET, HELD_OUT = 21, 2
FORMATS = ("int4/channel", "int4/block32")
AIMET = ("seq-mse", "ada-round")
CHAINS: tuple[tuple[str, ...], ...] = ((), ("gptq",), ("seq-mse",), ("seq-mse", "gptq"), ("ada-round",))


@dataclass(frozen=True, slots=True)
class Quantized:
    model: DetachedModel
    placement: Placement
    chosen: Chosen
    rows: tuple[OptimizedStep, ...]
    seconds: float

    def embed(self, samples: Sequence[Feeds]) -> np.ndarray:
        encodings = encode(self.placement, {}, self.model, self.chosen.encodings)
        outputs = iter(simulate_encodings(self.chosen.tune(self.model), encodings, samples))
        return minilm.embed(lambda _: next(outputs), samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    interpreter_options(parser.add_argument)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "onnxline-rounding")
    parser.add_argument("--iterations", type=int, default=500, help="of AdaRound, for each layer")
    parser.add_argument("--only", help="chains with this step alone")
    parser.add_argument("--model", type=Path, help="the exported MiniLM, where it is there already")
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    chosen = parser.parse_args()
    path = chosen.model or export_minilm(OPSET, chosen.folder)
    proto = onnx.load(path)
    evaluation = minilm.evaluation_samples()
    expected = minilm.embed(runner_of(proto), evaluation)
    print(
        f"{machine()}; {versions_line()}\n\n| weights | steps | SQNR | layers better | s |\n"
        "| --- | --- | --- | --- | --- |"
    )
    for weights in chosen.formats:
        for names in CHAINS:
            if not set(names).isdisjoint(AIMET) and not chosen.aimet:
                continue
            if (chosen.only and names and chosen.only not in names) or (weights != FORMATS[0] and "ada-round" in names):
                continue
            found = quantize_with(detach_copy(proto), weights, [_item(name, chosen) for name in names])
            ratio = minilm.sqnr_db(expected, found.embed(evaluation))
            better = ", ".join(
                f"{sum(layer.taken for layer in row.layers)} of {len(row.layers)}" if row.layers else str(row)
                for row in found.rows
            )
            steps = ", ".join(names) or "none"
            print(f"| {weights} | {steps} | {ratio:.2f} dB | {better} | {found.seconds:.0f} |", flush=True)


def _item(name: str, chosen: argparse.Namespace) -> dict[str, dict[str, Any]]:
    options: dict[str, Any] = {"python": chosen.aimet} if name in AIMET else {}
    return {name: options | ({"iterations": chosen.iterations} if name == "ada-round" else {})}


def quantize_with(model: DetachedModel, weights: str, items: Sequence[Any]) -> Quantized:
    """Weights alone, as `onnxline quantsim` does it with calibration data of 8 batches."""
    calibration = minilm.calibration_samples()
    seen, held = calibration[:-HELD_OUT], calibration[-HELD_OUT:]
    placement = place(model, [PlacementRule("op:*", parse_precision(weights), "float")])
    encodings = encode(placement, {}, model)

    def rate(chosen: Chosen) -> float:
        quantized = insert_qdq(chosen.tune(model), encode(placement, {}, model, chosen.encodings))
        return min(noise.sqnr_db for noise in compare_outputs(model, quantized, held).values())

    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        optimization = Optimization(model, placement, encodings, lambda: held, rate, Path(folder))
        chosen, rows = optimization.run(optimizers_of(items), seen)
    return Quantized(model, placement, chosen, rows, time.perf_counter() - begun)


if __name__ == "__main__":
    main()
