"""What children find in their environment, and that nothing of it stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from passes.guard.settings import BorrowedEnvironment, Settings, guards_in, variables_of
from passes.guard.startup.hooks import FOLDER, VARIABLE, add_guard

ONE = Settings(keep=("qkv",), journal="/one")
TWO = Settings(skip=("fuse_*",), watch=False, compare=False, timeout_s=3.0, quiet=True)


@pytest.mark.parametrize(
    "before", [{}, {"PYTHONPATH": ""}, {"PYTHONPATH": "/a::/b"}, {"PYTHONPATH": FOLDER, VARIABLE: "[]"}]
)
def test_the_environment_is_given_back_as_it_was(before: dict[str, str]) -> None:
    environment = {"LANG": "C", **before}
    borrowed = BorrowedEnvironment(environment)
    borrowed.set_guards([ONE, TWO])
    assert guards_in(environment) == (ONE, TWO)
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == FOLDER
    assert environment["PYTHONPATH"].count(FOLDER) == 1
    borrowed.set_guards([TWO])
    assert guards_in(environment) == (TWO,)
    borrowed.restore()
    assert environment == {"LANG": "C", **before}


def test_what_somebody_else_put_on_the_path_meanwhile_stays() -> None:
    environment = {"PYTHONPATH": "/a"}
    borrowed = BorrowedEnvironment(environment)
    borrowed.set_guards([ONE])
    environment["PYTHONPATH"] += ":/b"
    borrowed.restore()
    assert environment == {"PYTHONPATH": "/a:/b"}


def test_an_environment_made_for_a_child_is_not_changed_but_copied() -> None:
    own = {"PATH": "/bin"}
    assert guards_in(add_guard(own, variables_of([ONE]))) == (ONE,)
    assert own == {"PATH": "/bin"}


GUARDED = """
import os
import passes
from passes.guard.settings import guards_in
with passes.guard(keep=["gelu"], quiet=True):
    print([guard.keep for guard in guards_in(os.environ)])
"""


def test_a_child_that_enters_a_guard_keeps_the_one_that_it_was_given() -> None:
    environment = add_guard(dict(os.environ), variables_of([ONE]))
    ended = subprocess.run([sys.executable, "-c", GUARDED], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split("\n")[0] == "[('qkv',), ('gelu',)]"


PROGRAM = f"""
import sys
assert {FOLDER!r} not in sys.path
print(sys.modules["sitecustomize"].__file__, sys.hidden, [name for name in ("passes", "onnx") if name in sys.modules])
"""


def test_a_child_runs_the_sitecustomize_that_ours_hides_and_loads_nothing_else(tmp_path: Path) -> None:
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text("import sys\nsys.hidden = 'ran'\n")
    environment = add_guard({**os.environ, "PYTHONPATH": str(tmp_path)}, variables_of([ONE]))
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{hidden} ran []\n", done.stderr


def test_where_onnxline_cannot_work_an_optimizer_cannot_be_imported(tmp_path: Path) -> None:
    """Such a child could not be guarded, and must not go on as if it were."""
    (tmp_path / "onnxoptimizer.py").write_text("")
    (tmp_path / "onnx.py").write_text("raise ImportError('there is no onnx here')")
    environment = add_guard({**os.environ, "PYTHONPATH": str(tmp_path)}, variables_of([ONE]))
    command = [sys.executable, "-P", "-c", "import onnxoptimizer"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "does not work there (there is no onnx here)" in done.stderr
