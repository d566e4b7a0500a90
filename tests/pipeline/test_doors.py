"""The doors of jobs, batches, quantsim and reports: what is of another type is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from passes.weights.detached import detach
from pipeline.authoring import ModelBuilder, emit
from pipeline.batch import read_configs, run_batch
from pipeline.config import RunConfig
from pipeline.errors import UsageError
from pipeline.jobs import Job, LocalProcesses, choose_executor, run_jobs
from pipeline.optimize import optimize, run
from pipeline.quantsim import QuantSim, compare_values, find_jump, fit_encodings, from_aimet, insert_qdq
from pipeline.report.arena_picture import draw_arena
from pipeline.report.html import render
from pipeline.training import compare_step

ODD = (torch.zeros(2), [torch.zeros(1)], 3.5, object(), np.zeros(2), {1: None}, [1])

CONFIG = RunConfig.from_mapping({"model": {"onnx": "m.onnx"}})
JOB, ONE = Job("a", print), LocalProcesses(1)
MODEL = detach(
    onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> g (float[2] x) => (float[2] y) { y = Relu(x) }')
)
TABLE = Path("never-written.jsonl")

DOORS: dict[str, Callable[[Any], object]] = {
    "Job key": lambda odd: Job(odd, print),
    "Job function": lambda odd: Job("a", odd),
    "run_jobs jobs": lambda odd: run_jobs(odd, ONE, TABLE, {}),
    "run_jobs executor": lambda odd: run_jobs([JOB], odd, TABLE, {}),
    "run_jobs path": lambda odd: run_jobs([JOB], ONE, odd, {}),
    "run_jobs observer": lambda odd: run_jobs([JOB], ONE, TABLE, {}, odd),
    "run_jobs is_current": lambda odd: run_jobs([JOB], ONE, TABLE, {}, print, odd),
    "LocalProcesses": lambda odd: LocalProcesses(odd),
    "choose_executor": lambda odd: choose_executor(processes=odd),
    "read_configs": lambda odd: read_configs(odd),
    "run_batch planned": lambda odd: run_batch(odd, "out", ONE),
    "run_batch out": lambda odd: run_batch([], odd, ONE),
    "optimize observer": lambda odd: optimize("m.onnx", observer=odd),
    "run observer": lambda odd: run(CONFIG, observer=odd),
    "QuantSim": lambda odd: QuantSim(odd),
    "QuantSim progress": lambda odd: QuantSim(CONFIG, progress=odd),
    "insert_qdq model": lambda odd: insert_qdq(odd, {}),
    "insert_qdq encodings": lambda odd: insert_qdq(MODEL, odd),
    "compare_values model": lambda odd: compare_values(odd, MODEL, []),
    "compare_values samples": lambda odd: compare_values(MODEL, MODEL, [odd] if isinstance(odd, list) else odd),
    "find_jump": lambda odd: find_jump(odd),
    "render": lambda odd: render(odd),
    "draw_arena": lambda odd: draw_arena(odd),
    "emit builder": lambda odd: emit(odd, torch.nn.ReLU(), torch.zeros(1)),
    "emit module": lambda odd: emit(ModelBuilder(), odd),
    "compare_step": lambda odd: compare_step(odd, print, (torch.zeros(1),)),
    "from_aimet": lambda odd: from_aimet(odd),
    "fit_encodings model": lambda odd: fit_encodings({}, odd),
}


@pytest.mark.parametrize("door", DOORS)
def test_what_is_of_another_type_is_refused_in_one_sentence(door: str) -> None:
    for odd in ODD:
        with pytest.raises(UsageError, match="expected") as refusal:
            DOORS[door](odd)
        assert "\n" not in str(refusal.value)


def test_jobs_of_one_key_are_refused() -> None:
    with pytest.raises(UsageError, match="jobs need a key each, and these have one together: a"):
        run_jobs([JOB, Job("a", print)], ONE, TABLE, {})
