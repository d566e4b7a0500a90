"""Each way to call onnxslim returns what it returns without a guard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

import passes
from passes.guard import GuardLog, Returned
from tests.support.onnx_models import biased_attention, model_of, op_counts

onnxslim = pytest.importorskip("onnxslim")
import onnxslim.third_party.onnx_graphsurgeon as surgeon  # noqa: E402
from onnxslim import core  # noqa: E402
from onnxslim.core import optimization  # noqa: E402
from onnxslim.core.pattern import Pattern, PatternMatcher  # noqa: E402
from onnxslim.core.pattern.registry import DEFAULT_FUSION_PATTERNS  # noqa: E402

IDENTITY = "g (float[2, 3] x) => (float[2, 3] y) { a = Identity (x) b = Relu (a) c = Identity (b) y = Neg (c) }"


@pytest.fixture(scope="module")
def guards() -> Iterator[None]:
    with passes.guard(quiet=True, compare=False):
        yield


@pytest.fixture
def log(guards: None) -> Iterator[GuardLog]:
    with passes.guard(keep=["qkv"], quiet=True) as log:
        yield log


def test_from_memory(log: GuardLog) -> None:
    assert op_counts(onnxslim.slim(model_of(IDENTITY))) == Counter(Relu=1, Neg=1)
    slimmed = onnxslim.slim(biased_attention(), model_check=True, skip_optimizations=["weight_tying"])
    assert op_counts(slimmed)["Softmax"] == 1
    assert [(call.returned, call.proof) for call in log.calls] == [(Returned.GUARDED, "numbers")] * 2
    assert log.calls[1].kept == {"qkv": 1}


def test_from_a_file_into_a_file(log: GuardLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx")
    onnx.save(biased_attention(), source)
    assert onnxslim.slim(source, target, save_as_external_data=True) is None
    assert "Model Name" in capsys.readouterr().out  # onnxslim's own table
    stored = [numpy_helper.to_array(tensor) for tensor in onnx.load(target).graph.initializer]
    layouts = {matrix.tobytes() for array in stored for matrix in (array, array.T)}
    kept = [tensor for tensor in biased_attention().graph.initializer if tensor.name in ("wq", "wk", "wv")]
    assert layouts.issuperset(numpy_helper.to_array(tensor).tobytes() for tensor in kept)
    assert log.calls[0].model == source


def test_another_model_that_the_caller_asked_for_is_the_reference(log: GuardLog) -> None:
    slimmed = onnxslim.slim(biased_attention(), outputs=["mixed"])
    assert [output.name for output in slimmed.graph.output] == ["mixed"]
    assert (log.calls[0].kept, log.calls[0].proof) == ({"qkv": 1}, "numbers")


class NegOfReluIsAbs(PatternMatcher):
    """A fusion that computes something else."""

    name = "NegOfReluIsAbs"

    def __init__(self, priority: int) -> None:
        picture = "input input 0 1 relu\nRelu relu 1 1 input neg\nNeg neg 1 1 relu output\noutput output 1 0 neg"
        super().__init__(Pattern(picture), priority)

    def rewrite(self, opset: int = 11) -> dict:
        relu, neg = self.relu, self.neg
        inputs, outputs = list(relu.inputs), list(neg.outputs)
        for node in (relu, neg):
            node.inputs.clear()
            node.outputs.clear()
        abs_ = {"op": "Abs", "inputs": inputs, "outputs": outputs, "name": "abs", "attrs": {}, "domain": None}
        return {"abs": abs_}


def test_a_pattern_of_the_scripts_own_runs_in_its_process_and_is_reverted_if_wrong(log: GuardLog) -> None:
    onnxslim.register_fusion_pattern(NegOfReluIsAbs(1))
    try:
        slimmed = onnxslim.slim(model_of(IDENTITY))
    finally:
        DEFAULT_FUSION_PATTERNS.pop("NegOfReluIsAbs")
    (call,) = log.calls
    assert op_counts(slimmed) == Counter(Relu=1, Neg=1)
    assert "differs" in (call.reverted or {})["onnxslim/NegOfReluIsAbs"]
    assert call.unguarded_fault.startswith("differs: ")
    assert "so the call ran in it" in call.notes[0]


def test_the_functions_of_the_core_are_held(log: GuardLog) -> None:
    onnxslim.slim(model_of(IDENTITY))  # which leaves every switch on, with a guard as without
    onnxslim.register_fusion_pattern(NegOfReluIsAbs(1))
    try:
        by_core = core.optimize(model_of(IDENTITY))
        by_optimization = optimization.optimize_model(model_of(IDENTITY))
        by_graph = optimization.optimize_model(surgeon.import_onnx(model_of(IDENTITY)), None)
    finally:
        DEFAULT_FUSION_PATTERNS.pop("NegOfReluIsAbs")
    assert op_counts(by_core) == op_counts(by_optimization) == op_counts(by_graph) == Counter(Relu=1, Neg=1)
    assert [(call.function, call.returned) for call in log.calls[1:]] == [
        ("onnxslim.core.optimize", Returned.GUARDED),
        *[("onnxslim.core.optimization.optimize_model", Returned.GUARDED)] * 2,
    ]
    assert ["onnxslim/NegOfReluIsAbs" in (call.reverted or {}) for call in log.calls] == [False, True, True, True]


def test_switches_that_are_off_stay_off_in_the_core(log: GuardLog) -> None:
    optimization.OptimizationSettings.reset(optimization.OptimizationSettings.keys())
    try:
        slimmed = core.optimize(model_of(IDENTITY), skip_fusion_patterns=None)
        assert not optimization.OptimizationSettings.enabled()
    finally:
        optimization.OptimizationSettings.reset()
    assert op_counts(slimmed) == Counter(Identity=2, Relu=1, Neg=1)


def test_what_changes_a_graph_in_place_is_said(log: GuardLog) -> None:
    graph = surgeon.import_onnx(model_of(IDENTITY))
    optimization.dead_node_elimination(graph)
    graph.cleanup()
    assert [node.op for node in graph.nodes if node.op == "Identity"] == []
    (call,) = log.calls
    assert (call.function, call.returned) == ("onnxslim.core.optimization.dead_node_elimination", Returned.NOT_JUDGED)
    assert "of which no policy can speak" in call.notes[0]


def test_mistakes_of_the_caller_are_onnxslims_to_tell(log: GuardLog) -> None:
    with pytest.raises(FileNotFoundError):
        onnxslim.slim("nothing.onnx")
    with pytest.raises(Exception, match="Output name nothing not found"):
        onnxslim.slim(biased_attention(), outputs=["nothing"])
    assert [call.returned for call in log.calls] == [Returned.RAISED] * 2
