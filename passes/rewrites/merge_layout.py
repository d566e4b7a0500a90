"""Write each chain of operators that only move elements with the fewest operators that move them so.

A chain may go through operators that compute element by element: they do the same wherever the elements are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import NodeProto

from passes.graph.op_facts import CURVES, LAYOUT_OPS, OF_TWO, attribute_of, broadcasts, input_of
from passes.graph.traversal import bodies_in
from passes.rewrites.flat_rows import flatten_rows, join_biases, why_apart
from passes.rewrites.layout_map import LayoutCall, LayoutMap, NoLayout
from passes.rewrites.rewriter import Rewriter, RewriteStep
from passes.step import PassResult
from passes.suggest import say_count

MOVING: Final = LAYOUT_OPS | {"Expand", "Tile"}
"""The operators of a chain."""

NOTHING: Final = "every chain is in its shortest form"

LONGEST: Final = 16
"""How many nodes back a chain is looked through."""


@dataclass(frozen=True, slots=True)
class MergeLayout(RewriteStep, name="merge-layout", reads="structure"):
    """Write chains of Transpose, Reshape, Squeeze, Unsqueeze, Flatten and Expand in the shortest form. Tile counts
    too, and chains go through elementwise operators.

    A chain of which others read a value in the middle is written anew only where that leaves no more nodes. Rows that
    several operators compute between products of matrices stay matrices between these, and each product takes its bias,
    as one Gemm, where that leaves no more nodes. The row says how many products stay apart from their bias, and why.
    """

    def why_not(self, ops: Set[str]) -> str:
        return "" if ops & (MOVING | {"MatMul"}) else "nothing moves elements"

    def rewrite(self, rewriter: Rewriter) -> PassResult:
        before = len(rewriter.nodes)
        for node in rewriter.nodes:
            rewriter.drop_unread(node.output[0])  # a dead consumer would make its operand look shared
        while merge_chains(rewriter) or flatten_rows(rewriter) or join_biases(rewriter):
            pass
        gone = before - len(rewriter.nodes)
        return rewriter.result(say_count(gone, "node", "fewer") or NOTHING, why_apart(rewriter))


def merge_chains(rewriter: Rewriter) -> bool:
    """Merge each chain of layout operators once; whether any was."""
    return _ChainMerger(rewriter).run()


MOST_AXES: Final = 4
"""A Transpose gets more axes only where a Transpose, an Expand or a Tile of the chain has as many. Accelerators
take few; and onnxruntime moves a Transpose of five axes through Slice and Concat, after which it no longer fuses the
next Transpose into a product (Reformer: 0.94 of the speed)."""


@dataclass(frozen=True, slots=True)
class _LayoutChain:
    """A chain that ends in `nodes[0]` and begins with `source`, the nearest node first."""

    source: str
    nodes: Sequence[NodeProto]
    own: int
    """How many nodes go when the end is computed in another way; the value before the last of them is shared."""


@dataclass(slots=True)
class _ChainMerger:
    """Merges the chains of one graph."""

    rewriter: Rewriter

    def run(self) -> bool:
        """Merge each chain once; whether any was."""
        before = self.rewriter.changes
        for node in self.rewriter.by_op("Expand"):
            self._drop_expand(node)
        for node in self.rewriter.by_op(*MOVING, *CURVES, *OF_TWO, backward=True):
            self._merge(node)
        return self.rewriter.changes > before

    def _may_follow(self, node: NodeProto) -> bool:
        return not node.domain and (node.op_type in MOVING or self._operand(node) is not None)

    def _operand(self, node: NodeProto) -> int | None:
        """The input of an elementwise operator of one value, whose other operand is a number; None for others."""
        if node.domain:
            return None
        if node.op_type in CURVES:
            return 0
        if node.op_type in OF_TWO and len(node.input) == 2:
            for position in (0, 1):
                number = self.rewriter.constant(node.input[1 - position])
                if number is not None and number.size == 1 and number.ndim <= 1:
                    return position
        return None

    def _merge(self, end: NodeProto) -> None:
        """Write the chain anew that gains most; of equal ones, the longest."""
        best: tuple[int, int, _LayoutChain, list[LayoutCall]] | None = None
        for length, chain in enumerate(self._chains(end)):
            calls = self._calls_of(chain)
            if calls is None:
                continue
            moving = [node for node in chain.nodes[: chain.own] if node.op_type in MOVING]
            gain = len(moving) - len(calls)
            is_shorter = gain > 0 or (gain == 0 and self._frees_shared(chain, calls))
            if is_shorter and self._has_name_for(end, chain, calls) and (best is None or (gain, length) > best[:2]):
                best = gain, length, chain, calls
        if best is not None:
            self._write(end, *best[2:])

    def _frees_shared(self, chain: _LayoutChain, calls: Sequence[LayoutCall]) -> bool:
        """Whether equally many nodes no longer read a shared value that only chains read, without a Transpose more."""
        if chain.own == len(chain.nodes):
            return False
        name = chain.nodes[chain.own - 1].input[0]
        if name in self.rewriter.held or not all(map(self._may_follow, self.rewriter.consumers[name])):
            return False
        turns = sum(node.op_type == "Transpose" for node in chain.nodes[: chain.own])
        return sum(call.op == "Transpose" for call in calls) <= turns

    def _has_name_for(self, end: NodeProto, chain: _LayoutChain, calls: Sequence[LayoutCall]) -> bool:
        """Whether the end of the chain keeps the name of an output: an input, another output and what a node with
        bodies makes have their own."""
        if calls or end.output[0] not in self.rewriter.held or len(chain.nodes) > chain.own:
            return True
        computes = any(node.op_type not in MOVING for node in chain.nodes)
        producer = self.rewriter.producers.get(chain.source)
        is_free = producer is not None and not bodies_in(producer) and chain.source not in self.rewriter.held
        return computes or is_free

    def _chains(self, end: NodeProto) -> Iterator[_LayoutChain]:
        """The chains that end in a node, the shortest first."""
        nodes: list[NodeProto] = []
        node: NodeProto | None = end
        own, is_own = 0, True
        while node is not None and len(nodes) < LONGEST and self._may_follow(node):
            position = self._operand(node)
            if position is not None and not is_own:
                return
            nodes.append(node)
            own += is_own
            source = node.input[position or 0]
            if any(entry.op_type in MOVING for entry in nodes):
                yield _LayoutChain(source, list(nodes), own)
            is_own = is_own and not self.rewriter.is_shared(source)
            node = self.rewriter.producer(source)

    def _calls_of(self, chain: _LayoutChain) -> list[LayoutCall] | None:
        """The operators that do what the layout operators of a chain do; None where that is not known."""
        shape = self.rewriter.shape(chain.source)
        if not shape:
            return None
        try:
            layout = LayoutMap.of(shape)
            for node in reversed(chain.nodes):
                if node.op_type in MOVING:
                    self._follow(layout, node)
            calls = layout.shortest()
        except NoLayout:
            return None
        ranks = [(node, len(self.rewriter.shape(node.output[0]) or ())) for node in chain.nodes]
        most = max(len(shape), *(rank for _, rank in ranks))
        permuted = [rank for node, rank in ranks if node.op_type in ("Transpose", "Expand", "Tile")]
        most_permuted = max([MOST_AXES, *permuted])
        if any(len(call.sizes) > (most_permuted if call.op == "Transpose" else most) for call in calls):
            return None
        return calls

    def _follow(self, layout: LayoutMap, node: NodeProto) -> None:
        """Apply one node of a chain to `layout`; raises NoLayout where what it does is not known."""
        if node.op_type == "Transpose":
            layout.transpose(attribute_of(node, "perm", range(len(layout.groups))[::-1]))
        elif node.op_type == "Flatten":
            layout.flatten(attribute_of(node, "axis", 1))
        elif node.op_type != "Identity":
            numbers = attribute_of(node, "axes") or attribute_of(node, "shape")
            if numbers is None and input_of(node, 1):
                numbers = self.rewriter.ints(node.input[1])
            if numbers is None and (input_of(node, 1) or node.op_type != "Squeeze"):
                raise NoLayout
            if attribute_of(node, "allowzero") and 0 in (numbers or ()):
                raise NoLayout
            FOLLOWERS[node.op_type](layout, numbers)

    def _write(self, end: NodeProto, chain: _LayoutChain, calls: Sequence[LayoutCall]) -> None:
        """Compute the end of a chain by its elementwise operators, then by `calls`."""
        rewriter, name, shape = self.rewriter, chain.source, self.rewriter.shape(chain.source)
        for node in reversed(chain.nodes):
            position = self._operand(node) if node.op_type not in MOVING else None
            if position is not None:
                inputs = [name if at == position else read for at, read in enumerate(node.input)]
                name = rewriter.add_copy(node, inputs, shape)
        for call in calls:
            like = next(node for node in chain.nodes if node.op_type in MOVING)
            dtype = rewriter.dtype(name)
            if call.op == "Transpose":
                name = rewriter.add("Transpose", [name], like, call.sizes, dtype=dtype, perm=call.perm)
            else:
                shape_name = rewriter.constant_ints(call.shape, f"{like.output[0]}/shape")
                name = rewriter.add(call.op, [name, shape_name], like, call.sizes, dtype=dtype)
        rewriter.replace(end.output[0], name)

    def _drop_expand(self, node: NodeProto) -> None:
        """Remove an Expand whose consumers broadcast to the same shape without it."""
        rewriter, result = self.rewriter, node.output[0]
        shape, own = rewriter.fixed_shape(node.input[0]), rewriter.fixed_shape(result)
        consumers = rewriter.consumers[result]
        if shape is None or own is None or result in rewriter.held or not consumers:
            return
        for consumer in consumers:
            others = [rewriter.fixed_shape(name) for name in consumer.input if name != result]
            known = [sizes for sizes in others if sizes is not None]
            if consumer.domain or not broadcasts(consumer) or len(known) < len(others):
                return
            if np.broadcast_shapes(shape, *known) != np.broadcast_shapes(own, *known):
                return
        rewriter.replace(result, node.input[0])


FOLLOWERS: Final = {
    "Reshape": LayoutMap.reshape,
    "Expand": LayoutMap.expand,
    "Squeeze": LayoutMap.squeeze,
    "Tile": LayoutMap.tile,
    "Unsqueeze": LayoutMap.unsqueeze,
}
"""Operator with a list of numbers → what it does to a layout."""
