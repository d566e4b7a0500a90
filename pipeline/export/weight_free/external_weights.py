"""Turns the initializers of an exported model into references to their bytes in a checkpoint.

An initializer that the checkpoint holds in pieces becomes a Concat of references. ONNX gives a reference any shape that
its bytes fill, so a piece of a stack is (1, …) where the checkpoint has (…), and needs no Unsqueeze.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import onnx_ir as ir

from passes.suggest import plural
from pipeline.errors import SourceError
from pipeline.export.source import TorchSource
from pipeline.export.weight_free.checkpoint_names import Rule, best_rule, names_of, pieces_of
from pipeline.export.weight_free.shards import DTYPES, Shards
from pipeline.runtime.tensors import to_numpy

SHOWN: Final = 12

Pieces = Mapping[str, Sequence[str]]
"""See `checkpoint_names.pieces_of`."""


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
        more = f"\n  and {len(self.mistakes) - SHOWN} more" if len(self.mistakes) > SHOWN else ""
        raise SourceError(
            f"checkpoint {self.shards.folder} does not fit the model: {plural(len(self.mistakes), 'mistake')}\n  "
            + "\n  ".join(self.mistakes[:SHOWN])
            + f"{more}\n  check the class, its configuration and its dtype; where the checkpoint holds a tensor in "
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
