"""Which configurations a batch is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.batch import read_configs
from pipeline.errors import UsageError


def test_globs_are_expanded_and_each_file_is_taken_once(small_config, tmp_path: Path) -> None:
    for name in ("b", "a", "odd[1]"):
        small_config(f"{name}.yaml")
    planned = read_configs([str(tmp_path / "b.yaml"), str(tmp_path / "*.yaml"), str(tmp_path / "odd[1].yaml")])
    assert [config.path.name for config in planned] == ["b.yaml", "a.yaml", "odd[1].yaml"]


def test_overrides_hold_for_each(small_config, tmp_path: Path) -> None:
    small_config("a.yaml"), small_config("b.yaml")
    planned = read_configs([str(tmp_path / "*.yaml")], ["verify.draws=1"])
    assert [config.config.verify.draws for config in planned if config.config] == [1, 1]


def test_two_of_one_name_would_share_a_folder(small_config) -> None:
    first, second = small_config("a.yaml", name="same"), small_config("b.yaml", name="same")
    with pytest.raises(UsageError, match=r"a\.yaml and .*b\.yaml are both named 'same'"):
        read_configs([str(first), str(second)])


def test_a_pattern_that_names_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'.*nothing/\*\.yaml' names no file"):
        read_configs([str(tmp_path / "nothing/*.yaml")])


def test_one_that_cannot_be_read_is_kept_with_its_mistake(small_config) -> None:
    (planned,) = read_configs([str(small_config("a.yaml", passes={"recipes": []}))])
    assert planned.config is None
    assert "recipes" in str(planned.mistake)


def test_a_model_needs_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").touch(), (tmp_path / "b.py").touch()
    planned = read_configs([str(tmp_path / "*.onnx"), f"{tmp_path}/b.py:make", "package.module:make"])
    assert [one.name for one in planned] == ["a", "b-make", "package.module-make"]
    assert [one.config.model.onnx or one.config.model.factory for one in planned if one.config] == [
        f"{tmp_path}/a.onnx",
        f"{tmp_path}/b.py:make",
        "package.module:make",
    ]
