"""What a new user types first: a model by itself, a name that is misspelt, `--help`; and what the terminal shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import onnx
import pytest
from typer.testing import CliRunner

import passes
from passes.errors import PolicyError, UsageError
from passes.external.installed import refuse_older
from passes.proof.numbers import Errors
from passes.run.result import PassRow, Status, StructureVerdict
from pipeline.cli import COMMANDS, app, load_command
from pipeline.console import RunConsole
from pipeline.events import PassesEnded
from pipeline.terminal.screen import Screen
from tests.support.paths import EXAMPLES, ROOT
from tests.support.run_fixtures import FACTORIES

NEGS = '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { a = Identity (x) y = Neg (a) }'


@pytest.fixture
def onnxline(command_line):
    """The command line in this process: exit code, and all that it says."""

    def ask(*words: str | Path) -> tuple[int, str]:
        code, out, errors = command_line(*words)
        return code, out + errors

    return ask


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "negs.onnx"
    path.write_bytes(onnx.parser.parse_model(NEGS).SerializeToString())
    return path


def ops(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_each_says_of_itself(name: str) -> None:
    assert load_command(name).help.splitlines()[0] == COMMANDS[name][1]


def test_help_begins_with_run_and_every_command_knows_the_short_options() -> None:
    shown = CliRunner().invoke(app, ["-h"]).stdout
    assert 0 < shown.index(" run  ") < shown.index(" optimize ")
    assert CliRunner().invoke(app, ["baseline", "check", "-h"]).exit_code == 0
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("onnxline ")


@pytest.mark.parametrize("words", [[], ["run"], ["optimize"], ["baseline", "accept"], ["ir", "extract"]])
def test_a_flag_has_no_type_in_help(words: list[str]) -> None:
    shown = CliRunner().invoke(app, [*words, "-h"]).stdout
    assert "--help" in shown
    assert not re.search("bool", shown, re.IGNORECASE)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it fails
from pipeline.cli import main
for words in {commands!r}:
    sys.argv = ["onnxline", *words]
    try:
        main()
    except SystemExit as ended:
        print("exit code", ended.code, flush=True)
"""


def test_mistakes_and_optimize_need_no_torch_and_no_wide_terminal(model: Path, tmp_path: Path) -> None:
    out, broken = str(tmp_path / "out.onnx"), tmp_path / "broken.onnx"
    broken.write_bytes(model.read_bytes()[:-9])
    (tmp_path / "net.py").write_text("import torch\n\ndef make():\n    return torch.nn.ReLU()\n")
    commands = [
        ["run", "none.yaml"],
        ["run", "none.py:make"],
        ["run", str(model), "--keep", "qvk"],
        ["run", str(model), "--set", "passes.kep=[]"],
        ["run", str(broken)],
        ["run", f"{tmp_path}/net.py:maek"],
        ["check", str(model), "--recipe", "nop,onnxsmi"],
        ["check", str(model), "--set", "verify.inputs=no*.npz"],
        ["optimize", str(model), "-o", out, "--recipe", "eliminate_identity,eliminate_deadend"],
    ]
    program = WITHOUT_TORCH.format(commands=commands)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONIOENCODING": "latin-1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        timeout=120,
    )
    text = (done.stdout + done.stderr).decode("latin-1")
    for words in (
        "none.yaml: no such file; expected a YAML configuration, model.onnx, file.py:function",
        "no file 'none.py'",
        "no structure named 'qvk'; did you mean 'qkv'?",
        "unknown key 'kep' in passes; did you mean 'keep'?",
        "broken.onnx is not a readable ONNX file",
        "net.py:maek: no function 'maek' there; did you mean 'make'?",
        "verify.inputs: no file matches",
        "no pass named 'onnxsmi'; did you mean 'onnxsim'?",
        "eliminate_identity  ran",
    ):
        assert words in text
    codes = [line.split()[-1] for line in text.splitlines() if line.startswith("exit code")]
    assert codes == ["2"] * 8 + ["0"], text
    assert not (ROOT / "runs/broken").exists()
    assert ops(Path(out)) == ["Neg"]


