"""How this tree is laid out: what can be held by a test of the section on tests in CONTRIBUTING.md."""

from __future__ import annotations

import configparser
import re
import sys
from collections import defaultdict
from pathlib import Path

from tests.conftest import MARKS
from tests.support.one_of_each import NIGHTLY, ONE_OF_EACH
from tests.support.paths import ROOT, TESTS

FILES = sorted(TESTS.rglob("*.py"))
HELPERS = [path for path in FILES if not path.name.startswith("test_") and path.name != "conftest.py"]


def test_tests_mirror_the_packages() -> None:
    rooms = {
        path.parent.relative_to(TESTS) for path in FILES if path.relative_to(TESTS).parts[0] in ("passes", "pipeline")
    }
    assert sorted(str(room) for room in rooms if not (ROOT / room).is_dir()) == []


def test_no_helper_name_stands_twice() -> None:
    places = defaultdict(list)
    for path in HELPERS:
        places[path.name].append(str(path.relative_to(TESTS)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_all_stands_at_doors_only() -> None:
    """A name without an underscore is for the whole package; a list says what a folder offers to others."""
    inner = {path.relative_to(ROOT) for room in ("passes", "pipeline") for path in (ROOT / room).rglob("*.py")}
    rooms = {path for path in inner if path.name != "__init__.py" and path.parts[:2] != ("pipeline", "compat")}
    lists = {str(path) for path in rooms if re.search(r"^__all__", (ROOT / path).read_text(), re.MULTILINE)}
    public = {"pipeline/errors.py", "pipeline/onnx_backend.py", "pipeline/authoring/functional.py"}
    assert lists == public


def test_a_door_says_each_name_once() -> None:
    """What a door imports is what it shows; a list would say each name again."""
    doors = [path for room in ("passes", "pipeline") for path in (ROOT / room).rglob("__init__.py")]
    assert len(doors) > 50
    listed = [str(path.relative_to(ROOT)) for path in doors if re.search(r"^__all__", path.read_text(), re.MULTILINE)]
    assert listed == []


def test_no_test_file_is_two_ideas_long() -> None:
    long = {str(path.relative_to(TESTS)): n for path in FILES if (n := len(path.read_text().splitlines())) > 450}
    assert long == {}


def test_helpers_lie_in_the_room_that_uses_them() -> None:
    """A helper of several rooms lies in tests/support, where every room looks for it."""
    texts = {path: path.read_text(encoding="utf-8") for path in FILES}
    importers = {
        helper: [path for path, text in texts.items() if path != helper and imports(text, helper)] for helper in HELPERS
    }
    far = {
        str(helper.relative_to(TESTS)): [str(path.relative_to(TESTS)) for path in paths]
        for helper, paths in importers.items()
        if helper.parent != TESTS / "support" and any(helper.parent not in path.parents for path in paths)
    }
    assert far == {}


def imports(text: str, helper: Path) -> bool:
    module = ".".join(helper.relative_to(ROOT).with_suffix("").parts)
    return module in text and re.search(rf"^(from|import) {re.escape(module)}\b", text, re.MULTILINE) is not None


def test_marks_and_tables_name_what_is_here() -> None:
    texts = {path.relative_to(TESTS).as_posix(): path.read_text(encoding="utf-8") for path in FILES}
    named = [*(place for places in MARKS.values() for place in places), *NIGHTLY, *ONE_OF_EACH]
    places = [place.partition("::") for place in named]
    missing = [
        f"{path}::{test}"
        for path, _, test in places
        if not any(file.startswith(path) and f"def {test}" in text for file, text in texts.items())
    ]
    assert missing == []


def test_no_benchmark_is_called_like_a_module_of_python() -> None:
    """`python benchmarks/passes_cost.py` puts benchmarks/ in front of the standard library."""
    scripts = {path.stem for path in (ROOT / "benchmarks").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert "passes_cost" in scripts
    assert scripts & sys.stdlib_module_names == set()


def test_the_import_rules_know_each_finder_and_checker() -> None:
    """A file of `passes/structures` that neither list named could import from both sides."""
    rules = configparser.ConfigParser()
    rules.read(ROOT / ".importlinter", encoding="utf-8")
    finders, checkers = (rules[f"importlinter:contract:{name}"] for name in ("finders", "checkers"))
    room = {path.stem for path in (ROOT / "passes/structures").glob("*.py")} - {"__init__"}
    checks = {name for name in room if name.endswith("_check")}
    assert "core_check" in checks
    assert modules_of(finders["forbidden_modules"]) == checks
    assert modules_of(checkers["source_modules"]) == checks | {"types"}
    assert modules_of(finders["source_modules"]) == room - checks - {"kinds"}, "kinds.py joins finders and checkers"
    assert modules_of(checkers["forbidden_modules"]) == room - checks - {"types"}


def modules_of(lines: str) -> set[str]:
    return {line.rpartition(".")[2] for line in lines.split()}


# Nothing but `pipeline/terminal/` writes to the terminal, so that it shows every name safely.

WRITERS = re.compile(
    r"(?<![\w.])print\(|typer\.echo|click\.echo|secho\(|sys\.(__)?std(out|err)(__)?\.write|(?<!\w)Console\("
    r"|from rich\.(console|progress) import .*\b(Console|Progress)\b|traceback\.print_|os\.write\([12],"
)
"""How code of Python writes to a terminal, and how a console of rich is made."""

PLACES = {
    "pipeline/terminal/screen.py": "the one place",
    "passes/visible.py": "for guard and bisect, which run in a user's processes and must not load rich",
    "passes/worker/server.py": "its streams, and those of its forks, are a file that the client reads",
}


def test_one_place_prints() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in ("onnxline", "passes", "pipeline")
        for path in (ROOT / package).rglob("*.py")
        if WRITERS.search(path.read_text(encoding="utf-8"))
    }
    assert found == set(PLACES)
