"""Read the text form of `text.to_text` back into a Graph; an error names the line, the column and the token found.

graph     = "graph" STRING "(" [declare {"," declare}] ")" "{" {stored | op | fact} "return" [vids] "}"
stored    = ("param" | "state" | "const") declare ["from" STRING {"," STRING}]
op        = (declare {"," declare} | "(" ")") "=" word "(" [vids] ")" {detail}
fact      = "update" VID "=" VID | "dim" word ":" INT ".." [INT] | "guard" STRING
detail    = table | "@" STRING | "node" STRING | "of" STRING | "line" STRING | "where" table | "hints" table
          | "saves" "[" INT {"," INT} "]" | "kernel" INT STRING HEX
          | "with" "[" graph {"," graph} "]"
declare   = VID STRING ":" WORD sizes ["on" STRING] ["strides" sizes]
sizes     = "[" [dim {"," dim}] "]"
table     = "{" [word ":" item {"," word ":" item}] "}"
item      = scalar | "[" [item {"," item}] "]"
word      = WORD | STRING
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

from pipeline.argument_checks import MAPPING, TEXT, expects
from pipeline.errors import UsageError
from pipeline.ir.builder import GraphFacts, ValueDecl, assemble
from pipeline.ir.graph import (
    Attr,
    BodyRef,
    Dim,
    DimRange,
    Graph,
    InputRef,
    KernelSpec,
    Op,
    Payload,
    Role,
    SymExpr,
    TensorSpec,
    TorchConst,
)

T = TypeVar("T")


class IRSyntaxError(UsageError):
    """The text of a graph cannot be read. `line` and `column` count from 1."""

    def __init__(self, line: int, column: int, found: str, expected: str) -> None:
        super().__init__(f"line {line}, column {column}: found {found}, expected {expected}")
        self.line = line
        self.column = column
        self.found = found
        self.expected = expected


@expects(text=TEXT, payloads=MAPPING.or_none())
def from_text(text: str, payloads: Mapping[str, Payload] | None = None) -> Graph:
    """The Graph that `text` describes.

    `payloads` gives the bytes of stored values by name; other names are ignored.

    Raises:
        IRSyntaxError: the text is not a graph, or uses a value before it is declared.
    """
    return Parser(text).parse(payloads)


@dataclass(slots=True)
class PartialGraph:
    """What was parsed of one graph so far; each body has a PartialGraph of its own."""

    declared: dict[int, ValueDecl] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    ops: list[Op] = field(default_factory=list)
    updates: dict[int, int] = field(default_factory=dict)
    sources: dict[int, tuple[str, ...]] = field(default_factory=dict)
    dims: dict[str, DimRange] = field(default_factory=dict)
    guards: list[str] = field(default_factory=list)

    def facts(self) -> GraphFacts:
        return GraphFacts(self.updates, self.sources, self.dims, tuple(self.guards))


class Parser:
    """Recursive descent, one token ahead; one method for each line of the grammar."""

    def __init__(self, text: str) -> None:
        self._tokens = tokens(text)
        self._next = next(self._tokens)
        self._partial = PartialGraph()

    def parse(self, payloads: Mapping[str, Payload] | None) -> Graph:
        graph = self._graph(payloads)
        if self._next.kind != "end":
            self._fail("the end of the text")
        return graph

    def _graph(self, payloads: Mapping[str, Payload] | None = None) -> Graph:
        outer, self._partial = self._partial, PartialGraph()
        self._take("graph")
        name = self._string("the graph's name")
        inputs = self._read_list("(", ")", lambda: self._declare(Role.INPUT))
        self._take("{")
        while self._next.text != "return":
            self._statement()
        self._take("return")
        outputs = [] if self._next.text == "}" else self._read_items(self._use)
        declared = self._partial.declared
        if missing := set(range(len(declared))) - set(declared):
            self._fail(f"a declaration of %{min(missing)} before the end: vids are 0, 1, 2, … without a gap")
        self._take("}")
        scope, self._partial = self._partial, outer
        decls = [declared[vid] for vid in range(len(declared))]
        return assemble(name, decls, scope.ops, inputs, outputs, payloads, scope.facts())

    def _statement(self) -> None:
        if self._next.text in ("param", "state", "const"):
            vid = self._declare(Role(self._advance().text))
            if self._next.text == "from":
                self._advance()
                self._partial.sources[vid] = tuple(self._read_items(lambda: self._string("a name in a checkpoint")))
        elif self._next.kind == "vid" or self._next.text == "(":
            self._op()
        elif self._next.text in ("update", "dim", "guard"):
            self._fact(self._advance().text)
        else:
            self._fail("'param', 'state', 'const', an op, 'update', 'dim', 'guard', or 'return'")

    def _fact(self, which: str) -> None:
        if which == "guard":
            self._partial.guards.append(self._string("a condition"))
        elif which == "update":
            vid = self._use()
            self._take("=")
            self._partial.updates[vid] = self._use()
        else:
            name = self._word("the name of a dimension")
            self._take(":")
            least = self._natural()
            self._take("..")
            self._partial.dims[name] = DimRange(least, self._natural() if self._next.kind == "number" else None)

    def _op(self) -> None:
        decls = (
            self._read_list("(", ")", self._declaration)
            if self._next.text == "("
            else self._read_items(self._declaration)
        )
        self._take("=")
        kind, inputs = self._word("the kind of an op"), self._read_list("(", ")", self._use)
        outputs = [self._add(token, replace(decl, role=Role.TMP)) for token, decl in decls]
        attrs: dict[str, Attr] = {}
        constraints: dict[str, Any] = {}
        hints: dict[str, Any] = {}
        saved: tuple[int, ...] = ()
        name = node_type = origin = line = ""
        kernel = None
        bodies: list[Graph] = []
        while self._next.text in ("{", "@", "node", "of", "line", "where", "hints", "saves", "kernel", "with"):
            if self._next.text == "{":
                attrs = self._table()
                continue
            match self._advance().text:
                case "@":
                    origin = self._string("the origin of an op")
                case "node":
                    name = self._string("the source's name of an op")
                case "of":
                    node_type = self._string("the type of a node")
                case "line":
                    line = self._string("a line as file:line")
                case "where":
                    constraints = self._table()
                case "hints":
                    hints = self._table()
                case "saves":
                    saved = tuple(self._read_list("[", "]", self._natural))
                case "with":
                    bodies = self._read_list("[", "]", self._graph)
                case _:
                    kernel = self._kernel()
        ops = self._partial.ops
        details = (attrs, kernel, constraints, hints, saved, name, node_type, origin, line, tuple(bodies))
        ops.append(Op(len(ops), kind, tuple(inputs), tuple(outputs), *details))

    def _declare(self, role: Role) -> int:
        token, decl = self._declaration()
        return self._add(token, replace(decl, role=role))

    def _declaration(self) -> tuple[Token, ValueDecl]:
        if self._next.kind != "vid":
            self._fail("a value such as %3")
        token = self._advance()
        name_at = self._next
        name = self._string("the value's name")
        if name in self._partial.names:
            self._fail("a name that no other value has", name_at)
        self._partial.names.add(name)
        self._take(":")
        spec = self._spec()
        strides = None
        if self._next.text == "strides":
            self._advance()
            strides = self._sizes()
        return token, ValueDecl(name, spec, Role.TMP, strides)

    def _add(self, token: Token, decl: ValueDecl) -> int:
        vid = int(token.text[1:])
        if vid in self._partial.declared:
            self._fail("a vid that was not declared before", token)
        self._partial.declared[vid] = decl
        return vid

    def _use(self) -> int:
        if self._next.kind != "vid" or int(self._next.text[1:]) not in self._partial.declared:
            self._fail("a value that was declared above, such as %3")
        return int(self._advance().text[1:])

    def _spec(self) -> TensorSpec:
        at = self._next
        dtype = self._word("a dtype such as float32")
        shape = self._sizes()
        device = "cpu"
        if self._next.text == "on":
            self._advance()
            device = self._string("a device")
        try:
            return TensorSpec(shape, dtype, device)
        except ValueError as error:
            self._fail(f"a valid tensor ({error})", at)

    def _sizes(self) -> tuple[Dim, ...]:
        return tuple(self._read_list("[", "]", self._dim))

    def _natural(self) -> int:
        if self._next.kind != "number" or not self._next.text.isdigit():
            self._fail("a size of at least 0")
        return int(self._advance().text)

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

    def _table(self) -> dict[str, Any]:
        attributes: dict[str, Attr] = {}

        def pair() -> None:
            at = self._next
            key = self._word("the name of an attribute")
            if key in attributes:
                self._fail("each attribute once", at)
            self._take(":")
            attributes[key] = self._item()

        self._read_list("{", "}", pair)
        return attributes

    def _item(self) -> Attr:
        return tuple(self._read_list("[", "]", self._item)) if self._next.text == "[" else self._scalar()

    def _scalar(self) -> Attr:
        token = self._next
        if token.kind == "string":
            return self._string("a string")
        if token.kind == "number" and token.text.lstrip("-").isdigit():
            return int(self._advance().text)
        if token.kind == "number" or token.text in ("inf", "nan"):
            return float(self._advance().text)
        if token.kind == "use":
            return InputRef(int(self._advance().text[1:]))
        if token.text in CONSTANTS:
            return CONSTANTS[self._advance().text]
        if token.text in CALLS:
            return self._call(self._advance())
        self._fail("true, false, none, a number, a string, a list, $0, or one of body, size, word and complex")

    def _call(self, token: Token) -> Attr:
        make, types = CALLS[token.text]
        arguments = self._read_list("(", ")", self._scalar)
        if tuple(map(type, arguments)) != types:
            self._fail(f"{token.text}({', '.join(kind.__name__ for kind in types)})", token)
        return make(*arguments)

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

    def _read_list(self, opening: str, closing: str, item: Callable[[], T]) -> list[T]:
        self._take(opening)
        items = [] if self._next.text == closing else self._read_items(item)
        self._take(closing)
        return items

    def _read_items(self, item: Callable[[], T]) -> list[T]:
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
        raise IRSyntaxError(token.line, token.column, found, expected)


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    """vid, use, hex, number, string, word, mark, end, or bad for a character that begins nothing."""
    text: str
    """As written: a string keeps its quotes, so that it is never taken for a keyword."""
    line: int
    column: int


def tokens(text: str) -> Iterator[Token]:
    """The tokens of `text`, then `end` tokens without end. Blanks and comments are skipped."""
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
    | (?P<use>     \$[0-9]+ )
    | (?P<hex>     0x[0-9a-f]* )
    | (?P<number>  -?[0-9]+(?:\.(?!\.)[0-9]*)?(?:e[+-]?[0-9]+)? | -inf )
    | (?P<string>  "(?:[^"\\\n]|\\.)*" )
    | (?P<word>    [A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)* )
    | (?P<mark>    [][(){},:=@] | \.\. )
    | (?P<bad>     . )
    """,
    re.VERBOSE,
)

CONSTANTS: dict[str, Attr] = {"true": True, "false": False, "none": None}

CALLS: dict[str, tuple[Callable[..., Any], tuple[type, ...]]] = {
    "body": (BodyRef, (int,)),
    "size": (SymExpr, (str,)),
    "word": (TorchConst, (str, str)),
    "complex": (complex, (float, float)),
}
