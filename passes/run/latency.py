"""How long a model takes in onnxruntime as its users run it: with its own optimization, on one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from passes.context import PassContext

RUNS: Final = 10

LONGEST_S: Final = 2.0
"""Seconds after which no further run begins."""

HOW_MEASURED: Final = f"onnxruntime's CPU provider, its default optimization, 1 thread, median of up to {RUNS} runs"


def measure_latency(path: str, feeds: Mapping[str, np.ndarray], context: PassContext) -> float:
    """Median seconds of a run of the ONNX file `path` on `feeds`, after one run that does not count.

    Raises:
        StepFailed: onnxruntime refuses the model, stops, or takes too long.
    """
    return context.worker.call(time_runs, path=str(Path(path).absolute()), feeds=dict(feeds))


def time_runs(path: str, feeds: dict[str, np.ndarray]) -> float:
    """In the worker."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    known = {entry.name for entry in session.get_inputs()}
    given = {name: array for name, array in feeds.items() if name in known}
    session.run(None, given)
    seconds: list[float] = []
    while not seconds or (len(seconds) < RUNS and sum(seconds) < LONGEST_S):
        begun = time.perf_counter()
        session.run(None, given)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)
