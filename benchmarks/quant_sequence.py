"""MiniLM's weights in 4 bits, rounded piece by piece: to the nearest, by GPTQ, and by GPTQ in sequence.

    python -m benchmarks.quant_sequence [--weights int4/channel] [--mib 16] [--folder DIR]

GPTQ sees 6 of 8 batches of sentences. On the other 2 each product is judged before and after; the last ratio is that of
the embeddings of 200 other sentences, by the model that is written.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import onnx

from benchmarks.handoff import minilm
from benchmarks.handoff.harness import runner_of
from benchmarks.handoff.models import export_minilm
from benchmarks.measure import machine, versions_line
from passes.weights.detached import read_model
from pipeline.config.quantsim import parse_precision
from pipeline.jobs import choose_executor
from pipeline.quantsim.optimizers import Gptq
from pipeline.quantsim.placement import PlacementRule, place
from pipeline.quantsim.shard_data import FittingData
from pipeline.quantsim.shards import WEIGHT_TYPES, quantize_in_shards

OPSET, HELD_OUT = 21, 2
STEPS = (("to the nearest", None), ("gptq", Gptq()), ("gptq, sequential", Gptq(sequential=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--weights", default="int4/channel")
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "onnxline-rounding")
    chosen = parser.parse_args()
    proto = onnx.load(export_minilm(OPSET, chosen.folder))
    evaluation, calibration = minilm.evaluation_samples(), minilm.calibration_samples()
    expected = minilm.embed(runner_of(proto), evaluation)
    print(
        f"{machine()}; {versions_line()}\n\n"
        f"| {chosen.weights} | median of products before → after, held out | better | embeddings | s |"
    )
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        path = Path(name) / "net.onnx"
        onnx.save(proto, path, save_as_external_data=True, location="net.data")
        model = read_model(path, unread=True)
        placement = place(model, [PlacementRule("op:*", parse_precision(chosen.weights), "float")], WEIGHT_TYPES)
        for title, step in STEPS:
            data = step and FittingData(step, lambda: calibration, len(calibration) - HELD_OUT, ["sentences"])
            begun, out = time.perf_counter(), Path(name) / title
            found = quantize_in_shards(model, path, placement, out, chosen.mib, choose_executor(None, 1), data=data)
            seconds = time.perf_counter() - begun
            ratio = minilm.sqnr_db(expected, minilm.embed(runner_of(onnx.load(found.file)), evaluation))
            layers = found.step.layers if found.step else ()
            before, after = (
                statistics.median(getattr(layer, side) for layer in layers) if layers else 0.0
                for side in ("before_db", "after_db")
            )
            better = sum(layer.taken for layer in layers)
            shown = f"{before:.2f} → {after:.2f} dB | {better} of {len(layers)}" if layers else " | "
            print(f"| {title} | {shown} | {ratio:.2f} dB | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
