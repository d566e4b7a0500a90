"""Every `onnxline …` that a page shows is a command with options that it takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cli import COMMANDS, load_command
from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shown_commands(page: Path) -> Iterator[list[str]]:
    """The words of each command, in a code block or in a line: to its end, to a comment, or to what a shell reads."""
    text = page.read_text(encoding="utf-8")
    fenced = "".join(re.findall(r"^```(?:sh|console|bash|yaml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    for line in (
        *re.findall(r"`(onnxline [^`]+)`", text),
        *re.findall(r"^(?:\$ )?(onnxline .+)$", fenced, re.MULTILINE),
    ):
        bare = re.split(r"\s#|[;|>]|\s&&|…", line)[0]
        try:
            yield shlex.split(bare)
        except ValueError:  # a quote that ends in another line
            yield bare.split()


def strange_words(words: list[str]) -> list[str]:
    """The first command that there is not, or the options that a command does not take."""
    if len(words) < 2 or words[1].startswith("-"):
        return []
    if words[1] not in COMMANDS:
        return words[1:2] if re.fullmatch("[a-z-]+", words[1]) else []
    command, rest = load_command(words[1]), words[2:]
    if rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    known |= {"-h", "--help", "--traceback"}
    own = rest[: rest.index("--")] if "--" in rest else rest
    options = (re.split("[=\\[\\]]", word)[0] for word in own)
    return [option for option in options if re.match("--?[a-z]", option) and option not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_options(page: Path) -> None:
    assert {" ".join(words): strange for words in shown_commands(page) if (strange := strange_words(words))} == {}


def test_a_stranger_is_seen() -> None:
    assert strange_words(["onnxline", "optimize", "a.onnx", "-o", "b.onnx", "--nope=1"]) == ["--nope"]
    assert strange_words(["onnxline", "nope"]) == ["nope"]
    assert strange_words(["onnxline", "guard", "--keep", "qkv", "--", "python", "--nope"]) == []
