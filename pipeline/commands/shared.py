"""What commands share: how options are declared, settings and outputs that are checked, and text with colours."""

from __future__ import annotations

import inspect
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from passes.suggest import plural
from passes.visible import visible_line
from pipeline.errors import UsageError
from pipeline.terminal import open_screen, print_text

if TYPE_CHECKING:
    from passes.step import Repeat, Step
    from pipeline.config import RunConfig


CONFIG_SUFFIXES: Final = (".yaml", ".yml")

FORMAT_VERSION: Final = 1
"""Version of the output of `--json`; a command whose output changes has one of its own."""


def add_command(
    app: typer.Typer, name: str, function: Callable[..., Any], *, section: str = "", **settings: Any
) -> None:
    """Register `function` as a command; `name` is the whole one, such as `ir info`, of which `app` may be the group.
    `section` is that of options.toml, for commands that share options."""
    app.command(name.rpartition(" ")[2], **settings)(with_options(function, name, section))


def with_options(function: Callable[..., Any], name: str, section: str = "") -> Callable[..., Any]:
    """`function` with the words of its options from options.toml, as typer reads them from its annotations."""
    table = _read_options()
    sections = ("shared", section or name.partition(" ")[0], name)
    rows = {key: row for section in sections for key, row in table.get(section, {}).items()}
    kinds = get_type_hints(function)
    for key, parameter in inspect.signature(function).parameters.items():
        if kinds[key] is typer.Context:
            continue
        row = dict(rows[key])
        flags = row.pop("flags", "").split()
        is_argument = row.pop("argument", not flags and parameter.default is parameter.empty)
        make: Any = typer.Argument if is_argument else typer.Option
        kinds[key] = Annotated[kinds[key], make(*flags, **row)]
    function.__annotations__ = kinds
    if (signature := getattr(function, "__signature__", None)) is not None:  # one that was put together
        known = signature.parameters.values()
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[parameter.replace(annotation=kinds[parameter.name]) for parameter in known]
        )
    return function


@cache
def _read_options() -> dict[str, dict[str, dict[str, Any]]]:
    return tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))


def wishes_of(
    recipe: Sequence[str] | None, keep: Sequence[str] | None, skip: Sequence[str] | None
) -> dict[str, Sequence[Any]]:
    """The keys of the section `passes` that the given options replace."""
    from pipeline.config import read_recipe

    wishes: dict[str, Sequence[Any]] = {}
    if recipe is not None:
        wishes["recipe"] = read_recipe(recipe)
    for name, entries in (("keep", keep), ("skip", skip)):
        if entries is not None:
            wishes[name] = [] if list(entries) == [""] else split_names(f"--{name}", entries)
    return wishes


def split_names(option: str, entries: Sequence[str] | None) -> list[str]:
    """The names of an option that may be repeated and may hold commas.

    Raises:
        UsageError: an entry names nothing, as a variable does that a shell does not know.
    """
    for entry in entries or ():
        if not entry.strip(" ,"):
            raise UsageError(f"{option} {entry!r} names nothing; expected a name, or no {option}")
    return list(dict.fromkeys(name.strip() for entry in entries or () for name in entry.split(",") if name.strip()))


PARTS: Final = "parts"
"""The folder of a run in parts that has the folder of each part's run."""


def part_names(path: Path) -> list[str]:
    """The parts of the run in the folder `path`, sorted; empty where it is no run in parts."""
    folder = path / PARTS
    return sorted(child.name for child in folder.iterdir()) if folder.is_dir() else []


def folder_of_part(path: Path, part: str | None) -> Path:
    """The folder of one part where `path` is that of a run in parts; otherwise `path` itself.

    Raises:
        UsageError: the run has no such part, or has parts of which none is named.
    """
    known = part_names(path)
    if part in known:
        return path / PARTS / str(part)
    if known:
        found = "no --part" if part is None else f"--part {part}"
        raise UsageError(f"{path} is a run in parts, and found {found}; expected --part {' or --part '.join(known)}")
    if part is not None:
        raise UsageError(f"found --part {part}, but {path} is no folder of a run in parts; leave it out")
    return path


