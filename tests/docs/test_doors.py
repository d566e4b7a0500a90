"""The main doors name each parameter, what they return and what they raise; their examples run as they are shown."""

from __future__ import annotations

import ast
import doctest
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import onnx
import pytest

import onnxline
import passes
from onnxline.bisect import bisect
from tests.support.onnx_models import biased_attention
from tests.support.paths import ROOT

DOORS: Final[dict[str, Callable[..., Any]]] = {
    "onnxline.optimize": onnxline.optimize,
    "onnxline.run": onnxline.run,
    "onnxline.diff": onnxline.diff,
    "onnxline.compare": onnxline.compare,
    "onnxline.inspect_model": onnxline.inspect_model,
    "onnxline.split": onnxline.split,
    "onnxline.merge": onnxline.merge,
    "onnxline.extract": onnxline.extract,
    "onnxline.change_outputs": onnxline.change_outputs,
    "onnxline.rename": onnxline.rename,
    "onnxline.fix_shapes": onnxline.fix_shapes,
    "onnxline.change_batch": onnxline.change_batch,
    "onnxline.convert_opset": onnxline.convert_opset,
    "onnxline.to_fp16": onnxline.to_fp16,
    "onnxline.to_bf16": onnxline.to_bf16,
    "onnxline.to_int8": onnxline.to_int8,
    "onnxline.guard": onnxline.guard,
    "onnxline.why": onnxline.why,
    "onnxline.bisect.bisect": bisect,
    "onnxline.from_onnx": onnxline.from_onnx,
    "onnxline.compile_graph": onnxline.compile_graph,
    "onnxline.extract_ir": onnxline.extract_ir,
    "onnxline.execute_ir": onnxline.execute_ir,
    "onnxline.record_step": onnxline.record_step,
    "passes.optimize": passes.optimize,
}


def sections(door: Callable[..., Any]) -> dict[str, str]:
    """Heading → text, of a docstring in Google's form."""
    parts = re.split(r"^(\w+):\n", inspect.getdoc(door) or "", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", DOORS)
def test_every_parameter_is_named(name: str) -> None:
    named = re.findall(r"^ {4}(\w+): ", sections(DOORS[name])["Args"], re.MULTILINE)
    assert named == list(inspect.signature(DOORS[name]).parameters)
    assert sections(DOORS[name]).keys() >= {"Returns", "Raises", "Example"}


@pytest.mark.parametrize("name", DOORS)
def test_the_example_runs_as_it_is_shown(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with `model.onnx`, an attention block with an Identity before it."""
    model = biased_attention()
    for node in model.graph.node:
        node.input[:] = ["given" if value == "x" else value for value in node.input]
    identity = onnx.helper.make_node("Identity", ["x"], ["given"])
    nodes = [identity, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(sections(DOORS[name])["Example"], {}, name, None, None)
    assert example.examples
    report: list[str] = []
    doctest.DocTestRunner().run(example, out=report.append)
    assert not report, "".join(report)


def shown_things() -> dict[str, Any]:
    """Path → what `onnxline` and its rooms show."""
    rooms = [onnxline, *(import_module(f"onnxline.{room}") for room in onnxline.ROOMS)]
    return {f"{room.__name__}.{name}": getattr(room, name) for room in rooms for name in room.__all__}


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """What the rooms of `onnxline` show: functions, and the methods that a class of theirs documents."""
    for name, thing in shown_things().items():
        if inspect.isfunction(thing):
            yield name, thing
        for method, stored in vars(thing).items() if inspect.isclass(thing) else ():
            plain = getattr(stored, "__func__", stored)
            if inspect.isfunction(plain) and not method.startswith("_") and plain.__doc__:
                yield f"{name}.{method}", plain


def test_each_public_function_names_its_parameters() -> None:
    """In its Args, or as `name` in its sentences; a method without a docstring overrides one that has it."""
    unnamed: dict[str, set[str]] = {}
    for name, function in public_functions():
        if function.__module__ == "tests.conftest":  # it lends running workers in place of `open_context`
            continue
        said = " ".join(re.findall(r"^ {4}\w+: |`[^`]+`", inspect.getdoc(function) or "", re.MULTILINE))
        wanted = [*inspect.signature(function).parameters]
        missing = {*wanted} - {"self", "cls", "_"} - {*re.findall(r"\w+", said)}
        if missing:
            unnamed[name] = missing
    assert unnamed == {}


def fields_of(cls: type) -> tuple[set[str], set[str]]:
    """The public fields that a class declares, and the names that it says: in backticks, as `name: …`, or of a field
    with a docstring after it."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    said = " ".join(re.findall(r"^(?: {4})?[\w, ]+: |`[^`]+`", ast.get_docstring(tree) or "", re.MULTILINE))
    declared, named = set[str](), {*re.findall(r"\w+", said)}
    for statement, following in itertools.pairwise([*tree.body, ast.Pass()]):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            declared.add(statement.target.id)
            match following:
                case ast.Expr(value=ast.Constant(value=str())):
                    named.add(statement.target.id)
    return {name for name in declared if not name.startswith("_")}, named


def test_each_public_class_names_its_fields() -> None:
    """In its docstring, or in one after the field; a base that is not shown may declare further ones."""
    fields = {name: fields_of(cls) for name, cls in shown_things().items() if inspect.isclass(cls)}
    assert sum(bool(declared) for declared, _ in fields.values()) > 50
    unnamed = {name: sorted(declared - named) for name, (declared, named) in fields.items() if declared - named}
    assert unnamed == {}


def test_the_files_of_which_ruff_reads_the_docstrings_are_there() -> None:
    """A file that has moved would be left out in silence."""
    names = re.findall(r'^"!\{(.+)\}\.py" = \["D"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0].split(",")
    files = {name: {*ROOT.glob(f"{name}.py")} for name in names}
    assert [name for name, found in files.items() if not found] == []
    homes = {Path(inspect.getsourcefile(inspect.unwrap(door)) or "").resolve() for door in DOORS.values()}
    assert homes <= set().union(*files.values())
