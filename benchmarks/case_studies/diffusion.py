"""One transformer block of a diffusion model (DiT): what a calibration that sees one time step costs at all others.

    python -m benchmarks.case_studies.diffusion

The weights are random, from a seed: nobody can say from this what images come out. What the table shows is how far the
ranges move with the time step, since the block's norms are scaled and shifted by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.case_studies.study import Feeds, Study, quantize, show_table, sqnr_db

if TYPE_CHECKING:
    from torch import nn

SIDE, CHANNELS, KINDS = 16, 4, 10

STEPS: Final = (999, 750, 500, 250, 100, 10, 0)
"""From noise alone to the image."""

DRAWS: Final = 4

WAVES: Final = {"module:*.time_proj": {"activations": "float"}}
"""Sine and cosine of the time step, whose argument goes to 999."""

VARIANTS: Final = (
    ("the first step, A8", "calibrate_first_step", "ort-cpu", {}),
    ("all steps, A8", "calibrate_all_steps", "ort-cpu", {}),
    ("the first step, A8, waves of the step in float", "calibrate_first_step", "ort-cpu", WAVES),
    ("all steps, A8, waves of the step in float", "calibrate_all_steps", "ort-cpu", WAVES),
    ("the first step, A16", "calibrate_first_step", "qnn-htp", {}),
    ("all steps, A16", "calibrate_all_steps", "qnn-htp", {}),
)


def make() -> tuple[nn.Module, tuple[Any, ...]]:
    """A patch embedding, one block and an output layer; its modulation is not zero, as it is when training begins."""
    import torch
    from diffusers import DiTTransformer2DModel

    class Denoiser(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = DiTTransformer2DModel(
                num_attention_heads=4,
                attention_head_dim=32,
                in_channels=CHANNELS,
                out_channels=CHANNELS,
                num_layers=1,
                sample_size=SIDE,
                patch_size=2,
                num_embeds_ada_norm=1000,
            )

        def forward(self, image: torch.Tensor, step: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
            return self.transformer(image, timestep=step, class_labels=kind, return_dict=False)[0]

    torch.manual_seed(0)
    module = Denoiser().eval()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "emb.linear" in name or "emb.timestep_embedder" in name:
                weight.mul_(3)
    image = torch.zeros(1, CHANNELS, SIDE, SIDE)
    return module, (image, torch.tensor([500]), torch.tensor([3]))


def calibrate_first_step() -> Iterator[Feeds]:
    """The loader of someone who samples noise and looks no further."""
    yield from (_draw(999, number) for number in range(len(STEPS) * DRAWS))


def calibrate_all_steps() -> Iterator[Feeds]:
    """The loader that walks down the steps; as many samples as the other."""
    yield from (_draw(step, number) for number in range(DRAWS) for step in STEPS)


def main() -> None:
    show_table(("W8 per channel, calibrated on", *(f"step {step}" for step in STEPS)), _rows())


def _rows() -> Iterator[Sequence[str]]:
    for number, (title, loader, profile, rules) in enumerate(VARIANTS):
        settings = {
            "passes.keep": ["qkv"],
            "quantsim.profile": profile,
            "quantsim.rules": rules,
            "quantsim.calibration": {"data": f"{__file__}:{loader}", "samples": len(STEPS) * DRAWS},
        }
        study = quantize(f"{__file__}:make", f"diffusion-{number}", settings)
        yield title, *(f"{_measure(study, step):.1f} dB" for step in STEPS)


def _measure(study: Study, step: int) -> float:
    samples = [_draw(step, 1000 + number) for number in range(8)]
    expected, found = ([outputs[0] for outputs in run(samples)] for run in (study.run_float, study.run_quantized))
    return sqnr_db(expected, found)


def _draw(step: int, number: int) -> Feeds:
    """A smooth image of a kind, with the noise that it has at a step (a linear schedule)."""
    draw = np.random.default_rng(number)
    kept = float(np.prod(1 - np.linspace(1e-4, 0.02, 1000)[: step + 1]))
    places = np.linspace(0, np.pi, SIDE)
    waves = draw.normal(size=(CHANNELS, 4, 4))
    basis = np.stack([np.cos(order * places) for order in range(4)])
    image = np.einsum("cij,iy,jx->cyx", waves, basis, basis) / 2
    noisy = np.sqrt(kept) * image + np.sqrt(1 - kept) * draw.normal(size=image.shape)
    return {
        "image": noisy[None].astype(np.float32),
        "step": np.array([step]),
        "kind": np.array([number % KINDS]),
    }


if __name__ == "__main__":
    main()
