"""Calibration of ViT-base or of a small UNet: does its memory grow with the samples, and is it as fast as AIMET's?

    python -m benchmarks.quant_memory [vit | unet] [--samples 8 64 512] [--method minmax] [--aimet PYTHON]

Weights are random, and so are the samples; each number of samples is measured in a process of its own, and that of
AIMET after ours. ViT-base is the model of `benchmarks.quantsim_vit`; the UNet has the blocks of Stable Diffusion 1.5
and its latents of 64 × 64, with fewer channels: 12 MiB of weights. Every tensor is in W8 (per channel) A16. Seconds
are those of calibration alone, without the start of the process: of the clock, and of all processors.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.case_studies.study import Feeds
from benchmarks.case_studies.vit import draw_image
from benchmarks.handoff.harness import interpreter_options, write_samples
from benchmarks.measure import machine, run_child, versions_line
from benchmarks.quantsim_vit import export_vit
from passes.weights.detached import read_model
from pipeline.config.quantsim import MethodName, parse_precision
from pipeline.quantsim.calibration import measure
from pipeline.quantsim.placement import PlacementRule, place
from pipeline.quantsim.stored_constants import declare_types, store_constants


@dataclass(frozen=True, slots=True)
class Subject:
    """A model: `export` writes its ONNX file into a folder and returns the path, `draw` makes a sample of a number."""

    export: Callable[[Path], Path]
    draw: Callable[[int], Feeds]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("subject", choices=SUBJECTS, nargs="?", default="vit")
    parser.add_argument("--samples", type=int, nargs="*", default=[8, 64, 512])
    parser.add_argument("--method", choices=("minmax", "percentile", "entropy", "mse"), default="minmax")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "onnxline-handoff")
    interpreter_options(parser.add_argument)
    parser.add_argument("--child", type=Path)
    chosen = parser.parse_args()
    subject = SUBJECTS[chosen.subject]
    if chosen.child is not None:
        calibrate(chosen.child, subject, chosen.samples[0], chosen.method)
        return
    path = subject.export(chosen.folder)
    print(f"{machine()}; {versions_line()}\n\n| by | samples | most memory | seconds | of processors |")
    print("| --- | --- | --- | --- | --- |")
    for count in chosen.samples:
        options = ["--child", path, "--samples", count, "--method", chosen.method]
        command = ["-m", "benchmarks.quant_memory", chosen.subject, *options]
        subprocess.run([sys.executable, *map(str, command)], check=True)
        if chosen.aimet:
            seen = write_samples(map(subject.draw, range(count)), chosen.folder / f"{chosen.subject}-{count}")
            subprocess.run([chosen.aimet, "-c", ASK_AIMET, str(path), str(seen)], check=True, stderr=subprocess.DEVNULL)


def calibrate(path: Path, subject: Subject, count: int, method: MethodName) -> None:
    """Print a row of the table."""
    model = declare_types(store_constants(read_model(path)))
    placement = place(model, [PlacementRule("op:*", parse_precision("int8/channel"), parse_precision("uint16"))])
    begun, spent = time.perf_counter(), time.process_time()
    measure(model, placement, map(subject.draw, range(count)), method)
    seconds, spent = time.perf_counter() - begun, time.process_time() - spent
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"| onnxline, {method} | {count} | {most:.0f} MiB | {seconds:.1f} s | {spent:.1f} s |", flush=True)


def make_unet() -> object:
    """The UNet; what `onnxline run` calls in its process."""
    import torch
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=64,
        layers_per_block=1,
        block_out_channels=(32, 64, 80, 96),
        down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        cross_attention_dim=64,
        attention_head_dim=8,
        norm_num_groups=16,
    ).eval()


def draw_latent(number: int) -> Feeds:
    """Noise, a time step and the states of 77 tokens."""
    draw = np.random.default_rng(number)
    latent, states = (draw.normal(size=shape).astype(np.float32) for shape in ((1, 4, 64, 64), (1, 77, 64)))
    return {"sample": latent, "timestep": np.array(int(draw.integers(1000))), "encoder_hidden_states": states}


def export_unet(folder: Path) -> Path:
    out, config = folder / "unet_21", folder / "unet.yaml"
    if not (out / "model.onnx").exists():
        folder.mkdir(parents=True, exist_ok=True)
        config.write_text(UNET)
        run_child(["-m", "onnxline", "run", str(config), "--out", str(out)], memory=False)
    return out / "model.onnx"


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

UNET: Final = """
model:
  factory: benchmarks.quant_memory:make_unet
  inputs:
    sample: {shape: [1, 4, 64, 64]}
    timestep: {shape: [], dtype: int64, range: [0, 1000]}
    encoder_hidden_states: {shape: [1, 77, 64]}
export: {opset: 21}
runtime: {backends: [torch]}
"""

SUBJECTS: Final = {"vit": Subject(export_vit, draw_image), "unet": Subject(export_unet, draw_latent)}


if __name__ == "__main__":
    main()
