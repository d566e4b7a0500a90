"""Odd configurations and odd command lines, made from a fixed seed: a result or one sentence, and nothing else."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from pipeline.cli import COMMANDS, main
from pipeline.config import RunConfig
from pipeline.errors import OnnxlineError
from tests.support.paths import EXAMPLES, ROOT

SEED, YAMLS, LINES = 2031, 60, 30

CONTROL: Final = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal obeys, apart from tab and newline."""

SECTIONS: Final = ("model", "export", "passes", "verify", "runtime", "quantsim", "train", "report", "name", "extends")
KEYS: Final = (
    "onnx", "seed", "dims", "inputs", "factory", "transformers", "keep", "skip", "recipe", "draws", "opset",
    "?",
)  # fmt: skip
VALUES: Final = (
    "!!bool x", "!!int x", "!!float [1]", "!!binary aGk=", "!!set {a}", "!!python/object:os.system x", "!x y",
    "!!null z", "1e400", "-0", "0x" + "f" * 40, "9" * 5000, ".nan", "-.inf", "1_000", "0o17", "1:30:00",
    "2020-01-01", "~", "yes", '"\\ud800"', '"\\0"', '"\\e[31m\\a"', '"\\u202e"', "\x1b[2J", "\x85", "'", '"',
    "|", ">", "@", "`", "%", "*a", "&a b", "&a [*a]", "<<: *a", "? [a]", "[" * 150 + "]" * 150,
    "{a: " * 150 + "1" + "}" * 150, "[" * 3000, "{}", "[]", "- a", "{a: 1, a: 2}", "{[a]: 1}", "{1: 2, '1': 3}",
    "{~: 1}", "m.onnx", "a.py:f", "[default, onnxsim]", "{b: [2, 3]}", "\t",
)  # fmt: skip
DOCUMENTS: Final = (
    "model: {onnx: m.onnx}", "model: &a {onnx: m.onnx}\nverify: {}", "", "[]", "7", "a", "~", "---\n---\n",
    "--- {model: {onnx: a}}\n--- {}", "%YAML 9.9\n---\n{}", "\n" * 5,
)  # fmt: skip
CODECS: Final = ("utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32", "latin-1")


def odd_yamls(count: int, seed: int) -> Iterator[bytes]:
    """Files that look more or less like configurations."""
    draw = random.Random(seed)
    for index in range(count):
        if index % 5 == 0:
            text = draw.choice(DOCUMENTS)
        else:
            lines = ["model:", "  onnx: m.onnx"] if draw.random() < 0.6 else []
            for _ in range(draw.randint(1, 3)):
                section, key, value = draw.choice(SECTIONS), draw.choice(KEYS), draw.choice(VALUES)
                lines += draw.choice(([f"{section}: {value}"], [f"{section}:", f"  {key}: {value}"], [value]))
            text = "\n".join(lines) + "\n"
        content = text.encode(draw.choice(CODECS), errors="replace")
        if draw.random() < 0.1:
            at = draw.randrange(len(content) + 1)
            content = content[:at] + draw.choice((b"\0", b"\xff\xfe", b"\xc3", b"\x1b[31m")) + content[at:]
        yield content


WORDS: Final = (
    "--keep", "--skip", "--recipe", "--out", "-o", "--set", "--proof", "--json", "-v", "-q", "--", "-",
    "--help", "--nope", "--sizes", "--format", "--timeout", "--memory-gib", "--crash", "--lost", "--seed",
)  # fmt: skip
OPERANDS: Final = (
    "", " ", "=", "a=b=c", "passes.keep=[", "model={}", "model.seed=1e99", "[" * 3000, "9" * 5000, "-1", "nan",
    "\x1b[31mRED", "\u202ered", "\x9b31m", "none.onnx", ".", "/dev/null", "c.yaml", "bytes.onnx", "deep.json",
    "a\nb", "\udc80", "qkv", "*", "~", "x" * 5000, "qvk", "{}", "nothing.py:f", "%s%n", "default",
)  # fmt: skip


def odd_lines(count: int, seed: int) -> Iterator[list[str]]:
    """Command lines: each has a command, and seldom what that command expects."""
    draw = random.Random(seed)
    commands = [name for name in COMMANDS if name not in ("audit", "init")]  # these need no operand to begin their work
    inner = ("show", "check", "accept", "compare", "run", "extract", "verify")
    for _ in range(count):
        line = [draw.choice(commands)]
        if line[0] in ("plan", "debug", "ir", "baseline", "batch"):
            line.append(draw.choice(inner))
        for _ in range(draw.randint(1, 4)):
            line += draw.choice(([draw.choice(OPERANDS)], [draw.choice(WORDS), draw.choice(OPERANDS)]))
        yield line


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def knock(line: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """The exit code of a command line, and all that it has printed."""
    if line[0] == "guard":  # it adopts orphans for the rest of its process, which is not to be that of the tests
        done = subprocess.run(
            [sys.executable, "-m", "onnxline", *line], capture_output=True, text=True, env=ENVIRONMENT
        )
        return done.returncode, done.stdout + done.stderr
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["onnxline", *line])
        main()
    printed = capfd.readouterr()
    return ended.value.code, printed.out + printed.err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with some files that the lines name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text('name: "\\e[31m"\nmodel: {onnx: none.onnx}\n', encoding="utf-8")
    (tmp_path / "bytes.onnx").write_bytes(b"\x08\x07\x1b[31m\xff")
    (tmp_path / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    return tmp_path


def test_odd_configurations_end_in_a_result_or_in_one_error(folder: Path) -> None:
    accepted = 0
    for index, content in enumerate(odd_yamls(YAMLS, SEED)):
        path = folder / f"odd{index}.yaml"
        path.write_bytes(content)
        try:
            RunConfig.from_yaml(path)
        except OnnxlineError as error:
            assert error.exit_code == 2, content
            assert str(error), content
        else:
            accepted += 1
    assert 0 < accepted < YAMLS / 2


def test_odd_command_lines_end_in_an_exit_code_and_in_text(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    codes = set()
    for line in odd_lines(LINES, SEED):
        code, printed = knock(line, capfd)
        codes.add(code)
        assert code in (0, 1, 2) or (line[0] == "guard" and code in (126, 127)), (line, printed)  # as a shell's
        assert not CONTROL.search(printed), (line, printed)
    assert 2 in codes


@pytest.mark.parametrize(
    "line",
    [
        ["plan", "show", "deep"],
        ["plan", "trace", "deep"],
        ["ir", "info", "deep/ir.json"],
        ["ir", "visualize", "deep/ir.json"],
        ["encodings", "deep/plan.json", "-o", "e.json"],
        ["encodings", "MODEL", "--apply", "deep/plan.json", "-o", "e.onnx"],
        ["optimize", "MODEL", "-o", "o.onnx", "--encodings", "deep/plan.json"],
        ["quantsim", "MODEL", "--out", "sim", "--set", "quantsim.profile={aimet_config: deep/plan.json}"],
        ["run", "c.yaml", "--set", "model.dims=" + "[" * 3000],
    ],
    ids=lambda line: " ".join(line)[:40],
)
def test_deep_json_is_refused_in_one_sentence(line: list[str], folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "deep").mkdir()
    shutil.copy(EXAMPLES / "attention.onnx", folder / "deep" / "model.onnx")
    for name in ("plan.json", "ir.json", "report.json"):
        (folder / "deep" / name).write_text("[" * 100_000, encoding="utf-8")
    code, printed = knock([str(EXAMPLES / "attention.onnx") if word == "MODEL" else word for word in line], capfd)
    assert code == 2, printed
    assert re.search("recursion|nested", printed), printed
