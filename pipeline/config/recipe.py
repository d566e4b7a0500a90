"""The recipe of a run by default, and recipes outside of a configuration: on a command line, say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from passes.recipe import DEFAULT_RECIPE, EARLIER_RECIPES, FIRST_FOR_TORCH, TORCH_RECIPE
from pipeline.config.mistakes import to_config_error
from pipeline.config.paths import anchor_paths, read_with_bases
from pipeline.config.sections import PassesConfig
from pipeline.config.yaml_source import Document, Marks, describe, parse_value, read_yaml
from pipeline.errors import ConfigError

SUFFIXES: Final = (".yaml", ".yml")

OWNER: Final = "onnxoptimizer/"
"""Optional prefix of the passes of onnxoptimizer; a recipe names them without it."""


def default_recipe(model: object) -> tuple[str, ...]:
    """The default recipe for the section `model`, which may be plain data or validated."""
    return DEFAULT_RECIPE if _is_file(model) else TORCH_RECIPE


def _is_file(model: object) -> bool:
    if not isinstance(model, Mapping):
        return bool(getattr(model, "onnx", None))
    match model:
        case {"parts": Mapping() as sources, "part": str() as name}:
            return _is_file(sources.get(name))
    return bool(model.get("onnx"))


def write_out_earlier(model: object, recipe: Any) -> Any:
    """`recipe` with the items of each default recipe of an earlier release, which depend on the source too."""
    if not isinstance(recipe, list | tuple):
        return recipe
    names = [item if isinstance(item, str) else "" for item in recipe]
    first = () if _is_file(model) else (FIRST_FOR_TORCH,)
    earlier = {name: (*first, *EARLIER_RECIPES[name]) for name in names if name in EARLIER_RECIPES}
    return tuple(step for item, name in zip(recipe, names, strict=True) for step in earlier.get(name, (item,)))


def read_recipe(entries: Sequence[str]) -> tuple[Any, ...]:
    """The items of a recipe; none for an empty text, as `recipe: []` in YAML.

    Args:
        entries: each a YAML file: a list of steps, a mapping with a `recipe`, or a configuration; or items with commas
            between them, as YAML writes a list: `default,onnxsim`, or `{onnxsim: {check_n: 1}}`. Paths in a file are
            relative to its folder, others to the working directory.

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
    steps, _ = read_yaml(path)
    if not isinstance(steps, list | dict):
        raise ConfigError(f"{path}: found {describe(steps)}, expected a list of steps, or a configuration")
    data = {"recipe": steps} if isinstance(steps, list) else read_with_bases(path).data
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
