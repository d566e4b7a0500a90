"""Signatures of torch's operators as kernel calls with typed fields: parse one, pack a call, and read it back.

A signature is written as torch writes it, with a type of its own for each argument:

    add.Tensor(T self, T|n other, n alpha=1)

    T      an operand               T?   one that may be absent: a field `has_NAME`
    T[]    operands in a row: a field with their number
    T?[]   the same with gaps: a field with a 1 for each operand and a 0 for each gap
    T|n    an operand or a number: the fields `tensor_NAME`, and the number where it is one
    n i f ? s i[] f[]   a field of that code (`pipeline.ops.attrs`)
    n? i? f? i[]? f[]?  the same, with a field `has_NAME` before it
    dtype?              the name of a dtype, or ""
    =      only this value; another one makes the call no call of this signature
    -      an argument that does not matter to a runtime; where torch requires it, it gets this value

Operands come in the order of the signature. Arguments with a default may be left out of a call.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipeline.errors import InternalError
from pipeline.ir.graph import Attr, InputRef, TorchConst
from pipeline.ops.attrs import Packed

ARGUMENT: Final = re.compile(r"(\S+) (\w+)(?:=(.+))?")

REQUIRED: Final = object()
"""Stands for a default where there is none."""

MOST_OPERANDS: Final = 2**20

Fields = dict[str, Packed]


class OtherCallError(Exception):
    """A call that a signature does not cover."""


@dataclass(frozen=True, slots=True)
class SignatureArgument:
    """One argument of a signature."""

    code: str
    name: str
    default: Any = REQUIRED

    @classmethod
    def parse(cls, text: str) -> SignatureArgument:
        """The argument of a text such as `n alpha=1`."""
        code, name, default = ARGUMENT.fullmatch(text).groups()  # type: ignore[union-attr]
        if default is None:
            return cls(code, name, None if code in ("T?", "dtype?") else REQUIRED)
        return cls(code, name, literal_eval(default))

    @property
    def is_optional(self) -> bool:
        """Whether a field says if it is there."""
        return self.code.endswith("?") and self.code not in ("?", "dtype?")

    @property
    def packed_code(self) -> str:
        return self.code.removesuffix("?") if self.is_optional else self.code

    def is_said(self, item: Attr) -> bool:
        """Whether a call says that this argument is `item`: it need not say a default."""
        if self.code in ("-", "="):
            return item is not None
        return (type(item), item) != (type(self.default), self.default)

    def layout(self) -> str:
        """The fields that it takes in the attribute schema."""
        name = self.name
        match self.code:
            case "T" | "=" | "-":
                return ""
            case "T?":
                return f"has_{name}=?"
            case "T[]":
                return f"{name}=i"
            case "T?[]":
                return f"{name}=i[]"
            case "T|n":
                return f"tensor_{name}=?,{name}=n"
            case "dtype?":
                return f"{name}=s"
        return f"has_{name}=?,{name}={self.packed_code}" if self.is_optional else f"{name}={self.code}"

    def pack(self, item: Attr) -> Fields:
        """The fields for `item`, the argument in a call.

        Raises:
            OtherCallError: an item of another type, or another value than the only one.
        """
        name, code = self.name, self.code
        match code:
            case "-":
                return {}
            case "=":
                if item != self.default:
                    raise OtherCallError
                return {}
            case "T":
                return {} if isinstance(item, InputRef) else _refuse()
            case "T?":
                return {f"has_{name}": isinstance(item, InputRef)} if item is None or _is_ref(item) else _refuse()
            case "T[]":
                return {name: len(item)} if isinstance(item, tuple) and all(map(_is_ref, item)) else _refuse()
            case "T?[]":
                right = isinstance(item, tuple) and all(part is None or _is_ref(part) for part in item)
                return {name: tuple(int(_is_ref(part)) for part in item)} if right else _refuse()  # type: ignore[union-attr]
            case "T|n":
                is_tensor = _is_ref(item)
                return {f"tensor_{name}": is_tensor, name: 0 if is_tensor else _to_field("n", item)}
            case "dtype?":
                right = item is None or (isinstance(item, TorchConst) and item.kind == "dtype")
                return {name: item.name if isinstance(item, TorchConst) else ""} if right else _refuse()
        if not self.is_optional:
            return {name: _to_field(code, item)}
        absent = EMPTY[self.packed_code]
        return {f"has_{name}": item is not None, name: absent if item is None else _to_field(self.packed_code, item)}

    def unpack(self, fields: Mapping[str, Any], operands: Iterator[int]) -> Attr:
        """The argument that `pack` was given; `operands` counts those before it.

        Raises:
            InternalError: more operands than any call has, as a damaged plan may say.
        """
        name = self.name
        match self.code:
            case "-" | "=":
                return self.default
            case "T":
                return InputRef(next(operands))
            case "T?":
                return InputRef(next(operands)) if fields[f"has_{name}"] else None
            case "T[]":
                if fields[name] > MOST_OPERANDS:
                    raise InternalError(f"{name} has {fields[name]} operands; no call has more than {MOST_OPERANDS}")
                return tuple(InputRef(next(operands)) for _ in range(fields[name]))
            case "T?[]":
                return tuple(InputRef(next(operands)) if mark else None for mark in fields[name])
            case "T|n":
                return InputRef(next(operands)) if fields[f"tensor_{name}"] else fields[name]
            case "dtype?":
                return TorchConst("dtype", fields[name]) if fields[name] else None
        return fields[name] if not self.is_optional or fields[f"has_{name}"] else None


@dataclass(frozen=True, slots=True)
class OperatorSignature:
    """The operators that one kind of kernel stands for, and their arguments.

    Several operators differ only in which arguments are tensors and which are numbers, as `eq.Tensor` and `eq.Scalar`:
    the first has tensors everywhere, and each argument of the code `T|n` doubles the number of the others.
    """

    operators: tuple[str, ...]
    arguments: tuple[SignatureArgument, ...]

    @classmethod
    def parse(cls, text: str) -> OperatorSignature:
        """The signature of a text such as `eq.Tensor|Scalar(T self, T|n other)`."""
        head, _, rest = text.partition("(")
        name, _, overloads = head.rpartition(".")
        name = name if "." in name else f"aten.{name}"
        arguments = tuple(SignatureArgument.parse(part) for part in rest.removesuffix(")").split(", "))
        return cls(tuple(f"{name}.{overload}" for overload in overloads.split("|")), arguments)

    def refer(self, operands: int, given: Mapping[str, Attr]) -> dict[str, Attr]:
        """The arguments of a call that has its operands in the order of the signature, and `given` by name."""
        if any(map(_has_refs, given.values())):
            return dict(given)
        refs = map(InputRef, range(operands))
        call: dict[str, Attr] = {}
        for argument in self.arguments:
            if argument.name in given or not argument.code.startswith("T"):
                continue
            if "[]" in argument.code:
                call[argument.name] = tuple(refs)
            elif (ref := next(refs, None)) is not None:
                call[argument.name] = ref
        return {**call, **given}

    def layout(self) -> str:
        return ",".join(filter(None, (argument.layout() for argument in self.arguments)))

    def pack(self, operator: str, attrs: Mapping[str, Attr]) -> Fields | None:
        """The fields of a call of `operator`; None for one that this signature does not cover."""
        if attrs.keys() - {argument.name for argument in self.arguments}:
            return None
        fields: Fields = {}
        try:
            for argument in self.arguments:
                item = attrs.get(argument.name, argument.default)
                if item is REQUIRED:
                    return None
                fields |= argument.pack(item)
        except OtherCallError:
            return None
        # Operands out of order, one that is read twice, or numbers where this operator has tensors.
        found, call = self.unpack(fields)
        given = {name: item for name, item in attrs.items() if _has_refs(item)}
        right = found == operator and {name: item for name, item in call.items() if _has_refs(item)} == given
        return fields if right else None

    def unpack(self, fields: Mapping[str, Any]) -> tuple[str, dict[str, Attr]]:
        """The operator, and its arguments by name."""
        operands = iter(range(2**31))
        call: dict[str, Attr] = {}
        for argument in self.arguments:
            item = argument.unpack(fields, operands)
            if argument.is_said(item):
                call[argument.name] = item
        mixed = [argument for argument in self.arguments if argument.code == "T|n"]
        numbers = sum(1 << at for at, argument in enumerate(mixed) if not fields[f"tensor_{argument.name}"])
        return self.operators[numbers if len(self.operators) > 1 else 0], call

    def count_operands(self, fields: Mapping[str, Any]) -> int:
        """How many operands a call with these fields has."""
        _, call = self.unpack(fields)
        return sum(_is_ref(part) for item in call.values() for part in (item if isinstance(item, tuple) else (item,)))


EMPTY: Final[Mapping[str, Attr]] = {"n": 0, "i": 0, "f": 0.0, "s": "", "i[]": (), "f[]": ()}
"""What stands in a field whose argument is absent."""

TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "n": (bool, int, float),
    "i": (int,),
    "f": (int, float),
    "?": (bool,),
    "s": (str,),
}


def _to_field(code: str, item: Attr) -> Any:
    """`item` for a field of this code. A single number may stand for a list, as in torch for strides and pads.

    Raises:
        OtherCallError: it is of another type, or too large for its field.
    """
    if code.endswith("[]"):
        return tuple(_to_field(code[0], part) for part in (item if isinstance(item, tuple) else (item,)))
    if type(item) not in TYPES[code] or (type(item) is int and not -(2**63) <= item < 2**63):
        raise OtherCallError
    return float(item) if code == "f" else item  # type: ignore[arg-type]


def _is_ref(item: object) -> bool:
    return isinstance(item, InputRef)


def _has_refs(item: Attr) -> bool:
    return any(map(_is_ref, item if isinstance(item, tuple) else (item,)))


def _refuse() -> Fields:
    raise OtherCallError
