"""Turns the initializers of an exported model into references to their bytes in a checkpoint.

A checkpoint may store a tied tensor under another of its names, may add a prefix to all names or drop one, and may hold
in pieces a tensor that the module has as one. An initializer in pieces becomes a Concat of references. ONNX gives a
reference any shape that its bytes fill, so a piece of a stack is (1, …) where the checkpoint has (…), and needs no
Unsqueeze.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import onnx_ir as ir

from passes.suggest import join_first, plural
from pipeline.errors import SourceError
from pipeline.export.checkpoint import DTYPES, Shards
from pipeline.export.source import TorchSource
from pipeline.runtime.tensors import to_numpy

if TYPE_CHECKING:
    from torch import nn

DEEPEST: Final = 3
"""Most components of a prefix."""

Names = Mapping[str, Sequence[str]]
"""The name of an initializer → all names of that tensor in the module, itself first."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A change of prefix from the module's names to the checkpoint's: without `drop`, then with `add` in front."""

    drop: str = ""
    add: str = ""

    def __call__(self, name: str) -> str:
        return self.add + name.removeprefix(self.drop)

    def __str__(self) -> str:
        parts = [f"without {self.drop!r}"] * bool(self.drop) + [f"with {self.add!r} before"] * bool(self.add)
        return " and ".join(parts)

    def key(self, names: Sequence[str], stored: Collection[str]) -> str | None:
        """The checkpoint's name of a tensor: the first of `names` that is stored, after this change of prefix."""
        return next((self(name) for name in names if self(name) in stored), None)


def best_rule(wanted: Names, stored: Collection[str]) -> Rule:
    """The rule under which the fewest names are missing; no change of prefix wins a tie."""
    drops, adds = list(_prefixes(wanted)), list(_prefixes(stored))
    rules = [Rule(), *(Rule(drop=prefix) for prefix in drops), *(Rule(add=prefix) for prefix in adds)]
    rules += [Rule(drop, add) for drop in drops for add in adds]
    return min(rules, key=lambda rule: sum(rule.key(names, stored) is None for names in wanted.values()))


def _prefixes(names: Iterable[str]) -> Iterator[str]:
    """Prefixes of more than half of `names`, in whole components; the shortest first."""
    every = [name.split(".") for name in names]
    for depth in range(1, DEEPEST + 1):
        counts = Counter(".".join(parts[:depth]) + "." for parts in every if len(parts) > depth)
        yield from (prefix for prefix, count in counts.items() if 2 * count > len(every))


def names_of(module: nn.Module) -> Names:
    """All names of each parameter and of each persistent buffer."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in [*module.named_parameters(remove_duplicate=False), *_persistent_buffers(module)]:
        by_tensor.setdefault(id(tensor), []).append(name)
    return {name: (name, *(tied for tied in names if tied != name)) for names in by_tensor.values() for name in names}


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, object]]:
    for path, inner in module.named_modules(remove_duplicate=False):
        for name, buffer in inner.named_buffers(recurse=False):
            if name not in inner._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name), buffer


def pieces_of(name: str, count: int, pieces: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The names of the pieces of a tensor, a list for each of the `count` places along its first axis, in which the
    pieces follow each other along the second; empty if the tensor is whole.

    Args:
        pieces: pattern → patterns; `*` is any text, the same on both sides, and `#` counts along the
            first axis. `{"*.experts.up": ["*.experts.#.up.weight"]}`.
    """
    for pattern, parts in pieces.items():
        match = re.fullmatch(re.escape(pattern).replace(r"\*", r"(.+?)"), name)
        if match is not None:
            return [[_fill_pattern(part, match.groups(), place) for part in parts] for place in range(count)]
    return []


def _fill_pattern(pattern: str, stars: Sequence[str], place: int) -> str:
    if pattern.count("*") != len(stars):
        raise SourceError(f"export.pieces: {pattern!r} has {pattern.count('*')} stars, expected {len(stars)}")
    filled = iter(stars)
    return re.sub(r"[*#]", lambda sign: str(place) if sign[0] == "#" else next(filled), pattern)


SHOWN: Final = 12

Pieces = Mapping[str, Sequence[str]]
"""See `pieces_of`."""


def refer(model: ir.Model, source: TorchSource, shards: Shards, pieces: Pieces) -> tuple[str, ...]:
    """Point every parameter and persistent buffer among the initializers to its bytes in `shards`, in place.

    Other buffers are stored in the model, with the values that `source` knows of them.

    Returns:
        Notes: the change of prefix, and how many tensors of the checkpoint are not in the model.

    Raises:
        SourceError: listing all mistakes: tensors that the checkpoint lacks or has in another shape or dtype;
            and initializers that have no value at all.
    """
    known = names_of(source.module)
    wanted = {name: known[name] for name in model.graph.initializers if name in known}
    whole = {name: names for name, names in wanted.items() if not pieces_of(name, 1, pieces)}
    work = _ReferenceWriter(model.graph, model.graph[0], shards, best_rule(whole, shards.tensors.keys()))
    for name, value in list(model.graph.initializers.items()):
        if name in whole:
            work.point(value, whole[name])
        elif name in wanted:
            work.join(value, pieces_of(name, _dims(value)[0], pieces))
        else:
            work.store(value, source)
    work.refuse_mistakes()
    return tuple(work.notes())


