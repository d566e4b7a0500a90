"""ONNX's own backend cases on our runtime, on onnxruntime's backend and on ONNX's reference evaluator, in one run.

    .venv/bin/python -m benchmarks.onnx_cases [--only WORD] [--ours] [--save FILE]

Prints how many cases each passes, those that onnxruntime passes and we do not, what else we do not pass, by operator
and reason, and how many of our passing cases have an operator that another runtime computes. `--ours` leaves the others
out, `--only` takes the cases whose name has the word.
"""

from __future__ import annotations

import argparse
import json
import time
import unittest
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from onnx.backend.base import Backend, BackendRep
from onnx.backend.test import BackendTest
from onnx.reference import ReferenceEvaluator
from onnxruntime.backend.backend import OnnxRuntimeBackend

from pipeline.onnx_backend import OnnxlineBackend, OnnxlineModel

PASSED = "passed"


@dataclass(frozen=True)
class Outcome:
    """What became of a case: `passed`, or why not; and the operators that another runtime computed."""

    why: str
    fallbacks: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


class ReferenceRep(BackendRep):
    """ONNX's reference evaluator on one model."""

    def __init__(self, model: Any) -> None:
        self._evaluator = ReferenceEvaluator(model)

    def run(self, inputs: Any, **_: Any) -> Any:
        names = [str(name) for name in self._evaluator.input_names]
        return self._evaluator.run(None, dict(zip(names, inputs, strict=False)))


class ReferenceBackend(Backend):
    """ONNX's reference evaluator as a backend."""

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **_: Any) -> ReferenceRep:
        return ReferenceRep(model)


class CountingBackend(OnnxlineBackend):
    """Ours, which remembers the model that it prepared last."""

    last: OnnxlineModel | None = None
    kinds: tuple[str, ...] = ()

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **_: Any) -> OnnxlineModel:
        cls.last, cls.kinds = None, tuple(dict.fromkeys(node.op_type for node in model.graph.node))
        cls.last = super().prepare(model, device)
        return cls.last


def run_cases(backend: type[Backend], only: str = "") -> dict[str, Outcome]:
    """The outcome of every case for the CPU whose name has `only`."""
    outcomes: dict[str, Outcome] = {}
    for cases in BackendTest(backend, __name__).test_cases.values():
        for name in sorted(name for name in dir(cases) if name.startswith("test_") and name.endswith("_cpu")):
            if only in name:
                outcomes[name] = outcome(backend, cases(name), name)
    return outcomes


def outcome(backend: type[Backend], case: unittest.TestCase, name: str) -> Outcome:
    try:
        getattr(case, name)()
        why = PASSED
    except unittest.SkipTest as skip:
        why = f"skipped: {skip}"
    except Exception as error:  # of whatever type a backend raises
        why = f"{type(error).__name__}: {error}"
    if not issubclass(backend, CountingBackend):
        return Outcome(why)
    last = backend.last
    return Outcome(why, last.count().fallbacks if last else (), backend.kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--save", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    onnxruntime.set_default_logger_severity(4)
    others: dict[str, type[Backend]] = {"onnxruntime": OnnxRuntimeBackend, "onnx.reference": ReferenceBackend}
    found: dict[str, dict[str, Outcome]] = {}
    for label, backend in {"onnxline": CountingBackend, **({} if asked.ours else others)}.items():
        begun = time.perf_counter()
        found[label] = run_cases(backend, asked.only)
        passed = sum(item.why == PASSED for item in found[label].values())
        print(f"{label}: {passed} of {len(found[label])} pass, {time.perf_counter() - begun:.0f} s", flush=True)
    ours = found["onnxline"]
    print_fallbacks(ours)
    print_left(ours, found.get("onnxruntime", {}))
    if asked.save:
        asked.save.write_text(json.dumps({name: item.why for name, item in ours.items()}, indent=0))


def print_fallbacks(ours: dict[str, Outcome]) -> None:
    passed = [item for item in ours.values() if item.why == PASSED]
    through = [item for item in passed if item.fallbacks]
    print(f"\nthrough a fallback: {len(through)} of {len(passed)} that pass, {len(through) / max(len(passed), 1):.1%}")
    counts = Counter(kind for item in through for kind in dict.fromkeys(item.fallbacks))
    print("  " + ", ".join(f"{kind} {count}" for kind, count in counts.most_common()))


def print_left(ours: dict[str, Outcome], onnxruntime_outcomes: dict[str, Outcome]) -> None:
    left = {name: item for name, item in ours.items() if item.why != PASSED}
    theirs = [name for name in left if name in onnxruntime_outcomes and onnxruntime_outcomes[name].why == PASSED]
    print(f"\nonnxruntime passes and we do not: {len(theirs)}")
    print("\n".join(f"  {name}" for name in theirs))
    print(f"\nnot passed: {len(left)}")
    for name, item in sorted(left.items(), key=lambda row: (row[1].kinds, row[0])):
        print(f"  {','.join(item.kinds)} | {name} | {' '.join(item.why.split())[:200]}")


if __name__ == "__main__":
    main()
