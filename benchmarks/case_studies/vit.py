"""ViT-base, with Q, K and V of their own: a simulation of 86 million weights, and how long it takes.

    python -m benchmarks.case_studies.vit

The weights are random, from a seed, and the images are smooth noise: the table is about the tool, not about accuracy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from benchmarks.case_studies.study import Feeds, Study, quantize, show_table, sqnr_db

SIDE, CHANNELS, WAVES = 224, 3, 8
CALIBRATED, EVALUATED = 8, 4

SETTINGS: Final = {
    "export.opset": 21,
    "quantsim.calibration": {"data": "benchmarks/case_studies/vit.py:calibrate", "samples": CALIBRATED},
    "quantsim.evaluation": EVALUATED,
}

FORMATS: Final = {
    "W8 per channel, A16 (qnn-htp)": {"quantsim.profile": "qnn-htp"},
    "W8 per channel, A8 (ort-cpu)": {"quantsim.profile": "ort-cpu"},
    "W4 in blocks of 32, float (weight-only)": {"quantsim.profile": "weight-only"},
    "W4 for Q, K and V alone": {
        "quantsim.profile": "qnn-htp",
        "quantsim.rules": {"qkv": {"weights": "int4/block32"}},
    },
}


def calibrate() -> Iterator[Feeds]:
    """The loader: images that are not evaluated."""
    yield from (draw_image(number) for number in range(CALIBRATED))


def main() -> None:
    head = ("ViT-base", "last hidden state", "worst of Q, K, V", "weights, MiB", "seconds")
    show_table(head, _rows())


def _rows() -> Iterator[Sequence[str]]:
    samples = [draw_image(1000 + number) for number in range(EVALUATED)]
    for number, (title, overrides) in enumerate(FORMATS.items()):
        begun = time.perf_counter()
        study = quantize("configs/vit_base_keep_qkv.yaml", f"vit-{number}", SETTINGS | overrides)
        seconds = time.perf_counter() - begun
        expected, found = ([outputs[0] for outputs in run(samples)] for run in (study.run_float, study.run_quantized))
        sizes = [size / 2**20 for size in (study.report.weight_bytes, study.report.quantized_weight_bytes)]
        told = f"{sizes[0]:.0f} → {sizes[1]:.0f}"
        yield title, f"{sqnr_db(expected, found):.2f} dB", _worst_of_qkv(study), told, f"{seconds:.0f}"


def _worst_of_qkv(study: Study) -> str:
    rows = [row for row in study.report.rows if row.part.startswith("qkv ")]
    worst = min(rows, key=lambda row: row.total_db, default=None)
    return f"{worst.part.removeprefix('qkv ')}: {worst.total_db:.1f} dB" if worst else ""


def draw_image(number: int) -> Feeds:
    """Eight waves a colour, in any direction, of unit variance in all."""
    draw = np.random.default_rng(number)
    places = np.linspace(0, 2 * np.pi, SIDE)
    basis = np.stack([np.cos(order * places / 2) for order in range(WAVES)])
    image = np.einsum("cij,iy,jx->cyx", draw.normal(size=(CHANNELS, WAVES, WAVES)), basis, basis)
    return {"pixel_values": (image / image.std())[None].astype(np.float32)}


if __name__ == "__main__":
    main()
