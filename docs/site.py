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
from pipeline.ops import KINDS, Kind
from pipeline.ops.aten import TYPED
from pipeline.ops.aten.typed import TypedCall
from pipeline.ops.aten.views import OPERATORS as VIEW_OPERATORS
from pipeline.ops.kinds import OPERATORS
from pipeline.ops.rows import CAPTURING_DEVICES, KernelKind
from pipeline.runtime.kernels import NATIVE, PACKERS
from pipeline.runtime.kernels.aten.call import FUNCTIONAL, find_out_variant
from pipeline.runtime.kernels.aten.fast_paths import FAST_PATHS
from pipeline.runtime.kernels.aten.native import CALLS as NATIVE_CALLS
from pipeline.runtime.operators import find_operator

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
        "reference/operators.md": "\n".join(operator_lines()),
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
            spelled = ", ".join(f"`{spelling}`" for spelling in (*option.opts, *option.secondary_opts))
            yield f"| {spelled} | {_plain(option.help)} | {default} |"
        yield ""
    for name, inner in getattr(command, "commands", {}).items():
        yield from _lines_of(f"{path} {name}", inner, level + 1)


def _word_of(argument: Any) -> str:
    word = (argument.metavar or argument.name.upper()) + ("..." if argument.nargs == -1 else "")
    return word if argument.required else f"[{word}]"


def _plain(text: str | None) -> str:
    return " ".join((text or "").replace("|", "\\|").split())


def operator_lines() -> Iterator[str]:
    """The rows of `pipeline.ops`, and what the runtime has for them."""
    yield OPERATORS_HEAD
    yield "## Operators with a kind of their own\n"
    yield "| number | kind | operators | signature | result | may overwrite | faster forms | no capture |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    arguments = {row.number: row.signature.partition("(")[2] for row in OPERATORS}
    for kind, call in TYPED.items():
        first = call.signature.operators[0]
        cells = (
            " ".join(f"`{operator}`" for operator in call.signature.operators),
            f"`({_plain(arguments[kind])}`",
            _result_of(first),
            ", ".join(_overwritten(call)),
            ", ".join(_faster_forms(kind, first)),
            _obstacles_of(call.row),
        )
        yield f"| {int(kind)} | {kind.name} | {' | '.join(cells)} |"
    yield "\n## Views\n"
    yield "A view shares the storage of its operand where the layouts allow it, and is a copy elsewhere.\n"
    yield "| operators of torch | become, in all or in some calls |\n| --- | --- |"
    for rule, names in VIEW_OPERATORS:
        yield f"| {' '.join(f'`aten.{name}`' for name in names.split())} | {_name_of_rule(rule)} |"
    yield "\n## Kinds that no operator has\n"
    yield "| number | kind | fields | may overwrite input | view | faster forms | no capture |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for kind in Kind:
        if kind in TYPED:
            continue
        row = KINDS[kind.name]
        over = ", ".join(map(str, row.inplace)) or ("one for each result" if row.overwrites else "")
        forms, view = ", ".join(_faster_forms(kind, "")), "yes" if row.view else ""
        fields = f"`{row.schema.partition(':')[2]}`" if row.schema.partition(":")[2] else ""
        yield f"| {int(kind)} | {kind.name} | {fields} | {over} | {view} | {forms} | {_obstacles_of(row)} |"


OPERATORS_HEAD = """# Operators

The kind of an op is the name of an operator: of torch (`aten.add.Tensor`), or of onnxline
(`onnxline.quantize.default`), registered with torch. This page is made from the rows of `pipeline/ops`, which lowering,
planner, checker and kernels read. [ONNX operators as operators of torch](onnx-decompositions.md) is the way into them.

- **signature**: `T` is a tensor, `T?` one that may be absent, `T[]` several, `n` a number, `i` an integer, `f` a float,
  `s` a text, `?` a flag; `=` has only this value, and `-` does not matter. A call with other arguments, and every
  operator of torch that is not here, is a generic call: kind `Aten` (901), by its name.
- **result**: the overload of torch that writes it into given storage; the result of the others is copied there.
- **may overwrite**: operands whose storage the result may take when nobody reads them later, with the same shape and
  dtype.
- **faster forms**: *packed weight* where a weight is stored, *C++* where `native` asks for it, *fast path* in place of
  a call by schema.
- **no capture**: where a capture cannot hold the call, and why; the call splits the capture there.
"""


def _result_of(operator: str) -> str:
    variant = None if operator in FUNCTIONAL else find_out_variant(find_operator(operator))
    return "copied" if variant is None else f"`{variant[0]}`"


def _name_of_rule(rule: Any) -> str:
    """`as_swap(…)` is a rule called swap."""
    return rule.__qualname__.partition(".")[0].removeprefix("as_").replace("_", " ")


def _overwritten(call: TypedCall) -> list[str]:
    tensors = [argument.name for argument in call.signature.arguments if argument.code.startswith("T")]
    return [tensors[place] for place in call.row.inplace]


def _faster_forms(kind: Kind, operator: str) -> Iterator[str]:
    if kind in PACKERS:
        yield "packed weight"
    if kind in NATIVE or operator in NATIVE_CALLS:
        yield "C++"
    if operator in FAST_PATHS:
        yield "fast path"


def _obstacles_of(row: KernelKind) -> str:
    if len(set(row.obstacles.values())) == 1 and row.obstacles.keys() == set(CAPTURING_DEVICES):
        return f"on any device: {next(iter(row.obstacles.values()))}"
    return "; ".join(f"{device}: {reason}" for device, reason in row.obstacles.items())
