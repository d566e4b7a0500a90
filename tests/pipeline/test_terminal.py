"""What the terminal shows of names that others have chosen, and of streams that cannot be written."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import onnx
import pytest
import yaml
from rich.text import Text

from passes.visible import HIDDEN, json_text, visible, visible_data, visible_line, visible_markup
from pipeline.cli import main
from pipeline.config import RunConfig
from pipeline.errors import refusal_of
from pipeline.events import Note, RunLog
from pipeline.terminal import VisibleStream, print_text
from pipeline.terminal.screen import ProgressBar, Screen

NAME = "\x1b]0;title\x07\x1b[31mred\x9b2J\u202eback\x08[link=http://a]b[/link]\u2028\ud800"
SHOWN = r"\x1b]0;title\x07\x1b[31mred\x9b2J\u202eback\x08[link=http://a]b[/link]\u2028\ud800"


def test_controls_and_marks_of_direction_are_escapes_and_text_stays() -> None:
    assert visible(NAME) == SHOWN
    assert visible("größe 模型 \t→ 🙂\n") == "größe 模型 \t→ 🙂\n"
    assert visible_line("a\nonnxline: done") == r"a\nonnxline: done"
    assert visible_data({NAME: [NAME, 1, None]}) == {SHOWN: [SHOWN, 1, None]}


@pytest.mark.parametrize("code", [*range(9), *range(11, 32), 127, 0x85, 0x9B, 0x61C, 0x200E, 0x202A, 0x2066, 0xDFFF])
def test_each_character_that_commands_a_terminal_is_replaced(code: int) -> None:
    assert visible(chr(code)).isprintable()
    assert visible(chr(code)).startswith("\\")


def test_json_stays_json() -> None:
    text = json_text({NAME: NAME})
    assert HIDDEN.search(text) is None
    assert json.loads(text) == {NAME: NAME}


def test_what_a_run_writes_to_its_log_is_escaped_and_its_yaml_reads_back() -> None:
    log = RunLog()
    log.add(Note(f"{NAME}\nonnxline: done"))
    assert log.text().endswith(f"note: {SHOWN}\\nonnxline: done\n")
    config = RunConfig.from_mapping({"model": {"onnx": "a.onnx"}, "passes": {"keep": ["node:\u202eabc\x9b"]}})
    assert HIDDEN.search(config.to_yaml()) is None
    assert yaml.safe_load(config.to_yaml())["passes"]["keep"] == ["node:\u202eabc\x9b"]
    assert visible_markup("<\x0b\n>") == r"&lt;\x0b\n&gt;"


def test_a_screen_writes_its_own_styles_and_no_others() -> None:
    out = StringIO()
    screen = Screen(file=out, force_terminal=True, color_system="standard", width=200)
    screen.print_line(f"pass {NAME}", "red")
    screen.print(Text(NAME))
    with ProgressBar(console=screen) as bar:
        bar.add_task(NAME)
        bar.refresh()
    shown = out.getvalue()
    assert shown.startswith(f"\x1b[31mpass {SHOWN}")
    assert "\x1b]0;" not in shown
    assert "\u202e" not in shown
    assert "[link=http://a]" in shown


def test_what_is_printed_above_a_bar_is_escaped_too(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(console=Screen(force_terminal=True, width=200)):
        sys.stdout.write("\x1b]8;;http://a\x07link\x1b]8;;\x07\n")
    assert r"\x1b]8;;http://a\x07link" in capsys.readouterr().out


def test_lines_of_a_terminal_end_between_words() -> None:
    out = StringIO()
    path = "runs/" + "x" * 40 + "/report.html"
    Screen(file=out, force_terminal=True, color_system=None, width=30).print_line(f"note: the page of a run is {path}")
    assert out.getvalue() == f"note: the page of a run is\n  {path}\n"
    piped = StringIO()
    Screen(file=piped, width=30).print_line("word " * 20)
    assert piped.getvalue().count("\n") == 1


def test_a_text_of_several_lines_keeps_them(capsys: pytest.CaptureFixture[str]) -> None:
    print_text("one\n  two\x1b[2J\n")
    print_text("")
    assert capsys.readouterr().out == "one\n  two\\x1b[2J\n"


@pytest.mark.parametrize("words", [["diff", "a.onnx", "b.onnx"], ["why", "a.onnx", "n*"], ["why", "a.onnx", "y\nEVIL"]])
def test_a_name_begins_no_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, op in (("a.onnx", "Relu"), ("b.onnx", "Sigmoid")):
        model = onnx.parser.parse_model('<ir_version: 9, opset_import: ["" : 18]> g (float[4] x) => (float[4] y) {}')
        model.graph.input[0].name, model.graph.output[0].name = "x\nEVIL", "y\nEVIL"
        model.graph.node.append(onnx.helper.make_node(op, ["x\nEVIL"], ["y\nEVIL"], name="n\nEVIL"))
        onnx.save(model, file)
    monkeypatch.setattr(sys, "argv", ["onnxline", *words])
    with pytest.raises(SystemExit):
        main()
    printed = "".join(capsys.readouterr())
    assert r"\nEVIL" in printed
    assert "\nEVIL" not in printed


def test_a_stream_that_fails_is_written_no_more_and_says_why() -> None:
    with Path("/dev/full").open("w") as full:
        stream = VisibleStream(full)
        for _ in range(3):
            stream.write("lines\n")
            stream.flush()
        assert stream.loss == "No space left on device"


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(24, "Too many open files", "/dev/null"), "ulimit -n"),
        (OSError(28, "No space left on device"), "TMPDIR"),
        (MemoryError(), "more memory"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "more memory"),
    ],
)
def test_what_the_system_refuses_is_no_bug(error: Exception, advice: str) -> None:
    refusal = refusal_of(error)
    assert refusal is not None
    assert advice in str(refusal)
    assert refusal.exit_code == 2


def test_other_errors_stay_bugs() -> None:
    assert refusal_of(FileNotFoundError(2, "No such file or directory", "x")) is None
    assert refusal_of(ValueError("No space left on device")) is None


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("{} schema >/dev/full", 2, "standard output cannot be written: No space left on device"),
        ("{} schema >&-", 0, ""),
        ("{} check none.yaml 2>&-", 2, ""),
        ("{} schema | head -1", 0, ""),
        ("set -o pipefail; {} schema | head -1", 0, ""),
        ('cd "$(mktemp -d)" && rmdir "$PWD" && {} schema', 2, "the working directory has been removed; change to"),
    ],
)
def test_streams_that_cannot_be_written(shell: str, code: int, said: str) -> None:
    command = shell.format(f"{sys.executable} -m onnxline")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert said in done.stderr
    assert said or not done.stderr