def locate_parts(paths: Sequence[Path], part: str | None) -> list[Path]:
    """`folder_of_part` of each of the models that a command compares; an ONNX file stays as it is.

    Raises:
        UsageError: see `folder_of_part`; or a part is named, and all models are ONNX files.
    """
    if part is not None and all(path.is_file() for path in paths):
        raise UsageError(
            f"found --part {part} with ONNX files alone; leave it out, or name the folder of a run in parts"
        )
    return [path if path.is_file() else folder_of_part(path, part) for path in paths]


def custom_ops_of(path: Path, overrides: Sequence[str] = ()) -> Sequence[str]:
    """The files of custom operators that a configuration, or the run in a folder, names; none for an ONNX file."""
    from pipeline.config import RunConfig

    settings = path / "run.yaml" if path.is_dir() else path
    if settings.suffix not in CONFIG_SUFFIXES or not settings.is_file():
        return ()
    return RunConfig.from_source(settings, overrides).custom_ops


def check_output(path: Path, source: Path | None = None) -> None:
    """Refuse a place where no ONNX file can be written, before the work.

    Raises:
        UsageError: the message says what is wrong with the place.
    """
    if path.suffix != ".onnx":
        raise UsageError(f"-o {path}: expected a file that ends in .onnx, where the final model is written")
    from passes.weights.files import write_errors

    with write_errors(path):  # a name that is too long, say
        _check_free(path, source)


def _check_free(path: Path, source: Path | None) -> None:
    if path.is_dir():
        raise UsageError(f"-o {path} is a folder; expected a file, such as {path / 'model.onnx'}")
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise UsageError(f"-o {path} is the source itself, which is not written over; give another file")
    above = path.parent
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        raise UsageError(f"-o {path}: {above} is a file; expected a folder")
    if not os.access(above, os.W_OK):
        raise UsageError(f"-o {path}: the folder {above} cannot be written")


def describe_settings(config: RunConfig, steps: Sequence[Step | Repeat], folder: Path) -> str:
    """What a run of `config` would do: its source, its steps, its policy and its files."""
    from passes.policy.policy import Policy
    from passes.step import flatten

    policy = Policy(config.passes.skip, config.passes.keep, config.passes.watch)
    names = [step.name for step in flatten(steps)]
    model = config.model
    library = model.transformers or model.diffusers
    source = model.factory or model.onnx or (library.class_name or library.folder if library else "")
    if model.parts is not None:
        return "\n".join(_describe_parts(config, folder))
    left_out = ""
    if config.runtime.is_default("plan") and find_spec("torch") is None:
        left_out = " (plan is left out, since torch is not installed)"
    facts = {
        "name": config.name,
        "source": source,
        "checkpoint": config.checkpoint or "",
        "recipe": ", ".join(map(_item_text, config.passes.recipe)),
        "steps": f"{len(names)}: {', '.join(name for name in names if not policy.skips(name))}" if names else "none",
        "skipped": ", ".join(f"{name} ({skip.reason})" for name in names if (skip := policy.skips(name))),
        "keep": ", ".join(policy.keep) or "nothing",
        "contrib": config.passes.contrib or "",
        "skip": ", ".join(policy.skip) or "nothing",
        "proof": f"{config.verify.proof}, {plural(config.verify.draws, 'draw')}",
        "backends": ", ".join(config.runtime.chosen) + left_out,
        "files": f"{folder}/" + (" (has an earlier run)" if (folder / "report.json").exists() else ""),
    }
    return "".join(f"{key:<10}  {visible_line(text)}\n" for key, text in facts.items() if text)


def _describe_parts(config: RunConfig, folder: Path) -> Iterator[str]:
    """What a run of own parts would do: for each part what a run of it by itself would."""
    from passes.recipe.recipe import steps_of

    for name in config.model.part_names:
        part = config.of_part(name)
        yield f"part {name}\n{describe_settings(part, steps_of(part.passes.recipe), folder / 'parts' / name)}"


def _item_text(item: Any) -> str:
    if isinstance(item, str):
        return item
    ((name, options),) = item.items()
    return f"{name} {options}" if options else name


def print_styled(text: str, styles: Mapping[str, str]) -> None:
    """Print lines; on a terminal each has the style of the first key of `styles` that it begins with.

    Args:
        styles: how a line begins → a style of rich.
    """
    screen = open_screen()
    if not screen.is_terminal:
        print_text(text)
        return
    for line in text.removesuffix("\n").split("\n"):
        screen.print_line(line, next((style for begin, style in styles.items() if line.startswith(begin)), ""))
