"""A simulation as a user runs it, and both of its models, ready to run on the numbers of a task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import onnxruntime
import yaml

from passes.weights.detached import read_model
from passes.weights.sessions import Session
from pipeline.config import RunConfig
from pipeline.quantsim import QuantSim
from pipeline.quantsim.report import QuantSimReport

Feeds = dict[str, np.ndarray]

FOLDER: Final = Path("runs/case_studies")


@dataclass(frozen=True, slots=True)
class Study:
    """The folder of a simulation, its report, and its models: the float one and the quantized one."""

    folder: Path
    report: QuantSimReport

    def run_float(self, samples: Iterable[Feeds]) -> list[list[np.ndarray]]:
        return run_model(self.folder / "model.onnx", samples)

    def run_quantized(self, samples: Iterable[Feeds]) -> list[list[np.ndarray]]:
        return run_model(self.folder / "model.qdq.onnx", samples)


def quantize(source: str, name: str, overrides: Mapping[str, Any]) -> Study:
    """`onnxline quantsim SOURCE --set KEY=VALUE …` into a folder of its own, without its progress."""
    config = RunConfig.from_source(source, [f"{key}={_yaml(value)}" for key, value in overrides.items()])
    result = QuantSim(config, FOLDER / name).run()
    return Study(result.folder, result.report)


def run_model(path: Path, samples: Iterable[Feeds]) -> list[list[np.ndarray]]:
    """All outputs of each sample."""
    session = open_model(path)
    return [cast("list[np.ndarray]", session.run(None, dict(sample))) for sample in samples]


def open_model(path: Path) -> onnxruntime.InferenceSession:
    """A session with onnxruntime's optimizations off, so that it computes what the specification says."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run_values(path: Path, values: Sequence[str], samples: Iterable[Feeds]) -> list[dict[str, np.ndarray]]:
    """These values inside of a model, for each sample."""
    session = Session.of(read_model(path), values)
    return [session.run(dict(sample)) for sample in samples]


def sqnr_db(expected: Iterable[np.ndarray], found: Iterable[np.ndarray]) -> float:
    """Signal to quantization noise over all elements, in dB."""
    signal = noise = 0.0
    for wanted, got in zip(expected, found, strict=True):
        signal += float((wanted.astype(np.float64) ** 2).sum())
        noise += float(((wanted.astype(np.float64) - got) ** 2).sum())
    return 10 * math.log10(signal / noise) if noise else math.inf


def show_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A Markdown table; a row is shown when it is there, since each takes minutes."""
    print(f"\n| {' | '.join(head)} |\n|{' --- |' * len(head)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def _yaml(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).removesuffix("\n...\n").strip()
