"""A command that is asked to end ends as after Ctrl-C."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import EXAMPLES, ROOT
from tests.support.processes import run_forked

TERMINATED = """
import os, signal, sys


def terminate(event, arguments):
    if event == "os.rename" and os.path.basename(arguments[1]) == "out.onnx":
        os.kill(os.getpid(), signal.SIGTERM)


signal.signal(signal.SIGINT, INTERRUPTS)
sys.addaudithook(terminate)
from pipeline.cli import main

main()
"""


@pytest.mark.parametrize("interrupts", ["signal.default_int_handler", "signal.SIG_IGN"])
def test_sigterm_leaves_no_temporary_files(tmp_path: Path, monkeypatch, interrupts: str) -> None:
    temporary, out = tmp_path / "temporary", tmp_path / "out" / "out.onnx"
    temporary.mkdir()
    out.parent.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    code = TERMINATED.replace("INTERRUPTS", interrupts)
    done = run_forked("-c", code, "optimize", EXAMPLES / "attention.onnx", "-o", out)
    assert (done.returncode, "onnxline: stopped; " in done.stderr) == (130, True), done.stderr
    assert [*temporary.glob("onnxline-*"), *out.parent.iterdir()] == []


HANDLED = """
import os, signal
from pipeline.cli import _stopped_by_sigterm

signal.signal(signal.SIGINT, lambda number, frame: print("handled", int(number), flush=True))
with _stopped_by_sigterm():
    signal.raise_signal(signal.SIGTERM)
    child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    print("fork", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_sigterm_is_handled_as_ctrl_c_is_and_ends_a_fork() -> None:
    """A training handles Ctrl-C: it saves its states first. A worker of a DataLoader ends as its owner asks."""
    assert run_forked("-c", HANDLED).stdout.split() == ["handled", "2", "fork", "-15"]


def test_a_stop_while_python_compiles_text_ends_with_the_exit_code(tmp_path: Path) -> None:
    """The making of a dataclass runs text by `exec`: CPython keeps in mind that Ctrl-C has left one."""
    (tmp_path / "ops.py").write_text('exec("raise KeyboardInterrupt")')
    words = ("inspect", EXAMPLES / "attention.onnx", "--custom-ops", tmp_path / "ops.py")
    done = subprocess.run([sys.executable, "-m", "onnxline", *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "onnxline: stopped; " in done.stderr) == (130, True), done.stderr


FORKS = """
import os, signal, sys, tempfile
from passes.worker.platforms import fork_process

os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    fork_process(lambda: None, (), {}, tempfile.TemporaryFile())
except KeyboardInterrupt:
    print("stopped")
"""


def test_ctrl_c_is_not_lost_while_a_worker_is_forked() -> None:
    assert run_forked("-c", FORKS).stdout.split() == ["stopped"]
