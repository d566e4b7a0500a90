"""MiniLM with weights of 4 bits alone: the steps of `quantsim.optimize` and `prepare` against rounding to the nearest.

    python -m benchmarks.quant_rounding --aimet PYTHON [--nncf PYTHON] [--folder DIR] [--only STEP]

The steps see 6 of 8 batches of calibration and keep what is better on the other 2; the ratio is that of the embeddings
of 200 other sentences. Then each step against its library's own call on the same model, data and seed.
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
from onnx import numpy_helper

from benchmarks.handoff import minilm
from benchmarks.handoff.harness import Feeds, detach_copy, interpreter_options, run_tool, runner_of, write_samples
from benchmarks.handoff.models import export_minilm
from benchmarks.handoff.ours import simulate_encodings
from benchmarks.measure import machine, versions_line
from passes.weights.detached import DetachedModel, attach
from pipeline.config.quantsim import parse_precision
from pipeline.quantsim.encodings import encode, quantize
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
    parser.add_argument("--calls", action="store_true", help="only compare with the libraries' own calls")
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
    for weights in () if chosen.calls else chosen.formats:
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
    compare_gptq(proto)
    if chosen.aimet:
        compare_aimet(proto, path, chosen.folder, chosen.aimet, chosen.iterations)


def _item(name: str, chosen: argparse.Namespace) -> dict[str, dict[str, Any]]:
    options: dict[str, Any] = {"python": chosen.aimet} if name in AIMET else {}
    return {name: options | ({"iterations": chosen.iterations} if name == "ada-round" else {})}


def quantize_with(model: DetachedModel, weights: str, items: Sequence[Any], where: str = "op:*") -> Quantized:
    """Weights alone, as `onnxline quantsim` does it with calibration data of 8 batches."""
    calibration = minilm.calibration_samples()
    seen, held = calibration[:-HELD_OUT], calibration[-HELD_OUT:]
    placement = place(model, [PlacementRule(where, parse_precision(weights), "float")])
    encodings = encode(placement, {}, model)

    def rate(chosen: Chosen) -> float:
        quantized = insert_qdq(chosen.tune(model), encode(placement, {}, model, chosen.encodings))
        return min(noise.sqnr_db for noise in compare_outputs(model, quantized, held).values())

    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        optimization = Optimization(model, placement, encodings, lambda: held, rate, Path(folder))
        chosen, rows = optimization.run(optimizers_of(items), seen)
    return Quantized(model, placement, chosen, rows, time.perf_counter() - begun)


def compare_gptq(proto: onnx.ModelProto) -> None:
    """Figure 2: the numbers of our step against those of onnxsim's `apply_gptq`, for the first layer's products."""
    from onnxsim import apply_gptq

    model = detach_copy(proto)
    ours = quantize_with(model, "int4/block32", ["gptq"], FIRST_LAYER)
    nearest = insert_qdq(model, encode(ours.placement, {}, model))
    seen = minilm.calibration_samples()[:-HELD_OUT]
    begun = time.perf_counter()
    library = apply_gptq(proto, attach(nearest), seen)
    seconds = time.perf_counter() - begun
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in library.graph.initializer}
    same = total = 0
    for name, array in ours.chosen.arrays.items():
        equal = quantize(array, ours.chosen.encodings[name]) == stored[f"{name}_quantized"].astype(np.int64)
        same, total = same + int(equal.sum()), total + equal.size
    print(
        f"\ngptq: {same:,} of {total:,} numbers of {len(ours.chosen.arrays)} weights equal those of apply_gptq; "
        f"{ours.seconds:.0f} s with all that the step does, apply_gptq {seconds:.0f} s",
        flush=True,
    )


def compare_aimet(proto: onnx.ModelProto, path: Path, folder: Path, python: str, iterations: int) -> None:
    """Figure 2: our steps against AIMET's own calls for weights by channel, in the products of the first layer."""
    for name in AIMET:
        options = {"python": python} | ({"iterations": iterations} if name == "ada-round" else {})
        ours = quantize_with(detach_copy(proto), "int4/channel", [{name: options}], FIRST_LAYER)
        taken = sorted({layer.weight for row in ours.rows for layer in row.layers if layer.taken})
        weights = sorted({layer.weight for row in ours.rows for layer in row.layers})
        samples = write_samples(minilm.calibration_samples()[:-HELD_OUT], folder / "seen")
        more = {"algorithm": name, "weights": weights, "iterations": iterations}
        run = run_tool("aimet-rounding", python, path, samples, samples, folder / f"aimet-{name}", **more)
        if run.failure:
            print(run.failure)
            continue
        scales, stored = np.load(run.folder / "scales.npz"), np.load(run.folder / "weights.npz")
        same = sum(np.array_equal(ours.chosen.encodings[weight].scale, scales[weight]) for weight in taken)
        equal = sum(
            np.array_equal(
                quantize(ours.chosen.arrays.get(weight, stored[weight]), ours.chosen.encodings[weight]),
                quantize(stored[weight], ours.chosen.encodings[weight]),
            )
            for weight in taken
        )
        print(
            f"{name}: of {len(taken)} weights taken ({len(weights)} offered) {same} have the scales and {equal} the "
            f"numbers of AIMET {run.version}'s own call, bit for bit",
            flush=True,
        )


FIRST_LAYER = "module:*layer.0.*"


if __name__ == "__main__":
    main()
