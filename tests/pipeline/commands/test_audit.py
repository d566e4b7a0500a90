"""`onnxline audit` on a few models: tables, reproducers, the gate, and a second start that does nothing again."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import onnx
import pytest
from typer.testing import CliRunner, Result

from passes.advisories import table_text, tables_in
from pipeline.cli import app

FEW = ("--cases", "planted/*", "--only", "fuse_qkv", "--only", "eliminate_identity", "--jobs", "1")
NAMED = (
    '<ir_version: 9, opset_import: ["": 20]> g (float[64] input_0) => (float[64] output_0) { output_0 = Neg (input_0) }'
)
GROWS = '<ir_version: 9, opset_import: ["": 20]> g (float[64] x) => (float[64] y) { y = Neg (x) }'


def ask(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, words)])


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("audit") / "out"
    return out, ask(*FEW, "--out", out)


def test_tables_and_reproducers_are_written(audited: tuple[Path, Result]) -> None:
    out, shown = audited
    assert shown.exit_code == 0, shown.output
    (table,) = tables_in(out)
    assert table.names == ("eliminate_identity", "fuse_qkv")
    assert [(entry.name, entry.kind, entry.cases) for entry in table.entries if entry.kind == "raised"] == [
        ("fuse_qkv", "raised", ("planted/qkv_of_graph_input",))
    ]
    assert " on 9 models: " in shown.output
    small = onnx.load(out / "reproducers" / "fuse_qkv-raised.onnx")
    assert len(small.graph.node) == 3
    assert (out / "reproducers" / "fuse_qkv-raised.txt").read_text(encoding="utf-8").startswith("fuse_qkv: raised; ")


def test_a_second_start_does_nothing_again(audited: tuple[Path, Result]) -> None:
    out, first = audited
    done = (out / "jobs.jsonl").read_bytes()
    table = next(out.glob("*.txt")).read_bytes()
    again = ask(*FEW, "--out", out)
    assert (again.exit_code, again.stdout) == (0, first.stdout)
    assert (out / "jobs.jsonl").read_bytes() == done
    assert next(out.glob("*.txt")).read_bytes() == table


def test_the_gate_lets_pass_what_is_accepted(audited: tuple[Path, Result]) -> None:
    out, _ = audited
    shown = ask(*FEW, "--out", out, "--gate", "--accepted", out)
    assert (shown.exit_code, "nothing that is not accepted" in shown.output) == (0, True)


def test_the_gate_stops_what_is_new(audited: tuple[Path, Result], tmp_path: Path) -> None:
    out, _ = audited
    (table,) = tables_in(out)
    fewer = replace(table, entries=tuple(entry for entry in table.entries if entry.kind != "raised"))
    (tmp_path / "a.txt").write_text(table_text(fewer), encoding="utf-8")
    shown = ask(*FEW, "--out", out, "--gate", "--accepted", tmp_path)
    assert shown.exit_code == 1
    assert "  fuse_qkv raised: planted/qkv_of_graph_input" in shown.output
    assert ask(*FEW, "--out", out, "--accepted", tmp_path).exit_code == 0


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine" / "inner.onnx").mkdir(parents=True)
    onnx.save(onnx.parser.parse_model(GROWS), tmp_path / "mine" / "inner.onnx" / "two\nlines.ONNX")
    (tmp_path / "mine" / "broken.onnx").write_bytes(b"\x08\x07 this is no model")
    (tmp_path / "mine" / "empty.onnx").touch()
    words = ("--models", tmp_path / "mine", "--cases", "models/*", "--only", "rename_input_output")
    shown = ask(*words, "--out", tmp_path / "out", "--jobs", "1", "--gate")
    assert getattr(shown.exception, "exit_code", None) == 2
    assert "2 of the models cannot be read" in str(shown.exception)
    assert re.search(r"^not read: models/broken: .*broken\.onnx is not a readable ONNX file \(", shown.output, re.M)
    assert '  rename_input_output signature: "models/inner.onnx/two\\nlines.ONNX"; ' in shown.output
    (table,) = tables_in(tmp_path / "out")
    assert (table.unread, table.unjudged, table.cases) == (("models/broken", "models/empty"), (), {"models": 1})
    assert ("signature", ("models/inner.onnx/two\nlines.ONNX",)) in {
        (entry.kind, entry.cases) for entry in table.entries
    }
    reproducers = tmp_path / "out" / "reproducers"
    assert {path.name for path in reproducers.iterdir()} == {
        f"rename_input_output-signature.{end}" for end in ("onnx", "txt")
    }

    for name in ("broken", "empty"):  # a file that changes is tried again
        onnx.save(onnx.parser.parse_model(NAMED), tmp_path / "mine" / f"{name}.onnx")
    (tmp_path / "mine" / "inner.onnx" / "two\nlines.ONNX").unlink()
    (reproducers / "notes.txt").write_text("rename_input_output: signature; my own", encoding="utf-8")
    assert ask(*words, "--out", tmp_path / "out", "--jobs", "1").exit_code == 0
    assert tables_in(tmp_path / "out")[0].unread == ()
    assert [path.name for path in reproducers.iterdir()] == ["notes.txt"]  # the finding is gone, and its files


@pytest.mark.parametrize("only", ["rotate", "rot*", "aimet-onnx"])
def test_an_extra_that_is_not_there_is_named_by_step_glob_and_library(only: str, tmp_path: Path) -> None:
    if find_spec("aimet_onnx") is not None:
        pytest.skip("the extra is installed")
    message = str(ask("--only", only, "--out", tmp_path).exception)
    assert message.startswith("--only: rotate is not tried: the pass 'rotate' needs aimet_onnx")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--models", "/nowhere"), "--models: /nowhere is no folder"),
        (("--only", "fuse_qvk"), "no pass and no library named 'fuse_qvk'; did you mean 'fuse_qkv'?"),
        (("--cases", "nodes/*"), "--cases: nothing matches nodes/*"),
        (("--accepted", "/nowhere"), "--accepted: no table of an audit in /nowhere"),
        (("--ray", "auto", "--jobs", "2"), "found --jobs with --ray, where each node says"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    shown = ask(*words, "--out", tmp_path)
    assert message in str(shown.exception)
    assert getattr(shown.exception, "exit_code", None) == 2


def test_findings_as_annotations(audited: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, _ = audited
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    (table,) = tables_in(out)
    fewer = replace(table, entries=tuple(entry for entry in table.entries if entry.kind != "raised"))
    (tmp_path / "a.txt").write_text(table_text(fewer), encoding="utf-8")
    shown = ask(*FEW, "--out", out, "--accepted", tmp_path, "--format", "github")
    assert "::error title=onnxline audit::fuse_qkv; raised; planted" in shown.stdout
    assert "| fuse\\_qkv | raised |" in (tmp_path / "summary.md").read_text()
    accepted = ask(*FEW, "--out", out, "--accepted", out, "--format", "github")
    assert "::notice title=onnxline audit::nothing to report" in accepted.stdout
