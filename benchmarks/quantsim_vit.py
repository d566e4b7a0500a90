"""ViT-base, weights of 8 bits by channel and activations of 16: onnxline's simulation and AIMET's, in turns.

    python -m benchmarks.quantsim_vit --aimet PYTHON [--folder DIR] [--repeats N] [--images N]

Both place, calibrate and encode on the same images, and then run others through the quantized model. The weights are
random, from a seed, so only the times say something, and that both simulations agree.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
import onnx

from benchmarks.case_studies.vit import draw_image
from benchmarks.handoff import minilm
from benchmarks.handoff.harness import detach_copy, interpreter_options, run_tool, runner_of, write_samples
from benchmarks.handoff.ours import simulate
from benchmarks.measure import machine, run_child, versions_line

CONFIG = "configs/vit_base_keep_qkv.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    interpreter_options(parser.add_argument)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "onnxline-handoff")
    parser.add_argument("--repeats", type=int, default=1, help="of both, in turns; the median counts")
    parser.add_argument("--images", type=int, default=8, help="to calibrate on, and as many others to evaluate on")
    chosen = parser.parse_args()
    calibration = [draw_image(number) for number in range(chosen.images)]
    evaluation = [draw_image(1000 + number) for number in range(chosen.images)]
    stored = write_samples(calibration, chosen.folder / "vit-calibration")
    others = write_samples(evaluation, chosen.folder / "vit-evaluation")
    path = export_vit(chosen.folder)
    proto = onnx.load(path)
    runner = runner_of(proto)
    expected = np.stack([runner(sample) for sample in evaluation])
    print(f"{machine()}; {versions_line()}\n\n| ViT-base, simulated by | SQNR | quantize, s | evaluate, s |")
    print("| --- | --- | --- | --- |")
    seconds: dict[str, list[float]] = {"onnxline": [], "aimet": []}
    for _ in range(chosen.repeats):
        ours = simulate(detach_copy(proto), calibration, evaluation)
        seconds["onnxline"].append(ours.quantize_s + ours.evaluate_s)
        show("onnxline", expected, np.stack(ours.outputs), ours.quantize_s, ours.evaluate_s)
        run = run_tool("aimet", chosen.aimet, path, stored, others, chosen.folder / "vit-aimet")
        if run.failure:
            raise SystemExit(run.failure)
        parts = float(run.found["quantize_s"]), float(run.found["evaluate_s"])
        seconds["aimet"].append(sum(parts))
        show(f"aimet {run.version}", expected, np.stack(run.run(evaluation)), *parts)
    mine, theirs = (statistics.median(times) for times in seconds.values())
    print(f"\ncalibration and simulation: {mine:.1f} s, AIMET {theirs:.1f} s: {mine / theirs:.2f} ×")


def show(who: str, expected: np.ndarray, outputs: np.ndarray, quantize_s: float, evaluate_s: float) -> None:
    db = minilm.sqnr_db(expected, outputs)
    print(f"| {who} | {db:.2f} dB | {quantize_s:.1f} | {evaluate_s:.1f} |", flush=True)


def export_vit(folder: Path) -> Path:
    """ViT-base after onnxline's default recipe, with Q, K and V kept apart."""
    out = folder / "vit_base_21"
    if not (out / "model.onnx").exists():
        settings = ("export.opset=21", "runtime.backends=[torch]")
        options = [word for setting in settings for word in ("--set", setting)]
        run_child(["-m", "onnxline", "run", CONFIG, *options, "--out", str(out)], memory=False)
    return out / "model.onnx"


if __name__ == "__main__":
    main()
