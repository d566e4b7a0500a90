"""A recipe outside of a configuration: written on a command line, or in a YAML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from passes.recipe import DEFAULT_RECIPE, TORCH_RECIPE
from pipeline.config.explain import to_config_error
from pipeline.config.merge import read_with_bases
from pipeline.config.paths import anchor_paths
from pipeline.config.sections import PassesConfig
from pipeline.config.yaml_source import Document, Marks, parse_value
from pipeline.errors import ConfigError

SUFFIXES: Final = (".yaml", ".yml")

OWNER: Final = "onnxoptimizer/"
"""Optional prefix of the passes of onnxoptimizer; a recipe names them without it."""


def default_recipe(model: object) -> tuple[str, ...]:
    """The default recipe for the section `model`, which may be plain data or validated."""
    onnx = model.get("onnx") if isinstance(model, Mapping) else getattr(model, "onnx", None)
    return DEFAULT_RECIPE if onnx else TORCH_RECIPE


def read_recipe(entries: Sequence[str]) -> tuple[Any, ...]:
    """The items of a recipe; none for an empty text, as `recipe: []` in YAML.

    Args:
        entries: each a YAML file, which is a configuration or has a `recipe`; or items with commas between them, as
            YAML writes a list: `default,onnxsim`, or `{onnxsim: {check_n: 1}}`. Paths in a file are relative to its
            folder, others to the working directory.

    Raises:
        ConfigError: a file is missing or has no recipe, or an item is none.
    """
    return tuple(item for entry in entries for item in _items(entry))


def recipe_of_run(model: Path) -> tuple[Any, ...]:
    """The recipe of the run in the folder `model`; for an ONNX file, the default recipe."""
    config = model / "run.yaml"
    return read_recipe([str(config)]) if config.is_file() else DEFAULT_RECIPE


def _items(entry: str) -> tuple[Any, ...]:
    if entry.endswith(SUFFIXES):
        return _check_items(_of_file(Path(entry)), entry)
    return _check_items(parse_value(f"[{entry}]", "--recipe"), "--recipe")


def _of_file(path: Path) -> Any:
    data = read_with_bases(path).data
    if "recipe" in data:
        return anchor_paths({"passes": {"recipe": data["recipe"]}}, path.parent)["passes"]["recipe"]
    section = data.get("passes", {})
    if isinstance(section, dict) and "model" in data:  # a configuration that may leave its recipe out
        return section.get("recipe", list(default_recipe(data["model"])))
    if not isinstance(section, dict) or "recipe" not in section:
        raise ConfigError(f"{path}: found no recipe; expected a configuration, or `recipe: [default, onnxsim]`")
    return section["recipe"]


def check_passes(section: Mapping[str, Any], title: str) -> PassesConfig:
    """Check the section `passes` by itself, as an option of the command line or an argument gives it.

    Raises:
        ConfigError: its message begins with `title`, and names the keys without the section.
    """
    try:
        return PassesConfig.model_validate(section)
    except ValidationError as error:
        raise to_config_error(error, PassesConfig, Document(dict(section), Marks.none(title)), title) from None


def _check_items(items: Any, title: str) -> tuple[Any, ...]:
    recipe = check_passes({"recipe": items}, title).recipe
    return tuple(item.removeprefix(OWNER) if isinstance(item, str) else item for item in recipe)
