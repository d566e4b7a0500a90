"""Every result that a public function returns: `print` and a notebook show a table of it, and no weight."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import onnxline
import pipeline.parts
import pipeline.train_run
from onnxline.authoring import Evaluation, StepRecord, TrainingHistory
from onnxline.bisect import Bisection, Culprit, Smallest
from onnxline.quantsim import QuantSimResult
from onnxline.static_cache import Generated
from onnxline.torch_ir import VerificationReport
from passes.diff.types import NodeLabel
from passes.run.result import OptimizeResult
from passes.tools import merge, split
from passes.visible import TableResult
from passes.weights.detached import detach
from pipeline.parts import Generation, PartsResult
from pipeline.quantsim.parts import PartsQuantSimResult
from pipeline.quantsim.report import QuantSimReport
from pipeline.quantsim.simulation import OutputNoise
from pipeline.report.model import QuantizedLayer, TrainingReport
from pipeline.train_run import TrainResult
from pipeline.training import StepComparison
from tests.support.onnx_models import attention

ROOMS = (onnxline, pipeline.parts, pipeline.train_run, *(getattr(onnxline, room) for room in onnxline.ROOMS))

NO_RESULTS = {
    "a graph or a plan, which has a text form of its own, and what it is made of": {
        *("BodyRef", "ExecutionPlan", "FallbackCount", "Graph", "GraphFacts", "IR", "InputRef", "KernelSpec", "Layout"),
        *("MemoryRegion", "Move", "Occupant", "Op", "PlanFile", "SymExpr", "TensorSpec", "TorchConst", "Value"),
    },
    "a model, or the states of one": {"DetachedModel", "Snapshot"},
    "settings and types": {
        "ArrayType",
        "CacheSpec",
        "CustomOp",
        "Encoding",
        "Optimizer",
        "PassContext",
        "Repeat",
        "Step",
    },
    "an entry of a list, in one line": {"ComparedValue", "Outcome", "Sighting"},
}


def classes_of_ours(base: type = object) -> Iterator[type]:
    """The classes of the two packages that are loaded and derive from `base`."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("passes", "pipeline")]:
        for known in vars(sys.modules[name]).values():
            if inspect.isclass(known) and known.__module__ == name and base in known.__mro__[1:]:
                yield known


def public_functions() -> Iterator[Callable[..., Any]]:
    """The functions of all rooms, and the methods of their classes."""
    for room in ROOMS:
        for name in getattr(room, "__all__", None) or [name for name in vars(room) if not name.startswith("_")]:
            public = getattr(room, name)
            members = [public]
            if inspect.isclass(public):
                members = [member for key, member in vars(public).items() if not key.startswith("_")]
            yield from (member for member in members if inspect.isfunction(member))


def test_every_public_result_has_a_table() -> None:
    """A result is a dataclass that a public function returns, except those above; no class name stands twice."""
    exempt = set().union(*NO_RESULTS.values())
    annotated = {name for function in public_functions() for name in re.findall(r"\w+", returned_by(function))}
    assert exempt <= annotated, "a reason that excuses no class"
    named = [known for known in classes_of_ours() if known.__name__ in annotated - exempt]
    results = {known for base in named for known in (base, *classes_of_ours(base)) if dataclasses.is_dataclass(known)}
    assert {known.__name__ for known in results} >= {"MergedModel", "PassRun", "PartsResult", "VerificationReport"}
    for known in results:
        assert hasattr(known, "_repr_html_"), f"{known.__name__} has no table in a notebook"
        generated = hasattr(known.__repr__, "__wrapped__") and known.__str__ is object.__str__
        assert not generated, f"print of {known.__name__} writes out every field"


def returned_by(function: Callable[..., Any]) -> str:
    """The annotation of what a function returns, with the meaning of a name in it that is an alias."""
    text = str(function.__annotations__.get("return", ""))
    aliases = (vars(sys.modules[function.__module__]).get(name) for name in re.findall(r"\w+", text))
    return " ".join([text, *(str(alias) for alias in aliases if not inspect.isclass(alias))])


LOOKED_AT = 0.8765432109
"""An element of the weights below."""


def marked() -> onnx.ModelProto:
    model = attention()
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.full_like(array, LOOKED_AT / 100), tensor.name))
    return model


