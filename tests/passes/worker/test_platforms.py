"""How much memory a process may have, of the machine, of itself and of its container; and how a fork ends."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from passes.worker.own_names import FILE, ROOT
from passes.worker.platforms import memory_limit, return_free_memory

MIB = 2**20


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/app\n", {"app/memory.max": f"{3 * MIB}\n"}, 3 * MIB),
        ("0::/app/job\n", {"app/job/memory.max": "max\n", "app/memory.max": f"{5 * MIB}\n"}, 5 * MIB),
        ("0::/\n", {"memory.max": f"{7 * MIB}\n"}, 7 * MIB),  # as a container sees its own group
        ("5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": f"{9 * MIB}\n"}, 9 * MIB),
        ("4:memory:/docker/1\n", {"memory/memory.limit_in_bytes": f"{2 * MIB}\n"}, 2 * MIB),
    ],
)
def test_the_limit_of_a_control_group_is_that_of_its_processes(
    groups: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    _write(tmp_path, groups, files)
    assert memory_limit(tmp_path) == expected


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("", {}),
        ("0::/app\n", {"app/memory.max": "max\n"}),
        ("0::/app\n", {"other/memory.max": "4096\n"}),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}),
        ("5:cpu:/a\n", {"memory/a/memory.limit_in_bytes": "4096\n"}),
    ],
)
def test_without_a_limit_it_is_the_memory_of_the_machine(groups: str, files: dict[str, str], tmp_path: Path) -> None:
    machine = memory_limit(tmp_path / "no such system")
    _write(tmp_path, groups, files)
    assert memory_limit(tmp_path) == machine > MIB


def _write(system: Path, groups: str, files: dict[str, str]) -> None:
    for name, text in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        path = system / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


FORK = """
import sys, tempfile
from passes.worker.platforms import fork_process

with tempfile.TemporaryFile() as output:
    def work():
        sys.stdout.write("not written out yet")
        {end}

    process = fork_process(work, [], {{}}, output)
    code = process.wait()
    output.seek(0)
    print(code, output.read().decode())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no forks")
@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("sys.exit(7)", 7), ("sys.exit('a reason')", 1), ("1 / 0", 1)])
def test_a_fork_ends_with_the_code_of_its_work_and_loses_no_output(end: str, code: int) -> None:
    """In a process with one thread, as that of the command."""
    done = subprocess.run([sys.executable, "-c", FORK.format(end=end)], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"{code} "), done.stderr
    assert "not written out yet" in done.stdout


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries of C keep freed memory in other ways")
def test_freed_memory_goes_back_to_the_system() -> None:
    """Small blocks under one that is still in use, which glibc keeps."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    blocks = [ctypes.c_void_p(libc.malloc(2**16)) for _ in range(1600)]
    last = ctypes.c_void_p(libc.malloc(2**16))
    for block in blocks:
        ctypes.memset(block, 1, 2**16)
    for block in blocks:
        libc.free(block)
    held = _resident_bytes()
    return_free_memory()
    libc.free(last)
    assert held - _resident_bytes() > 50 * MIB


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# Our packages beside a script's own `passes` and `pipeline`.

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
