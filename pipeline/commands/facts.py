"""`onnxline inspect MODEL`: what an ONNX file is; `split` and `merge`: a file in parts, and two files as one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from passes.suggest import bytes_text, plural
from passes.visible import html_table, text_table, visible_line
from pipeline.commands.change import read_pairs, read_shapes
from pipeline.commands.shared import FORMAT_VERSION, add_command, check_output, locate_parts
from pipeline.errors import CheckFailed, UsageError
from pipeline.terminal import print_json, print_line, print_text

if TYPE_CHECKING:
    from passes.proof.numbers import Errors
    from passes.weights.detached import DetachedModel


MOST_SIZES: Final = 8
"""Parts whose sizes are all printed."""


def register(app: typer.Typer) -> None:
    add_command(app, "inspect", inspect)
    add_command(app, "split", split)
    add_command(app, "merge", merge)


def inspect(
    model: Path,
    shape: list[str] | None = None,
    target: list[str] | None = None,
    html: Path | None = None,
    part: str | None = None,
    as_json: bool = False,
) -> None:
    """Say what an ONNX file is: inputs, outputs, operators, parameters, MACs, memory, structures, targets."""
    from passes.tools import inspect_model
    from passes.weights.detached import read_model
    from passes.weights.files import write_file
    from passes.why import file_of
    from pipeline.quantsim.profiles import TARGETS, load_target
    from pipeline.quantsim.target_check import check_targets

    tables = [load_target(name) for name in target or ()]
    (model,) = locate_parts([model], part)
    opened = read_model(file_of(model), unread=True)
    facts = inspect_model(opened, read_shapes(shape or ()))
    names = target or TARGETS
    reports = check_targets(opened, tables or [*map(load_target, TARGETS)])
    refused = {name: [found.what for found in report.obstructions] for name, report in zip(names, reports, strict=True)}
    rows = [(name, ", ".join(found) or "takes every operator") for name, found in refused.items()]
    title = "what targets refuse"
    if html is not None:
        body = facts._repr_html_() + html_table(title, (), rows)
        write_file(html, PAGE.format(title=visible_line(model.name), body=body))
    if as_json:
        print_json({"format_version": FORMAT_VERSION, **facts.as_data(), "refused": refused})
        return
    print_text(f"{facts}{title}\n{text_table(rows)}")
    if html is not None:
        print_line(f"page: {html}")


PAGE: Final = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>:root{{color-scheme:light dark;font:14px/1.5 system-ui}}body{{margin:2em;max-width:70em}}
table{{border-collapse:collapse;margin:0 0 1.5em}}caption{{font-weight:600;padding:.3em 0}}
td,th{{padding:.15em 1.5em .15em 0;vertical-align:top;border-top:1px solid #8884}}
h1,td,th{{overflow-wrap:anywhere}}</style>
<h1>{title}</h1>
{body}"""


def split(
    model: Path,
    out: Path,
    at: list[str] | None = None,
    max_size: str | None = None,
    module: str | None = None,
    target: str | None = None,
    encodings: Path | None = None,
    no_proof: bool = False,
) -> None:
    """Write an ONNX file as parts that feed each other, with a manifest of what feeds what."""
    from passes.encodings.aimet import read_aimet
    from passes.errors import StepFailed
    from passes.tools import parts as tools
    from passes.weights.detached import read_model
    from passes.weights.files import write_errors

    ways: dict[str, Any] = {"at": at, "max_bytes": max_size, "module": module, "runs_on": target}
    if sum(way is not None for way in ways.values()) != 1:
        raise UsageError("split: expected one of --at VALUE, --max-size 1GB, --module GLOB and --target NAME")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"-o {out} is there already; expected a folder that is empty, or does not exist")
    opened = read_model(model)
    given, *versions = (None,) if encodings is None else read_aimet(encodings)
    ways = {
        "at": at or (),
        "max_bytes": None if max_size is None else read_size(max_size),
        "module": module,
        "runs_on": None if target is None else _nodes_taken(opened, target),
    }
    try:
        found = tools.split(opened, encodings=given, proof=not no_proof, **ways)
    except StepFailed as failure:
        raise CheckFailed(f"{failure}; nothing was written") from failure
    try:
        with write_errors(out):
            found.save(out, *versions)
    except BaseException:  # Ctrl-C too: the same command would not take a folder with some of the parts
        for file in out.glob("*"):
            file.unlink()
        raise
    print_text(str(found))
    nbytes = [part.model.nbytes() for part in found.parts]
    shown = nbytes if len(nbytes) <= MOST_SIZES else (min(nbytes), max(nbytes))
    sizes = (", " if shown is nbytes else " to ").join(map(bytes_text, shown))
    print_line(f"{plural(len(found.parts), 'part')} ({sizes}) in {out}, with {tools.MANIFEST}")
    print_line(_proof_text("the chain of parts computes what the whole does", found.errors))


