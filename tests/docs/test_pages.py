"""The reference pages say what the code says."""

from __future__ import annotations

import configparser
import dataclasses
import importlib
import json
import operator
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import onnxline
from passes import PassError, PassRow, Status, StructureVerdict
from passes.policy.policy import GROUPS
from passes.proof.numbers import TOLERANCES, Errors, Tolerance
from passes.proof.prover import Sensitivity
from passes.recipe.recipe import OWN_STEPS, SETS
from passes.structures import STRUCTURES
from pipeline.cli import INTERRUPTED
from pipeline.config import json_schema
from pipeline.errors import OnnxlineError
from pipeline.ir import Role, from_text, to_json, to_text
from pipeline.ir.json import FORMAT_VERSION as IR_VERSION
from pipeline.ir.tagged import READERS, SINGULARS, TAG_BYTES
from pipeline.lowering import lower
from pipeline.ops.attrs import CODES
from pipeline.planning import make_plan
from pipeline.planning import to_json as plan_to_json
from pipeline.planning.files import FORMAT_VERSION as PLAN_VERSION
from pipeline.planning.files import MAGIC, VERSION
from pipeline.quantsim.report import FORMAT_VERSION as QUANTSIM_VERSION
from pipeline.report import REPORT_VERSION, BackendReport, ExportReport, Report, RuntimeReport
from pipeline.report.model import TrainingReport
from tests.support.kinds_header import HEADER, kinds_header
from tests.support.pages import PAGES, blocks, rows
from tests.support.paths import ROOT

FORMATS = {
    "report.json": f"{REPORT_VERSION}",
    "ir.json": f"{IR_VERSION}",
    "plan.json": f"{PLAN_VERSION}",
    "plan.bin": f"{VERSION}",
    "quantsim.json": f"{QUANTSIM_VERSION}",
}
"""File → the number of its format, as it is written."""


def test_tolerances() -> None:
    """Every dtype with both numbers, and none besides."""
    documented = {
        name: Tolerance(float(cells[0]), float(cells[1]))
        for name, *cells in rows("docs/reference/tolerances.md")
        if name != "all others"
    }
    assert documented == dict(TOLERANCES)


