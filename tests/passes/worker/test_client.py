"""The worker: a crash, an endless loop or an error costs one call, and the next one works."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import passes
from passes.context import PassContext, open_context
from passes.errors import StepCrashed, StepFailed, StepTimedOut
from passes.weights.sessions import count_threads
from passes.worker.client import Worker
from passes.worker.platforms import CAN_FORK
from tests.support import worker_faults as faults
from tests.support.onnx_models import attention, matrix, model_of
from tests.support.processes import run_forked, still_running


@pytest.mark.parametrize(
    ("function", "arguments", "kind", "words"),
    [
        ("die", {}, StepCrashed, "died \\(signal SIGABRT\\)"),
        ("leave", {}, StepCrashed, "died \\(exit code 7\\)"),
        ("loop", {}, StepTimedOut, "ran past 2 s"),
        ("complain", {"words": "no such tensor"}, StepFailed, "^ValueError: no such tensor$"),
    ],
)
def test_a_fault_is_reported_and_the_next_call_works(function, arguments, kind, words) -> None:
    with Worker(timeout_s=5) as worker:
        assert worker.call(faults.double, number=2) == 4
        worker.timeout_s = 2
        with pytest.raises(kind, match=words) as caught:
            worker.call(getattr(faults, function), **arguments)
        assert type(caught.value) is kind
        worker.timeout_s = 5
        assert worker.call(faults.double, number=21) == 42


def test_a_process_that_has_closed_its_standard_streams_has_workers_too(tmp_path: Path) -> None:
    file = tmp_path / "answer"
    program = (
        "import os\nfrom pathlib import Path\nfrom passes.worker.client import Worker\n"
        "for handle in range(3):\n    os.close(handle)\n"
        f"with Worker() as worker:\n    Path({str(file)!r}).write_text(worker.call(os.path.basename, p='a/b'))\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=120, check=True)
    assert file.read_text() == "b"


def test_a_function_that_the_process_cannot_find_is_refused_before_it_is_called() -> None:
    with Worker() as worker:
        process = worker.call(os.getpid)
        with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
            worker.call(lambda: 1)
        assert worker.call(os.getpid) == process


def test_arguments_that_cannot_be_read_in_the_process_cost_one_call() -> None:
    with Worker() as worker:
        with pytest.raises(StepFailed, match=r"^ZeroDivisionError: one by nothing$"):
            worker.call(faults.double, number=faults.Unreadable())
        assert worker.call(faults.double, number=21) == 42


def test_the_worker_is_kept_between_calls() -> None:
    with Worker() as worker:
        assert worker.call(os.getpid) == worker.call(os.getpid)


def test_output_of_a_native_library_does_not_mix_with_answers() -> None:
    with Worker() as worker:
        assert worker.call(faults.shout) == "done"


def test_a_call_that_asks_for_too_much_memory_costs_one_call() -> None:
    with Worker(memory_bytes=2**30) as worker:
        assert worker.call(faults.allocate, bytes_wanted=2**20) == 2**20
        with pytest.raises(StepCrashed, match=r"more memory than the limit of 1 GiB \(memory_gib\)"):
            worker.call(faults.allocate, bytes_wanted=2**31)
        assert worker.call(faults.double, number=21) == 42


OWNER_OF_MUCH = """
import numpy as np
import onnxline.__main__  # as the command
from passes.worker.client import Worker
from tests.support import worker_faults as faults
kept = np.ones(2**28, np.uint8)
with Worker(memory_bytes=2**27) as worker:
    print(worker.call(faults.double, number=21), type(worker._process).__name__)
