"""Gradients of a model's outputs for values inside it, in memory that one piece of the model decides.

The nodes between these values and the outputs run once in order, and keep only what crosses a cut between two pieces.
The backward pass begins with the last piece. It computes a piece again, with all that torch needs for its gradients,
and drops that when the piece is done: one more forward pass for memory of about the square root.

Cuts lie where few bytes cross. A model whose results take less than `WHOLE` bytes is one piece, and runs once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from onnx import NodeProto
from torch import Tensor

from passes.graph.inference import EVERY_FLOAT, find_floats
from passes.graph.traversal import reads_of
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from pipeline.errors import Unsupported
from pipeline.ir import Graph, Op
from pipeline.quantsim.torch_nodes import Arrays, ImportedNodes, Tensors, TorchNodes, compute_op, read_stored
from pipeline.runtime.tensors import as_tensor

WHOLE: Final = 2**28
"""Bytes of results that one piece may hold in any case."""

Visit = Callable[[str, np.ndarray, Tensors], object]
"""Gets the name of a value, its gradient in float32 or more, and by name the values that go with it."""


@dataclass(frozen=True, slots=True)
class GraphPiece:
    """Ops of a graph that run together.

    reads: vids that pieces before it make, or inputs of the graph.
    makes: vids of it that pieces after it read, or the caller.
    keeps: vids of it that outlive their last op: those, and what a visitor reads.
    """

    ops: tuple[Op, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    keeps: frozenset[int]


def cut_graph(
    graph: Graph, company: Mapping[int, Collection[int]], wanted: Collection[int], whole: int = WHOLE
) -> tuple[GraphPiece, ...]:
    """The ops in pieces, such that what crosses the cuts, and the results of the largest piece, take few bytes.

    Args:
        company: vid → vids that are in its piece as well, made there or read.
        wanted: vids that the caller reads after the last op.
        whole: bytes of results up to which there is one piece.
    """
    uses = [{*op.inputs}.union(*(company.get(vid, ()) for vid in op.outputs)) for op in graph.ops]
    made = {vid: place for place, op in enumerate(graph.ops) for vid in op.outputs}
    last = {vid: place for place, vids in enumerate(uses) for vid in vids}
    last |= dict.fromkeys(wanted, len(graph.ops))
    nbytes = {vid: graph.values[vid].spec.nbytes for vid in made}
    spans = [(made[vid], last[vid], nbytes[vid]) for vid in made if vid in last]
    sizes = [*accumulate((sum(nbytes[vid] for vid in op.outputs) for op in graph.ops), initial=0)]
    ends: tuple[int, ...] = (0, len(graph.ops))
    if sizes[-1] > whole:
        ends = min(_try_cuts(sizes, spans, whole), key=lambda cuts: _cost(cuts, sizes, spans))
    known = {*made, *graph.inputs}
    pieces: list[GraphPiece] = []
    for begin, end in pairwise(ends):
        own = {vid for vid, place in made.items() if begin <= place < end}
        used = set().union(*uses[begin:end])
        makes = tuple(vid for vid in own if last.get(vid, -1) >= end)
        visited = {vid for vid in own if vid in company}.union(*(company.get(vid, ()) for vid in own))
        reads = tuple(sorted((used - own) & known))
        pieces.append(GraphPiece(tuple(graph.ops[begin:end]), reads, makes, frozenset(visited.union(makes))))
    return tuple(pieces)


Span = tuple[int, int, int]
"""The op that makes a value, the last op that reads it, and its bytes."""


def _try_cuts(sizes: Sequence[int], spans: Sequence[Span], whole: int) -> Iterator[tuple[int, ...]]:
    """Ways to cut: where no more than a width crosses, into pieces as small as these places allow, or larger."""
    count = len(sizes) - 1
    changes = [0] * (count + 2)
    for begin, end, nbytes in spans:
        changes[begin + 1] += nbytes
        changes[end + 1] -= nbytes
    crossing = [*accumulate(changes)][1:count]  # before the ops 1, 2, …
    width = max(min(crossing, default=0), 1)
    while True:
        narrow = [0, *(place for place, nbytes in enumerate(crossing, 1) if nbytes <= width), count]
        most = max(whole, *(sizes[end] - sizes[begin] for begin, end in pairwise(narrow)))
        while most < sizes[-1]:
            cuts = [0]
            while cuts[-1] < count:
                fitting = bisect_right(narrow, bisect_right(sizes, sizes[cuts[-1]] + most) - 1) - 1
                cuts.append(narrow[max(fitting, bisect_right(narrow, cuts[-1]))])
            yield tuple(cuts)
            most *= 2
        if width >= max(crossing, default=0):
            break
        width *= 2
    yield (0, count)


def _cost(cuts: Sequence[int], sizes: Sequence[int], spans: Sequence[Span]) -> int:
    """Bytes of what crosses `cuts`, each value once, and of the largest piece."""
    crossing = sum(nbytes for begin, end, nbytes in spans if bisect_right(cuts, begin) < bisect_right(cuts, end))
    return crossing + max(sizes[end] - sizes[begin] for begin, end in pairwise(cuts))


class Backward:
    """Backward passes through the part of `model` after the values `names`.

    `reads` are the values that a pass needs as well as the weights, and `computed` those that it computes.

    Args:
        names: values of which gradients are asked for → the values that a visitor gets with each of them.
        computed_here: values that are computed here too, though nodes make them before all `names` or they are among
            `names`.
        whole: bytes of results up to which the nodes are one piece.

    Raises:
        Unsupported: no output of floats depends on `names`.
    """

    def __init__(
        self,
        model: DetachedModel,
        names: Mapping[str, Collection[str]],
        computed_here: Collection[str] = (),
        whole: int = WHOLE,
    ) -> None:
        self.names, self._whole = names, whole
        nodes, self.reached, self.outputs = find_gradient_nodes(model, names.keys(), frozenset(computed_here))
        self.computed = frozenset(name for node in nodes for name in node.output if name)
        self.op_of = MappingProxyType({name: node.op_type for node in nodes for name in node.output})
        self._nodes = TorchNodes(nodes, model.proto.opset_import, self.computed, read_stored(model))
        self.reads = tuple(sorted({*self._nodes.reads, *(names.keys() - self.computed)}))
        self._pieces: dict[int, tuple[ImportedNodes, tuple[GraphPiece, ...]]] = {}

    def forward(self, values: Arrays) -> Forward:
        """Compute the nodes on the way, from the values named in `reads`.

        Raises:
            Unsupported: an operator on the way has no gradient.
        """
        given = {name: as_tensor(values[name]) for name in self.reads}
        for name in self.names.keys() - self.computed:
            given[name].requires_grad_()
        imported = self._nodes.import_for({name: given[name] for name in self._nodes.reads})
        vids = {value.name: vid for vid, value in enumerate(imported.part.graph.values)}
        company = {
            vids[name]: {vids[member] for member in members if member in vids}
            for name, members in self.names.items()
            if name in vids
        }
        pieces = cut_graph(imported.part.graph, company, [vids[name] for name in self.outputs], self._whole)
        return Forward(self, imported, pieces, given)


class Forward:
    """The values of one pass, through which gradients can be taken more than once."""

    def __init__(
        self, backward: Backward, imported: ImportedNodes, pieces: Sequence[GraphPiece], given: Tensors
    ) -> None:
        self._backward, self._pieces = backward, pieces
        self._known = {**given, **imported.constants}
        graph = imported.part.graph
        self._names = [value.name for value in graph.values]
        self._vids = {name: vid for vid, name in enumerate(self._names)}
        self._held = {**imported.tensors, **{vid: given[self._names[vid]] for vid in graph.inputs}}
        self._cut: set[str] = set()
        self._slots: dict[int, Tensor] = {}
        for piece in pieces:
            self._slots = self._run(piece)
            for vid in piece.makes:
                self._held[vid] = self._slots[vid].detach().requires_grad_(self._slots[vid].requires_grad)
        if self._cut:
            operators = sorted(self._cut)
            shown = ", ".join(operators)
            raise Unsupported(
                f"no gradient goes through {plural(len(operators), 'operator')} of the model: {shown}", operators
            )

    def outputs(self) -> dict[str, np.ndarray]:
        """By name, in float32 or more: sums of squares overflow in 16 bits."""
        return {name: _to_wide_array(self._held[self._vids[name]]) for name in self._backward.outputs}

    def visit_gradients(self, directions: Arrays, visit: Visit, *, is_last: bool = False) -> None:
        """Call `visit` with each value that an output depends on, and the gradient of the sum of direction · output.

        Values come as the backward pass reaches them, the last of the model first, and no gradient is held longer.

        Args:
            directions: output → array of its shape.
            visit: called once for each value.
            is_last: whether no other gradients are taken, so that the pass may free what it has read.
        """
        flows: dict[int, Tensor] = {}
        for name, line in directions.items():
            vid = self._vids[name]
            flows[vid] = as_tensor(line).to(self._held[vid].dtype)
        for piece in reversed(self._pieces):
            is_kept = piece is self._pieces[-1] and not is_last
            slots = dict(self._slots) if piece is self._pieces[-1] else self._run(piece)
            if is_last:
                self._slots = {}
            self._visit_piece(piece, slots, flows, visit, keeps_graph=is_kept)
        for name in self._backward.names.keys() - self._backward.computed:
            if self._vids.get(name) in flows:
                visit(name, _to_wide_array(flows[self._vids[name]]), self._known)

    def _visit_piece(
        self, piece: GraphPiece, slots: dict[int, Tensor], flows: dict[int, Tensor], visit: Visit, *, keeps_graph: bool
    ) -> None:
        """Take the gradients `flows` of what leaves the piece through it, to what it reads; `slots` are its values."""
        names, held = self._backward.names, self._held
        starts = [vid for vid in piece.reads if held[vid].requires_grad]
        ends = [vid for vid in piece.makes if vid in flows]
        roots, gradients = [slots[vid] for vid in ends], [flows.pop(vid) for vid in ends]
        values = {self._names[vid]: tensor for vid, tensor in slots.items()}
        own = [name for name in values.keys() & names.keys() if self._vids[name] not in piece.reads]
        leaves = [*(held[vid] for vid in starts), *(values[name] for name in own if values[name].is_leaf)]
        slots.clear()
        waiting = Counter(member for name in own for member in names[name])

        def visit_and_drop(name: str, gradient: Tensor) -> None:
            visit(name, _to_wide_array(gradient), self._known | values)
            waiting.subtract(names[name])
            for member in names[name]:
                if not waiting[member]:
                    values.pop(member, None)

        with ExitStack() as hooks:
            for name in own:
                hook = values[name].register_hook(partial(visit_and_drop, name))
                hooks.callback(hook.remove)
            found = torch.autograd.grad(roots, leaves, gradients, retain_graph=keeps_graph, allow_unused=True)
        for vid, gradient in zip(starts, found, strict=False):
            if gradient is not None:
                flows[vid] = flows[vid] + gradient if vid in flows else gradient

    def _run(self, piece: GraphPiece) -> dict[int, Tensor]:
        """The values that `piece` reads and keeps, with what torch needs for their gradients."""
        slots = {vid: self._held[vid] for vid in piece.reads}
        last = {vid: place for place, op in enumerate(piece.ops) for vid in op.inputs}
        with torch.enable_grad():
            for place, op in enumerate(piece.ops):
                ins = [slots[vid] if vid in slots else self._held[vid] for vid in op.inputs]
                results = compute_op(op, ins)
                if any(result.requires_grad and not torch.isfinite(result.sum()) for result in results):
                    results = compute_op(op, [_NoNanGradient.apply(tensor) for tensor in ins])
                for vid, result in zip(op.outputs, results, strict=True):
                    name = self._names[vid]
                    slots[vid] = result.requires_grad_() if name in self._backward.names else result
                    if name in self._backward.reached and not slots[vid].requires_grad:
                        self._cut.add(self._backward.op_of[name])
                for vid in {*op.inputs, *op.outputs} & slots.keys() - piece.keeps:
                    if last.get(vid, place) == place:
                        del slots[vid]
        return slots


class _NoNanGradient(torch.autograd.Function):
    """The tensor itself, whose gradient is 0 where it would be NaN: that of a value which a later operator drops, 0,
    times the slope of an operator that makes infinity, such as the logarithm of 0."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.where(gradient.isnan(), 0, gradient)