def _nodes_taken(model: DetachedModel, target: str) -> dict[str, bool]:
    """Node → whether the target takes it."""
    from pipeline.quantsim.profiles import load_target
    from pipeline.quantsim.target_check import check_target

    refused = {place for found in check_target(model, load_target(target)).obstructions for place in found.places}
    nodes = model.without_functions().proto.graph.node
    return {node.name or node.output[0]: (node.name or node.output[0]) not in refused for node in nodes}


def read_size(text: str) -> int:
    """`1GB`, `500MiB` or a number of bytes.

    Raises:
        UsageError: it is something else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?)?B?", text, re.IGNORECASE)
    if found is None or not float(found[1]):
        raise UsageError(f"--max-size is {text!r}; expected a size such as 1GB or 500MiB")
    unit = (found[2] or "").lower()
    base = 1024 if unit.endswith("i") else 1000
    return int(float(found[1]) * base ** ("kmg".find(unit[:1]) + 1 if unit else 0))


def merge(
    first: Path, second: Path, out: Path, pairs: list[str], encodings: list[Path] | None = None, no_proof: bool = False
) -> None:
    """Write two ONNX files as one, where outputs of the first feed inputs of the second."""
    from passes.encodings.aimet import aimet_text_of, read_aimet
    from passes.errors import StepFailed
    from passes.tools import merge as merge_models
    from passes.weights.files import write_file, write_model

    if encodings and len(encodings) != 2:
        raise UsageError(f"merge: found --encodings {len(encodings)} times, expected two files: A's, then B's")
    known, versions = zip(*map(read_aimet, encodings), strict=True) if encodings else (({}, {}), ())
    check_output(out, first)
    check_output(out, second)
    try:
        mapped: dict[str, list[str]] = {}
        for text in pairs:
            [(value, fed)] = read_pairs("--map", [text], "A_OUT=B_IN").items()
            mapped.setdefault(value, []).append(fed)
        merged = merge_models(first, second, mapped, encodings=known, proof=not no_proof)
    except StepFailed as failure:
        raise CheckFailed(f"{failure}; {out} was not written") from failure
    model = merged.model
    write_model(model, out)
    if versions:
        path = out.with_suffix(".encodings")
        write_file(path, aimet_text_of(model, merged.encodings, versions[0]))
        print_line(f"encodings: {path}")
    how = _proof_text("it computes what A and B do one after the other", merged.errors)
    print_line(f"model: {out}, {plural(len(model.proto.graph.node), 'node')}; {how}")


def _proof_text(claim: str, errors: Mapping[str, Errors]) -> str:
    """What a proof of `claim` has found, by the errors of each output; there are none without a proof."""
    from passes.proof.numbers import only_compared

    if not errors:
        return "not proven"
    compared = only_compared(errors)
    drawn = [name for name in errors if name not in compared]
    worst = [f"max error {max(found.max_abs for found in compared.values()):.1e}"] if compared else []
    rest = [f"only shape and dtype of {', '.join(drawn)}, which is random"] if drawn else []
    return f"{claim}: {'; '.join([*worst, *rest])}"
