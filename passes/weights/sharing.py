"""Models that can be sent to other processes: weights are in files, which the receiver maps without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx

from passes.errors import StepFailed
from passes.weights.detached import DetachedModel, WeightStore, open_model
from passes.weights.mapped import FileMaps, FileRange, append_page, find_file_range
from passes.weights.stand_ins import Weight, key_of

if TYPE_CHECKING:
    from passes.weights.sessions import Session


@dataclass(frozen=True, slots=True)
class WeightRef:
    """The file range of one initializer's bytes, as in ONNX `raw_data`; it can be sent to another process."""

    name: str
    dims: tuple[int, ...]
    data_type: int
    path: str
    offset: int
    nbytes: int
    digest: str = ""
    unread: bool = False

    def weight(self, digest: str = "", *, maps: FileMaps | None = None) -> Weight:
        """Map the weight.

        Args:
            digest: its digest, where the reference has none.
            maps: mappings of files to share with other weights.

        Returns:
            The weight, as a view of its file.
        """
        data = (maps or FileMaps()).view(FileRange(self.path, self.offset, self.nbytes))
        return Weight(self.dims, self.data_type, data, digest or self.digest, self.unread)


class WeightFile:
    """A file for weights that are only in memory; it grows until `renew` is called.

    Args:
        folder: where the file is made; it lives as long as the folder.
    """

    def __init__(self, folder: Path, name: str = "weights.data") -> None:
        self._path = self._first = folder / name
        self._renewed = 0
        self._ranges: dict[str, tuple[str, int]] = {}

    def renew(self) -> None:
        """Begin another file, for another model. Views of the old file stay valid; its space on the disk is freed after
        the last view is gone."""
        if self._ranges:
            self._path.unlink(missing_ok=True)
            self._renewed += 1  # a name that was in use would be taken for the file that is still mapped
            self._path = self._first.with_stem(f"{self._first.stem}-{self._renewed}")
            self._ranges = {}

    def store(self, weight: Weight) -> tuple[str, int]:
        """Find or write the bytes of a weight in a file.

        Args:
            weight: a weight in memory, or mapped from a file.

        Returns:
            The path of the file, and the offset in bytes.

        Raises:
            OSError: the disk is full.
        """
        file_range = find_file_range(weight.data)
        if file_range is not None:
            return file_range.path, file_range.offset
        if weight.digest not in self._ranges:
            self._ranges[weight.digest] = (str(self._path), self._append(weight.data))
        return self._ranges[weight.digest]

    def _append(self, data: np.ndarray) -> int:
        try:
            with self._path.open("ab") as file:
                return append_page(file, data)
        except OSError as error:  # a full disk: the error of a write names no file
            raise OSError(error.errno, error.strerror, str(self._path)) from error


@dataclass(frozen=True, slots=True)
class MappedModel:
    """A model that can be sent to another process: its graph as bytes, and the file ranges of its weights."""

    proto: bytes
    weights: tuple[WeightRef, ...]

    def model(self) -> onnx.ModelProto:
        """The graph, with stand-ins for weights."""
        return onnx.load_from_string(self.proto)

    def session(self, extra_outputs: Sequence[str] = (), *, may_evaluate: bool = False) -> Session:
        """A session of onnxruntime over the mapped weights.

        Args:
            extra_outputs: values that become outputs too.
            may_evaluate: see `Session`.

        Returns:
            The session.

        Raises:
            StepFailed: onnxruntime refuses the model.
        """
        from passes.weights.sessions import Session  # not above: a worker that runs no model needs no onnxruntime

        return Session(self.model(), self.map_weights(), extra_outputs, may_evaluate=may_evaluate)

    def to_detached(self, known: WeightStore | None = None) -> DetachedModel:
        """The model that was sent.

        Args:
            known: weights to take in place of equal ones that would be mapped anew.

        Returns:
            The detached model.
        """
        proto, known, found = self.model(), known or {}, self.map_weights()
        keys = {tensor.name: key_of(tensor) for tensor in proto.graph.initializer if tensor.name in found}
        store = {key: known.get(key, found[name]) for name, key in keys.items() if key is not None}
        return DetachedModel(proto, store)

    def map_weights(self) -> dict[str, Weight]:
        maps = FileMaps()
        return {reference.name: reference.weight(maps=maps) for reference in self.weights}


def portable(model: DetachedModel, spill: WeightFile) -> MappedModel:
    """A model that can be sent to another process, with each of its weights in a file.

    Args:
        model: the model.
        spill: the file for weights that are only in memory.

    Returns:
        The model as bytes, with the file ranges of its weights.
    """
    found = []
    for tensor in model.proto.graph.initializer:
        weight = model.weight(tensor)
        if weight is not None:
            path, offset = spill.store(weight)
            stored = (path, offset, weight.data.nbytes, weight.digest, weight.unread)
            found.append(WeightRef(tensor.name, weight.dims, weight.data_type, *stored))
    return MappedModel(model.proto.SerializeToString(), tuple(found))


def detached_copy(model: onnx.ModelProto, spill: WeightFile) -> DetachedModel:
    """A detached copy of a message, with its weights in a file.

    Args:
        model: a message with inline data; it does not change.
        spill: the file for the weights.

    Returns:
        The detached model.

    Raises:
        ModelError: the model is broken, or its data is external.
    """
    detached = open_model(model)
    for weight in detached.weights.values():
        spill.store(weight)  # all of them first, since a file that has grown has to be mapped again
    maps = FileMaps()
    return DetachedModel(
        detached.proto, {key: _store_in_file(weight, spill, maps) for key, weight in detached.weights.items()}
    )


def _store_in_file(weight: Weight, spill: WeightFile, maps: FileMaps) -> Weight:
    path, offset = spill.store(weight)
    return replace(weight, data=maps.view(FileRange(path, offset, weight.data.nbytes)))


def why_not_run(model: MappedModel) -> str:
    """In the proof worker: why onnxruntime does not run a model as it is; empty where it does."""
    try:
        model.session()
    except StepFailed as failure:
        return str(failure)
    return ""