"""


def test_what_our_process_has_is_not_counted_in_its_forks() -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", OWNER_OF_MUCH], env=environment, capture_output=True, text=True)
    assert ended.stdout.split() == ["42", "ForkedProcess" if CAN_FORK else "Popen"], ended.stderr


def test_mapped_files_do_not_count(tmp_path: Path) -> None:
    """Weights are mapped, so a model may be larger than what a worker may allocate."""
    file = tmp_path / "weights"
    with file.open("wb") as out:
        out.truncate(2**31)
    with Worker(memory_bytes=2**30) as worker:
        assert worker.call(faults.map_file, path=str(file)) == 2**31


def test_a_posted_call_runs_while_we_go_on() -> None:
    with Worker() as worker:
        ticket = worker.post(faults.double, number=21)
        assert worker.awaits(ticket)
        assert worker.collect(ticket) == 42
        assert not worker.awaits(ticket)


def test_a_call_voids_what_was_posted_before() -> None:
    with Worker() as worker:
        ticket = worker.post(faults.complain, words="unheard")
        assert worker.call(faults.double, number=2) == 4
        assert not worker.awaits(ticket)
        with pytest.raises(ValueError, match="ticket 1 is void"):
            worker.collect(ticket)


def test_a_posted_call_has_a_time_limit_too() -> None:
    with Worker(timeout_s=0.2) as worker:
        ticket = worker.post(faults.loop)
        with pytest.raises(StepTimedOut):
            worker.collect(ticket)
        assert not worker.awaits(ticket)


def test_a_worker_that_dies_over_a_posted_call_is_replaced() -> None:
    with Worker() as worker:
        ticket = worker.post(faults.die)
        with pytest.raises(StepCrashed, match="SIGABRT"):
            worker.collect(ticket)
        assert worker.call(faults.double, number=21) == 42


def test_a_generator_goes_on_by_itself() -> None:
    with Worker() as worker:
        ticket = worker.post(faults.count, to=3)
        assert [worker.collect(ticket)[0] for _ in range(3)] == [0, 1, 2]
        assert worker.awaits(ticket)
        assert worker.collect(ticket) == "counted"
        assert not worker.awaits(ticket)


@pytest.mark.parametrize("silent", [False, True], ids=["items", "nothing to say"])
@pytest.mark.parametrize("collected", [0, 1])
def test_the_next_call_stops_a_generator(collected: int, silent: bool) -> None:
    with Worker(timeout_s=20) as worker:
        process = worker.call(os.getpid)
        ticket = worker.post(faults.count, to=10**9, silent=silent)
        for _ in range(0 if silent else collected):
            worker.collect(ticket)
        assert worker.call(os.getpid) == process
        assert not worker.awaits(ticket)


def test_neither_side_waits_for_the_other_to_listen() -> None:
    """What comes and what is sent is more than a pipe holds."""
    with Worker(timeout_s=20) as worker:
        process = worker.call(os.getpid)
        for _ in range(3):
            worker.post(faults.count, to=10**9, size=2**22)
            assert worker.call(faults.length, data=bytes(2**22)) == 2**22
        assert worker.call(os.getpid) == process


def test_a_generator_that_has_ended_is_not_stopped_any_more() -> None:
    with Worker() as worker:
        for _ in range(3):
            worker.post(faults.count, to=2)
            time.sleep(0.1)
            assert worker.call(faults.double, number=21) == 42


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        ("count_and_die", StepCrashed, "SIGABRT"),
        ("count_and_complain", StepFailed, "no more numbers"),
        ("count_and_loop", StepTimedOut, "ran past 0.5 s"),
    ],
)
def test_what_a_generator_gave_before_it_broke_down_is_not_lost(function, kind, words) -> None:
    with Worker() as worker:
        worker.call(faults.double, number=1)
        worker.timeout_s = 0.5
        ticket = worker.post(getattr(faults, function), to=2)
        time.sleep(0.2)
        assert [worker.collect(ticket) for _ in range(2)] == [0, 1]
        with pytest.raises(kind, match=words):
            worker.collect(ticket)
        assert not worker.awaits(ticket)
        worker.timeout_s = 20
        assert worker.call(faults.double, number=21) == 42


def test_a_worker_may_die_in_the_middle_of_a_message() -> None:
    """As when the system is out of memory, while we do something else."""
    with Worker(timeout_s=20) as worker:
        process = worker.call(os.getpid)
        for collects in (True, False):
            ticket = worker.post(faults.count, to=10**6, size=10**7)
            time.sleep(0.2)
            os.kill(process, signal.SIGKILL)
            if collects:
                with pytest.raises(StepCrashed, match="SIGKILL"):
                    for _ in range(100):
                        worker.collect(ticket)
            process = worker.call(os.getpid)


def test_what_the_worker_has_started_ends_with_it(tmp_path: Path) -> None:
    """A library may fork; an endless loop in the fork must not go on for ever."""
    file = tmp_path / "child"
    with Worker() as worker:
        worker.call(faults.double, number=1)
        with pytest.raises(StepTimedOut):
            worker.call(faults.fork_and_loop, within_s=2.0, file=str(file))
    assert not still_running([int(file.read_text())])


ORPHANS = """
import os, signal
import onnxline.__main__  # as the command
from passes.worker.client import Worker
from passes.worker.platforms import CAN_FORK
from tests.support import worker_faults as faults
first, worker = Worker(), Worker(cores={cores})
first.start()
worker.post(faults.fork_and_loop, file={file!r})
while not os.path.exists({file!r}) or not open({file!r}).read():
    assert worker._process.poll() is None
