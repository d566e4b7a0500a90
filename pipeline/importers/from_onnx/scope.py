"""What the names of a model mean while its graph is built: vids.

A stored value joins the graph when an op first reads it, so what only gave a shape or a bound is not in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.errors import InternalError, SourceError
from pipeline.importers.from_onnx.resolve import Resolved
from pipeline.importers.from_onnx.stored import ArrayPayload
from pipeline.ir.builder import Builder
from pipeline.ir.graph import Attr
from pipeline.ir.spec import TensorSpec

__all__ = ["Scope"]


class Scope:
    """Names → vids, over one Builder."""

    def __init__(self, builder: Builder, resolved: Resolved, labels: Mapping[str, str], taken: set[str]) -> None:
        self.resolved = resolved
        self._builder = builder
        self._labels = labels
        """Values that get another name than the model's: what a graph output is an Identity of."""
        self._taken = taken
        self._vids: dict[str, int] = {}
        self._names: list[str] = []

    def input(self, name: str) -> None:
        self._bind_new(name, self._builder.input(name, self.resolved.specs[name]), name)

    def bind(self, name: str, vid: int) -> None:
        """Say that `name` means the value `vid`."""
        self._vids[name] = vid

    def vid(self, name: str) -> int:
        """The value that `name` means; a param or const joins the graph here.

        Raises:
            InternalError: no importer has bound the name.
        """
        name = self.resolved.root(name)
        if name in self._vids:
            return self._vids[name]
        if name in self.resolved.stored:
            item = self.resolved.stored[name]
            add = self._builder.param if item.trainable else self._builder.const
            return self._bind_new(name, add(name, item.spec, item.payload), name)
        if name in self.resolved.constants:
            return self.constant(name, self.resolved.constants[name])
        raise InternalError(f"{name!r} is read, but the node that makes it was not imported")

    def knows(self, name: str) -> bool:
        """Whether `name` means something by now."""
        name = self.resolved.root(name)
        if not name or name in self.resolved.pieces:
            return True
        return name in self._vids or name in self.resolved.stored or name in self.resolved.constants

    def constant(self, name: str, array: np.ndarray) -> int:
        """Add a const that the importer made."""
        spec = TensorSpec(array.shape, array.dtype.name)
        return self._bind_new(name, self._builder.const(name, spec, ArrayPayload(array)), name)

    def emit(
        self,
        kind: str,
        inputs: Sequence[int],
        outputs: Sequence[tuple[str, TensorSpec]],
        attrs: Mapping[str, Attr],
        name: str,
        origin: str,
    ) -> tuple[int, ...]:
        """Add an op. An output whose name is a value of the model is bound to it."""
        labelled = [(self._labels.get(label, label), spec) for label, spec in outputs]
        try:
            made = self._builder.emit(kind, inputs, labelled, attrs, name=name, origin=origin)
        except InternalError as error:  # the rules of the IR's kinds, which ONNX's inference does not all know
            first = name or outputs[0][0]
            raise SourceError(f"node {first!r} cannot be a {error}; check its inputs and attributes") from error
        for (label, _), (written, _), vid in zip(outputs, labelled, made, strict=True):
            self._bind_new(label, vid, written)
        return made

    def spec(self, vid: int) -> TensorSpec:
        return self._builder.spec(vid)

    def name(self, vid: int) -> str:
        """The name of a value in the graph."""
        return self._names[vid]

    def fresh(self, base: str) -> str:
        """A name that no value of the model or of the graph has."""
        name, count = base, 0
        while name in self._taken:
            name, count = f"{base}.{count}", count + 1
        self._taken.add(name)
        return name

    def _bind_new(self, name: str, vid: int, written: str) -> int:
        if vid != len(self._names):
            raise InternalError(f"value {written!r} has vid {vid}, expected {len(self._names)}")
        self._vids[name] = vid
        self._names.append(written)
        self._taken.update((name, written))
        return vid
