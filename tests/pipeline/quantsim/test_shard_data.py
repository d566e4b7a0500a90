"""GPTQ in shards: the integers of GPTQ in memory, bit for bit, by pieces of the model, also after kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from passes.weights.detached import DetachedModel, attach, read_model
from passes.weights.sessions import Session
from pipeline.config import QuantSimConfig
from pipeline.errors import CheckFailed, UsageError
from pipeline.jobs import Job, Outcome
from pipeline.jobs.job import perform
from pipeline.quantsim import insert_qdq, shard_data, shard_files, shards
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.optimize import Optimization
from pipeline.quantsim.optimizers import Gptq
from pipeline.quantsim.pieces import PieceRunner, cut_pieces
from pipeline.quantsim.placement import Placement, place
from pipeline.quantsim.shards import FittingData, ShardResult, quantize_in_shards
from pipeline.quantsim.simulation import compare_outputs
from tests.pipeline.quantsim.pictures_of_qdq import model_of, rule

GRAPH = """g (int64[2, 16] ids) => (float[2, 16, 24] y) {
    x = Gather(table, ids)
    h = MatMul(x, first)
    r = Relu(h)
    t = Transpose <perm = [1, 0]> (second)
    a = MatMul(r, t)
    s = Add(a, x)
    k = MatMul(s, third)
    q = MatMul(s, fourth)
    u = Mul(k, q)
    y = MatMul(u, last)
}"""

TABLE_ROWS = 30

MOST_BYTES = 2**13
"""Bytes of the weights of a piece: two of the matrices in float32."""


def draw_weights() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    sizes = {"table": (TABLE_ROWS, 40), "first": (40, 24), "second": (40, 24), "last": (24, 24)}
    sizes |= {"third": (40, 24), "fourth": (40, 24)}
    return {name: draw.normal(size=size).astype(np.float32) for name, size in sizes.items()}


def samples(count: int = 8) -> list[Mapping[str, np.ndarray]]:
    draw = np.random.default_rng(1)
    return [{"ids": draw.integers(0, TABLE_ROWS, (2, 16))} for _ in range(count)]


FITTED = 5


def write_source(folder: Path) -> Path:
    path = folder / "net.onnx"
    model = attach(model_of(GRAPH, 21, **draw_weights()))
    onnx.save(model, path, save_as_external_data=True, location="net.data", size_threshold=64)
    return path


class ThisProcess:
    """Runs jobs here, one after the other.

    Args:
        last: after this job, whose outcome nobody gets, the process is killed as by kill -9.
    """

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.run_jobs: list[str] = []

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        for job in jobs:
            outcome = perform(job)
            self.run_jobs.append(job.key)
            if len(self.run_jobs) == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
            yield outcome


def round_shards(
    path: Path, out: Path, weights: str, executor: ThisProcess | None = None, *, sequential: bool = False
) -> ShardResult:
    shards.MIB = 1  # type: ignore[misc]  # so that bytes can be asked for
    model = read_model(path, unread=True)
    placement = place(model, [rule("op:*", weights, "float")], shards.WEIGHT_TYPES)
    data = FittingData(Gptq(sequential=sequential), samples, FITTED, ["samples"])
    return quantize_in_shards(model, path, placement, out, MOST_BYTES, executor or ThisProcess(), data=data)


@pytest.fixture(autouse=True)
def keep_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MIB", 1)


def in_memory(path: Path, weights: str, folder: Path) -> tuple[DetachedModel, frozenset[str]]:
    """The model as `quantsim.optimize: [gptq]` rounds it with all of it in memory, and the weights that it takes."""
    model = read_model(path)
    placement: Placement = place(model, [rule("op:*", weights, "float")])
    held = samples()[FITTED:]
    folder.mkdir()
    optimization = Optimization(model, placement, encode(placement, {}, model), lambda: held, lambda _: 0.0, folder)
    chosen, (row,) = optimization.run([Gptq()], samples()[:FITTED])
    assert row.status == "ran", row
    quantized = insert_qdq(chosen.tune(model), encode(placement, {}, model, chosen.encodings))
    return quantized, frozenset(layer.weight for layer in row.layers if layer.taken)


@pytest.mark.parametrize("weights", ["int4/block16", "uint3/channel"])
def test_shards_hold_what_gptq_in_memory_gives(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "SLICE", 300)  # slices end within a weight
    monkeypatch.setattr(shard_data, "GPTQ_SLICE", 500)
    monkeypatch.setattr(shard_data, "JUDGED_SLICE", 500)
    path = write_source(tmp_path)
    found = round_shards(path, tmp_path / "out", weights)
    expected, taken = in_memory(path, weights, tmp_path / "memory")
    assert found.step is not None
    assert {layer.weight for layer in found.step.layers if layer.taken} == taken
    assert taken >= {"first", "second"}
    known = {tensor.name: numpy_helper.to_array(tensor) for tensor in attach(expected).graph.initializer}
    written = onnx.load(found.file).graph.initializer
    for tensor in written:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), known[tensor.name], tensor.name)
    assert {"table", "first_quantized", "last_quantized"} <= {tensor.name for tensor in written}
    rows = {layer.weight: layer for layer in found.step.layers}
    for noise in compare_outputs(read_model(path), read_model(found.file), samples()[FITTED:]).values():
        assert noise.sqnr_db < rows["first"].after_db  # the ratio of one layer alone
    assert rows["first"].after_db > rows["first"].before_db
    assert not (tmp_path / "out" / shard_data.DATA).exists()


def stored_in(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def test_in_sequence_pieces_read_what_rounded_ones_give(tmp_path: Path) -> None:
    """As if the model had the rounded weights of the pieces before in place of its own."""
    path = write_source(tmp_path)
    result = round_shards(path, tmp_path / "out", "int3/channel", sequential=True)
    found = result.file
    assert result.step is not None
    assert {layer.weight for layer in result.step.layers} == {"first", "second", "third", "fourth", "last"}
    assert all(layer.taken == (layer.after_db > layer.before_db) for layer in result.step.layers)
    ours, apart = stored_in(found), stored_in(round_shards(path, tmp_path / "apart", "int3/channel").file)
    pieces = (("first", "second"), ("third", "fourth"), ("last",))
    for number, names in enumerate(pieces[1:], 1):
        before = [name for piece in pieces[:number] for name in piece]
        results = Session.of(read_model(found), [f"{name}_dequantized" for name in before]).run(dict(samples(1)[0]))
        arrays = {name: results[f"{name}_dequantized"] for name in before}
        folder = tmp_path / names[0]
        folder.mkdir()
        replaced = attach(read_model(path).with_arrays(arrays))
        onnx.save(replaced, folder / "net.onnx", save_as_external_data=True, location="net.data", size_threshold=64)
        expected = stored_in(round_shards(folder / "net.onnx", folder / "out", "int3/channel").file)
        for name in names:
            np.testing.assert_array_equal(ours[f"{name}_quantized"], expected[f"{name}_quantized"], name)
            assert (ours[f"{name}_quantized"] != apart[f"{name}_quantized"]).any(), name
    np.testing.assert_array_equal(ours["first_quantized"], apart["first_quantized"])
    assert not (tmp_path / "out" / shard_data.DATA).exists()
    with pytest.raises(ValueError, match="found sequential of gptq without shard_mib"):
        QuantSimConfig.model_validate({"optimize": [{"gptq": {"sequential": True}}]})


@pytest.mark.parametrize("sequential", [False, True])
def test_a_run_that_is_killed_goes_on_where_it_stopped(sequential: bool, tmp_path: Path) -> None:
    path = write_source(tmp_path)
    whole = ThisProcess()
    round_shards(path, tmp_path / "whole", "int4/block16", whole, sequential=sequential)
    out = tmp_path / "out"
    for last in (3, 2):  # the second process goes on with what the first has recorded
        script = (
            "import sys; from pathlib import Path; from tests.pipeline.quantsim.test_shard_data import *; "
            "round_shards(Path(sys.argv[1]), Path(sys.argv[2]), 'int4/block16', ThisProcess(int(sys.argv[3])), "
            f"sequential={sequential})"
        )
        child = subprocess.run([sys.executable, "-c", script, str(path), str(out), str(last)], capture_output=True)
        assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    rest = ThisProcess()
    round_shards(path, out, "int4/block16", rest, sequential=sequential)
    assert rest.run_jobs == whole.run_jobs[3:]  # two outcomes of the first, one of the second
    names = sorted(file.name for file in out.iterdir() if file.suffix != ".jsonl")
    assert names == sorted(file.name for file in (tmp_path / "whole").iterdir() if file.suffix != ".jsonl")
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_a_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    path = write_source(tmp_path)
    whole, again = ThisProcess(), ThisProcess()
    out = tmp_path / "out"
    round_shards(path, out, "int4/block16", whole)
    file = out / "fitted-0001.data"
    before = file.read_bytes()
    file.unlink()
    round_shards(path, out, "int4/block16", again)
    assert file.read_bytes() == before
    pieces = [key for key in whole.run_jobs if key.startswith("piece")]
    assert len(again.run_jobs) == len(pieces) + 1  # the values of all pieces were gone
    assert set(pieces) < set(again.run_jobs)


def test_pieces_compute_what_the_model_does(tmp_path: Path) -> None:
    model = read_model(write_source(tmp_path), unread=True)
    pieces = cut_pieces(model, MOST_BYTES)
    assert [(piece.first, piece.last, piece.reads, piece.makes) for piece in pieces] == [
        (0, 1, ("ids",), ("x",)),
        (1, 6, ("x",), ("s",)),
        (6, 9, ("s",), ("u",)),
        (9, 10, ("u",), ()),
    ]
    sample = dict(samples(1)[0])
    values = dict(sample)
    for piece in pieces:
        wanted = [*piece.makes, *(["y"] if piece is pieces[-1] else [])]
        values |= PieceRunner(model, piece, wanted, values).run({name: values[name] for name in piece.reads})
    np.testing.assert_array_equal(values["y"], Session.of(model).run(sample)["y"])


def test_a_model_is_cut_where_the_fewest_values_cross() -> None:
    text = """g (float[2, 32] x) => (float[2, 32] y) {
        a = MatMul (x, w1) b = MatMul (a, w2) c = MatMul (b, w3) d = Neg (b) e = Add (c, d)
        f = Neg (e) h = Abs (e) i = MatMul (f, w4) y = Add (i, h) }"""
    model = model_of(text, **{f"w{place}": np.full((32, 32), place + 1, np.float32) for place in (1, 2, 3, 4)})
    assert [(piece.first, piece.last) for piece in cut_pieces(model, 3 * 4096)] == [(0, 5), (5, 9)]


def test_a_model_in_bfloat16_runs_in_float32(tmp_path: Path) -> None:
    wide = model_of(
        GRAPH,
        21,
        **{name: array.astype(ml_dtypes.bfloat16).astype(np.float32) for name, array in draw_weights().items()},
    )
    proto = attach(wide)
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(ml_dtypes.bfloat16), tensor.name))
    proto.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    path = tmp_path / "narrow.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="narrow.data", size_threshold=64)
    model = read_model(path, unread=True)
    (piece,) = cut_pieces(model, 2**20)
    sample = dict(samples(1)[0])
    found = PieceRunner(model, piece, ["y"], sample).run(sample)["y"]
    np.testing.assert_array_equal(found, Session.of(wide).run(sample)["y"])
    rounded = round_shards(path, tmp_path / "out", "int4/block16")
    scales = {tensor.name: tensor.data_type for tensor in onnx.load(rounded.file).graph.initializer}
    assert scales["first_scale"] == onnx.TensorProto.BFLOAT16
    assert rounded.step is not None
    assert any(layer.taken for layer in rounded.step.layers)


def test_what_gptq_cannot_do_in_shards_is_refused(tmp_path: Path) -> None:
    for optimize in (["seq-mse"], ["gptq", "bias-correction"]):
        with pytest.raises(ValueError, match=r"expected \[gptq\] or none"):
            QuantSimConfig.model_validate({"shard_mib": 1, "optimize": optimize})
    with pytest.raises(ValueError, match="the nodes of Ray say what they take"):
        QuantSimConfig.model_validate({"shard_mib": 1, "shard_jobs": 2, "shard_ray": "auto"})
    with pytest.raises(ValueError, match="without shard_mib"):
        QuantSimConfig.model_validate({"shard_jobs": 2})
    path = write_source(tmp_path)
    model = read_model(path, unread=True)
    placement = place(model, [rule("op:*", "int4/block16", "float")])
    own = FittingData(Gptq(python=sys.executable), samples, FITTED, [])
    with pytest.raises(UsageError, match="found python next to shard_mib"):
        quantize_in_shards(model, path, placement, tmp_path / "out", 1, ThisProcess(), data=own)
    infinite = [{"ids": np.full((2, 16), 0)}]
    weights = draw_weights()
    weights["table"][0] = np.inf
    onnx.save(
        attach(model_of(GRAPH, 21, **weights)), path, save_as_external_data=True, location="net.data", size_threshold=64
    )
    model = read_model(path, unread=True)
    placement = place(model, [rule("op:*", "int4/block16", "float")])
    data = FittingData(Gptq(), lambda: infinite * 2, 1, [])
    with pytest.raises(CheckFailed, match="is infinite or NaN in the float model"):
        quantize_in_shards(model, path, placement, tmp_path / "out", MOST_BYTES, ThisProcess(), data=data)
