"""What a training found, as data: a part of `report.json`, and what the page draws of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LossPoint:
    """The loss of a step before its update, and the seconds of training until then."""

    step: int
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainingPhase:
    """Trace, Compile, Warmup, Capture or Replay, with what it took in seconds."""

    name: str
    seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """`last_loss` is the mean of the last 50 steps, None where none was done; `metrics` are of `train.evaluate`."""

    steps: int
    last_loss: float | None
    loss: str
    optimizer: str
    parameters: int
    """Numbers that are trained."""
    ops: int
    """Of the Graph of a step: forward, backward and update."""
    phases: tuple[TrainingPhase, ...]
    losses: tuple[LossPoint, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    onnx: str = ""
    """What the main job made of the trained model; empty where it was not asked to."""