print(first._process.pid, worker._process.pid, open({file!r}).read(), type(worker._process).__name__, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("cores", "kind"), [([0], "Popen"), ([], "ForkedProcess" if CAN_FORK else "Popen")])
def test_workers_and_what_they_forked_end_when_we_are_killed(cores: list[int], kind: str, tmp_path: Path) -> None:
    """The workers of a command with one thread are forks, and must not hold the pipes of each other open."""
    script = ORPHANS.format(file=str(tmp_path / "child"), cores=cores)
    paths = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    *processes, found = ended.stdout.split()
    assert found == kind
    orphans = [int(process) for process in processes]
    assert len(orphans) == 3
    assert not still_running(orphans)


def test_a_worker_runs_on_the_cores_that_it_is_given() -> None:
    core = min(os.sched_getaffinity(0))
    with Worker(cores=[core]) as worker:
        assert worker.call(faults.cores) == ({core}, "1")
        assert worker.call(count_threads) == (1 if (os.cpu_count() or 1) > 1 else 0)


def test_the_last_words_are_those_of_the_call_that_died() -> None:
    with Worker() as worker:
        worker.call(faults.say, words="a warning of an earlier pass")
        with pytest.raises(StepCrashed, match=r"SIGABRT\): no such axis$"):
            worker.call(faults.say_and_die, words="no such axis")


def test_the_last_words_of_a_generator_are_those_of_its_last_round() -> None:
    with Worker() as worker:
        ticket = worker.post(faults.say_in_turn, words=["first", "second"])
        assert [worker.collect(ticket) for _ in range(2)] == ["first", "second"]
        with pytest.raises(StepCrashed, match=r"SIGABRT\): the last one$"):
            worker.collect(ticket)


def test_a_question_is_put_again_where_somebody_kills_the_process(tmp_path: Path) -> None:
    with Worker() as worker:
        assert worker.ask(faults.be_killed, counter=str(tmp_path / "twice"), times=2) == 2
        with pytest.raises(StepCrashed, match="SIGKILL"):
            worker.ask(faults.be_killed, counter=str(tmp_path / "always"), times=9)
        assert (tmp_path / "always").read_text() == "killed\n" * 3, "and no more than that"


def test_a_question_that_brings_its_process_down_is_put_once() -> None:
    with Worker() as worker, pytest.raises(StepCrashed, match="SIGABRT"):
        worker.ask(faults.die)
    assert worker.generation == 1


