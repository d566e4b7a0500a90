"""What each layer adds to its own result if it alone is quantized, by torch's functions of ONNX's operators.

Recurrent cells are computed by onnxruntime: torch has no function for some of their settings, and walks through the
places of a sequence one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import onnx
import torch
from onnx import NodeProto, TensorProto, helper
from torch import Tensor

from passes.graph.index import initializers_of
from passes.weights.detached import DetachedModel, detach
from passes.weights.sessions import Session
from pipeline.quantsim.encodings import Encoding, round_trip
from pipeline.quantsim.gradients import compute_node
from pipeline.quantsim.noise import drop_unread_nodes, find_fixed_values
from pipeline.runtime.tensors import as_tensor

CELLS: Final = frozenset({"GRU", "LSTM", "RNN"})


class QuantizedLayers:
    """Layers that read quantized values. Their weights lie in memory beside those of `model`.

    Args:
        layers: the nodes of each, which are cells or have a function of torch.
    """

    def __init__(
        self, model: DetachedModel, encodings: Mapping[str, Encoding], layers: Sequence[Sequence[NodeProto]]
    ) -> None:
        self._encodings, self._layers = encodings, layers
        reads = {name for nodes in layers for node in nodes for name in node.input if name}
        stored = initializers_of(model.proto.graph)
        arrays = {name: model.array(stored[name]) for name in reads & stored.keys()}
        for name in arrays.keys() & encodings.keys():
            arrays[name] = round_trip(arrays[name], encodings[name], is_stored=True)
        fixed = find_fixed_values(model.proto.graph, stored).intersection(reads).difference(encodings)
        arrays |= _compute_fixed(model, encodings, sorted(fixed))
        self._constants = {name: as_tensor(array) for name, array in arrays.items()}
        opsets = list(model.proto.opset_import)
        cells = (node for nodes in layers for node in nodes if node.op_type in CELLS)
        self._cells = {id(node): _session_of_node(node, opsets) for node in cells}

    def measure_differences(self, values: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Each result of each layer: what it is with quantized values, less what it is in float.

        Args:
            values: of the float model; all that the layers read and make.
        """
        known = dict(self._constants)
        differences: dict[str, np.ndarray] = {}
        with torch.no_grad():
            for nodes in self._layers:
                results: dict[str, Tensor] = {}
                for node in nodes:
                    reads = [
                        results[name] if name in results else self._read(name, values, known) for name in node.input
                    ]
                    outputs = self._compute(node, reads)
                    results |= {name: self._quantize(name, output) for name, output in outputs.items()}
                last = filter(None, nodes[-1].output)
                differences |= {name: (results[name] - values[name]).numpy() for name in last}
        return differences

    def _compute(self, node: NodeProto, reads: Sequence[Tensor | None]) -> dict[str, Tensor]:
        session = self._cells.get(id(node))
        if session is None:
            return compute_node(node, reads)
        feeds = {
            name: value.detach().numpy() for name, value in zip(node.input, reads, strict=True) if value is not None
        }
        return {name: as_tensor(array) for name, array in session.run(feeds).items()}

    def _read(self, name: str, values: Mapping[str, Tensor], known: dict[str, Tensor]) -> Tensor | None:
        """The value in its format; `known` keeps it for other layers."""
        if not name:
            return None
        if name not in known:
            known[name] = self._quantize(name, values[name])
        return known[name]

    def _quantize(self, name: str, value: Tensor) -> Tensor:
        encoding = self._encodings.get(name)
        return value if encoding is None else as_tensor(round_trip(value.detach().numpy(), encoding, is_stored=False))


def _session_of_node(node: NodeProto, opsets: Sequence[onnx.OperatorSetIdProto]) -> Session:
    """A model of one cell. All that it reads are floats, but for the lengths of sequences."""
    types = [TensorProto.INT32 if place == LENGTHS else TensorProto.FLOAT for place in range(len(node.input))]
    inputs = {name: kind for name, kind in zip(node.input, types, strict=True) if name}
    graph = helper.make_graph(
        [node],
        "cell",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in node.output if name],
    )
    return Session.of(detach(helper.make_model(graph, opset_imports=opsets, ir_version=10)))


LENGTHS: Final = 4
"""Which input of a cell says how long each sequence is."""


def _compute_fixed(
    model: DetachedModel, encodings: Mapping[str, Encoding], names: Iterable[str]
) -> dict[str, np.ndarray]:
    """The values `names`, which are computed from constants alone, such as a weight behind a Transpose: from the
    constants in their formats."""
    proto = model.copy_proto()
    graph = proto.graph
    del graph.output[:], graph.input[:], graph.initializer[:]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    drop_unread_nodes(graph)
    read = {name for node in graph.node for name in node.input}
    feeds: dict[str, np.ndarray] = {}
    for tensor in model.proto.graph.initializer:
        if tensor.name in read and tensor.name in encodings:
            feeds[tensor.name] = round_trip(model.array(tensor), encodings[tensor.name], is_stored=True)
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        elif tensor.name in read:
            graph.initializer.append(tensor)
    return Session.of(model.with_proto(proto)).run(feeds) if feeds else {}
