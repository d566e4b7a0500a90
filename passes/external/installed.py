"""What is known of the libraries: passes and options of the installed releases, clear errors for those that they do not
have, and tables of text next to this file with a row for each pass."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import onnx

from passes.errors import PolicyError, StepFailed
from passes.step import Description
from passes.suggest import nearest

if TYPE_CHECKING:
    from passes.context import PassContext

Answer = TypeVar("Answer")

LISTING_S: Final = 180.0
"""Seconds that a library may take to be imported and listed."""


def require(module: str, step: str, extra: str) -> None:
    """Refuse to go on without an optional package. It is looked for and not imported.

    Raises:
        PolicyError: naming the extra that brings it.
    """
    if importlib.util.find_spec(module) is None:
        raise PolicyError(f"the pass {step!r} needs {module}, an extra: pip install 'onnxline[{extra}]'")


def refuse_older(distribution: str, oldest: str, installed: str | None = None) -> None:
    """Raises PolicyError where the release of a library that is installed is older than what onnxline can use."""
    installed = installed or installed_version(distribution)
    if _numbers(installed) < _numbers(oldest):
        raise PolicyError(
            f"{distribution} {installed} is installed, and onnxline needs {oldest} or newer; "
            f"pip install -U '{distribution}>={oldest}'"
        )


@cache
def installed_version(distribution: str) -> str:
    """The installed release; `metadata.version` reads and parses a file each time."""
    return metadata.version(distribution)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def ask(context: PassContext, function: Callable[..., Answer], step: str, **arguments: Any) -> Answer:
    """Ask the worker for what the installed release has; `function` runs there and returns it.

    Raises:
        PolicyError: the library cannot be asked; its passes cannot be left out without their names.
    """
    try:
        return context.worker.ask(function, within_s=LISTING_S, **arguments)
    except StepFailed as failure:
        raise PolicyError(
            f"{step} cannot be asked for its passes, so none of them can be skipped: {failure}"
        ) from failure


def refuse_unknown(names: Iterable[object], known: Iterable[str], title: str) -> None:
    """Raises PolicyError for the first of `names` that is not known; `title` as in `onnxslim has no option`."""
    known = tuple(known)
    for name in names:
        if name not in known:
            hint = nearest(str(name), known) or f"; it has: {', '.join(known)}"
            raise PolicyError(f"{title} {name!r}{hint}")


def refuse_wrong_values(
    context: PassContext, hints: Callable[[], Mapping[str, Any]], step: str, options: Mapping[str, Any]
) -> None:
    """Raises PolicyError for the first option whose value is not of the type that the library declares.

    Args:
        context: where the library is asked.
        hints: a function for the worker that returns option → type.
        step: the name of the step, for the message.
        options: name → value, as the user gave them.
    """
    wrong = context.worker.ask(find_wrong_value, within_s=LISTING_S, hints=hints, options=dict(options))
    if wrong:
        raise PolicyError(f"{step}: {wrong}")


def find_wrong_value(hints: Callable[[], Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """In the worker: describe the first value of a wrong type; empty if all types are right. Options without a type
    take any value."""
    from pydantic import TypeAdapter, ValidationError

    types = hints()
    for option, value in options.items():
        hint = types.get(option, Any)
        try:
            TypeAdapter(hint).validate_python(value, strict=True)
        except ValidationError:
            return f"{option} is {value!r}; expected {inspect.formatannotation(hint).replace('typing.', '')}"
    return ""


def refuse_failing(context: PassContext, function: Callable[..., None], step: str, options: Mapping[str, Any]) -> None:
    """Raises PolicyError for options that the library itself refuses; `function` calls it in the worker on a model in
    which there is nothing to do."""
    try:
        context.worker.ask(function, within_s=LISTING_S, options=dict(options))
    except StepFailed as failure:
        reason = " ".join(str(failure).split())
        raise PolicyError(f"{step} does not take these options ({format_options(options)}): {reason}") from failure


def trivial_model() -> onnx.ModelProto:
    """A model in which no library has anything to do."""
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[1] x) => (float[1] y) {y = Neg(x)}'
    )


def format_options(options: Mapping[str, Any]) -> str:
    """Options that have a value, as `name: value`, with commas between."""
    return ", ".join(f"{name}: {value}" for name, value in options.items() if value is not None)


def refuse_wrong_shapes(step: str, options: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises PolicyError where one of the options `names` is no mapping of inputs to shapes."""
    for name in names:
        given = options.get(name)
        shapes = given.values() if isinstance(given, Mapping) else ()
        is_right = given is None or isinstance(given, Mapping)
        for shape in shapes:
            is_right &= isinstance(shape, list | tuple) and all(type(size) is int and size > 0 for size in shape)
        if not is_right:
            raise PolicyError(
                f"{step}: {name} is {given!r}; expected the shapes of inputs, as in {{x: [1, 3, 224, 224]}}"
            )


def texts(options: Mapping[str, Any], key: str, step: str) -> list[str]:
    """The option `key` of a step as a list of names; empty where the option is absent.

    Raises:
        PolicyError: it is something else.
    """
    value = options.get(key, [])
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise PolicyError(f"{step}: {key} is {value!r}; expected a list of names")
    return list(value)


TABLES: Final = Path(__file__).with_name("tables")

OF_EQUALS: Final = " (equal parts)"
"""Marks a pass that destroys a structure only if the structure has two equal parts."""


@dataclass(frozen=True, slots=True)
class PassTable:
    """Pass → what it does and reads, and the structures that it destroys; see the fields of `Step` with these names."""

    describes: Mapping[str, Description]
    destroys: Mapping[str, tuple[str, ...]]
    destroys_equals: tuple[str, ...]


@cache
def read_table(library: str) -> PassTable:
    """The table of `library`: a row is `pass | reads | destroys | what it does`."""
    describes: dict[str, Description] = {}
    destroys: dict[str, tuple[str, ...]] = {}
    equals: list[str] = []
    for line in (TABLES / f"{library}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        name, reads, kinds, does = (cell.strip() for cell in line.split("|"))
        if does:
            describes[name] = Description(does, "values" if reads == "values" else "structure")
        if kinds:
            destroys[name] = tuple(kinds.removesuffix(OF_EQUALS).split(", "))
        if kinds.endswith(OF_EQUALS):
            equals.append(name)
    return PassTable(describes, destroys, tuple(equals))


def known_tables() -> tuple[PassTable, ...]:
    """The tables of all libraries."""
    return tuple(map(read_table, NAMES))


NAMES: Final = (
    *("onnxsim", "onnxslim", "onnxruntime", "onnxruntime_fusions", "onnxscript", "onnxscript_rewrites", "onnxline"),
    "onnxoptimizer",
)
"""The names of the tables, in the order in which their passes are suspected of a fault."""


def read_groups(file: Path) -> dict[str, tuple[str, ...]]:
    """Group → its words: a line `group:`, then indented lines of words."""
    groups: dict[str, tuple[str, ...]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.endswith(":"):
            groups[line.removesuffix(":")] = ()
        elif line.startswith(" "):
            groups[list(groups)[-1]] += tuple(line.split())
    return groups
