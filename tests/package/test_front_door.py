"""`import onnxline` and the command, whatever lies beside a script or in the working directory."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import onnx
import pytest
import torch
from torch import nn

import onnxline
import passes
import pipeline
from passes.worker.own_names import ROOT
from pipeline.events import StageEnded, show_progress
from tests.support.onnx_models import attention

MINE = {"passes.py": "", "pipeline/__init__.py": "", "onnxline.py": ""}

SCRIPT = """
import passes, pipeline  # its own
import onnx, onnxline
import onnxline.ir
from onnxline.passes import optimize

assert passes.MINE and pipeline.MINE
run = onnxline.optimize("in.onnx", recipe=["eliminate_nop_transpose", "fuse_qkv"], keep=["qkv"])
run.save("out.onnx")
assert run.to_proto() == onnx.load("out.onnx")
try:
    onnxline.optimize("in.onnx", keep=["qvk"])
except onnxline.OnnxlineError as error:
    assert onnxline.ir.Graph is onnxline.Graph and callable(optimize)
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
    assert {"__version__", "optimize", "from_onnx", "compile_graph", "PolicyError"} < set(onnxline.__all__)
    assert onnxline.Builder is onnxline.CheckedBuilder and onnxline.diff is onnxline.compare_models
    assert all(getattr(onnxline, name) for name in onnxline.__all__)
    assert dir(onnxline) == sorted([*onnxline.__all__, *onnxline.ROOMS])
    for package in (passes, pipeline):
        own = set(package.__all__) - {"optimize"}
        assert all(getattr(onnxline, name) is getattr(package, name) for name in own)
    with pytest.raises(AttributeError, match="module 'onnxline' has no attribute 'optimise'"):
        onnxline.optimise  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", onnxline.ROOMS)
