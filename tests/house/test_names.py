"""How the code names things: what can be held by a test of the rules in CONTRIBUTING.md."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from typing import NamedTuple

from tests.support.paths import ROOT, TESTS

PACKAGES = ("passes", "pipeline")
TESTED = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

BANNED = re.compile(
    r"\b(told|tells of|comes to|lies (as|where|behind)|otherwise of|whoever|of its own accord|is about|the word"
    r"|speaks? (of|to|for)|(bound|made) anew|stands? (twice|in for)|what is (there|made) of)\b"
)
"""Words that a reader has to learn here first; CONTRIBUTING.md says what to write in their place."""

MOST_BANNED = 10

TEST_NAME = re.compile(r"^def (test_\w+)", re.MULTILINE)

PARTICIPLE = re.compile(
    r"[a-z]{3,}ed|told|given|made|kept|shown|held|seen|found|drawn|written|taken|known|built|bound|lost|left|led|sent|said"
    r"|put|gone|done|spelled|broken|chosen|grown|hidden|laid|lain|met|torn|apart|alike|absent|plain|own|near|far|late"
    r"|loosely|whole|other|otherwise"
)
VERBS = {"feed", "need", "embed"}

MOST_PARTICIPLES = 0.02
"""Share of the functions whose name is a participle or an adjective alone."""


DEFINITION = re.compile(r"^( *)((?:@.*\n\1)*)(?:async )?(class|def) (\w+)", re.MULTILINE)


class Definition(NamedTuple):
    path: str
    decorators: str
    word: str
    name: str


@cache
def definitions() -> list[Definition]:
    """Read as text: a parser takes four seconds for them, and no docstring here shows a definition."""
    return [
        Definition(str(path.relative_to(ROOT)), decorators, word, name.strip("_"))
        for path in TESTED
        for _, decorators, word, name in DEFINITION.findall(path.read_text(encoding="utf-8"))
    ]


def test_no_class_name_stands_twice() -> None:
    places = defaultdict(set)
    for definition in definitions():
        if definition.word == "class":
            places[definition.name].add(definition.path)
    assert {name: sorted(files) for name, files in places.items() if len(files) > 1} == {}


def test_functions_are_verbs() -> None:
    functions = [one for one in definitions() if is_plain_function(one)]
    assert len(functions) > 1000
    alone = [f"{function.path}: {function.name}" for function in functions if is_participle(function.name)]
    assert len(alone) <= MOST_PARTICIPLES * len(functions), "\n".join(alone)


def is_plain_function(definition: Definition) -> bool:
    """A function or method; a property is read like data, so it may be called like data."""
    return definition.word == "def" and not re.search(r"@\w*property\b", definition.decorators)


def is_participle(name: str) -> bool:
    return name not in VERBS and PARTICIPLE.fullmatch(name) is not None


def test_plain_words() -> None:
    said = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*TESTED, *PAGES)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if BANNED.search(line)
    ]
    names = (name for path in sorted(TESTS.rglob("test_*.py")) for name in TEST_NAME.findall(path.read_text("utf-8")))
    said += [name for name in names if BANNED.search(name.replace("_", " "))]
    assert len(said) <= MOST_BANNED, "\n".join(said)


def test_no_file_is_two_ideas_long() -> None:
    long = {str(path.relative_to(ROOT)): n for path in TESTED if (n := len(path.read_text().splitlines())) > 450}
    assert long == {}
