"""An ONNX model that runs on whatever it is fed: arrays of any shape, sequences, optionals, strings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from pipeline.importers.from_onnx.model import NodeList
from pipeline.importers.from_onnx.replacements import pending_nodes
from pipeline.importers.from_onnx.source import read_initializers, read_source
from pipeline.importers.from_onnx.specs import is_ir_type
from pipeline.segments.stage import FallbackCount, Stage


class SegmentedModel:
    """Runs a model in segments, which are made at the first run for a feed of some shapes, and kept.

    `native`: their plans have kernels in C++, as with `compile_graph`.

    Raises:
        SourceError: the model cannot be read, is not valid, or its data files are outside its folder or cut short.
        Unsupported: sparse initializers.
    """

    def __init__(
        self, model: onnx.ModelProto | str | Path, *, base_dir: str | Path | None = None, native: bool = False
    ) -> None:
        source = read_source(model, base_dir)
        graph = source.model.graph
        self._stored = read_initializers(graph, source.folder, takes_all=True)
        self._odd = odd_initializers(graph)
        self.inputs = tuple(value.name for value in graph.input if value.name not in {*self._stored, *self._odd})
        self.outputs = tuple(value.name for value in graph.output)
        nodes = pending_nodes(graph.node, source.model.opset_import)
        self._stage = Stage(NodeList(graph.name or "graph", nodes, self.outputs, self._stored), native=native)

    def run(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs by name: arrays, lists of arrays for sequences, None for an optional without a value.

        Raises:
            Unsupported: an operator that neither a plan nor another runtime has.
            UsageError: the feed does not suit the model.
        """
        values = {**self._odd, **{name: _normal(value) for name, value in feed.items()}}
        self._stage.run(values)
        return {name: values[name] for name in self.outputs}

    def count(self) -> FallbackCount:
        """How many calls the kept segments have, and which operators among them another runtime computes."""
        return self._stage.count()


def odd_initializers(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """Initializers of types that the IR does not have, such as strings and four-bit numbers."""
    return {
        tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if not is_ir_type(tensor.data_type)
    }


def _normal(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_normal(item) for item in value]
    return None if value is None else np.asarray(value)
