"""ONNX's own backend cases through `OnnxlineBackend`, by ONNX's own runner.

`onnx_cases_not_passed.txt` lists every case that does not pass, with the reason. The suite runs each eighth case and
all of the listed ones; `python -m benchmarks.onnx_cases` runs all, beside onnxruntime and the reference evaluator.
"""

from __future__ import annotations

import unittest
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.backend.test import BackendTest
from onnx.reference import ReferenceEvaluator

from pipeline.onnx_backend import OnnxlineBackend

LISTED = Path(__file__).parent / "onnx_cases_not_passed.txt"
STEP = 8

DECIDED_BY_THE_PROCESSOR = {
    # All weights are equal, so its 1,000 logits are 7.6e11 and equal but for the last bits that a product's kernel
    # rounds at the edge of a block; the softmax of these bits is the expected 0.001 on some processors only.
    "test_zfnet512_cpu"
}
"""Cases whose expected numbers hold or not as torch's kernels for this processor round."""


def not_passed() -> dict[str, str]:
    """Name of a case → why it does not pass."""
    return dict(line.split(" | ", 1) for line in LISTED.read_text().splitlines())


@cache
def cases() -> dict[str, unittest.TestCase]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, where the expected values are computed
        tables = BackendTest(OnnxlineBackend, __name__).test_cases.values()
    return {
        name: table(name)
        for table in tables
        for name in dir(table)
        if name.startswith("test_") and name.endswith("_cpu")
    }


def why_not(name: str) -> str:
    """Empty where the case passes."""
    case = cases()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            getattr(case, name)()
        except Exception as error:  # of whatever type
            return f"{type(error).__name__}: {error}"
    return ""


def test_most_cases_are_there() -> None:
    assert len(cases()) > 1900
    assert set(not_passed()) <= cases().keys()


def test_each_eighth_case_passes() -> None:
    listed = not_passed()
    chosen = [name for name in sorted(cases())[::STEP] if name not in {*listed, *DECIDED_BY_THE_PROCESSOR}]
    assert {name: why for name in chosen if (why := why_not(name))} == {}


def test_what_is_listed_does_not_pass() -> None:
    """A case that passes has to leave the list."""
    assert [name for name in not_passed() if not why_not(name)] == []


def test_one_node_runs_alone() -> None:
    node = helper.make_node("Add", ["x", "x"], ["y"])
    x = np.array([1.0, 2.0], np.float32)
    np.testing.assert_array_equal(OnnxlineBackend.run_node(node, [x])[0], [2.0, 4.0])


def test_another_device_is_refused() -> None:
    assert not OnnxlineBackend.supports_device("CUDA")
    with pytest.raises(ValueError, match="expected 'CPU'"):
        OnnxlineBackend.prepare(onnx.ModelProto(), "CUDA")


def test_a_fallback_is_counted() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[1, 2, 4] x) => (float[1, 2, 4] z) {
      y = MeanVarianceNormalization <axes = [0, 2]> (x) f = Cast <to = 23> (y) z = Cast <to = 1> (f)
    }"""
    model = onnx.parser.parse_model(text)
    prepared = OnnxlineBackend.prepare(model)
    x = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    (wanted,) = list(ReferenceEvaluator(model).run(None, {"x": x}))
    np.testing.assert_allclose(prepared.run([x])[0], np.asarray(wanted))
    assert prepared.count().fallbacks == ("Cast", "Cast")