def keys_of(section: dict[str, Any], schema: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted key → its default as the page writes it, for every key of a JSON Schema."""
    defaults: dict[str, str] = {}
    for key, entry in section["properties"].items():
        defaults[prefix + key] = default_of(key, entry, section)
        for inner, step in sections_in(entry, schema):
            if inner is section:  # a part of one's own has the keys of a model
                continue
            defaults |= keys_of(inner, schema, f"{prefix}{key}.{step}")
    return defaults


def default_of(key: str, entry: dict[str, Any], section: dict[str, Any]) -> str:
    if key in section.get("required", ()):
        return "required"
    if "default" in entry:
        default = entry["default"]
        return "none" if default is None else yaml.safe_dump(default, default_flow_style=True).split("\n")[0]
    # What has neither is a mapping or a section, made empty; `extends` is read before them.
    return "none" if key == "extends" else "{}"


def sections_in(entry: dict[str, Any], schema: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """The sections that an entry is, or holds by name."""
    sections = []
    for branch in (entry, *entry.get("anyOf", ())):
        named = branch.get("additionalProperties")
        for candidate, step in ((branch, ""), (named if isinstance(named, dict) else {}, "<name>.")):
            if "$ref" in candidate:
                sections.append((schema["$defs"][candidate["$ref"].rpartition("/")[2]], step))
    return sections


def test_configuration() -> None:
    """Every key of the models, with its default, in a row of its own; and no key that is not there."""
    schema = json_schema()
    expected = keys_of(schema, schema)
    documented = {
        row[0]: row[1] for row in rows("docs/reference/configuration.md") if len(row) == 3 and row[0] in expected
    }
    documented |= {
        row[0]: row[1] for row in rows("docs/reference/configuration.md") if "." in row[0] and " " not in row[0]
    }
    assert documented == expected
    assert len(expected) > 30


def test_groups_of_passes() -> None:
    """Every group that a skip list may name, and none besides."""
    text = (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")
    table = text.partition("| group | what its passes do |\n| --- | --- |\n")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(GROUPS)


def test_every_structure_and_every_step_of_a_recipe() -> None:
    text = (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")
    table = text.partition("| kind | what it is | kept means |\n| --- | --- | --- |\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(STRUCTURES)
    steps = text.partition("| step | what it is | options |\n| --- | --- | --- |\n")[2].partition("\n\n")[0]
    named = {name for row in steps.splitlines() for name in re.findall(r"`([\w@.-]+)`", row.split("|")[1])}
    assert named == {"default", *SETS, *OWN_STEPS}


REPORTED = (
    Report, ExportReport, PassRow, StructureVerdict, Sensitivity, RuntimeReport, BackendReport, Errors, TrainingReport,
)  # fmt: skip


@pytest.mark.parametrize("kind", REPORTED, ids=lambda kind: kind.__name__)
def test_report_fields(kind: type) -> None:
    text = (ROOT / "docs/reference/report.md").read_text(encoding="utf-8")
    assert [entry.name for entry in dataclasses.fields(kind) if f"`{entry.name}`" not in text] == []


def test_report_names_every_status_and_version() -> None:
    text = (ROOT / "docs/reference/report.md").read_text(encoding="utf-8")
    assert [status for status in Status if f"`{status}`" not in text] == []
    assert f"`format_version` is {REPORT_VERSION}." in text


def test_formats_of_ir_and_plan() -> None:
    """The page's graph as text is its JSON and its plan; and it names every key, every tag and both versions."""
    page = "docs/reference/formats.md"
    text = (ROOT / page).read_text(encoding="utf-8")
    (written,), shown = blocks(page, "text"), [json.loads(block) for block in blocks(page, "json")]
    graph = from_text(written)
    data = [to_json(graph), plan_to_json(make_plan(graph, lower(graph)))]
    assert (to_text(graph), data) == (written, shown)
    arguments = {"negative_slope", "self", "other"}
    assert [key for key in keys_in(data) - arguments if f"`{key}`" not in text] == []
    assert [tag for tag in (*READERS, *SINGULARS) if f"`{tag}`" not in text] == []
    assert [code for code in CODES if f"`{code}`" not in text] == []
    assert [tag for tag in TAG_BYTES if f"`{tag}`" not in text] == []
    versions = {row[0]: row[2] for row in rows(page) if row[1] == "format_version"}
    assert versions == {name: version for name, version in FORMATS.items() if name.endswith(".json")}


@pytest.mark.parametrize("page", ["docs/reference/formats.md", "docs/reference/stability.md"])
def test_both_tables_of_formats_have_the_numbers_that_are_written(page: str) -> None:
    named = {re.split(r"[`,]", row[0])[0]: row[2] for row in rows(page) if len(row) == 3}
    assert {name: named.get(name) for name in FORMATS} == FORMATS


def test_plan_bin() -> None:
    """The page and the C header have the version, the magic and the numbers of roles that Python writes."""
    page = (ROOT / "docs/reference/plan-format.md").read_text(encoding="utf-8")
    header = (ROOT / "examples/plan_reader/onnxline_plan.h").read_text(encoding="utf-8")
    assert f"64 bytes; version {VERSION}." in page
    assert f"#define ONNXLINE_PLAN_VERSION {VERSION}u" in header
    assert f'#define ONNXLINE_PLAN_MAGIC "{MAGIC.decode()}"' in header
    assert f"`{MAGIC.decode()}`" in page
    assert [f"{at} {role}" for at, role in enumerate(Role) if f"{at} {role}" not in page] == []
    assert HEADER.read_text(encoding="utf-8") == kinds_header(), "python -m tests.support.kinds_header writes it anew"
    roles = ", ".join(f"ONNXLINE_{role.name}" for role in Role)
    assert f"enum onnxline_role {{ {roles} }};" in header


def keys_in(data: Any) -> set[str]:
    if isinstance(data, list):
        return {key for item in data for key in keys_in(item)}
    if isinstance(data, dict):
        return set(data) | {key for value in data.values() for key in keys_in(value)}
    return set()


def test_exit_codes() -> None:
    codes = {0, INTERRUPTED} | {error.exit_code for root in (OnnxlineError, PassError) for error in family(root)}
    assert {int(row[0]) for row in rows("docs/reference/report.md") if row[0].isdigit()} == codes


def family(error: type[Any]) -> list[type[Any]]:
    return [error, *(kind for child in error.__subclasses__() for kind in family(child))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_import_from_onnxline_alone(page: Path) -> None:
    """`passes` and `pipeline` may be files of the reader; rooms of `onnxline` have every name that a page uses."""
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"^(?:> |    )?(?:from|import) (?:passes|pipeline)\b", text, re.MULTILINE)
    for room, names in re.findall(r"^(?:> |    )?from (onnxline[.\w]*) import ([^(#\n]+)", text, re.MULTILINE):
        public = importlib.import_module(room).__all__
        assert not [name for name in re.split(r",\s*", names.strip()) if name not in public], room


@pytest.mark.parametrize("page", ["reference/python.md", "reference/stability.md", "how-to/gpu.md"])
def test_pages_name_what_is_there(page: str) -> None:
    """Other pages name keys of metadata and operators that begin alike."""
    for name in re.findall(r"`onnxline\.(\w+(?:\.\w+)*)", (ROOT / "docs" / page).read_text(encoding="utf-8")):
        assert operator.attrgetter(name)(onnxline) is not None


def test_import_rules() -> None:
    """The page shows the layers as .importlinter has them."""
    rules = configparser.ConfigParser()
    rules.read(ROOT / ".importlinter")
    layers = rules["importlinter:contract:layers"]["layers"].split("\n")[1:]
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    [shown] = re.findall(rf"((?:^    .+\n)*^    {layers[-1]}\n)", page, re.MULTILINE)
    assert shown.split("\n")[:-1] == [f"    {layer}" for layer in layers]


def test_messages_of_the_troubleshooting_page_are_in_the_code() -> None:
    """The longest fixed part of each message; a value stands in braces there, and `qkv` is the page's example."""
    code = " ".join(
        path.read_text(encoding="utf-8") for room in ("passes", "pipeline") for path in (ROOT / room).rglob("*.py")
    )
    page = (ROOT / "docs/start/troubleshooting.md").read_text(encoding="utf-8")
    parts = [
        max(re.split("…|NAME|qkv|torch, ", quoted), key=len).strip(" :")
        for quoted in re.findall("^\\| `([^`]+)`", page, re.MULTILINE)
    ]
    messages = [part for part in parts if len(part) > 15]
    assert len(messages) > 4
    assert [message for message in messages if message not in code] == []
