"""Our own simulation, step by step, as `onnxline quantsim` runs it: what the tools are compared with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.handoff.harness import Feeds
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.config.quantsim import parse_precision
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import Encoding, encode
from pipeline.quantsim.placement import Placement, PlacementRule, place
from pipeline.quantsim.qdq import insert_qdq

W8A16: Final = PlacementRule("op:*", parse_precision("int8/channel"), parse_precision("uint16"))
"""The formats that every tool here has: those of HTP, without its exceptions."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """quantize_s: to place, calibrate and encode. evaluate_s: to open a session and run all samples."""

    placement: Placement
    encodings: dict[str, Encoding]
    outputs: list[np.ndarray]
    quantize_s: float
    evaluate_s: float


def simulate(model: DetachedModel, calibration: Sequence[Feeds], evaluation: Sequence[Feeds]) -> Simulated:
    """Calibrate on one set of samples, and run another through the quantized model."""
    begun = time.perf_counter()
    placement = place(model, [W8A16])
    encodings = encode(placement, calibrate(model, placement, calibration), model)
    encoded = time.perf_counter()
    outputs = simulate_encodings(model, encodings, evaluation)
    return Simulated(placement, encodings, outputs, encoded - begun, time.perf_counter() - encoded)


def simulate_encodings(
    model: DetachedModel, encodings: Mapping[str, Encoding], evaluation: Sequence[Feeds]
) -> list[np.ndarray]:
    """The first output of each sample, in the model quantized by `encodings`."""
    session = Session.of(insert_qdq(model, encodings))
    return [session.run(sample)[session.outputs[0]] for sample in evaluation]
