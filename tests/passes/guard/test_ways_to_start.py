"""Each way to start a Python from a guarded one: the child has the guard, or the log says that it has not."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

import passes
from passes.guard.startup.hooks import VARIABLE

HELD: Final[Mapping[str, str]] = {
    "run": "subprocess.run(command)",
    "environment of its own": "subprocess.run(command, env={'LANG': 'C'})",
    "empty environment": "subprocess.run(command, env={})",
    "environment in bytes": "subprocess.run(command, env={b'LANG': b'C', b'PYTHONPATH': b'/tmp'})",
    "PYTHONPATH replaced": "subprocess.run(command, env={**os.environ, 'PYTHONPATH': '/tmp'})",
    "PYTHONPATH put in front": "os.environ['PYTHONPATH'] = 'own:' + os.environ['PYTHONPATH']; subprocess.run(command)",
    "sitecustomize that raises": "subprocess.run(command, env={'PYTHONPATH': 'raising'})",
    "environment cleared": "os.environ.clear(); subprocess.run(command)",
    "another folder": "subprocess.run([python, here + '/probe.py', here + '/' + name], cwd='/')",
    "shell": "subprocess.run(shlex.join(command), shell=True, env={})",
    "shell that execs": "subprocess.run(['sh', '-c', 'exec \"$@\"', '-', *command], env={})",
    "executable": "subprocess.run(['snake', *command[1:]], executable=python, env={})",
    "without closing handles": "subprocess.run(command, env={}, close_fds=False)",
    "module": "subprocess.run([python, '-m', 'probe', name], env={})",
    "text": "subprocess.run([python, '-c', open('probe.py').read(), name], env={})",
    "standard input": "subprocess.run([python, '-', name], stdin=open('probe.py'), env={})",
    "grandchild": "subprocess.run([python, '-c', again, *command], env={})",
    "system": "os.system(shlex.join(command))",
    "system in a cleared environment": "os.environ.clear(); os.system(shlex.join(command))",
    "popen": "os.environ.clear(); os.popen(shlex.join(command)).read()",
    "posix_spawn": "os.waitpid(os.posix_spawn(python, command, {}), 0)",
    "posix_spawnp": "os.waitpid(os.posix_spawnp(python, command, {b'LANG': b'C'}), 0)",
    "spawnv": "os.environ.clear(); os.spawnv(os.P_WAIT, python, command)",
    "spawnve": "os.spawnve(os.P_WAIT, python, command, {})",
    "execv": "os.environ.clear(); os.execv(python, command)",
    "execve": "os.execve(python, command, {})",
    "execvpe": "os.execvpe(python, command, {'PATH': ''})",
    "execl": "os.environ.pop('PYTHONPATH'); os.execl(python, *command)",
    "execle": "os.execle(python, *command, {})",
    "terminal": "os.environ.clear(); pty.spawn(command)",
    "asyncio": "asyncio.run(wait_for(command))",
    "fork": "os.fork() or run(name); os.wait()",
    "spawned": "start('spawn', name)",
    "forkserver": "os.environ.clear(); start('forkserver', name)",
    "forked": "start('fork', name)",
    "pool": "pooled('spawn', name)",
    "a function by name": "getattr(os, 'posix_' + 'spawn')(python, command, {}); os.wait()",
    "daemon": "os.fork() or (os.setsid(), subprocess.Popen(command, env={}), os._exit(0)); os.wait(); time.sleep(0.5)",
}
"""Way → what a script does; a Python of which the guard says nothing, since it is there."""

IN_NO_ENVIRONMENT: Final = f"{VARIABLE} is not in its environment"
SAID: Final[Mapping[str, tuple[str, str]]] = {
    "env -i": ("subprocess.run(['env', '-i', *command])", IN_NO_ENVIRONMENT),
    "shell unsets the guard": (f"os.system('unset {VARIABLE};' + shlex.join(command))", IN_NO_ENVIRONMENT),
    "shell unsets PYTHONPATH": ("os.system('unset PYTHONPATH;' + shlex.join(command))", "its PYTHONPATH was replaced"),
    "shell sets PYTHONPATH": ("os.system('PYTHONPATH=/tmp ' + shlex.join(command))", "its PYTHONPATH was replaced"),
    "a sitecustomize first": (
        "os.system('PYTHONPATH=own:$PYTHONPATH ' + shlex.join(command))",
        "another folder comes first on its PYTHONPATH, maybe with a sitecustomize of its own",
    ),
    "-I": ("subprocess.run([python, '-I', *command[1:]])", "python -I reads no PYTHONPATH"),
    "-E": ("subprocess.run([python, '-uE', *command[1:]])", "python -E reads no PYTHONPATH"),
    "-S": ("os.execv(python, [python, '-S', *command[1:]])", "python -S loads no site"),
    "-I posix_spawn": (
        "os.posix_spawn(python, [python, '-I', *command[1:]], {}); os.wait()",
        "python -I reads no PYTHONPATH",
    ),
    "another name": ("subprocess.run(['env', '-i', './snake', *command[1:]])", IN_NO_ENVIRONMENT),
    "fork of one without": ("subprocess.run(['env', '-i', python, 'forks.py', name])", IN_NO_ENVIRONMENT),
}
"""Way → what a script does, and what the log says of it."""

PROBE: Final = """
import sys, time
held = any(getattr(finder, "only_waits", False) for finder in sys.meta_path)
with open(sys.argv[-1], "w") as file:
    file.write("held" if held else "without")
