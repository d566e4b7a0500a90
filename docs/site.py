"""What the site adds to this folder: commands, operators, the Python API, reports, and the pages of the project's root.

mkdocs calls the functions by name (`hooks` in mkdocs.yml). Pages link to files of the repository as they do on GitHub;
on the site such a link leads there.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

import onnxline
from pipeline.cli import COMMANDS, load_command
from pipeline.importers.from_onnx.model import FAMILIES

ROOT: Final = Path(__file__).parents[1]

GALLERY: Final = ROOT / "runs" / "gallery"
"""Runs of the shipped configurations, whose reports the site shows."""

ROOT_PAGES: Final = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md"}
"""Page of the site → file of the repository."""

LINK: Final = re.compile(r"\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of code, and those of the repository's root."""
    pages = {
        "reference/cli.md": "\n".join(_command_lines()),
        "reference/operators.md": "\n".join(_operator_lines()),
        **{f"reference/api/{name}.md": text for name, text in _api_pages()},
        **{page: (ROOT / source).read_text(encoding="utf-8") for page, source in ROOT_PAGES.items()},
    }
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    for report in _reports():
        files.append(File.generated(config, f"start/{report.parent.name}.html", abs_src_path=str(report)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Lead each link to a file outside of this folder to the repository."""
    home = ROOT_PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    pages = {source: page for page, source in ROOT_PAGES.items()}

    def target(match: re.Match[str]) -> str:
        path, mark, anchor = match[1].partition("#")
        if not path or ":" in path:
            return match[0]
        full = posixpath.normpath(posixpath.join(posixpath.dirname(home), path))
        inside = pages.get(full) or (full.removeprefix("docs/") if full.startswith("docs/") else None)
        if inside is not None:
            return f"]({posixpath.relpath(inside, posixpath.dirname(page.file.src_uri) or '.')}{mark}{anchor})"
        return f"]({config['extra']['repository']}/blob/main/{full}{mark}{anchor})"

    text = LINK.sub(target, markdown)
    return text.replace("GALLERY", "\n".join(_gallery_lines())) if page.file.src_uri == "start/gallery.md" else text


def _reports() -> list[Path]:
    return sorted(GALLERY.glob("*/report.html"))


def _gallery_lines() -> Iterator[str]:
    """A row for each report; links in HTML, since mkdocs takes a file that is no page for a mistake."""
    if not _reports():
        yield "This copy of the site was built without reports."
        return
    yield "| configuration | report |\n| --- | --- |"
    for report in _reports():
        name = report.parent.name
        yield f'| `configs/{name}.yaml` | <a href="{name}.html">{name}</a> |'


def _api_pages() -> Iterator[tuple[str, str]]:
    """(name, page) of the front door and of each room, for mkdocstrings to add signatures and descriptions."""
    for module in (onnxline, *(getattr(onnxline, room) for room in onnxline.ROOMS)):
        shown = {name: getattr(module, name) for name in module.__all__ if not name.startswith("__")}
        documented = [entry for entry in shown.values() if inspect.isclass(entry) or inspect.isfunction(entry)]
        title = f"# {module.__name__}\n\n{(module.__doc__ or '').partition(chr(10))[0]}\n"
        entries = (f"::: {entry.__module__}.{entry.__qualname__}\n" for entry in documented)
        yield module.__name__.rpartition(".")[2], "\n".join((title, *entries))


def _command_lines() -> Iterator[str]:
    """Every command with its arguments and options, as `--help` knows them."""
    yield "# Commands\n\nThis page is made from the commands themselves. `onnxline COMMAND --help` says the same.\n"
    for name in COMMANDS:
        yield from _lines_of(f"onnxline {name}", load_command(name), 2)


def _lines_of(path: str, command: Any, level: int) -> Iterator[str]:
    words = [_word_of(param) for param in command.params if param.param_type_name == "argument"]
    yield f"{'#' * level} `{' '.join([path, *words])}`\n\n{_plain(command.help)}\n"
    options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    if options:
        yield "| option | meaning | default |\n| --- | --- | --- |"
        for option in options:
            default = "" if option.default in (None, False, ()) or callable(option.default) else f"`{option.default}`"
            spelled = ", ".join(f"`{one}`" for one in (*option.opts, *option.secondary_opts))
            yield f"| {spelled} | {_plain(option.help)} | {default} |"
        yield ""
    for name, inner in getattr(command, "commands", {}).items():
        yield from _lines_of(f"{path} {name}", inner, level + 1)


def _word_of(argument: Any) -> str:
    word = (argument.metavar or argument.name.upper()) + ("..." if argument.nargs == -1 else "")
    return word if argument.required else f"[{word}]"


def _plain(text: str | None) -> str:
    return " ".join((text or "").replace("|", "\\|").split())


def _operator_lines() -> Iterator[str]:
    """The ONNX operators that become IR, by family, with the opsets at which ONNX has changed each."""
    yield "# Operators\n\nWhat the importer takes, with the opsets in which ONNX has defined each operator anew.\n"
    yield "| operator | family | opsets |\n| --- | --- | --- |"
    for family, importers in FAMILIES.items():
        for name in sorted(importers):
            yield f"| {name} | {family} | {', '.join(map(str, _opsets(name)))} |"


def _opsets(operator: str) -> list[int]:
    import onnx

    domain, _, name = operator.rpartition("::")
    schemas = onnx.defs.get_all_schemas_with_history()
    return sorted({one.since_version for one in schemas if one.name == name and one.domain == domain})
