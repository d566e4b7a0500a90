"""docs/how-to/guard.md says what the code does."""

from __future__ import annotations

import dataclasses
import inspect
import re

import passes
from passes.guard import GuardedCall, Returned
from passes.guard.calls import TARGETS
from passes.guard.startup.hooks import VARIABLE
from tests.support.pages import rows
from tests.support.paths import ROOT

PAGE = "docs/how-to/guard.md"


def first_cells() -> set[str]:
    return {name for row in rows(PAGE) for name in re.split("`?, `?", row[0])}


def test_every_function_field_and_outcome_has_a_row() -> None:
    fields = {field.name for field in dataclasses.fields(GuardedCall)}
    assert {target.key for target in TARGETS} | fields | set(Returned) <= first_cells()


def test_every_argument_has_a_row() -> None:
    documented = {re.split("[=`]", row[1])[0] for row in rows(PAGE) if row[0].startswith("--")}
    assert documented == set(inspect.signature(passes.guard).parameters)


def test_the_environment_variable_is_named() -> None:
    assert f"`{VARIABLE}`" in (ROOT / PAGE).read_text(encoding="utf-8")
