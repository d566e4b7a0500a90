"""Tables: grouped, as text and back, the same however the findings came; compared with accepted ones."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from passes.audited import Finding, Table, known_table, own_tables, parse, table_of, table_text, tables_in, unsafe_names
from passes.audited.gate import news
from passes.audited.known import SHIPPED
from passes.audited.table import LISTED
from passes.errors import ModelMistake

MANY = [Finding("b", "grew-nodes", f"node/{number}") for number in range(LISTED + 1)]
FINDINGS = [
    Finding("nop", "invalid", "node/sequence", "a type is missing"),
    Finding("b", "invalid", "node/sequence", "a type is missing"),
    Finding("b", "invalid", "node/other", "worse"),
    Finding("a", "crashed", "node/shape", "SIGSEGV"),
    *MANY,
]
TEXT = """\
onnxline audit, format 1
library: lib 1.2
judged by: numpy 2.0, onnx 1.23
cases: node 70, planted 3

pass  crashed  invalid  grew-nodes
a           1        .           .
b           .        1          61
nop         .        1           .

nothing found: 1
  clean

numbers not judged: 1
  node/random

[a] crashed 1 f609219c9882
  SIGSEGV
  - node/shape

[b] grew-nodes 61 22fc989c3d5b

[b] invalid 1 b6a7f8a9d4bf
  worse
  - node/other

[nop] invalid 1 ecbcb5cc8cb4
  a type is missing
  - node/sequence
"""


def table(findings: list[Finding], version: str = "1.2") -> Table:
    judges = {"onnx": "1.23", "numpy": "2.0"}
    cases = {"planted": 3, "node": 70}
    return table_of("lib", version, ["nop", "b", "a", "clean"], findings, cases, judges, ["node/random"])


def test_a_picture() -> None:
    """What nop does too is told once; many cases are a number and a digest."""
    assert table_text(table(FINDINGS)) == TEXT


def test_the_order_of_what_was_found_does_not_count() -> None:
    shuffled = random.Random(0).sample(FINDINGS, len(FINDINGS))
    assert table_text(table([*shuffled, *shuffled])) == TEXT


def test_the_text_is_the_table() -> None:
    assert parse(TEXT) == table(FINDINGS)
    assert table_text(parse(TEXT)) == TEXT


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("onnxline audit, format 1", "something else", "no table of an audit"),
        ("  - node/shape\n", "  - node/shape\n  - node/new\n", r"line 17.* does not fit to the 2 cases below it"),
        ("] crashed 1", "] crashde 1", "does not fit"),
    ],
)
def test_a_table_that_was_edited_by_half(old: str, new: str, words: str) -> None:
    with pytest.raises(ModelMistake, match=words):
        parse(TEXT.replace(old, new), "it")


def test_what_is_accepted_is_no_news_whatever_the_words() -> None:
    accepted = table(FINDINGS)
    reworded = [replace(one, why="in other words") for one in FINDINGS]
    assert news([table(reworded, "1.3")], [accepted]) == ()
    assert news([table([])], [accepted]) == ()


def test_news() -> None:
    accepted = table(FINDINGS)
    found = news([table([*FINDINGS, Finding("a", "crashed", "node/abs", "SIGABRT")], "1.3")], [accepted])
    assert [(one.entry.name, one.entry.kind, one.cases, one.accepted) for one in found] == [
        ("a", "crashed", ("node/abs",), "lib 1.2")
    ]


def test_one_more_of_many_is_news_and_one_less_is_none() -> None:
    accepted = table(FINDINGS)
    more = table([*FINDINGS, Finding("b", "grew-nodes", "node/one_more")])
    assert [(one.entry.count, one.cases) for one in news([more], [accepted])] == [(LISTED + 2, ())]
    assert news([table(MANY[1:])], [accepted]) == ()


def test_what_the_round_trip_does_is_accepted_of_each_pass() -> None:
    """A run of a single pass knows nothing of nop."""
    alone = table_of("lib", "1.2", ["b"], [FINDINGS[1]], {}, {})
    assert alone.entries and news([alone], [table(FINDINGS)]) == ()


def test_without_a_table_everything_is_news() -> None:
    assert {one.accepted for one in news([table(FINDINGS)], [])} == {""}


def test_the_table_of_the_release_before_is_compared_with() -> None:
    tables = [table([], version) for version in ("1.2", "1.10", "0.9")]
    asked = ("1.2", "1.9", "2.0", "0.1")
    found = [known_table(tables, "lib", version) for version in asked]
    assert [one.version for one in found if one] == ["1.2", "1.2", "1.10", "0.9"]
    assert known_table(tables, "other", "1.2") is None


def test_unsafe_is_what_harms_and_is_the_passes_own_fault() -> None:
    assert unsafe_names([table(FINDINGS)], {"lib": "1.2"}) == {"a", "b"}
    assert unsafe_names([table(MANY)], {"lib": "1.2"}) == set()
    assert unsafe_names([table(FINDINGS)], {"lib": "1.3"}) == set()


def test_our_own_tables_are_as_they_are_written() -> None:
    assert len(own_tables()) >= 5
    for file, one in zip(sorted(SHIPPED.glob("*.txt")), tables_in(SHIPPED), strict=True):
        assert table_text(one) == file.read_text(encoding="utf-8"), file.name