def test_a_factory_that_ends_the_process_is_an_error(onnxline, tmp_path: Path, monkeypatch) -> None:
    """The command ended with exit code 0, without a word and without a model."""
    monkeypatch.chdir(tmp_path)
    end = os._exit
    Path("net.py").write_text("import os\ndef make(): os._exit(0)\n", encoding="utf-8")
    code, text = onnxline("run", "net.py:make")
    assert code == 2
    assert "SystemExit: os._exit(0) was called, which would end the command" in text
    assert os._exit is end


def test_a_folder_in_place_of_a_file_is_called_one(onnxline, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("m.onnx", "c.yaml"):
        (tmp_path / name).mkdir()
    os.mkfifo("pipe.onnx")
    assert onnxline("run", "m.onnx") == (2, "onnxline: m.onnx: it is a folder; expected an ONNX file\n")
    assert onnxline("run", "pipe.onnx") == (2, "onnxline: pipe.onnx: it is no regular file; expected an ONNX file\n")
    assert "c.yaml: it is a folder; expected a YAML configuration, model.onnx" in onnxline("run", "c.yaml")[1]
    assert "m.onnx: it is a folder; expected an ONNX file" in onnxline("optimize", "m.onnx", "-o", "o.onnx")[1]


def test_a_misspelt_starter_is_refused_in_plain_words(onnxline) -> None:
    code, said = onnxline("init", "vt")
    assert code == 2
    assert (
        "'vt' is not one of 'vit', 'llm', 'seq2seq', 'speech', 'vlm', 'diffusion', 'parts', 'cnn', 'onnx-file'" in said
    )
    assert "Value error" not in said


def test_a_model_by_itself(model: Path, onnxline, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = onnxline("run", model, "-o", "small.onnx", "--recipe", "eliminate_identity", "--skip", "fuse_qkv,nop")
    assert code == 0, said
    assert ops(tmp_path / "small.onnx") == ops(tmp_path / "runs/negs/model.onnx") == ["Neg"]
    code, said = onnxline("run", model, "-o", model)
    assert code == 2
    assert "is the source itself" in said
    monkeypatch.setattr("os.access", lambda path, mode: False)
    code, said = onnxline("run", model, "-o", "other.onnx")
    assert code == 2
    assert "-o other.onnx: the folder . cannot be written" in said


NOWHERE = {
    "/proc/x.onnx": "No such file or directory",  # root may write there, it seems, and cannot
    "{}/loop/x.onnx": "{}/loop is no folder",
    f"{{}}/{'n' * 300}.onnx": "File name too long",
    "{}/file/x.onnx": "{}/file is no folder",
}


@pytest.mark.parametrize("place", NOWHERE)
def test_a_place_where_nothing_can_be_written_is_one_sentence(
    place: str, model: Path, onnxline, tmp_path: Path
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    out, reason = place.format(tmp_path), NOWHERE[place].format(tmp_path)
    run = passes.optimize(onnx.load(model), recipe=["eliminate_identity"])
    with pytest.raises(UsageError) as caught:
        run.save(out)
    assert str(caught.value) == f"cannot write to {out}: {reason}; what was there before is unharmed"
    code, said = onnxline("optimize", model, "-o", out, "--recipe", "eliminate_identity")
    assert code == 2
    assert len(said.strip().splitlines()) == 1 or f"onnxline: {caught.value}" in said
    assert "bug" not in said


def test_an_empty_recipe_is_a_recipe(model: Path, onnxline, tmp_path: Path) -> None:
    code, said = onnxline("optimize", model, "-o", tmp_path / "same.onnx", "--recipe", "")
    assert code == 0, said
    assert ops(tmp_path / "same.onnx") == ["Identity", "Neg"]
    code, said = onnxline("check", model, "--recipe", "")
    assert code == 0
    assert "steps       none\n" in said
    assert "none" in load_command("optimize").params[4].help
    code, said = onnxline("bisect", model, "--crash", "--recipe", "")
    assert (code, said) == (
        2,
        "onnxline: the recipe has no step, so none can be at fault; give --recipe, such as default,onnxsim\n",
    )


def test_check_opens_an_onnx_file_and_names_a_target_that_is_none(model: Path, onnxline) -> None:
    assert onnxline("check", model)[0] == 0
    code, said = onnxline("check", model, "--target", "npu")
    assert (code, said.split(";")[0]) == (2, "onnxline: no target named 'npu'")
    model.write_bytes(model.read_bytes()[:-9])
    code, said = onnxline("check", model)
    assert (code, len(said.strip().splitlines())) == (2, 1)


LINEAR = """
import torch


def make():
    return torch.nn.Linear(4, 4), (torch.ones(2, 4),)
"""


def test_a_factory_in_the_working_directory(onnxline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "linear.py").write_text(LINEAR)
    monkeypatch.chdir(tmp_path)
    code, said = onnxline("run", "linear.py:make", "--recipe", "eliminate_identity", "--set", "runtime.backends=[]")
    assert code == 0, said


def test_options_replace_what_a_configuration_says(config_file, onnxline, tmp_path: Path) -> None:
    path = config_file(passes={"keep": ["gelu"], "recipe": ["onnxsim"]})
    code, said = onnxline("check", path, "--keep", "qkv,op:Softmax?", "--recipe", "nop,eliminate_identity")
    assert code == 0, said
    facts = dict(line.split(None, 1) for line in said.splitlines())
    assert facts["steps"] == "2: nop, eliminate_identity"
    assert facts["keep"] == "qkv, op:Softmax?"
    code, said = onnxline("run", f"{FACTORIES}:attention", "--dry-run", "--out", tmp_path / "never")
    assert code == 0, said
    assert f"{FACTORIES}:attention" in said
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("passes.recipe=[{onnxsim: {chek_n: 1}}]", "onnxsim.simplify has no option 'chek_n'; did you mean 'check_n'?"),
        (
            "passes.recipe=[{onnxsim: {input_data: {x: [1]}}}]",
            "onnxsim: input_data is no option of the step: the run itself compares, on draws and on inputs of your own",
        ),
        ("passes.recipe=[{onnxsim: {check_n: many}}]", "onnxsim: check_n is 'many'; expected int"),
        ("passes.recipe=[{onnxscript: {num_iterations: many}}]", "num_iterations is 'many'; expected int"),
        ("passes.recipe=[{onnxslim: {size_threshold: many}}]", "size_threshold is 'many'; expected int"),
        ("passes.recipe=[{infer_shapes: {data_prop: 3}}]", "data_prop is 3; expected true or false"),
        ("passes.skip=[onnxsim/fuse_qvk]", "no pass named 'onnxsim/fuse_qvk'; did you mean 'onnxsim/fuse_qkv'?"),
        ("passes.keep=[qvk]", "no structure named 'qvk'"),
    ],
)
def test_names_are_checked_before_the_model_is_made(config_file, onnxline, tmp_path, setting: str, words: str) -> None:
    """The factory raises, which is not said: it was not called."""
    code, said = onnxline("run", config_file(factory="broken"), "--set", setting, "--out", tmp_path / "out")
    assert code == 2, said
    assert words in said
    assert not (tmp_path / "out").exists()


def test_a_compiler_is_looked_for_before_the_model_is_made(config_file, onnxline, tmp_path, monkeypatch) -> None:
    """The factory raises, which is not said where a compiler is missing. Other backends than `plan` need none."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    words = ["run", config_file(factory="broken"), "--set", "runtime.native=true", "--out", tmp_path / "out"]
    code, said = onnxline(*words)
    assert code == 2, said
    assert "native needs a C++ compiler, and did not find 'no-such-compiler' of $CXX" in said
    assert not (tmp_path / "out").exists()
    assert "C++ compiler" not in onnxline(*words, "--set", "runtime.backends=[torch]")[1]


def test_a_mistake_leaves_a_good_report(model: Path, onnxline, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert onnxline("run", model, "--out", out, "--recipe", "eliminate_identity")[0] == 0
    before = {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "log.txt"}
    assert onnxline("run", model, "--out", out, "--set", "export.opset=18")[0] == 2
    assert onnxline("check", model, "--set", "export.opset=18")[0] == 2
    after = {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "log.txt"}
    assert before == after
    code, said = onnxline("run", model, "--out", out, "--keep", "gelu")  # that there is none, only the model says
    assert code == 2, said
    assert "keep: gelu matches nothing" in said
    after = {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "log.txt"}
    assert {name for name in before if before[name] != after.get(name)} <= {"settings.json", "export.json"}


def test_a_failed_run_says_where_the_files_are(model: Path, onnxline, tmp_path: Path) -> None:
    code, said = onnxline("run", model, "--out", tmp_path / "out", "--keep", "gelu")
    assert code == 2
    assert f"files so far: {tmp_path / 'out'}/ (log.txt, report.html, report.json)" in said


def row(name: str, status: Status, *, changed: bool = False, reason: str = "") -> PassRow:
    errors = {"y": Errors(1e-7, 1e-7, 1.0, 100.0, 1.0, 0.1)} if changed else {}
    return PassRow(name, "onnxsim", status, reason, 1258, 1200 if changed else 1258, 12.5, changed, errors)


def test_at_80_columns_no_name_is_cut() -> None:
    long = "onnxsim/fuse_matmul_add_bias_into_gemm_batched_and_more"
    rows = (
        row("nop", Status.RAN),
        row("fuse_bn_into_conv", Status.RAN, changed=True),
        row(long, Status.REVERTED, changed=True, reason="qkv encoder 0 is lost"),
        row("eliminate_identity", Status.TIMED_OUT, reason="ran past 60 s and was stopped"),
        row("fuse_qkv", Status.SKIPPED, reason="skip: fuse_qkv"),
        row("eliminate_deadend", Status.RAN),
        replace(row("fuse_gelu", Status.CRASHED, reason="ended by SIGSEGV"), reproducer="fuse_gelu.onnx"),
    )
    verdicts = tuple(StructureVerdict("qkv", f"layer.{n}", "", n == 0, "onnxsim/fuse_qkv") for n in range(6))
    console = Screen(file=StringIO(), force_terminal=True, width=80, color_system=None)
    screen = RunConsole(console, keep=["gelu"])
    screen.show(PassesEnded(rows, verdicts))
    screen.show_passes(Path("runs/a"))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    table = lines[: lines.index("2 steps had nothing to do, fuse_qkv was skipped (--verbose shows all)")]
    assert max(map(len, table)) <= 80
    assert long in table
    text = "\n".join(lines)
    assert "nop" not in text
    assert max(len(line) for line in lines if long not in line) <= 80
    assert f"reverted: {long}: qkv encoder 0 is lost" in " ".join(text.split())
    assert "timed out: eliminate_identity: ran past 60 s" in text
    assert "brings it down: runs/a/reproducers/fuse_gelu.onnx" in text
    assert "lost: qkv layer.1, layer.2, layer.3 and 2 more, by onnxsim/fuse_qkv" in text
    assert "run again with --keep gelu,qkv" in text


@pytest.mark.parametrize("width", [1, 4, 12])
def test_a_terminal_of_few_columns_shows_the_words_of_a_row(width: int) -> None:
    console = Screen(file=StringIO(), force_terminal=True, width=width, color_system=None)
    screen = RunConsole(console)
    screen.show(PassesEnded((replace(row("fuse", Status.RAN, changed=True), remarks=("grows by half",)),), ()))
    screen.show_passes()
    assert "grows by half" in " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", ["optimize m.onnx -o out.onnx", "run m.onnx", "quantsim m.onnx"])
def test_all_lines_and_none_are_not_asked_for_together(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx.parser.parse_model(NEGS), "m.onnx")
    error = CliRunner().invoke(app, [*command.split(), "--verbose", "--quiet"]).exception
    assert isinstance(error, UsageError)
    assert "--verbose shows every step, and --quiet and --json show none" in str(error)


def test_an_old_onnxsim_is_named() -> None:
    refuse_older("onnxsim", "0.8.1", "0.10.0")
    with pytest.raises(PolicyError, match=r"onnxsim 0\.4\.36 is installed, and onnxline needs 0\.8\.1 or newer"):
        refuse_older("onnxsim", "0.8.1", "0.4.36")


STOPPED = """
def make():
    raise ImportError("numpy: error importing native modules") from KeyboardInterrupt()
"""


def test_an_import_that_ctrl_c_has_stopped_is_no_bug(onnxline, tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text(STOPPED)
    code, said = onnxline("run", f"{tmp_path}/stopped.py:make", "--out", tmp_path / "out")
    assert (code, "onnxline: stopped; " in said) == (130, True), said


@pytest.mark.parametrize("name", ["check", "run"])
def test_an_opset_that_onnx_has_not_is_refused_before_the_export(config_file, onnxline, name: str) -> None:
    code, said = onnxline(name, config_file(), "--set", "export.opset=99")
    assert (code, f"export.opset: found 99, expected {onnx.defs.onnx_opset_version()} at most" in said) == (2, True)


AXES = (
    ("export.dynamic_shapes={x: {9: n}}", "input 'x': axis 9 was asked to be 'n', but its shape is [2, 4, 8]"),
    ("model.inputs.x.dynamic={-4: n}", "input 'x': axis -4 was asked to be 'n', but its shape is [2, 4, 8]"),
)


@pytest.mark.parametrize(("setting", "words"), AXES, ids=["export", "input"])
def test_a_dynamic_axis_out_of_the_shape_is_refused_before_the_model_is_made(
    config_file, onnxline, setting: str, words: str
) -> None:
    path = config_file(factory="broken")
    code, said = onnxline("check", path, "--set", "model.inputs.x.shape=[2, 4, 8]", "--set", setting)
    assert (code, words in " ".join(said.split())) == (2, True), said


def test_a_dynamic_axis_of_an_onnx_file_is_refused(onnxline, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(f"model: {{onnx: {EXAMPLES / 'attention.onnx'}, inputs: {{x: {{dynamic: {{0: n}}}}}}}}\n")
    code, said = onnxline("check", path)
    assert code == 2
    assert "model.inputs.x.dynamic: an ONNX file keeps its dims; leave this key out" in said


@pytest.mark.parametrize(
    ("place", "words"), [("", "is a folder; give a file"), ("block.yaml", "is there already and is no baseline")]
)
def test_a_baseline_at_a_bad_place_is_refused_before_the_run(config_file, onnxline, tmp_path, place, words) -> None:
    path = config_file(factory="broken")
    code, said = onnxline("baseline", "accept", path, "--file", tmp_path / place)
    assert code == 2
    assert words in said
    assert "Traceback" not in said


def test_a_traceback_is_shown_on_demand(onnxline) -> None:
    assert "Traceback" not in onnxline("run", "none.yaml")[1]
    assert "Traceback" in onnxline("run", "none.yaml", "--traceback")[1]
    assert "Traceback" in onnxline("--traceback", "run", "none.yaml")[1]


def test_json_of_an_audit_and_of_a_baseline(config_file, onnxline, tmp_path: Path) -> None:
    out = tmp_path / "audit"
    words = ("--only", "eliminate_identity", "--cases", "planted/*", "--jobs", "1", "--out", out, "--json")
    code, said = onnxline("audit", *words)
    assert code == 0, said
    assert json.JSONDecoder().raw_decode(said)[0]["tables"][0]["library"] == "onnxoptimizer"
    path = config_file(passes={"recipe": ["eliminate_identity"]}, runtime={"backends": ["onnxruntime"]})
    assert onnxline("baseline", "accept", path, "--out", tmp_path / "out")[0] == 0
    code, said = onnxline("baseline", "check", path, "--out", tmp_path / "out", "--json")
    assert code == 0, said
    assert json.loads(said)["changes"] == []


def test_a_second_run_of_an_onnx_file_needs_no_torch(onnxline, tmp_path: Path) -> None:
    """To import torch takes longer than all that such a run has to do."""
    words = ["run", str(EXAMPLES / "attention.onnx"), "--out", str(tmp_path / "out"), "-q"]
    assert onnxline(*words)[0] == 0
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*.onnx")}
    program = f"import sys; sys.argv = ['onnxline', *{words!r}]; from pipeline.cli import main; main()"
    without = f"import sys; sys.modules['torch'] = None; {program}"
    subprocess.run([sys.executable, "-c", without], cwd=ROOT, check=True, timeout=120)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*.onnx")} == before
