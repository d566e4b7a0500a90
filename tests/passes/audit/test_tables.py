"""Tables: grouped, as text and back, the same however the findings came; compared with accepted ones."""

from __future__ import annotations

import random
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from passes.advisories import (
    AuditFinding,
    AuditTable,
    known_table,
    own_tables,
    parse,
    table_of,
    table_text,
    tables_in,
    unsafe_names,
)
from passes.advisories.known import SHIPPED, find_news
from passes.advisories.table import LISTED, mark_of
from passes.errors import ModelError

INDENTS = ("initial_indent", "subsequent_indent")
MANY = [AuditFinding("b", "grew-nodes", f"node/{number}") for number in range(LISTED + 1)]
FINDINGS = [
    AuditFinding("nop", "invalid", "node/sequence", "a type is missing"),
    AuditFinding("b", "invalid", "node/sequence", "a type is missing"),
    AuditFinding("b", "invalid", "node/other", "# worse"),
    AuditFinding("a", "crashed", "node/shape", "SIGSEGV"),
    *MANY,
]
TEXT = """\
onnxline audit, format 2
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

not read: 0

[a] crashed 1
  SIGSEGV
    - node/shape

[b] grew-nodes 61
MARKS

[b] invalid 1
  # worse
    - node/other

[nop] invalid 1
  a type is missing
    - node/sequence
"""
MARKS = textwrap.fill(
    " ".join(sorted(mark_of(finding.case) for finding in MANY)), 118, **dict.fromkeys(INDENTS, "    # ")
)
TEXT = TEXT.replace("MARKS", MARKS)


def table(findings: list[AuditFinding], version: str = "1.2") -> AuditTable:
    judges = {"onnx": "1.23", "numpy": "2.0"}
    cases = {"planted": 3, "node": 70}
    return table_of("lib", version, ["nop", "b", "a", "clean"], findings, cases, judges, ["node/random"])


def test_a_picture() -> None:
    """What nop does too is listed once; of many cases there are marks."""
    assert table_text(table(FINDINGS)) == TEXT


def test_the_order_of_what_was_found_does_not_count() -> None:
    shuffled = random.Random(0).sample(FINDINGS, len(FINDINGS))
    assert table_text(table([*shuffled, *shuffled])) == TEXT


def test_the_text_is_the_table() -> None:
    assert table_text(parse(TEXT)) == TEXT
    few = table(FINDINGS[:4])
    assert parse(table_text(few)) == few


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("onnxline audit, format 2", "something else", "it, line 1: .* expected 'onnxline audit, format 2'"),
        ("    - node/shape\n", "    - node/shape\n    - node/new\n", "it, line 7: .* cut off, or edited by half"),
        ("] crashed 1", "] crashde 1", "it, line 6: "),
        ("nop         .        1", "nop         .        2", "it, line 9: "),
        ("node 70", "node many", "it, line 4: "),
        ("    # ", "    # 00000 ", "it, line 8: "),
        ("not read: 0\n", "", "it, line 17: .* 'not read: 0'"),
    ],
)
def test_a_table_that_was_edited_by_half(old: str, new: str, words: str) -> None:
    assert old in TEXT
    with pytest.raises(ModelError, match=words):
        parse(TEXT.replace(old, new, 1), "it")


def test_a_table_that_was_cut_off_anywhere() -> None:
    lines = TEXT.splitlines(keepends=True)
    for number in range(len(lines)):
        with pytest.raises(ModelError, match="line "):
            parse("".join(lines[:number]))


def test_any_name_of_a_file_can_be_read_back() -> None:
    names = ["models/two\nlines", 'models/"', "models/\u2028", "models/\udcff", "models/plain \\n"]
    odd = table_of(
        "lib", "1", ["a"], [AuditFinding("a", "wrong", name) for name in sorted(names)], {}, {}, names, names
    )
    assert parse(table_text(odd).encode().decode()) == odd


