"""A Ray cluster of two nodes on loopback, one of which is killed in the middle of its jobs."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from passes.weights.detached import read_model
from pipeline.batch import read_configs, run_batch
from pipeline.config.quantsim import FLOAT, parse_precision
from pipeline.errors import UsageError
from pipeline.jobs import Job, JobStatus, choose_executor, run_jobs
from pipeline.jobs.job import perform
from pipeline.jobs.on_ray import RayCluster
from pipeline.quantsim.placement import PlacementRule, place
from pipeline.quantsim.shards import quantize_in_shards
from tests.pipeline.jobs import sample_jobs as functions

pytest.importorskip("ray", reason="ray is an extra: pip install 'onnxline[ray]'")
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """One node; the folder's path is short, since the path of a socket has at most 107 characters."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # at Ray's 15 a busy machine gives a worker a second in a minute
    handler = signal.getsignal(signal.SIGTERM)  # a node takes it, and keeps it
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    yield made
    made.shutdown()
    signal.signal(signal.SIGTERM, handler)
    shutil.rmtree(folder, ignore_errors=True)


def test_what_ran_on_a_node_that_died_is_done_elsewhere(cluster: Any, tmp_path: Path) -> None:
    second = cluster.add_node(**NODE)
    marks = tmp_path / "marks"
    marks.mkdir()
    jobs = [
        Job(name, functions.name_the_node, {"folder": str(marks), "name": name, "seconds": 1.5}) for name in "abcd"
    ] + [Job("mistake", functions.mistake), Job("dies", functions.die_at_first, {"file": str(tmp_path / "deaths")})]

    def kill_the_second_when_it_works() -> None:
        while second.node_id not in {path.read_text() for path in marks.iterdir()}:
            time.sleep(0.02)
        cluster.remove_node(second, allow_graceful=False)

    killer = threading.Thread(target=kill_the_second_when_it_works, daemon=True)
    killer.start()
    table = tmp_path / "table.jsonl"
    found = {one.key: one for one in run_jobs(jobs, choose_executor(ray=cluster.address), table, {})}
    killer.join(5)

    begun = Counter(path.name.partition(".")[0] for path in marks.iterdir())
    moved = {path.name.partition(".")[0] for path in marks.iterdir() if path.read_text() == second.node_id}
    head = cluster.head_node.node_id
    assert {key: (one.status, one.attempts) for key, one in found.items() if key in "abcd"} == {
        key: (JobStatus.DONE, 2 if key in moved else 1) for key in "abcd"
    }
    assert {found[key].value for key in "abcd"} == {head}
    assert moved and all(begun[key] == found[key].attempts for key in "abcd")
    assert (found["mistake"].status, found["mistake"].why) == (JobStatus.FAILED, "this is wrong; do that")
    assert (found["dies"].status, found["dies"].value, found["dies"].attempts) == (JobStatus.DONE, "alive", 2)
    lines = [json.loads(line)["key"] for line in table.read_text().splitlines()]
    assert sorted(lines) == sorted(found)


def test_jobs_of_one_node(cluster: Any, tmp_path: Path) -> None:
    jobs = [Job("double", functions.double, {"number": 2}), Job("mistake", functions.mistake)]
    jobs += [Job("dies", functions.abort), Job("last", functions.double, {"number": 1}, after=["dies"])]
    executor = RayCluster(cluster.address, attempts=1)
    found = {one.key: one for one in run_jobs(jobs, executor, tmp_path / "table.jsonl", {})}
    assert [(found[name].status, found[name].attempts) for name in ("dies", "last")] == [
        (JobStatus.LOST, 1),
        (JobStatus.LOST, 0),
    ]
    assert (found["double"].status, found["double"].value, found["double"].attempts) == (JobStatus.DONE, 4, 1)
    assert (found["mistake"].status, found["mistake"].why) == (JobStatus.FAILED, "this is wrong; do that")


def test_a_run_in_parts_is_a_job_for_each_part_and_one_for_the_whole(
    cluster: Any, small_config, tmp_path: Path
) -> None:
    models = {"first": {"onnx": "small.onnx"}, "second": {"onnx": "small.onnx"}}
    planned = read_configs([str(small_config("p.yaml", model={"parts": models}))])
    told: list[str] = []
    executor = choose_executor(ray=cluster.address)
    (row,) = run_batch(planned, tmp_path / "out", executor, lambda one: told.append(one.outcome.key))
    assert sorted(told[:2]) == ["p/parts/first", "p/parts/second"] and told[2:] == ["p"]
    assert [row.state, *(part.state for part in row.parts)] == ["done"] * 3, row.why
    assert all("Ray node" in part.where for part in (row, *row.parts))
    report = json.loads((tmp_path / "out/p/report.json").read_text())
    assert {f"{part}: passes" for part in models} < set(report["cached"])


def test_weights_are_rounded_in_shards_on_a_cluster_as_in_this_process(cluster: Any, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    weights = [
        onnx.numpy_helper.from_array(draw.normal(size=(64, 64)).astype(np.float32), name)
        for name in ("first", "second")
    ]
    made = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[3, 64] x) => (float[3, 64] y) '
        "{ h = MatMul(x, first) y = MatMul(h, second) }"
    )
    made.graph.initializer.extend(weights)
    path = tmp_path / "model.onnx"
    onnx.save(made, path, save_as_external_data=True, location="model.data", size_threshold=0)
    model = read_model(path, unread=True)
    placement = place(model, [PlacementRule("op:*", parse_precision("int4/block16"), FLOAT)])
    here = SimpleNamespace(run=lambda jobs: (perform(job) for job in jobs))
    executors = {"here": here, "there": choose_executor(ray=cluster.address)}
    files = {
        name: quantize_in_shards(model, path, placement, tmp_path / name, 1, executor).file
        for name, executor in executors.items()
    }
    expected, found = ({data.name: data.read_bytes() for data in file.parent.glob("*.data")} for file in files.values())
    assert found == expected and expected


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_a_cluster_that_is_not_there(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where `auto` looks
    with pytest.raises(UsageError, match=f"no Ray cluster answers at {address}: .*start one with `ray start"):
        list(RayCluster(address).run([Job("a", functions.double, {"number": 1})]))


def test_a_node_says_which_versions_differ() -> None:
    from pipeline.jobs.on_ray import differences

    ours = {"onnx": "1.23.2", "torch": "2.13.0"}
    assert differences(ours, dict(ours)) == ""
    assert differences(ours, {"onnx": "1.22.0", "ray": "2.60.0", "torch": "2.13.0"}) == (
        "onnx 1.22.0 and not 1.23.2, ray 2.60.0 and not none"
    )


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--ray needs ray, which is not installed; pip install 'onnxline\[ray\]'"):
        choose_executor(ray="auto")
