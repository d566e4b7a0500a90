"""Small faults at places of the product that a seed draws: a comparison that flips, a number that is one too large.

Only bodies of functions are drawn from: tables at the foot of a file have tests that compare them with a page.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PACKAGES: Final = ("onnxline", "passes", "pipeline")

COMPARISONS: Final = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC: Final = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "*"}
BARE: Final = (ast.Constant, ast.Compare, ast.BoolOp)
"""What a negation of a condition leaves alone: other faults are made of these."""

Fault = tuple[ast.expr, Callable[[], str]]
"""An expression, and what makes the text that takes its place."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """`found` at these places of a file, of which line and byte count from 0, becomes `instead`."""

    file: str
    start: tuple[int, int]
    end: tuple[int, int]
    found: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.start[0] + 1}: {' '.join(self.found.split())} → {' '.join(self.instead.split())}"


def draw_mutations(root: Path, seed: int, count: int, below: Sequence[str] = PACKAGES) -> list[Mutation]:
    """`count` of all mutations in the folders and files `below` of the tree `root`, or all if there are not as many.

    They are in order of files, and the same for the same tree and seed.
    """
    every = every_mutation(root, below)
    drawn = random.Random(seed).sample(range(len(every)), min(count, len(every)))
    return [every[place] for place in sorted(drawn)]


def every_mutation(root: Path, below: Sequence[str] = PACKAGES) -> list[Mutation]:
    files = sorted(path for name in below for path in (root / name, *(root / name).rglob("*.py")) if path.is_file())
    return [mutation for path in files for mutation in _mutations_of(path, path.relative_to(root).as_posix())]


def _mutations_of(path: Path, file: str) -> Iterator[Mutation]:
    text = path.read_text(encoding="utf-8")
    lines = text.encode().splitlines(keepends=True)
    for node, instead in _faults(ast.parse(text), False):
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = (node.lineno - 1, node.col_offset), (node.end_lineno - 1, node.end_col_offset)
        yield Mutation(file, start, end, _text_between(lines, start, end), instead())


def _text_between(lines: Sequence[bytes], start: tuple[int, int], end: tuple[int, int]) -> str:
    """The text between two places, of which line and byte count from 0."""
    inside = [*lines[start[0] : end[0]], lines[end[0]][: end[1]]]
    return b"".join([inside[0][start[1] :], *inside[1:]]).decode()


def edit(text: str, edits: list[tuple[Mutation, str, str]]) -> str:
    """`text` with a word before and one after each mutation's place, which may lie in another's."""
    lines = [bytearray(line) for line in text.encode().splitlines(keepends=True)]
    inserts = [(mutation.end, 0, -mutation.start[0], -mutation.start[1], after) for mutation, _, after in edits]
    inserts += [(mutation.start, 1, -mutation.end[0], -mutation.end[1], before) for mutation, before, _ in edits]
    for (line, column), *_, word in sorted(inserts, reverse=True):
        lines[line][column:column] = word.encode()
    return b"".join(bytes(line) for line in lines).decode()


def _faults(node: ast.AST, inside: bool) -> Iterator[Fault]:
    """The expressions below `node` in bodies of functions, each with the fault that takes its place."""
    if isinstance(node, ast.JoinedStr | ast.pattern | ast.Raise | ast.Assert):
        return  # places in an f-string are wrong before Python 3.12; a message is not worth a test; mypy's asserts
    if inside:
        yield from _faults_at(node)
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        function = isinstance(node, ast.FunctionDef) and field == "body"
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _faults(child, inside or function)


def _faults_at(node: ast.AST) -> Iterator[Fault]:
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            yield node, lambda: f"({ast.unparse(left)}) {COMPARISONS[type(operator)]} ({ast.unparse(right)})"
        case ast.BoolOp(op=operator, values=values):
            word = " or " if isinstance(operator, ast.And) else " and "
            yield node, lambda: word.join(f"({ast.unparse(value)})" for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, lambda: ast.unparse(operand)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
            yield node, lambda: f"({ast.unparse(left)}) {ARITHMETIC[type(operator)]} ({ast.unparse(right)})"
        case ast.Constant(value=bool() as value):
            yield node, lambda: str(not value)
        case ast.Constant(value=int() as value):
            yield node, lambda: str(value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, (*BARE, ast.UnaryOp)):
            yield test, lambda: f"not ({ast.unparse(test)})"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, BARE):
            yield value, lambda: "None"
        case ast.Expr(value=ast.Call() as call):
            yield call, lambda: "None"
