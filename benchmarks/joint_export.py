"""Train steps of the tests and benchmarks by torch's joint export, next to the recording of `record_step`.

    python -m benchmarks.joint_export [TESTS …]    by default tests/pipeline/training and tests/pipeline/authoring

Runs the tests; each module that `record_step` is called with is given to torch's `aot_export_module(trace_joint=True)`
too, on a copy. The models of `benchmarks.train_steps` follow. Prints two tables: models that are recorded and that
joint export refuses, with torch's sentence, and models that are refused and that joint export records.
"""

from __future__ import annotations

import copy
import re
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_module

from benchmarks.measure import versions_line
from benchmarks.train_steps import CASES, LOSS
from pipeline.errors import OnnxlineError
from pipeline.training import record
from pipeline.training.batch import Batch, BatchLayout, LossFunction
from pipeline.training.trace import trace_step

TESTS = ("tests/pipeline/training", "tests/pipeline/authoring")


@dataclass(frozen=True, slots=True)
class Row:
    """A module, and why each way does not record it; empty where it does."""

    name: str
    test: str
    refusal: str
    joint_refusal: str


class LossModule(nn.Module):
    """From the tensors of a batch to the loss, as joint export takes it."""

    def __init__(self, module: nn.Module, loss: LossFunction, layout: BatchLayout) -> None:
        super().__init__()
        self.module, self.loss, self.layout = module, loss, layout

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.layout.loss(self.module, self.loss, tensors).reshape(()),)


class Survey:
    """A pytest plugin that tries joint export wherever a test records a step."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self.test = ""
        self._pending: list[tuple[nn.Module, nn.Module, LossFunction, Batch, str]] = []

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.test = item.nodeid.rpartition("::")[2].partition("[")[0]

    def pytest_runtest_teardown(self) -> None:
        """Try joint export after the test, which what joint export leaves in caches of the user's would disturb."""
        for module, copied, loss, batch, refusal in self._pending:
            key = (self.test, repr(module))
            if key not in self.rows:
                self.rows[key] = Row(name_of(module), self.test, refusal, why_not_joint(copied, loss, batch))
        self._pending.clear()

    def trace(self, module: nn.Module, loss: LossFunction, batch: Batch, **options: Any) -> Any:
        """As `trace_step`, with a row for the module."""
        try:
            copied = copy.deepcopy(module)
        except Exception:  # of a user's class
            return trace_step(module, loss, batch, **options)
        refusal = ""
        try:
            return trace_step(module, loss, batch, **options)
        except OnnxlineError as error:
            refusal = first_line(error)
            raise
        finally:
            self._pending.append((module, copied, loss, batch, refusal))


def why_not_joint(module: nn.Module, loss: LossFunction, batch: Batch) -> str:
    """Why joint export does not take the step; empty where it does."""
    try:
        layout = BatchLayout.of(module, batch)
        given = layout.tensors(batch)
        tensors = [given[name].detach() for name in layout.names]
        aot_export_module(LossModule(module, loss, layout), tensors, trace_joint=True, output_loss_index=0)
    except Exception as error:  # torch has errors of many kinds
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def first_line(error: Exception) -> str:
    text = " ".join(str(error).split()).replace("|", "\\|")
    return re.split(r"(?<=[.:;]) ", text)[0][:140]


def name_of(module: nn.Module) -> str:
    inner = [type(part).__name__ for part in module.children()]
    return f"{type(module).__name__}({', '.join(inner[:4])}{', …' if len(inner) > 4 else ''})"


def main() -> None:
    survey = Survey()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(record, "trace_step", survey.trace)
        code = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *(sys.argv[1:] or TESTS)], plugins=[survey])
        for case in CASES:
            survey.test = f"benchmarks.train_steps {case.name}"
            survey.trace(case.make(), LOSS, (torch.randn(case.shape), torch.randint(0, 10, case.shape[:1])))
            survey.pytest_runtest_teardown()
    rows = [*survey.rows.values()]
    recorded = [row for row in rows if not row.refusal]
    kept = [row for row in recorded if row.joint_refusal]
    loose = [row for row in rows if row.refusal and not row.joint_refusal]
    print(f"{versions_line()}; pytest ended with {code}")
    print(f"{len(recorded)} models are recorded; joint export refuses {len(kept)} of them:\n")
    print("| model | test | joint export |\n| --- | --- | --- |")
    for row in kept:
        print(f"| {row.name} | `{row.test}` | {row.joint_refusal} |")
    print(f"\n{len(rows) - len(recorded)} models are refused; joint export records {len(loose)} of them:\n")
    print("| model | test | recording |\n| --- | --- | --- |")
    for row in loose:
        print(f"| {row.name} | `{row.test}` | {row.refusal} |")


if __name__ == "__main__":
    main()