@dataclass(slots=True)
class _ReferenceWriter:
    """Replaces initializers of `graph` by references into `shards`, and collects the mistakes."""

    graph: ir.Graph
    first: ir.Node
    """The first node of the graph; new nodes that read weights only go before it."""
    shards: Shards
    rule: Rule
    used: set[str] = field(default_factory=set)
    mistakes: list[str] = field(default_factory=list)

    def point(self, value: ir.Value, names: Sequence[str]) -> None:
        """Make `value` a reference to one stored tensor."""
        key = self.rule.key(names, self.shards.tensors.keys()) or self.rule(names[0])
        value.const_value = self._reference(value.name or key, key, _dtype(value), _dims(value)) or value.const_value

    def join(self, value: ir.Value, keys: list[list[str]]) -> None:
        """Replace `value` by a Concat of references, `keys` along its first two axes."""
        name, dims = value.name or "", _dims(value)
        columns = []
        for column in zip(*keys, strict=True):
            width = dims[1] // len(keys[0]) if len(dims) > 1 else 1
            shape = [1, width, *dims[2:]] if len(dims) > 1 else [1]
            columns.append(self._concatenate([self._piece(self.rule(key), value, shape) for key in column], 0, value))
        joined = columns[0] if len(columns) == 1 else self._concatenate(columns, 1, value)
        joined.type, joined.shape = value.type, value.shape
        del self.graph.initializers[name]
        ir.convenience.replace_all_uses_with(value, joined)
        joined.name = name

    def _piece(self, key: str, whole: ir.Value, shape: Sequence[int]) -> ir.Value:
        reference = self._reference(key, key, _dtype(whole), shape[1:], shape)
        piece = ir.Value(name=key, shape=ir.Shape(shape), type=whole.type, const_value=reference)
        if key not in self.graph.initializers:
            self.graph.initializers[key] = piece
        return self.graph.initializers[key]

    def _concatenate(self, values: Sequence[ir.Value], axis: int, whole: ir.Value) -> ir.Value:
        node = ir.node("Concat", values, {"axis": axis})
        node.metadata_props.update(next((use.node.metadata_props for use in whole.uses()), {}))
        self.graph.insert_before(self.first, node)
        return node.outputs[0]

    def _reference(
        self, name: str, key: str, dtype: ir.DataType, dims: Sequence[int], shape: Sequence[int] | None = None
    ) -> ir.ExternalTensor | None:
        """A reference to the tensor `key` in `shape`; notes a mistake and returns None if it does not have `dims`."""
        stored = self.shards.tensors.get(key)
        if stored is None:
            self.mistakes.append(f"{key!r} is missing")
            return None
        self.used.add(key)
        if DTYPES[stored.dtype] != dtype or list(dims) != list(stored.shape):
            wanted = f"{SPELLED.get(dtype, dtype)}{list(dims)}"
            self.mistakes.append(f"{key!r} is {stored.dtype}{list(stored.shape)}, and the model takes {wanted}")
            return None
        where = (stored.shard, stored.offset, stored.nbytes, dtype)
        return ir.ExternalTensor(*where, shape=ir.Shape(shape or dims), name=name, base_dir=self.shards.folder)

    def store(self, value: ir.Value, source: TorchSource) -> None:
        """Store in the model a value that no checkpoint holds."""
        buffer = source.buffers.get(value.name or "")
        if buffer is not None:
            value.const_value = ir.Tensor(to_numpy(buffer), name=value.name)
        elif getattr(getattr(getattr(value.const_value, "raw", None), "device", None), "type", "cpu") == "meta":
            self.mistakes.append(
                f"{value.name!r} is not in the checkpoint and has no value: it is a buffer or a constant that was made "
                "without data; make it on the CPU in the module's constructor, or register it as a persistent buffer"
            )

    def refuse_mistakes(self) -> None:
        if not self.mistakes:
            return
        raise SourceError(
            f"checkpoint {self.shards.folder} does not fit the model: {plural(len(self.mistakes), 'mistake')}\n  "
            + join_first(self.mistakes, SHOWN, "\n  and {} more", "\n  ")
            + "\n  check the class, its configuration and its dtype; where the checkpoint holds a tensor in "
            "pieces, such as experts one by one, say so in export.pieces"
        )

    def notes(self) -> Iterator[str]:
        yield f"the model refers to {plural(len(self.used), 'tensor')} of the checkpoint"
        if str(self.rule):
            yield f"the checkpoint's names are the module's {self.rule}"
        unused = len(self.shards.tensors.keys() - self.used)
        if unused:
            yield f"the model lacks {plural(unused, 'tensor')} of the checkpoint"


def _dims(value: ir.Value) -> list[int]:
    return [] if value.const_value is None else list(value.const_value.shape.numpy())


def _dtype(value: ir.Value) -> ir.DataType:
    return ir.DataType.UNDEFINED if value.const_value is None else value.const_value.dtype


SPELLED: Final[Mapping[ir.DataType, str]] = {ir.DataType(number): name for name, number in DTYPES.items()}
