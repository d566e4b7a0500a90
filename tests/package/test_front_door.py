"""`import onnxline` and the command, whatever lies beside a script or in the working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import onnxline
import passes
import pipeline
from passes.worker.own_names import ROOT
from tests.support.onnx_models import attention

MINE = {"passes.py": "", "pipeline/__init__.py": "", "onnxline.py": ""}

SCRIPT = """
import passes, pipeline  # its own
import onnx, onnxline

assert passes.MINE and pipeline.MINE
run = onnxline.optimize("in.onnx", recipe=["eliminate_nop_transpose", "fuse_qkv"], keep=["qkv"])
run.save("out.onnx")
assert run.to_proto() == onnx.load("out.onnx")
try:
    onnxline.optimize("in.onnx", keep=["qvk"])
except onnxline.OnnxlineError as error:
    print(type(error) is onnxline.PolicyError, run.structures[0].kept, passes.MINE, onnxline.PREFIX)
"""


def python(folder: Path, *command: str, paths: str = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def put_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"MINE = {name!r}")


def test_all_names_are_there() -> None:
    listed = [name for names in onnxline.HOMES.values() for name in names]
    assert sorted(onnxline.__all__) == sorted(["__version__", *listed])
    assert all(getattr(onnxline, name) for name in onnxline.__all__)
    assert dir(onnxline) == sorted(onnxline.__all__)
    for package in (passes, pipeline):
        own = set(package.__all__) - {"optimize"}
        assert all(getattr(onnxline, name) is getattr(package, name) for name in own)
    with pytest.raises(AttributeError, match="module 'onnxline' has no attribute 'optimise'"):
        onnxline.optimise  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]


def test_a_script_beside_files_of_our_names(tmp_path: Path) -> None:
    put_files(tmp_path, "passes.py", "pipeline/__init__.py")
    onnx.save(attention(), tmp_path / "in.onnx")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = python(tmp_path, sys.executable, "script.py")
    assert done.stdout == "True True passes.py _onnxline.\n", done.stderr


def test_the_command_in_a_folder_with_files_of_our_names(tmp_path: Path) -> None:
    put_files(tmp_path, "passes/__init__.py", "pipeline.py")
    paths = f"{tmp_path}{os.pathsep}{ROOT}"
    done = python(tmp_path, sys.executable, "-m", "onnxline", "schema", paths=paths)
    assert '"title": "RunConfig"' in done.stdout, done.stderr
    put_files(tmp_path, "onnxline.py")
    done = python(tmp_path, str(Path(sys.executable).with_name("onnxline")), "schema")
    assert '"title": "RunConfig"' in done.stdout, done.stderr


FACTORY = """
import torch
from passes import MINE

def make():
    return torch.nn.Linear(4, 4), (torch.ones(2, 4),)
"""


def test_a_factory_beside_files_of_our_names(tmp_path: Path) -> None:
    put_files(tmp_path, "passes.py")
    (tmp_path / "factory.py").write_text(FACTORY)
    command = str(Path(sys.executable).with_name("onnxline"))
    options = ("--recipe", "eliminate_identity", "--set", "runtime.backends=[]", "--out", str(tmp_path / "out"))
    done = python(tmp_path, command, "run", "factory.py:make", *options)
    assert done.returncode == 0, done.stderr
    (tmp_path / "elsewhere").mkdir()
    done = python(tmp_path / "elsewhere", command, "run", "../factory.py:make", *options)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"  {tmp_path}/passes.py is not found here, since onnxline has a package of that name; rename it, or run "
        "onnxline in its folder"
    )


def test_our_pipeline_with_the_passes_of_somebody_else_is_one_sentence(tmp_path: Path) -> None:
    put_files(tmp_path, "passes.py")
    done = python(tmp_path, sys.executable, "-c", "from pipeline import RunConfig")
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: `passes` is {tmp_path}/passes.py here, and onnxline's `pipeline` needs the package "
        f"{ROOT}/passes; use `import onnxline`, which works beside any such file, or rename the file"
    )


def test_importing_the_face_or_the_errors_loads_no_library(tmp_path: Path) -> None:
    code = "import sys, onnxline, pipeline.errors; print({'numpy', 'onnx', 'torch', 'pydantic'} & set(sys.modules))"
    assert python(tmp_path, sys.executable, "-c", code).stdout == "set()\n"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        return self.dropout(torch.softmax(scores, -1) @ self.value(x))


def test_a_live_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module, x = Attention().train(), torch.randn(2, 4, 32, requires_grad=True)
    dynamic = {"export": {"dynamic_shapes": {"x": {0: "batch"}}}, "runtime": {"backends": ["onnxruntime"]}}
    result = onnxline.optimize(module, x, recipe=["fuse_qkv"], keep=["qkv"], settings=dynamic)
    assert result.folder == Path("runs/Attention")
    assert [structure.kept for structure in result.structures] == [True]
    assert module.training and module.dropout.training
    assert result.to_proto().graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert "# The module was given from Python" in (result.folder / "run.yaml").read_text(encoding="utf-8")
    result.save("copy.onnx")
    assert onnx.load("copy.onnx") == result.to_proto()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"model": Attention(), "args": 3}, "args: found int, expected a tuple of what the module is called with"),
        (
            {"model": Attention()},
            "optimize: found no args, expected a tuple of what Attention is called with, such as (x,)",
        ),
        (
            {"model": torch.nn.DataParallel(Attention())},
            "optimize: found no args, expected a tuple of what Attention is called with, such as (x,)",
        ),
        ({"model": 3}, "optimize: found int, expected a torch module, an onnx.ModelProto or an ONNX file's path"),
        (
            {"model": "m.onnx", "args": (1,)},
            "optimize: found 'args' with an ONNX model, expected it with a torch module only",
        ),
        (
            {"model": Attention(), "settings": {"model": {"onnx": "m.onnx"}}},
            "settings: found model.onnx, but the module was given",
        ),
        (
            {"model": Attention(), "strict": True, "settings": {"passes": {"strict": False}}},
            "settings: found passes.strict, which was given as an argument too; leave one of them out",
        ),
        ({"model": "m.onnx", "keep": "qkv"}, 'keep is "qkv", expected a list: keep=["qkv"]'),
        ({"model": "m.onnx", "keep": ["qkv", 3]}, "keep holds 3, expected names"),
        ({"model": "m.onnx", "sizes": 8}, "sizes is 8, expected a list: sizes=[8]"),
        ({"model": Attention(), "recipe": "default"}, 'recipe is "default", expected a list: recipe=["default"]'),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(onnxline.OnnxlineError) as caught:
        onnxline.optimize(**arguments)  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert (str(caught.value), caught.value.exit_code) == (sentence, 2)
