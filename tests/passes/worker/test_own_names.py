"""Our packages beside a script's own `passes` and `pipeline`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from passes.worker.own_names import FILE, ROOT

SCRIPT = f"""
import importlib.util, os, pickle, sys
spec = importlib.util.spec_from_file_location("_onnxline.passes.worker.own_names", {FILE!r})
own_names = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = own_names
spec.loader.exec_module(own_names)
sys.path[:] = [path for path in sys.path if path != {ROOT!r}]
print("taken:", own_names.taken_names())
own_names.add_private_names()

from _onnxline.passes import PolicyError
from _onnxline.passes.errors import StepFailed
from _onnxline.passes.suggest import nearest
from _onnxline.passes.worker.client import Worker
with Worker() as worker:
    print(worker.call(os.getcwd) == worker.call(os.path.dirname, p=__file__))
    try:
        worker.call(nearest, name=1)
    except StepFailed as failure:
        print("ours:", failure)
try:
    import passes.errors
except ModuleNotFoundError as error:
    print("theirs:", passes.MINE, error)

del sys.modules["passes"]
sys.path.insert(0, {ROOT!r})
import passes.errors
print(passes.PolicyError is PolicyError, passes.errors.StepFailed is StepFailed)
print(pickle.loads(pickle.dumps(StepFailed)))
try:
    import passes.no_such_module
except ModuleNotFoundError as error:
    print(error)
"""


def test_a_script_keeps_its_module_and_our_code_and_its_worker_find_theirs(tmp_path: Path) -> None:
    (tmp_path / "passes.py").write_text("MINE = 'of the script'")
    (tmp_path / "pipeline.py").write_text("")
    (tmp_path / "script.py").write_text("import passes\n" + SCRIPT)
    environment = {**os.environ, "PYTHONPATH": ""}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [
        "taken: ['passes', 'pipeline']",
        "True",
        "ours: TypeError: nearest() missing 1 required positional argument: 'known'",
        "theirs: of the script No module named 'passes.errors'; 'passes' is not a package",
        "True True",
        "<class '_onnxline.passes.errors.StepFailed'>",
        "No module named 'passes.no_such_module'",
    ], done.stderr