def simulated(folder: Path) -> QuantSimResult:
    noise = {"y": OutputNoise(**{field.name: 1.0 for field in dataclasses.fields(OutputNoise)})}
    layer = QuantizedLayer("scores", "MatMul", "encoder.0", "q", 31.5, 0.5)
    report = QuantSimReport(
        rules=(), rows=(), layers=(layer,), left_in_float=(), outputs=noise, device_like=None,
        weight_bytes=4096, quantized_weight_bytes=1024, tensors=9, quantized_tensors=8,
    )  # fmt: skip
    return QuantSimResult(folder, report, ("encodings.json",))


def bisected() -> Bisection:
    culprit = Culprit("onnxsim", "onnxsim", "fuse_qkv", (), 2, 1, repeats=False, why="loses qkv attention 0")
    smallest = Smallest(detach(marked()), removed=(NodeLabel("MatMul", "q"),), added=(NodeLabel("MatMul", "qkv"),))
    return Bisection("lost qkv", 3, culprit, smallest, "", runs=9, seconds=1.5)


def history() -> TrainingHistory:
    return TrainingHistory(tuple(StepRecord(step, 4.0 - step / 100, 0.1) for step in range(1, 201)))


def merged() -> Any:
    second = onnxline.rename(marked(), {"x": "a", "y": "b"}, proof="structure").to_proto()
    return merge(marked(), second, {"y": "a"}, proof=False)


SHOWN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "MergedModel": (lambda _: merged(), "takes"),
    "PartedModel": (lambda _: split(marked(), at=["scores"], proof=False), "scores"),
    "ModelPart": (lambda _: split(marked(), at=["scores"], proof=False).parts[0], "scores"),
    "ModelFacts": (lambda _: onnxline.inspect_model(marked()), "MatMul"),
    "Diff": (lambda _: onnxline.diff(marked(), attention()), "values differ"),
    "PassRun": (lambda _: onnxline.optimize(marked(), recipe=["fuse_qkv"], proof="structure"), "fuse_qkv"),
    "Origin": (lambda _: onnxline.why(marked(), "op:Softmax")[0], "no pass"),
    "WeightOrigin": (lambda _: onnxline.why_weights(marked(), "*")[0], "MatMul"),
    "Bisection": (lambda _: bisected(), "onnxsim/fuse_qkv"),
    "Int8Result": (lambda _: onnxline.to_int8(marked(), samples=2), "outputs, compared on 8 samples"),
    "QuantSimResult": (simulated, "encoder.0"),
    "PartsQuantSimResult": (
        lambda folder: PartsQuantSimResult(folder, simulated(folder).report, (), parts={"decoder": simulated(folder)}),
        "part decoder",
    ),
    "TrainingHistory": (lambda _: history(), "2.245"),
    "TrainResult": (
        lambda folder: TrainResult(
            folder, TrainingReport(200, 2.2, "mse", "adam", 9, 9, (), (), {"accuracy": 0.5}), history(), ("model.onnx",)
        ),
        "accuracy",
    ),
    "Evaluation": (lambda _: Evaluation(0.25, 64, {"accuracy": 0.5}), "accuracy"),
    "VerificationReport": (
        lambda _: VerificationReport(True, 0.0, 0.0, 1, [{"path": "y", "is_close": True}]),
        "PASSED",
    ),
    "StepComparison": (lambda _: StepComparison(3, 12), "agree on 12 values"),
    "Generated": (lambda _: Generated(torch.arange(100), torch.full((100, 512), LOOKED_AT)), "84 more"),
    "Generation": (lambda _: Generation((1, 2), (3, 4), 0.2, 0.1, 20.0, "plan", "a text"), "a text"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_table_is_short_and_holds_no_weight(name: str, tmp_path: Path) -> None:
    make, words = SHOWN[name]
    result = make(tmp_path)
    assert type(result).__name__ == name
    page, texts = result._repr_html_(), (str(result), repr(result))
    assert words in page or words in str(result)
    assert page.startswith("<table") and "<td" in page
    for text in (page, *texts):
        assert f"{LOOKED_AT}"[:6] not in text and f"{LOOKED_AT / 100}"[:6] not in text
        assert len(text) < 6_000


def test_tables_of_all_results_are_looked_at() -> None:
    shown = {known.__name__ for base in (TableResult, OptimizeResult) for known in classes_of_ours(base)}
    assert shown - set(SHOWN) == {"RunResult", "PartsResult"}, "which show what PassRun shows, by one base class"
    assert issubclass(PartsResult, OptimizeResult)


def test_hostile_names_stay_text() -> None:
    result = Evaluation(0.25, 64, {"<script>\x1b[2J": 0.5})
    assert "<script" not in result._repr_html_() and "\x1b" not in str(result) + result._repr_html_()
