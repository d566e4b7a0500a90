"""`onnxline guard`: scripts that nobody edits, run as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from tests.support.onnx_models import attention, biased_attention

ONNXLINE = [str(Path(sys.executable).with_name("onnxline"))]
ONNXSIM = Path(sys.executable).with_name("onnxsim")

SCRIPT = f"""
import multiprocessing, os, subprocess, sys, threading, time
import onnx
from onnxoptimizer import optimize
import onnxline, passes, pipeline

assert (passes.MINE, pipeline.MINE, onnxline.MINE) == ("passes.py", "pipeline/__init__.py", "onnxline.py")

def merge(target):
    onnx.save(optimize(onnx.load("in.onnx"), ["fuse_qkv"]), target)

if __name__ == "__main__":
    merge("plain.onnx")
    thread = threading.Thread(target=merge, args=("thread.onnx",), name="its own thread")
    thread.start()
    thread.join()
    process = multiprocessing.get_context("spawn").Process(target=merge, args=("spawned.onnx",))
    process.start()
    process.join()
    child = [sys.executable, "-c", "import script; script.merge('child.onnx')"]
    subprocess.run(child, check=True, env={{"LANG": "C.UTF-8"}})
    subprocess.run([{str(ONNXSIM)!r}, "biased.onnx", "command.onnx"], check=True)
    alone = "import script, time; script.merge('alone.onnx'); time.sleep(0.3)"
    os.system(f'(env -i {{sys.executable}} -c "{{alone}}" & ) && sleep 0.1')
    while not os.path.exists("alone.onnx"):
        time.sleep(0.05)
    sys.exit(7)
"""


def test_a_script_and_all_that_it_starts(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "pipeline").mkdir()
    for name in ("passes.py", "pipeline/__init__.py", "onnxline.py"):
        (tmp_path / name).write_text(f"MINE = {name!r}")
    onnx.save(attention(), tmp_path / "in.onnx")
    onnx.save(biased_attention(), tmp_path / "biased.onnx")
    wishes = ["--keep", "qkv", "--log", "calls.jsonl"]
    command = [*ONNXLINE, "guard", *wishes, "--", sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 7, done.stderr
    *calls, warning = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [(call["function"], call["kept"], len(call["would_have_lost"])) for call in calls] == [
        *[("onnxoptimizer.optimize", {"qkv": 1}, 1)] * 4,
        ("onnxsim.simplify", {"qkv": 1}, 1),
    ]
    assert [call["thread"] for call in calls[:2]] == ["MainThread", "its own thread"]
    assert {(call["file"], call["caller"]) for call in calls[:4]} == {(str(tmp_path / "script.py"), "merge")}
    assert (calls[4]["file"], calls[4]["model"]) == (str(ONNXSIM), "biased.onnx")
    assert len({call["process"] for call in calls}) == 4
    for name in ("plain", "thread", "spawned", "child", "command"):
        model = onnx.load(tmp_path / f"{name}.onnx")
        assert {"wq", "wk", "wv"} <= {tensor.name for tensor in model.graph.initializer}
    assert warning["text"].startswith("child python started without the guard, so no call in it is guarded: ")
    assert "alone.onnx" in warning["text"]
    assert done.stderr.count("without the guard lost: qkv attention 0") == 5
    assert done.stderr.splitlines()[-1] == (
        "onnxline guard: 5 calls of an optimizer, kept qkv ×5, 5 would have been lost without the guard"
    )


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["sh", "-c", "exit 3"], 3),
        (["sh", "-c", "kill -TERM $$"], 143),
        (["no-such-command-at-all"], 127),
        (["/"], 126),
        (["sh", "-c", 'test "$1" = --keep', "sh", "--keep"], 0),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_the_exit_code_is_that_of_the_command(command: list[str], code: int) -> None:
    assert CliRunner().invoke(app, ["guard", "--quiet", "--", *command]).exit_code == code


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (["--keep", "qvk"], "keep: no structure named 'qvk'; did you mean 'qkv'?"),
        (["--log", "nowhere/calls.jsonl"], "the guard's log cannot be written"),
        (["--nonsense"], "No such option"),
    ],
    ids=str,
)
def test_a_mistake_is_refused_before_the_command_begins(wishes: list[str], words: str, tmp_path: Path) -> None:
    command: list[Any] = [*ONNXLINE, "guard", *wishes, "--", "touch", "begun"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert words in done.stderr