def test_only_a_file_that_says_so_is_a_table(tmp_path: Path) -> None:
    (tmp_path / "my-notes.txt").write_text("what I think", encoding="utf-8")
    (tmp_path / "x-1.txt").mkdir()
    (tmp_path / "bytes-2.txt").write_bytes(b"\xff\xfe")
    assert tables_in(tmp_path) == ()
    file = tmp_path / "lib.txt"
    file.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())  # as an editor may leave it
    assert tables_in(tmp_path) == (parse(TEXT),)
    file.write_bytes(TEXT.encode().replace(b"SIGSEGV", b"\xff"))
    with pytest.raises(ModelError, match=r"lib\.txt, line 20: not UTF-8"):
        tables_in(tmp_path)


def test_what_is_accepted_is_no_news_whatever_the_words() -> None:
    accepted = table(FINDINGS)
    reworded = [replace(finding, why="in other words") for finding in FINDINGS]
    assert find_news([table(reworded, "1.3")], [accepted]) == ()
    assert find_news([table([])], [accepted]) == ()


def test_news() -> None:
    accepted = table(FINDINGS)
    news = find_news([table([*FINDINGS, AuditFinding("a", "crashed", "node/abs", "SIGABRT")], "1.3")], [accepted])
    assert [(addition.entry.name, addition.entry.kind, addition.cases, addition.accepted) for addition in news] == [
        ("a", "crashed", ("node/abs",), "lib 1.2")
    ]


def test_one_more_of_many_is_news_and_one_less_is_none() -> None:
    accepted = parse(TEXT)
    more = table([*MANY[1:], AuditFinding("b", "grew-nodes", "node/one_more")])
    assert [addition.cases for addition in find_news([more], [accepted])] == [("node/one_more",)]
    assert [addition.cases for addition in find_news([parse(table_text(more))], [accepted])] == [
        (f"#{mark_of('node/one_more')}",)
    ]
    assert find_news([table(MANY[1:])], [accepted]) == ()


def test_many_cases_of_one_pass_accept_none_of_another() -> None:
    """But what the round trip does to the very same model."""
    accepted = table([AuditFinding("nop", "grew-nodes", finding.case) for finding in MANY])
    other = table_of(
        "lib", "1.3", ["new"], [AuditFinding("new", "grew-nodes", f"node/{name}") for name in ("0", "x")], {}, {}
    )
    assert [addition.cases for addition in find_news([other], [parse(table_text(accepted))])] == [("node/x",)]
    assert len(find_news([other], [table(MANY)])[0].cases) == 2


def test_what_the_round_trip_does_is_accepted_of_each_pass() -> None:
    """A run of a single pass knows nothing of nop."""
    alone = table_of("lib", "1.2", ["b"], [FINDINGS[1]], {}, {})
    assert alone.entries and find_news([alone], [table(FINDINGS)]) == ()


def test_without_a_table_everything_is_news() -> None:
    assert {addition.accepted for addition in find_news([table(FINDINGS)], [])} == {""}


def test_the_table_of_the_release_before_is_compared_with() -> None:
    tables = [table([], version) for version in ("1.2", "1.10", "0.9")]
    asked = ("1.2", "1.9", "2.0", "0.1")
    tables_found = [known_table(tables, "lib", version) for version in asked]
    assert [table.version for table in tables_found if table] == ["1.2", "1.2", "1.10", "0.9"]
    assert known_table(tables, "other", "1.2") is None


def test_unsafe_is_what_harms_and_is_the_passes_own_fault() -> None:
    assert unsafe_names([table(FINDINGS)], {"lib": "1.2"}) == {"a", "b"}
    assert unsafe_names([table(MANY)], {"lib": "1.2"}) == set()
    assert unsafe_names([table(FINDINGS)], {"lib": "1.3"}) == set()


def test_our_own_tables_are_as_they_are_written() -> None:
    assert len(own_tables()) >= 5
    for file, table in zip(sorted(SHIPPED.glob("*.txt")), tables_in(SHIPPED), strict=True):
        assert table_text(table) == file.read_text(encoding="utf-8"), file.name