time.sleep(0 if held else 0.4)  # less than it takes to import an optimizer
"""

DRIVER: Final = """
import asyncio, concurrent.futures, json, multiprocessing, os, pty, shlex, subprocess, sys, time

python, here = sys.executable, os.getcwd()
again = "import subprocess, sys; subprocess.run(sys.argv[1:], env={})"

def run(name):
    sys.argv = ["probe.py", name]
    exec(open("probe.py").read(), {})
    os._exit(0)

def start(method, name):
    process = multiprocessing.get_context(method).Process(target=run, args=(name,))
    process.start()
    process.join()

def pooled(method, name):
    context = multiprocessing.get_context(method)
    try:
        with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
            pool.submit(run, name).result()
    except concurrent.futures.process.BrokenProcessPool:
        pass  # the probe ends its process

async def wait_for(command):
    process = await asyncio.create_subprocess_exec(*command, env={})
    await process.wait()

if __name__ == "__main__":
    ways = json.load(open("ways.json"))
    running = 0
    for name, code in ways.items():
        if running == 4:
            os.wait()
            running -= 1
        running += 1
        if not os.fork():
            command = [python, "probe.py", name]
            exec(code)
            os._exit(0)
    while running:
        os.wait()
        running -= 1
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="processes are found in Linux's /proc")
def test_every_way_is_held_or_said(tmp_path: Path) -> None:
    ways = {**HELD, **{name: code for name, (code, _) in SAID.items()}}
    (tmp_path / "ways.json").write_text(json.dumps(ways))
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "forks.py").write_text("import os, time\nos.fork()\nexec(open('probe.py').read())")
    (tmp_path / "snake").write_bytes(Path(sys.executable).resolve().read_bytes())
    (tmp_path / "snake").chmod(0o755)
    for folder, text in (("own", ""), ("raising", "raise RuntimeError('of the project')")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "sitecustomize.py").write_text(text)
    with passes.guard(quiet=True) as log:
        subprocess.run([sys.executable, "driver.py"], cwd=tmp_path, check=True, timeout=120, capture_output=True)
    actual = {name: (tmp_path / name).read_text() for name in ways if (tmp_path / name).exists()}
    assert actual == {**dict.fromkeys(HELD, "held"), **dict.fromkeys(SAID, "without")}
    said: dict[str, list[str]] = {name: [] for name in ways}
    for text in log.warnings:
        command, _, reason = text.partition(": ")[2].rpartition(" (")
        said[shlex.split(command)[-1]].append(reason.rstrip(")"))
    assert said == {**{name: [] for name in HELD}, **{name: [reason] for name, (_, reason) in SAID.items()}}
