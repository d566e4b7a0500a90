"""Calibration of ViT-base: does its memory grow with the samples?

    python -m benchmarks.quant_memory [--samples 8 64 512] [--method minmax] [--folder DIR]

Weights are random, of ViT-base, and so are the images; each number of samples is measured in a process of its own. The
model is that of `benchmarks.quantsim_vit`, with every tensor in W8 (per channel) A16.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.case_studies.vit import draw_image
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
    parser.add_argument("--child", type=Path)
    chosen = parser.parse_args()
    if chosen.child is not None:
        calibrate(chosen.child, chosen.samples[0], chosen.method)
        return
    path = export_vit(chosen.folder)
    print(f"{machine()}; {versions_line()}\n\n| method | samples | most memory | seconds |\n| --- | --- | --- | --- |")
    for count in chosen.samples:
        command = ["-m", "benchmarks.quant_memory", "--child", path, "--samples", count, "--method", chosen.method]
        subprocess.run([sys.executable, *map(str, command)], check=True)


def calibrate(path: Path, count: int, method: MethodName) -> None:
    """Print a row of the table."""
    model = declare_types(store_constants(read_model(path)))
    placement = place(model, [PlacementRule("op:*", parse_precision("int8/channel"), parse_precision("uint16"))])
    begun = time.perf_counter()
    measure(model, placement, (draw_image(number) for number in range(count)), method)
    seconds = time.perf_counter() - begun
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"| {method} | {count} | {most:.0f} MiB | {seconds:.1f} s |", flush=True)


if __name__ == "__main__":
    main()
