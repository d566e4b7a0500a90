"""Read the text form of `text.to_text` back into a Graph; a complaint names the line, the column and what was there.

graph     = "graph" STRING "(" [declare {"," declare}] ")" "{" {stored | op} "return" [vids] "}"
stored    = ("param" | "state" | "const") declare
op        = (declare {"," declare} | "(" ")") "=" word "(" [vids] ")" {detail}
detail    = table | "@" STRING | "node" STRING | "where" table | "kernel" INT STRING HEX
declare   = VID STRING ":" WORD "[" [dim {"," dim}] "]" ["on" STRING]
table     = "{" [word ":" item {"," word ":" item}] "}"
word      = WORD | STRING
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from pipeline.errors import UserMistake
from pipeline.ir.assemble import assemble
from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Attr, Graph, KernelSpec, Op, Payload, Role
from pipeline.ir.spec import Dim, TensorSpec

__all__ = ["IRSyntaxMistake", "from_text"]

T = TypeVar("T")


class IRSyntaxMistake(UserMistake):
    """The text of a graph cannot be read. `line` and `column` count from 1."""

    def __init__(self, line: int, column: int, found: str, expected: str) -> None:
        super().__init__(f"line {line}, column {column}: found {found}, expected {expected}")
        self.line = line
        self.column = column
        self.found = found
        self.expected = expected


def from_text(
    text: str, payloads: Mapping[str, Payload] | None = None, emitters: Mapping[str, Emitter] | None = None
) -> Graph:
    """The Graph that `text` describes.

    `payloads` gives the bytes of stored values by name; names that the graph does not store are passed over. With
    `emitters` the kernels are made anew, else they are read from the text.

    Raises:
        IRSyntaxMistake: the text is not a graph, or uses a value before it is declared.
    """
    return Parser(text).graph(payloads, emitters)


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    """vid, hex, number, string, word, mark, end, or bad for a character that begins nothing."""
    text: str
    """As written: a string keeps its quotes, so that it is never taken for a keyword."""
    line: int
    column: int


class Parser:
    """Recursive descent, one token ahead; one method for each line of the grammar."""

    def __init__(self, text: str) -> None:
        self._tokens = tokens(text)
        self._next = next(self._tokens)
        self._declared: dict[int, tuple[str, TensorSpec, Role]] = {}
        self._names: set[str] = set()
        self._ops: list[Op] = []

    def graph(self, payloads: Mapping[str, Payload] | None, emitters: Mapping[str, Emitter] | None) -> Graph:
        self._take("graph")
        name = self._string("the graph's name")
        inputs = self._listed("(", ")", lambda: self._declare(Role.INPUT))
        self._take("{")
        while self._next.text != "return":
            if self._next.text in ("param", "state", "const"):
                self._declare(Role(self._advance().text))
            elif self._next.kind == "vid" or self._next.text == "(":
                self._op()
            else:
                self._fail("'param', 'state', 'const', an op, or 'return'")
        self._take("return")
        outputs = [] if self._next.text == "}" else self._several(self._use)
        if missing := set(range(len(self._declared))) - set(self._declared):
            self._fail(f"a declaration of %{min(missing)} before the end: vids are 0, 1, 2, … without a gap")
        self._take("}")
        if self._next.kind != "end":
            self._fail("the end of the text")
        stubs = [self._declared[vid] for vid in range(len(self._declared))]
        return assemble(name, stubs, self._ops, inputs, outputs, payloads, emitters)

    def _op(self) -> None:
        stubs = self._listed("(", ")", self._stub) if self._next.text == "(" else self._several(self._stub)
        self._take("=")
        kind, inputs = self._word("the kind of an op"), self._listed("(", ")", self._use)
        made = [self._add(token, name, spec, Role.TMP) for token, name, spec in stubs]
        attrs: dict[str, Attr] = {}
        constraints: dict[str, Attr] = {}
        name = origin = ""
        kernel = None
        while self._next.text in ("{", "@", "node", "where", "kernel"):
            if self._next.text == "{":
                attrs = self._table()
                continue
            match self._advance().text:
                case "@":
                    origin = self._string("the origin of an op")
                case "node":
                    name = self._string("the source's name of an op")
                case "where":
                    constraints = self._table()
                case _:
                    kernel = self._kernel()
        self._ops.append(Op(len(self._ops), kind, tuple(inputs), tuple(made), attrs, kernel, constraints, name, origin))

    def _declare(self, role: Role) -> int:
        return self._add(*self._stub(), role)

    def _stub(self) -> tuple[Token, str, TensorSpec]:
        if self._next.kind != "vid":
            self._fail("a value such as %3")
        token = self._advance()
        name_at = self._next
        name = self._string("the value's name")
        if name in self._names:
            self._fail("a name that no other value has", name_at)
        self._names.add(name)
        self._take(":")
        return token, name, self._spec()

    def _add(self, token: Token, name: str, spec: TensorSpec, role: Role) -> int:
        vid = int(token.text[1:])
        if vid in self._declared:
            self._fail("a vid that was not declared before", token)
        self._declared[vid] = (name, spec, role)
        return vid

    def _use(self) -> int:
        if self._next.kind != "vid" or int(self._next.text[1:]) not in self._declared:
            self._fail("a value that was declared above, such as %3")
        return int(self._advance().text[1:])

    def _spec(self) -> TensorSpec:
        at = self._next
        dtype = self._word("a dtype such as float32")
        shape = tuple(self._listed("[", "]", self._dim))
        device = "cpu"
        if self._next.text == "on":
            self._advance()
            device = self._string("a device")
        try:
            return TensorSpec(shape, dtype, device)
        except ValueError as error:
            self._fail(f"a valid tensor ({error})", at)

    def _dim(self) -> Dim:
        if self._next.kind == "number" and self._next.text.isdigit():
            return int(self._advance().text)
        return self._word("a size of at least 0 or the name of a dimension")

    def _kernel(self) -> KernelSpec:
        if self._next.kind != "number" or not (kind_id := self._next.text).lstrip("-").isdigit():
            self._fail("the number of a kernel")
        self._advance()
        schema = self._string("an attribute schema")
        if self._next.kind != "hex" or len(self._next.text) % 2:
            self._fail("the packed attributes as whole bytes, such as 0x00ff")
        return KernelSpec(int(kind_id), schema, bytes.fromhex(self._advance().text[2:]))

    def _table(self) -> dict[str, Attr]:
        found: dict[str, Attr] = {}

        def pair() -> None:
            at = self._next
            key = self._word("the name of an attribute")
            if key in found:
                self._fail("each attribute once", at)
            self._take(":")
            found[key] = self._item()

        self._listed("{", "}", pair)
        return found

    def _item(self) -> Attr:
        if self._next.text != "[":
            return self._scalar()
        at = self._next
        items = self._listed("[", "]", self._scalar)
        if len({type(item) for item in items}) > 1 or any(type(item) is bool for item in items):
            self._fail("a list of ints, of floats or of strings", at)
        return tuple(items)  # pyright: ignore[reportReturnType]  (all of one type, just checked)

    def _scalar(self) -> bool | int | float | str:
        token = self._next
        if token.kind == "string":
            return self._string("a string")
        if token.kind == "number" and token.text.lstrip("-").isdigit():
            return int(self._advance().text)
        if token.kind == "number" or token.text in ("inf", "nan"):
            return float(self._advance().text)
        if token.text in ("true", "false"):
            return self._advance().text == "true"
        self._fail("true, false, a number, a string or a list")

    def _word(self, expected: str) -> str:
        return self._advance().text if self._next.kind == "word" else self._string(expected)

    def _string(self, expected: str) -> str:
        if self._next.kind != "string":
            self._fail(f"{expected} in double quotes" if self._next.kind == "word" else expected)
        try:
            text = json.loads(self._next.text)
        except ValueError:
            self._fail("a string with JSON's escapes")
        self._advance()
        return text

    def _listed(self, opening: str, closing: str, item: Callable[[], T]) -> list[T]:
        self._take(opening)
        items = [] if self._next.text == closing else self._several(item)
        self._take(closing)
        return items

    def _several(self, item: Callable[[], T]) -> list[T]:
        items = [item()]
        while self._next.text == ",":
            self._advance()
            items.append(item())
        return items

    def _take(self, text: str) -> None:
        if self._next.text != text:
            self._fail(f"'{text}'")
        self._advance()

    def _advance(self) -> Token:
        token = self._next
        if token.kind != "end":
            self._next = next(self._tokens)
        return token

    def _fail(self, expected: str, at: Token | None = None) -> NoReturn:
        token = at or self._next
        found = "the end of the text" if token.kind == "end" else repr(token.text)
        raise IRSyntaxMistake(token.line, token.column, found, expected)


def tokens(text: str) -> Iterator[Token]:
    """The tokens of `text`, then `end` tokens as often as asked for. Blanks and comments are passed over."""
    line, start = 1, 0
    for match in TOKEN.finditer(text):
        kind = match.lastgroup or "bad"
        if kind == "newline":
            line, start = line + 1, match.end()
        elif kind != "blank":
            yield Token(kind, match.group(), line, match.start() - start + 1)
    while True:
        yield Token("end", "", line, len(text) - start + 1)


TOKEN = re.compile(
    r"""
      (?P<newline> \n )
    | (?P<blank>   [ \t\r]+ | \#[^\n]* )
    | (?P<vid>     %[0-9]+ )
    | (?P<hex>     0x[0-9a-f]* )
    | (?P<number>  -?[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)? | -inf )
    | (?P<string>  "(?:[^"\\\n]|\\.)*" )
    | (?P<word>    [A-Za-z_][A-Za-z0-9_]* )
    | (?P<mark>    [][(){},:=@] )
    | (?P<bad>     . )
    """,
    re.VERBOSE,
)
