"""What comes with the package: systems without Linux's calls, Python's version, starters, what lies in the wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import onnx
import pytest
import yaml
from typer.testing import CliRunner

import onnxline
from passes.advisories.table import FORMAT_VERSION as AUDIT
from passes.policy.policy import Policy
from passes.worker.own_names import ROOT
from pipeline import Pipeline, RunConfig
from pipeline.baseline import FORMAT_VERSION as BASELINE
from pipeline.cli import app
from pipeline.commands.run import Starter
from pipeline.errors import UsageError
from tests.support.onnx_models import attention
from tests.support.pages import rows
from tests.support.processes import still_running

NOT_LINUX = """
import builtins, io, mmap, multiprocessing, os, sys, sysconfig
sysconfig.get_config_vars()
sys.modules["fcntl"] = sys.modules["resource"] = None
sys.platform = "elsewhere"
del os.sched_getaffinity, os.sched_setaffinity, os.sysconf, os.fork, os.register_at_fork, mmap.MADV_DONTNEED
multiprocessing.set_start_method("spawn")

def hide(function):
    def call(path=".", *arguments, **named):
        if not isinstance(path, int) and str(path).startswith("/proc"):
            raise FileNotFoundError(2, "there is no /proc", path)
        return function(path, *arguments, **named)
    return call

builtins.open = io.open = hide(io.open)
for name in ("open", "listdir", "scandir", "stat"):
    setattr(os, name, hide(getattr(os, name)))
"""
"""What Windows lacks, in a sitecustomize, so that workers lack it too: /proc as well, and processes are spawned."""

SCRIPT = """
import os, passes
from passes.worker.client import Worker
from pipeline.workspace import Workspace
from pathlib import Path
run = passes.optimize("in.onnx", ["fuse_qkv"], keep=["qkv"])
run.save("out.onnx")
with Workspace(Path("run")).acquire():
    pass
