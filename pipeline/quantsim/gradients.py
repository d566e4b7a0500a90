"""Gradients of a model's outputs with respect to inner values, by torch's autograd over ONNX's operators.

Only nodes between the wanted values and the outputs are computed here. What else these nodes read (shapes, masks, and
all that lies before) comes from a run of onnxruntime, by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx
import torch
from onnx import NodeProto, helper
from torch import Tensor

from passes.graph.inference import EVERY_FLOAT, find_floats
from passes.graph.op_facts import ONNX_DOMAINS
from passes.graph.traversal import reads_of
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from pipeline.errors import Unsupported
from pipeline.quantsim.gradient_functions import FUNCTIONS
from pipeline.runtime.tensors import as_tensor

Arrays = Mapping[str, np.ndarray]


class Backward:
    """Backward passes through the part of `model` behind the values `names`.

    `reads` are the values that a pass has to be given beside the weights, and `computed` those that it computes.

    Args:
        computed_here: values that are computed here too, though they lie before all `names` or are among them.

    Raises:
        Unsupported: operators on the way have no function here, and all are listed; or no output of floats is there.
    """

    def __init__(self, model: DetachedModel, names: Collection[str], computed_here: Collection[str] = ()) -> None:
        graph = model.proto.graph
        self._names = frozenset(names)
        self._nodes, missing = _find_path(
            graph, self._names, frozenset(computed_here), find_floats(model.proto, EVERY_FLOAT).keys()
        )
        if missing:
            shown = ", ".join(sorted(missing))
            raise Unsupported(f"no gradient goes through {plural(len(missing), 'operator')} of the model: {shown}")
        computed = frozenset(name for node in self._nodes for name in node.output)
        read = {name for node in self._nodes for name in node.input if name}
        stored = {tensor.name: tensor for tensor in graph.initializer}
        self._weights = {name: as_tensor(model.array(stored[name])) for name in read & stored.keys()}
        self.computed = computed
        self._starts = self._names - computed
        self.reads = tuple(sorted((read | self._starts) - computed - stored.keys()))
        self._outputs = [info.name for info in graph.output if info.name in computed | self._starts]
        if not self._outputs:
            raise Unsupported("no output of floats depends on a layer that is quantized")

    def forward(self, values: Arrays) -> Forward:
        """Compute the nodes on the way, from the values named in `reads`."""
        slots: dict[str, Tensor] = dict(self._weights)
        for name in self.reads:
            value = as_tensor(values[name])
            slots[name] = value.requires_grad_() if name in self._starts else value
        with torch.enable_grad():
            for node in self._nodes:
                results = compute_node(node, [slots.get(name) for name in node.input])
                for name in self._names.intersection(results):
                    results[name].requires_grad_()
                slots.update(results)
        return Forward(slots, self._outputs, [name for name in self._names if name in slots])


class Forward:
    """The values of one pass, through which gradients can be taken more than once."""

    def __init__(self, values: dict[str, Tensor], outputs: Sequence[str], names: Sequence[str]) -> None:
        self.values = values
        self._outputs, self._names = outputs, names

    def outputs(self) -> dict[str, np.ndarray]:
        """By name, in float32 or more: sums of squares overflow in 16 bits."""
        return {name: _to_wide_array(self.values[name]) for name in self._outputs}

    def gradients(self, directions: Arrays) -> dict[str, np.ndarray]:
        """The gradient of the sum of direction · output for each value that an output depends on."""
        lines = [(self.values[name] * as_tensor(line)).double().sum() for name, line in directions.items()]
        starts = [self.values[name] for name in self._names]
        computed = torch.autograd.grad(torch.stack(lines).sum(), starts, retain_graph=True, allow_unused=True)
        return {
            name: _to_wide_array(gradient)
            for name, gradient in zip(self._names, computed, strict=True)
            if gradient is not None
        }


def compute_node(node: NodeProto, reads: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """The results of `node` by name, by its function of torch.

    Raises:
        Unsupported: torch refuses the operands, such as a window that is larger than what it is laid over.
    """
    attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    try:
        results = FUNCTIONS[node.op_type](attributes, reads)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        title = f"node {node.name or node.output[0]!r} ({node.op_type})"
        raise Unsupported(f"no gradient goes through {title} on these inputs: {error}") from error
    several = results if isinstance(results, tuple | list) else (results,)
    return {name: result for name, result in zip(node.output, several, strict=False) if name}


def _to_wide_array(tensor: Tensor) -> np.ndarray:
    """In float32 or more; numpy has no bfloat16 either."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).numpy()


def _find_path(
    graph: onnx.GraphProto, names: Collection[str], computed_here: frozenset[str], floats: Collection[str]
) -> tuple[list[NodeProto], set[str]]:
    """The nodes between `names` and the outputs, by float values, with those that make the values `computed_here`; and
    the operators that have no function."""
    reached = set(names)
    forward: list[NodeProto] = []
    for node in graph.node:
        results = [name for name in node.output if name in floats]
        is_behind = not reached.isdisjoint(reads_of(node)) and results
        if is_behind or not computed_here.isdisjoint(node.output):
            forward.append(node)
            reached.update(results)
    wanted = {info.name for info in graph.output}
    nodes: list[NodeProto] = []
    missing: set[str] = set()
    for node in reversed(forward):
        if wanted.isdisjoint(node.output):
            continue
        nodes.append(node)
        wanted.update(reads_of(node))
        if node.domain not in ONNX_DOMAINS or node.op_type not in FUNCTIONS:
            missing.add(".".join(filter(None, (node.domain, node.op_type))))
    nodes.reverse()
    return nodes, missing
