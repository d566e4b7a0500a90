"""What a pass of the user's does to its process ends with it: the steps after it work as if it had not been there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import passes
from passes.context import PassContext, open_context
from passes.errors import StepCrashed, StepFailed
from passes.run.result import PassRun, Status
from passes.worker.client import Worker
from tests.passes.recipe import harmful_passes
from tests.support import worker_faults as faults
from tests.support.onnx_models import attention
from tests.support.processes import still_running

FILE = harmful_passes.__file__

AFTER = ["eliminate_identity", "fuse_matmul_add_bias_into_gemm", f"{FILE}:write_to_stdout", "onnxsim"]
"""Steps of each worker, that of passes of the user's too."""

ENDS = {
    "return_in_the_fork_alone": "the pass ended its process (exit code 0)",
    "patch_pickle": "the pass wrote bytes of its own to the file of its answer",
    "patch_builtins": "expected an onnx.ModelProto",
    "lower_file_size": "the pass ended its process (exit code 1)",
    "forget_modules": "the pass ended its process (exit code 1)",
    "delete_files_of_the_run": "",
    "exit_at_once": "the pass ended its process (exit code 0)",
    "exit_by_python": "the pass ended its process (exit code 3)",
    "kill_itself": "the worker process died (signal SIGSEGV)",
    "kill_its_group": "SIGTERM",
    "interrupt": "KeyboardInterrupt",
    "trace_everything": "ZeroDivisionError",
}
"""The passes that harm themselves, and so fail, with words of the row."""


def run(context: PassContext, *recipe: str) -> PassRun:
    return passes.optimize(attention(), recipe=recipe, keep=["qkv"], context=context)


def rows(done: PassRun) -> list[tuple]:
    return [(row.name, row.status, row.changed, row.nodes_after, row.errors) for row in done.rows]


def test_the_steps_after_harmful_passes_are_those_of_a_run_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOLDER_TO_DELETE", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    here, environment = Path.cwd(), dict(os.environ)
    with open_context(timeout_s=30, folder=tmp_path / "run") as context:
        expected = run(context, *AFTER)
        done = run(context, *(f"{FILE}:{name}" for name in harmful_passes.PASSES), *AFTER)
    first = len(harmful_passes.PASSES)
    harmful = {row.name: row for row in done.rows[:first]}
    assert rows(done)[first:] == rows(expected)
    assert done.model.proto == expected.model.proto
    assert {name for name, row in harmful.items() if row.status is not Status.RAN} <= ENDS.keys()
    for name, words in ENDS.items():
        assert words in harmful[name].reason
    assert not any(row.changed for row in harmful.values())
    assert (Path.cwd(), dict(os.environ)) == (here, environment)


def test_what_a_pass_has_started_ends_with_it() -> None:
    with Worker(alone=True) as worker:
        started = worker.call(faults.leave_processes)
        assert len(started) == 2
        assert not still_running(started)
        assert worker.call(faults.double, number=21) == 42


def test_a_call_alone_leaves_nothing_to_the_next() -> None:
    with Worker(alone=True) as worker:
        assert [worker.call(faults.count_calls) for _ in range(3)] == [1, 1, 1]
        with pytest.raises(StepFailed, match="no such tensor"):
            worker.call(faults.complain, words="no such tensor")
        with pytest.raises(StepCrashed, match="SIGABRT"):
            worker.call(faults.die)
        assert worker.generation == 1, "the process that forks has seen nothing of it"


def test_a_pass_that_is_harmful_when_it_is_loaded_harms_nobody(tmp_path: Path, context: PassContext) -> None:
    """The file is run to see what it is, too: that is no more in this process than a call is."""
    code = "import os, onnx\nos.chdir('/')\nonnx.load = None\ndef same(model): return model\n"
    (tmp_path / "own.py").write_text(code)
    here = Path.cwd()
    assert [row.status for row in run(context, f"{tmp_path}/own.py:same", "onnxsim").rows] == [Status.RAN] * 2
    assert Path.cwd() == here
    (tmp_path / "dies.py").write_text("import os\nos._exit(4)\n")
    with pytest.raises(passes.PolicyError, match=r"dies.py:same: it is loaded to see what it is, and .*exit code 4"):
        run(context, f"{tmp_path}/dies.py:same")


def test_bytes_on_the_pipe_cost_one_call() -> None:
    """A library has the pipe, as it keeps its process."""
    with Worker() as worker:
        for garbage in (b"hello", b"\x00\x00\x00\x05hello", b"\xff" * 64, b"\x00"):
            with pytest.raises(StepFailed, match=r"wrote bytes of its own to file descriptor \d+, the pipe"):
                worker.call(faults.write_to_every_descriptor, garbage=garbage)
            assert worker.call(faults.double, number=21) == 42


def test_a_fork_of_a_library_answers_nothing() -> None:
    with Worker() as worker:
        process = worker.call(os.getpid)
        for number in range(5):
            assert worker.call(faults.fork_and_double, number=number) == 2 * number
        assert worker.call(os.getpid) == process


def test_a_pass_has_no_descriptor_of_another_process() -> None:
    """So it cannot reach the prover: what is open is its output, and files that Python has opened for itself."""
    with open_context() as context:
        context.start()
        opened = context.user_code.call(faults.open_descriptors)
    assert not [place for place in opened if place.startswith(("pipe:", "socket:"))]
