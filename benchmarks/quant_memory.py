"""Calibration of ViT-base: does its memory grow with the samples, and is it as fast as AIMET's?

    python -m benchmarks.quant_memory [--samples 8 64 512] [--method minmax] [--aimet PYTHON] [--folder DIR]

Weights are random, of ViT-base, and so are the images; each number of samples is measured in a process of its own, and
that of AIMET after ours. The model is that of `benchmarks.quantsim_vit`, with every tensor in W8 (per channel) A16.
Seconds are those of calibration alone, without the start of the process: of the clock, and of all processors.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.case_studies.vit import draw_image
from benchmarks.handoff.harness import interpreter_options, write_samples
from benchmarks.measure import machine, versions_line
from benchmarks.quantsim_vit import export_vit
from passes.weights.detached import read_model
from pipeline.config.quantsim import MethodName, parse_precision
from pipeline.quantsim.calibration import measure
from pipeline.quantsim.placement import PlacementRule, place
from pipeline.quantsim.sites import declare_types, store_constants


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--samples", type=int, nargs="*", default=[8, 64, 512])
    parser.add_argument("--method", choices=("minmax", "percentile", "entropy", "mse"), default="minmax")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "onnxline-handoff")
    interpreter_options(parser.add_argument)
    parser.add_argument("--child", type=Path)
    chosen = parser.parse_args()
    if chosen.child is not None:
        calibrate(chosen.child, chosen.samples[0], chosen.method)
        return
    path = export_vit(chosen.folder)
    print(f"{machine()}; {versions_line()}\n\n| by | samples | most memory | seconds | of processors |")
    print("| --- | --- | --- | --- | --- |")
    for count in chosen.samples:
        command = ["-m", "benchmarks.quant_memory", "--child", path, "--samples", count, "--method", chosen.method]
        subprocess.run([sys.executable, *map(str, command)], check=True)
        if chosen.aimet:
            seen = write_samples(map(draw_image, range(count)), chosen.folder / f"images-{count}")
            subprocess.run([chosen.aimet, "-c", ASK_AIMET, str(path), str(seen)], check=True, stderr=subprocess.DEVNULL)


ASK_AIMET: Final = """
import resource, sys, time
from pathlib import Path
import numpy as np, onnx
from aimet_onnx import QuantizationSimModel
sim = QuantizationSimModel(onnx.load(sys.argv[1]), param_type="int8", activation_type="int16", config_file="htp_v73")
samples = (dict(np.load(path)) for path in sorted(Path(sys.argv[2]).glob("*.npz")))
count = len(list(Path(sys.argv[2]).glob("*.npz")))
begun, spent = time.perf_counter(), time.process_time()
sim.compute_encodings(samples)
seconds, spent = time.perf_counter() - begun, time.process_time() - spent
most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
print(f"| AIMET, its min-max | {count} | {most:.0f} MiB | {seconds:.1f} s | {spent:.1f} s |", flush=True)
"""


def calibrate(path: Path, count: int, method: MethodName) -> None:
    """Print a row of the table."""
    model = declare_types(store_constants(read_model(path)))
    placement = place(model, [PlacementRule("op:*", parse_precision("int8/channel"), parse_precision("uint16"))])
    begun, spent = time.perf_counter(), time.process_time()
    measure(model, placement, (draw_image(number) for number in range(count)), method)
    seconds, spent = time.perf_counter() - begun, time.process_time() - spent
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"| onnxline, {method} | {count} | {most:.0f} MiB | {seconds:.1f} s | {spent:.1f} s |", flush=True)


if __name__ == "__main__":
    main()
