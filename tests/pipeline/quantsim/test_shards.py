"""Weights rounded in shards: equal to rounding in memory, bit for bit, and what needs runs of the model is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from passes.weights.detached import DetachedModel, attach, read_model
from passes.weights.sessions import Session
from pipeline.config.quantsim import parse_precision
from pipeline.errors import CheckFailed, UsageError
from pipeline.jobs import Job, Outcome
from pipeline.jobs.job import perform
from pipeline.quantsim import insert_qdq, shard_files, shards
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.placement import Placement, PlacementRule, place
from pipeline.quantsim.shards import quantize_in_shards
from pipeline.workspace import Workspace
from tests.pipeline.quantsim.pictures_of_qdq import model_of


class ThisProcess:
    """Runs jobs here, one after the other."""

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        yield from map(perform, jobs)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three products, whose weights lie in a file of their own."""
    monkeypatch.setattr(shards, "MIB", 2**13)
    monkeypatch.setattr(shard_files, "SLICE", 500)  # slices end within a weight
    draw = np.random.default_rng(0)
    model = model_of(
        "g (float[3, 40] x) => (float[3, 24] y) { h = MatMul(x, first) r = Relu(h) "
        "g = Gemm <transB = 1>(r, second, bias) y = MatMul(g, third) }",
        first=draw.normal(size=(40, 64)).astype(np.float32),
        second=draw.normal(size=(24, 64)).astype(np.float32),
        bias=draw.normal(size=24).astype(np.float32),
        third=draw.normal(size=(24, 24)).astype(np.float32),
    )
    path = tmp_path / "net.onnx"
    onnx.save(attach(model), path, save_as_external_data=True, location="net.data", size_threshold=64)
    return path


def placed(path: Path, formats: str, activations: str = "float") -> tuple[DetachedModel, Placement]:
    model = read_model(path, unread=True)
    return model, place(
        model, [PlacementRule("op:*", parse_precision(formats), parse_precision(activations) or "float")]
    )


@pytest.mark.parametrize("formats", ["int4/block16", "uint4/channel", "int8/channel", "int3/block32", "uint6/block16"])
def test_shards_hold_what_rounding_in_memory_gives(formats: str, source: Path, tmp_path: Path) -> None:
    model, placement = placed(source, formats)
    found = quantize_in_shards(model, source, placement, tmp_path / "out", 1, ThisProcess())
    assert (found.weights, found.shards) == (3, 3)
    whole = read_model(source)
    expected = attach(insert_qdq(whole, encode(placement, {}, whole)))
    known = {tensor.name: numpy_helper.to_array(tensor) for tensor in expected.graph.initializer}
    written = onnx.load(found.file)
    for tensor in written.graph.initializer:
        array = numpy_helper.to_array(tensor)
        assert array.dtype == known[tensor.name].dtype
        np.testing.assert_array_equal(array, known[tensor.name], tensor.name)
    x = np.random.default_rng(1).normal(size=(3, 40)).astype(np.float32)
    runs = [Session.of(read_model(found.file)), Session.of(insert_qdq(whole, encode(placement, {}, whole)))]
    first, second = (run.run({"x": x})["y"] for run in runs)
    np.testing.assert_array_equal(first, second)


def test_weights_in_bfloat16_have_scales_in_bfloat16_that_decide_the_integers(source: Path, tmp_path: Path) -> None:
    model = onnx.load(source)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor).astype(ml_dtypes.bfloat16)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    first = numpy_helper.to_array(model.graph.initializer[0]).astype(np.float32)
    path = tmp_path / "narrow.onnx"
    onnx.save(model, path, save_as_external_data=True, location="narrow.data", size_threshold=64)
    narrow = read_model(path, unread=True)
    rules = [PlacementRule("op:*", parse_precision("int8/channel"), "float")]
    with pytest.raises(UsageError, match="only float32 is simulated"):
        place(narrow, rules)
    found = quantize_in_shards(narrow, path, place(narrow, rules, ("bfloat16",)), tmp_path / "out", 1, ThisProcess())
    written = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(found.file).graph.initializer}
    scale = written["first_scale"]
    assert scale.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(written["first_quantized"], np.rint(first / scale.astype(np.float32)))


def test_the_next_run_removes_the_shard_that_kill_9_left_half_written(tmp_path: Path) -> None:
    quantized = tmp_path / shards.FOLDER
    quantized.mkdir()
    (half := quantized / ".shard-0002.data.12.12.tmp").write_bytes(b"half")
    (whole := quantized / "shard-0001.data").write_bytes(b"whole")
    with Workspace(tmp_path).acquire():
        assert not half.exists() and whole.exists()


def test_shards_that_are_done_stay(source: Path, tmp_path: Path) -> None:
    model, placement = placed(source, "int4/block16")
    found = quantize_in_shards(model, source, placement, tmp_path / "out", 1, ThisProcess())
    files = sorted((tmp_path / "out").glob("shard-*.data"))
    times = [file.stat().st_mtime_ns for file in files]
    table = tmp_path / "out" / shards.TABLE
    table.write_bytes(table.read_bytes()[:-20])  # as a process leaves it that is killed while it writes
    files[0].unlink()
    again = quantize_in_shards(model, source, placement, tmp_path / "out", 1, ThisProcess())
    assert again.worst == found.worst
    assert [file.stat().st_mtime_ns != time for file, time in zip(files, times, strict=True)] == [True, False, True]


def test_what_cannot_be_rounded_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, placement = placed(source, "int8/channel", "uint8")
    with pytest.raises(UsageError, match="its range needs runs of the model"):
        quantize_in_shards(model, source, placement, tmp_path / "out", 1, ThisProcess())
    model, placement = placed(source, "lpbq16")
    with pytest.raises(
        UsageError, match="first is lpbq16; expected integers by channel or in blocks, with scales in float"
    ):
        quantize_in_shards(model, source, placement, tmp_path / "out", 1, ThisProcess())
    model, placement = placed(source, "int4/block16")
    monkeypatch.setattr(shard_files, "HALF_STEP", 0.2)  # the proof can fail
    with pytest.raises(CheckFailed, match="further off than half a step"):
        quantize_in_shards(model, source, placement, tmp_path / "out", 1, ThisProcess())
