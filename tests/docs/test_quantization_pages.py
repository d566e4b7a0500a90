"""Each page on quantization begins with a configuration that its first command runs, and all YAML there is right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import RunConfig
from tests.support.pages import blocks
from tests.support.paths import ROOT

PAGES = (
    "docs/how-to/quantization.md",
    "docs/how-to/four-bits.md",
    "docs/how-to/mixed-precision.md",
    "docs/how-to/converter.md",
    "docs/how-to/quantize-large.md",
    "docs/how-to/adapters.md",
    "docs/reference/quantization-rules.md",
)


def read_config(text: str, folder: Path, source: dict[str, Any]) -> RunConfig:
    """The configuration of a YAML in `folder`, with `source` where the YAML names no model."""
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    path = folder / "page.yaml"
    path.write_text(yaml.safe_dump(source | yaml.safe_load(text)), encoding="utf-8")
    return RunConfig.from_yaml(path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: Path(page).stem)
def test_the_first_yaml_is_a_whole_configuration_that_a_command_runs(page: str, tmp_path: Path) -> None:
    first = blocks(page, "yaml")[0]
    name = first.partition(".yaml")[0].removeprefix("# ")
    assert re.search(rf"^    onnxline .*\b{name}\.yaml$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert read_config(first, tmp_path, {}).quantsim is not None


@pytest.mark.parametrize(
    ("page", "text"), [(Path(page).stem, text) for page in PAGES for text in blocks(page, "yaml")[1:]]
)
def test_every_other_yaml_is_a_section_of_a_configuration(page: str, text: str, tmp_path: Path) -> None:
    assert read_config(text, tmp_path, {"model": {"onnx": "examples/attention.onnx"}}).quantsim is not None