def test_each_room_has_an_import_path(name: str) -> None:
    room = importlib.import_module(f"onnxline.{name}")
    assert room is getattr(onnxline, name)
    assert room.__all__ and all(getattr(room, public) is not None for public in room.__all__)
    assert not hasattr(room, "__path__"), "a package would load the files of the room a second time"
    [home] = re.findall(r'open_room\("(.+)"\)', Path(str(room.__file__)).read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    exec(f"from {home} import *", names)
    assert names.keys() - {"__builtins__"} == set(room.__all__), "a module such as pipeline.ir.json hides Python's own"


ROOM_SCRIPT = """
import passes, pipeline  # its own
import onnxline.runtime
from onnxline.authoring import Model
from onnxline.ir import Graph
from onnxline.passes import optimize

assert passes.MINE and pipeline.MINE
print(Graph is onnxline.Graph, onnxline.runtime.compile_graph is onnxline.compile_graph, Model.__name__)
"""


def test_rooms_are_imported_beside_files_of_our_names(tmp_path: Path) -> None:
    put_files(tmp_path, "passes.py", "pipeline/__init__.py")
    (tmp_path / "script.py").write_text(ROOM_SCRIPT)
    assert python(tmp_path, sys.executable, "script.py").stdout == "True True Model\n"


def test_both_results_of_optimize_are_one_type_with_a_short_summary(tmp_path: Path) -> None:
    of_onnx = onnxline.optimize(attention(), recipe=["eliminate_identity", "fuse_qkv"], keep=["qkv"])
    of_module = onnxline.optimize(
        Doubles().eval(), (torch.ones(2),), recipe=["onnxsim"], out=tmp_path, settings={"runtime": {"backends": []}}
    )
    for result in (of_onnx, of_module):
        assert isinstance(result, onnxline.OptimizeResult)
        assert [row.name for row in result.passes] and isinstance(result.reverted, tuple)
        assert len(repr(result).splitlines()) <= 10
    assert repr(of_onnx).splitlines()[-1].strip() == "qkv: 1 of 1 kept"
    assert repr(of_module).splitlines()[-1].strip() == f"files: {tmp_path}/"


def test_a_notebook_without_widgets_shows_lines_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with show_progress(None) as show:
        show(StageEnded("passes", 1.0, cached=False, detail=""))
    with show_progress(False) as show:
        show(StageEnded("passes", 1.0, cached=False, detail=""))
    assert capsys.readouterr() == ("", "passes: 1.0 s\n")


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


@pytest.mark.parametrize(("progress", "lines"), [(None, 0), (False, 0), (True, 5)])
def test_progress_goes_to_stderr_and_elsewhere_than_on_a_terminal_only_where_it_is_asked_for(
    progress: bool | None, lines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(
        "name: twice\nmodel: {onnx: in.onnx}\npasses: {recipe: []}\nruntime: {backends: []}\n"
    )
    onnx.save(attention(), tmp_path / "in.onnx")
    result = onnxline.run(tmp_path / "run.yaml", tmp_path / "out", progress=progress)
    assert result.model.is_file()
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", lines)
    assert [line.partition(":")[0] for line in err.splitlines()] == [
        "source",
        "reference",
        "export",
        "passes",
        "runtime",
    ][:lines]
    onnxline.optimize(tmp_path / "in.onnx", recipe=["nop"], progress=progress)
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == ["passes"][:lines]
    with pytest.raises(onnxline.UsageError, match="progress is 'yes', expected True, False or None"):
        onnxline.run(tmp_path / "run.yaml", progress="yes")  # pyright: ignore[reportArgumentType]


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


USER_PASS = """
def early(model):
    from passes import MINE

    return model
"""


def test_a_pass_of_the_users_beside_a_file_of_our_name_is_one_sentence(tmp_path: Path) -> None:
    put_files(tmp_path, "passes.py")
    (tmp_path / "own.py").write_text(USER_PASS)
    (tmp_path / "early.py").write_text(f"from passes import MINE\n{USER_PASS}")
    clash = f"{tmp_path}/passes.py is not found here, since onnxline has a package of that name; rename it"
    run = onnxline.optimize(attention(), recipe=[f"{tmp_path}/own.py:early"])
    assert run.rows[0].status == "failed"
    assert clash in run.rows[0].reason
    with pytest.raises(onnxline.PolicyError) as caught:
        onnxline.optimize(attention(), recipe=[f"{tmp_path}/early.py:early"])
    assert str(caught.value).splitlines()[-1] == f"  {clash}"


def test_our_pipeline_with_the_passes_of_somebody_else_is_one_sentence(tmp_path: Path) -> None:
    put_files(tmp_path, "passes.py")
    done = python(tmp_path, sys.executable, "-c", "from pipeline import RunConfig")
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: `passes` is {tmp_path}/passes.py here, and onnxline's `pipeline` needs the package "
        f"{ROOT}/passes; use `import onnxline`, which works next to any such file, or rename the file"
    )


def test_importing_the_face_or_the_errors_loads_no_library(tmp_path: Path) -> None:
    code = "import sys, onnxline, pipeline.errors; print({'numpy', 'onnx', 'torch', 'pydantic'} & set(sys.modules))"
    assert python(tmp_path, sys.executable, "-c", code).stdout == "set()\n"


def test_a_run_that_only_takes_earlier_results_loads_no_library_of_symbols(tmp_path: Path) -> None:
    """onnx_ir loads sympy: half a second, which a run of an unchanged model would spend for nothing."""
    code = "import sys, pipeline.run; print({'onnx_ir', 'sympy', 'onnx.reference', 'onnx'} & set(sys.modules))"
    assert python(tmp_path, sys.executable, "-c", code).stdout == "{'onnx'}\n"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        return self.dropout(torch.softmax(scores, -1) @ self.value(x))


def test_a_module_that_does_not_take_its_arguments_is_sent_to_them() -> None:
    with pytest.raises(onnxline.SourceError) as caught:
        onnxline.optimize(Attention(), (torch.ones(2, 3, 5),))
    assert str(caught.value).splitlines()[-1] == "  check shapes, dtypes and ranges in args and kwargs"


WRONG_VALUES = {
    "why": lambda: onnxline.why(3, "y"),
    "why_weights": lambda: onnxline.why_weights(3, "y"),
    "from_onnx": lambda: onnxline.from_onnx(3),
    "compare_models": lambda: onnxline.compare_models("none.onnx", 3),
    "compile_graph": lambda: onnxline.compile_graph(3),
    "Pipeline": lambda: onnxline.Pipeline({"model": {"onnx": "m.onnx"}}),
    "save": lambda: onnxline.optimize(attention(), recipe=["nop"]).save(3),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_value_of_another_kind_is_an_error_of_ours(name: str) -> None:
    words = r"found int|found dict|graph is 3|no ONNX file at none\.onnx"
    with pytest.raises(onnxline.OnnxlineError, match=words) as caught:
        WRONG_VALUES[name]()
    assert caught.value.exit_code == 2


def test_two_models_are_compared_however_they_are_given(tmp_path: Path) -> None:
    onnx.save(attention(), tmp_path / "a.onnx")
    assert onnxline.compare_models(tmp_path / "a.onnx", attention()).is_empty
    assert not onnxline.compare_models(str(tmp_path / "a.onnx"), attention(width=16)).is_empty


def test_a_live_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module, x = Attention().train(), torch.randn(2, 4, 32, requires_grad=True)
    dynamic = {"export": {"dynamic_shapes": {"x": {0: "batch"}}}, "runtime": {"backends": ["onnxruntime"]}}
    monkeypatch.setattr("pipeline.export.exported.EXTERNAL_DATA_BYTES", 0)
    places = [parameter.data_ptr() for parameter in module.parameters()]
    result = onnxline.optimize(module, x, recipe=["fuse_qkv"], keep=["qkv"], settings=dynamic)
    assert places == [parameter.data_ptr() for parameter in module.parameters()], "the weights stay the user's"
    assert result.folder == Path("runs/Attention")
    assert [structure.kept for structure in result.structures] == [True]
    assert module.training and module.dropout.training
    assert "put into eval mode, which changes dropout" in (result.folder / "report.json").read_text(encoding="utf-8")
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
        (
            {"model": "m.onnx", "recipe": [3]},
            "recipe holds 3, expected the name of a pass, or one name with its options",
        ),
        ({"model": "m.onnx", "proof": "nubers"}, "proof is 'nubers', expected 'numbers' or 'structure'"),
        ({"model": "m.onnx", "sizes": ["a"]}, "sizes holds 'a', expected integers of 1 or more"),
        ({"model": "m.onnx", "timeout_s": "x"}, "timeout_s is 'x', expected seconds, more than 0"),
        ({"model": "m.onnx", "timeout_s": -1}, "timeout_s is -1, expected seconds, more than 0"),
        ({"model": "m.onnx", "memory_gib": "x"}, "memory_gib is 'x', expected a number, 0 or more"),
        (
            {"model": "m.onnx", "feeds": [3]},
            "feeds holds int, expected mappings of an input's name to its array",
        ),
        (
            {"model": "m.onnx", "timeout": 3},
            "optimize: found 'timeout', which is no option for an ONNX model; did you mean 'timeout_s'?",
        ),
        (
            {"model": Attention(), "kwargs": [1]},
            "optimize: kwargs is list, expected a mapping of the call's keyword arguments",
        ),
        (
            {"model": Attention(), "settings": {"model": 3}},
            "settings: model is 3, expected a mapping",
        ),
        ({"model": Attention(), "out": 3}, "optimize: out is int, expected the path of a folder"),
        ({"model": Attention(), "stric": True}, "optimize: unknown key 'stric'; did you mean 'strict'?"),
        ({"model": Attention(), "timeout_s": "x"}, "optimize: timeout_s: found 'x', expected a number"),
        (
            {"model": Attention(), "settings": {"export": {"opset": 3}}},
            "settings: export.opset: found 3, expected 7 or more",
        ),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(onnxline.OnnxlineError) as caught:
        onnxline.optimize(**arguments)  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert (str(caught.value), caught.value.exit_code) == (sentence, 2)


def test_one_builder_is_public() -> None:
    """The one that knows the operators; a graph by a builder without them is refused only when it is compiled."""
    assert onnxline.Builder is onnxline.runtime.CheckedBuilder
    assert "Builder" not in onnxline.ir.__all__
