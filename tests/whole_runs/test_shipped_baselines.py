"""The baselines beside the shipped configurations hold on this machine too; they were accepted on another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from passes.weights.detached import read_model
from pipeline import Pipeline, RunConfig
from pipeline.baseline import baseline_of, changes, read_baseline
from pipeline.quantsim.deoptimization import graph_entry
from tests.support.paths import ROOT

CONFIGS = ROOT / "configs"
BASELINES = sorted(CONFIGS.glob("*.baseline"))


@pytest.mark.parametrize("accepted", BASELINES, ids=lambda path: path.stem)
def test_nothing_but_versions_may_differ(accepted: Path, tmp_path: Path) -> None:
    result = Pipeline(RunConfig.from_yaml(accepted.with_suffix(".yaml")), tmp_path).run()
    found = {**baseline_of(result.report), "graph": graph_entry(read_model(result.model))}
    entries = changes(read_baseline(accepted), found)
    assert [entry for entry in entries if not entry.startswith("versions")] == []


def test_they_are_the_same_for_everybody() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in BASELINES)
    assert len(BASELINES) >= 3
    assert not re.search(r"seconds|\d s\b|(?<![\w:])/[a-z]+/", text)