worker = Worker()
print(run.structures[0].kept, worker.call(os.getpid), flush=True)
os._exit(0)
"""


def test_without_fcntl_and_resource_a_run_works_and_its_worker_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOT_LINUX)
    onnx.save(attention(), tmp_path / "in.onnx")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    kept, worker = done.stdout.split() or [done.stderr, ""]
    assert kept == "True"
    assert still_running([int(worker)], within_s=60) == [], "the worker outlives its owner"


def test_an_old_python_makes_no_venv(tmp_path: Path) -> None:
    shutil.copy(Path(ROOT) / "Makefile", tmp_path)
    old = tmp_path / "python"
    old.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import sys; sys.version_info = (3, 10); exec(sys.argv[1])' \"$2\"\n"
    )
    old.chmod(0o755)
    done = subprocess.run(["make", ".venv/made", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == (
        f"onnxline needs Python 3.11 or later, and {old} is Python 3.10; name another one: make run PYTHON=python3.11"
    )
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("kind", list(Starter))
def test_a_starter_is_a_configuration(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["init", kind])
    assert shown.output.splitlines()[-1] == f"next: onnxline run {kind}.yaml"
    config = RunConfig.from_yaml(f"{kind}.yaml")
    assert config.name == kind
    text = Path(f"{kind}.yaml").read_text(encoding="utf-8")
    Path("all.yaml").write_text(re.sub(r"^(\s*)# (?!factory|args)( *\w+:)", r"\1\2", text, flags=re.MULTILINE))
    everything = RunConfig.from_yaml("all.yaml")  # what is commented out is right too
    Policy((), everything.passes.keep).check((), ())
    again = CliRunner().invoke(app, ["init", kind])
    assert str(again.exception) == f"{kind}.yaml is there already; name another file with --out"
    assert isinstance(again.exception, UsageError)


@pytest.mark.parametrize("kind", ["onnx-file", "vit"])
def test_a_starter_runs_as_it_is(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, ["init", kind, "--out", "mine.yaml"])
    result = Pipeline(RunConfig.from_yaml("mine.yaml")).run()
    assert result.structures and all(structure.kept for structure in result.structures)


def test_every_data_file_is_in_the_wheel() -> None:
    project = tomllib.loads((Path(ROOT) / "pyproject.toml").read_text(encoding="utf-8"))
    for package, patterns in project["tool"]["setuptools"]["package-data"].items():
        folder = Path(ROOT) / package
        shipped = {file for pattern in patterns for file in folder.glob(pattern)}
        data = {file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
        modules = {file for file in data if file.suffix == ".py" and "compat" not in file.parts}
        assert data - modules == shipped


def test_the_versions_that_are_written_down_agree() -> None:
    citation = yaml.safe_load((Path(ROOT) / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == onnxline.__version__
    assert f"## [{onnxline.__version__}]" in (Path(ROOT) / "CHANGELOG.md").read_text(encoding="utf-8")
    formats = {row[0]: row[-1] for row in rows("docs/reference/stability.md")}
    assert formats["baselines"] == str(BASELINE)
    assert int(formats["audit tables"]) == AUDIT


@pytest.mark.parametrize("file", sorted((Path(ROOT) / ".github").rglob("*.yml")), ids=lambda file: file.name)
def test_workflows_are_yaml_with_jobs_and_steps(file: Path) -> None:
    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    if file.parent.name == "workflows":
        assert all(job["steps"] and job["runs-on"] for job in data["jobs"].values())
        assert set(data) >= {"name", True, "permissions"}  # YAML reads `on` as true


def test_the_conda_recipe_has_the_requirements_of_the_package() -> None:
    project = tomllib.loads((Path(ROOT) / "pyproject.toml").read_text())["project"]
    recipe = yaml.safe_load((Path(ROOT) / "conda/recipe.yaml").read_text().replace("${{", "").replace("}}", ""))
    wanted = [re.sub(r"^([\w-]+)", r"\1 ", entry) for entry in project["dependencies"]]
    assert recipe["requirements"]["run"] == [f"python {project['requires-python']}", *wanted]
    assert recipe["context"]["version"] == onnxline.__version__


def test_the_image_is_made_from_the_wheel() -> None:
    text = (Path(ROOT) / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE)
    assert copied == ["onnxline", "passes", "pipeline"]
    assert "pip wheel" in text


# What works on an ONNX file where torch is not installed, and the sentence on the rest.

PROGRAM = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # an import fails, as where they are not installed
import onnxline
from pipeline.config import RunConfig
from pipeline.errors import UsageError
from pipeline.quantsim import QuantSim
from pipeline.stages.check import check_settings
from pipeline.workspace import Workspace

for backends in ("[plan]", "[onnxruntime, torch]"):
    try:
        check_settings(RunConfig.from_source("m.onnx", [f"runtime.backends={backends}"]), Workspace("runs"))
    except UsageError as error:
        print(error)
for name in ("compile_graph", "torch_ir"):
    try:
        getattr(onnxline, name)
    except ImportError as error:
        print(error)
notes = []
result = QuantSim(RunConfig.from_source("m.onnx", ["passes.recipe=[]"]), "out", notes.append).run()
print(result.report.not_estimated, "torch" in {name for name, module in sys.modules.items() if module})
"""

SAID = """\
runtime.backends: plan needs torch, which is not installed; pip install 'onnxline[torch]'
runtime.backends: torch needs torch, which is not installed; pip install 'onnxline[torch]'
onnxline.compile_graph needs torch, which is not installed; pip install 'onnxline[torch]'
pipeline.torch_ir needs torch, which is not installed; pip install 'onnxline[torch]'
it needs torch, which is not installed; pip install 'onnxline[torch]' False
"""


def test_an_onnx_file_is_quantized_and_a_named_backend_is_refused_before_the_run(tmp_path: Path) -> None:
    onnx.save(attention(), tmp_path / "m.onnx")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == SAID, done.stderr