def _to_wide_array(tensor: Tensor) -> np.ndarray:
    """In float32 or more; numpy has no bfloat16 either."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).numpy()


def find_gradient_nodes(
    model: DetachedModel, names: Collection[str], computed_here: frozenset[str] = frozenset()
) -> tuple[list[NodeProto], set[str], list[str]]:
    """The nodes between `names` and the outputs, by values that carry a gradient, with those that make the values
    `computed_here`; the values that depend on `names`, and the outputs among them.

    Raises:
        Unsupported: no output of floats depends on `names`.
    """
    graph, floats = model.proto.graph, find_floats(model.proto, EVERY_FLOAT).keys()
    reached = set(names)
    forward: list[NodeProto] = []
    for node in graph.node:
        # integers that a DequantizeLinear reads carry a gradient, too
        results = [name for name in node.output if name in floats or (name and node.op_type == "QuantizeLinear")]
        read = node.input[:1] if node.op_type == "CastLike" else reads_of(node)  # it takes only a type of the second
        depends = not reached.isdisjoint(read) and results
        if depends or not computed_here.isdisjoint(node.output):
            forward.append(node)
        if depends:
            reached.update(results)
    wanted = {info.name for info in graph.output}
    nodes: list[NodeProto] = []
    for node in reversed(forward):
        if not wanted.isdisjoint(node.output):
            nodes.append(node)
            wanted.update(reads_of(node))
    nodes.reverse()
    outputs = [info.name for info in graph.output if info.name in reached]
    if not outputs:
        raise Unsupported("no output of floats depends on a layer that is quantized")
    return nodes, reached, outputs