def test_a_call_of_a_step_is_not_made_again(tmp_path: Path) -> None:
    with Worker() as worker, pytest.raises(StepCrashed, match="SIGKILL"):
        worker.call(faults.be_killed, counter=str(tmp_path / "once"), times=1)
    assert worker.was_killed and worker.generation == 1


class KilledBefore(Worker):
    """A worker that is killed once, when nothing runs in it, before it is asked to run a model for some `purpose`."""

    purpose = ""

    def post(self, function: Any, /, **arguments: Any) -> int:
        if self.purpose and getattr(arguments.get("request"), self.purpose, ()) and self._process is not None:
            self.purpose = ""
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        return super().post(function, **arguments)


@pytest.mark.parametrize("purpose", ["own", "draws", "zeroed"])
def test_a_proof_worker_that_is_killed_between_two_questions_is_asked_again(purpose: str, tmp_path: Path) -> None:
    model = model_of("g (float[8] x) => (float[8] y) { y = Sub (x, w) }", w=matrix(1, 8, 0).ravel())
    with Worker() as worker, KilledBefore(preload=("passes.proof.runs",)) as proofs:
        proofs.start()
        proofs.purpose = purpose
        run = passes.optimize(
            model, recipe=["default"], keep=["op:Sub"], context=PassContext(worker, tmp_path.resolve(), proofs)
        )
    assert not run.reverted and run.power.margin > 1
    assert proofs.generation == 2


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_survives_that_its_proofs_are_killed_at_random_moments(seed: int) -> None:
    """Steps that lose the passes' own worker are named as crashed; a killed proof is no step's fault."""
    moments = random.Random(seed)
    with open_context() as context:
        context.start()
        done = threading.Event()

        def kill() -> None:
            for _ in range(2):
                if not done.wait(moments.uniform(0.05, 0.6)) and (process := context.proofs._process) is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            run = passes.optimize(attention(), recipe=["default"], keep=["qkv"], context=context)
        finally:
            done.set()
            killer.join()
    assert not run.reverted
    assert [one.kept for one in run.structures] == [True]
    assert run.power.margin > 1


def test_what_a_killed_worker_leaves_goes_with_its_context() -> None:
    with open_context() as context:
        left = [Path(worker.call(tempfile.mkdtemp)) for worker in (context.worker, context.proofs)]
        assert all(path.is_dir() and path.parent != context.folder for path in left)  # user code is shown that folder
    assert not [path for path in left if path.exists()]


FORKS = """
import sys, tempfile
from passes.worker.platforms import fork_process

tempfile.gettempdir()
with tempfile.TemporaryFile() as output:
    fork_process(lambda: print(tempfile.gettempdir()), (), {"TMPDIR": sys.argv[1]}, output).wait()
    output.seek(0)
    print(output.read().decode())
"""


def test_a_worker_that_is_a_fork_has_the_folder_of_its_environment(tmp_path: Path) -> None:
    assert run_forked("-c", FORKS, tmp_path).stdout.split() == [str(tmp_path)]


BLOCKED = """
import os, signal, tempfile
from passes.worker.platforms import fork_process

blocked = lambda: print(*signal.pthread_sigmask(signal.SIG_BLOCK, ()), "blocked", flush=True)

def refuse():
    raise OSError("no process is left")

with tempfile.TemporaryFile() as output:
    fork_process(blocked, (), {}, output).wait()
    output.seek(0)
    print(output.read().decode())
    os.fork = refuse
    files = os.listdir("/proc/self/fd")
    try:
        fork_process(blocked, (), {}, output)
    except OSError as error:
        print(error)
    print(len(os.listdir("/proc/self/fd")) - len(files))
    blocked()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="lists the open files by /proc")
def test_a_fork_blocks_no_signal_and_neither_does_its_owner() -> None:
    """A Ctrl-C that stays blocked would never arrive, in a fork or where there was none."""
    said = run_forked("-c", BLOCKED).stdout.split()
    assert said == ["blocked", "no", "process", "is", "left", "0", "blocked"]
