"""What each layer adds to its own result if it alone is quantized, by torch's operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
import torch
from onnx import NodeProto, helper
from torch import Tensor

from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.quantsim.encodings import Encoding, round_trip
from pipeline.quantsim.gradients import TorchNodes
from pipeline.quantsim.noise import drop_unread_nodes, find_fixed_values
from pipeline.runtime.tensors import as_tensor, to_numpy


class QuantizedLayers:
    """Layers that read quantized values. Their weights take memory as well as those of `model`.

    Args:
        layers: the nodes of each.
    """

    def __init__(
        self, model: DetachedModel, encodings: Mapping[str, Encoding], layers: Sequence[Sequence[NodeProto]]
    ) -> None:
        self._encodings, self._layers = encodings, layers
        reads = {name for nodes in layers for node in nodes for name in node.input if name}
        stored = {tensor.name: tensor for tensor in model.proto.graph.initializer}
        arrays = {name: model.array(stored[name]) for name in reads & stored.keys()}
        for name in arrays.keys() & encodings.keys():
            arrays[name] = round_trip(arrays[name], encodings[name], is_stored=True)
        fixed = find_fixed_values(model.proto.graph, stored).intersection(reads).difference(encodings)
        arrays |= _compute_fixed(model, encodings, sorted(fixed))
        self._constants = {name: as_tensor(array) for name, array in arrays.items()}
        opsets = list(model.proto.opset_import)
        self._nodes = {
            id(node): TorchNodes([node], opsets, list(filter(None, node.output)), {})
            for nodes in layers
            for node in nodes
        }

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
                    for name in filter(None, node.input):
                        if name not in results and name not in known:
                            known[name] = self._quantize(name, values[name])
                    made = self._nodes[id(node)].compute({**known, **results})
                    results |= {name: self._quantize(name, made[name]) for name in node.output if name}
                last = filter(None, nodes[-1].output)
                differences |= {name: (results[name] - values[name]).numpy() for name in last}
        return differences

    def _quantize(self, name: str, value: Tensor) -> Tensor:
        encoding = self._encodings.get(name)
        return value if encoding is None else as_tensor(round_trip(to_numpy(value), encoding, is_stored=False))


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
