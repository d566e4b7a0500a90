"""Forms that some accelerators want, by choice: products as convolutions, a head of attention each, no int64.

They move elements and weights, and compute the same values; the sums of a Conv may be rounded in another order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from onnx import NodeProto, TensorProto

from passes.graph.op_facts import attribute_of, input_of, is_scaled
from passes.graph.traversal import walk
from passes.rewrites.canonical_attention import SoftmaxAttention, find_attentions, why_no_attention
from passes.rewrites.canonical_parts import is_feature_vector
from passes.rewrites.flat_rows import find_bias
from passes.rewrites.graph_values import Dim
from passes.rewrites.rewriter import Array, Rewriter, RewriteStep
from passes.step import PassResult
from passes.suggest import say_count, say_left


@dataclass(frozen=True, slots=True)
class LinearToConv(RewriteStep, name="linear-to-conv", reads="values"):
    """Write each product with a stored matrix as a 1×1 Conv. The products are MatMul and Gemm. Rows are an image of
    one line, [1, K, 1, rows].

    The weight becomes [N, K, 1, 1]; the bias that is added after a MatMul, that of the Conv. With `merge-layout` after
    it, the Transposes between two products go.
    """

    def rewrite(self, rewriter: Rewriter) -> PassResult:
        products = [node for node in rewriter.by_op("MatMul", "Gemm") if node.input[1] in rewriter.stored]
        reasons = [reason for node in products if (reason := _write_conv(rewriter, node))]
        written = len(products) - len(reasons)
        said = say_count(written, "product", "as Conv")
        return rewriter.result(said, say_left(reasons, "product"), default="no product has a stored matrix")


def _write_conv(rewriter: Rewriter, node: NodeProto) -> str:
    """Write a product as a Conv; why not, or nothing where it is written."""
    shape, weight = rewriter.fixed_shape(node.input[0]), rewriter.constant(node.input[1])
    label = node.name or node.output[0]
    if shape is None or len(shape) < 2 or 0 in shape:
        return f"{label}: the sizes of its data are not fixed"
    if weight is None or weight.ndim != 2:
        return f"{label}: its weight is no matrix that is read"
    if is_scaled(node):
        return f"{label}: it scales or transposes its data"
    matrix = weight if attribute_of(node, "transB", 0) else weight.T
    if rewriter.dtype(node.output[0]) not in NARROW_FLOATS:
        return f"{label}: its data is no float of 16 or 32 bits"
    end, bias = _bias_of(rewriter, node, (*shape[:-1], matrix.shape[0]))
    if bias is None and input_of(node, 2):
        return f"{label}: its bias is no stored vector"
    rows, width, count = math.prod(shape[:-1]), shape[-1], matrix.shape[0]
    image = rewriter.transpose(rewriter.reshape(node.input[0], (1, 1, rows, width), node), [0, 3, 1, 2], node)
    kernel = rewriter.constant_of(np.ascontiguousarray(matrix)[:, :, None, None], f"{node.input[1]}_conv")
    inputs = [image, kernel, *([rewriter.constant_of(bias, f"{node.output[0]}/bias")] if bias is not None else [])]
    made = rewriter.add("Conv", inputs, node, (1, count, 1, rows), kernel_shape=[1, 1])
    back = rewriter.transpose(made, [0, 2, 3, 1], node)
    rewriter.replace(end, rewriter.reshape(back, (*shape[:-1], count), node))
    return ""


def _bias_of(rewriter: Rewriter, node: NodeProto, shape: Sequence[int]) -> tuple[str, Array | None]:
    """The value with the bias, and the bias: that of a Gemm, or that of the Add which alone reads a MatMul."""
    if node.op_type == "Gemm":
        return node.output[0], _vector(rewriter, input_of(node, 2), shape)
    found = find_bias(rewriter, node)
    return (found[0].output[0], _vector(rewriter, found[1], shape)) if found is not None else (node.output[0], None)


def _vector(rewriter: Rewriter, name: str, shape: Sequence[int]) -> Array | None:
    array = rewriter.constant(name) if name else None
    if array is None or not is_feature_vector(array, len(shape), shape[-1]):
        return None
    return np.broadcast_to(array.reshape(-1), shape[-1:]).copy()


NARROW_FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True, slots=True)
class MhaToSha(RewriteStep, name="mha-to-sha", reads="structure"):
    """Compute each head of an attention by operators of its own. They are Split, MatMul, scale, mask, Softmax and
    MatMul for each head, and one Concat.

    Each head computes with the very same elements as before. Heads that share keys and values read the same piece.
    """

    def rewrite(self, rewriter: Rewriter) -> PassResult:
        reasons: list[str] = []
        heads = 0
        for attention in list(find_attentions(rewriter)):
            shape = rewriter.fixed_shape(attention.scores)
            if shape is None or len(shape) != 4 or shape[1] < 2:
                label = attention.softmax.name or attention.softmax.output[0]
                found = "open sizes" if shape is None else "one head" if shape[1:2] == (1,) else f"{len(shape)} dims"
                reasons.append(f"{label}: its scores have {found}")
                continue
            writer = _HeadWriter(rewriter, attention, shape[1])
            open_operand = writer.find_open_operand()
            if open_operand:
                reasons.append(f"{open_operand}: how many heads it has is not known")
                continue
            writer.write()
            heads += shape[1]
        said = say_count(heads, "head", f"by {'themselves' if heads > 1 else 'itself'}")
        return rewriter.result(said, say_left(reasons, "attention"), default=why_no_attention(rewriter))


@dataclass(slots=True)
class _HeadWriter:
    """Writes the heads of one attention."""

    rewriter: Rewriter
    attention: SoftmaxAttention
    count: int
    pieces: dict[str, list[str]] = field(default_factory=dict)

    def find_open_operand(self) -> str:
        """An operand that may have an axis of heads, of a size that is not known; empty where there is none."""
        product = self.rewriter.producers[self.attention.scores]
        names = [
            *product.input,
            *(name for node in self._path() for name in node.input),
            self.attention.context.input[1],
        ]
        shapes = {name: self.rewriter.shape(name) for name in names if name}
        heads = ((), (1,), (self.count,))
        return next((name for name, shape in shapes.items() if shape is None or shape[-3:-2] not in heads), "")

    def write(self) -> None:
        rewriter, attention = self.rewriter, self.attention
        path = self._path()
        product = rewriter.producers[attention.scores]
        results = []
        for head in range(self.count):
            known = {name: self._piece(name, head) for name in product.input}
            known[attention.scores] = self._copy(product, known)
            for node in path:
                known |= {name: self._piece(name, head) for name in node.input if name and name not in known}
                known[node.output[0]] = self._copy(node, known)
            known[attention.context.input[1]] = self._piece(attention.context.input[1], head)
            results.append(self._copy(attention.context, known))
        result = attention.context.output[0]
        rewriter.replace(result, rewriter.add("Concat", results, attention.context, rewriter.shape(result), axis=1))

    def _path(self) -> list[NodeProto]:
        """The nodes after the scores up to the Softmax, in order."""
        path = [self.attention.softmax]
        while self.attention.scores not in path[0].input:
            path.insert(0, next(node for name in path[0].input if (node := self._on_path(name)) is not None))
        return path

    def _on_path(self, name: str) -> NodeProto | None:
        """The producer of a value that the scores lead to."""

        def before(value: str) -> Sequence[str]:
            producer = self.rewriter.producer(value, "Add", "Mul", "Div", "Where")
            return () if producer is None else producer.input

        return self.rewriter.producer(name) if self.attention.scores in walk([name], before) else None

    def _piece(self, name: str, head: int) -> str:
        """The part of an operand for one head; the operand itself where all heads share it."""
        shape = self.rewriter.shape(name)
        if shape is None or shape[-3:-2] != (self.count,):
            return name
        if name not in self.pieces:
            self.pieces[name] = self._split(name, shape)
        return self.pieces[name][head]

    def _split(self, name: str, shape: Sequence[Dim]) -> list[str]:
        rewriter, axis = self.rewriter, len(shape) - 3  # a mask or a bias may have no axis of the batch
        piece_shape = (*shape[:axis], 1, *shape[axis + 1 :])
        array = rewriter.constant(name)
        if array is not None:
            pieces = np.split(array, self.count, axis)
            return [rewriter.constant_of(piece.copy(), f"{name}_head_{head}") for head, piece in enumerate(pieces)]
        names = [rewriter.free(f"{name}/head_{head}") for head in range(self.count)]
        sizes = rewriter.constant_of(np.ones(self.count, np.int64), "one_each")
        rewriter.add_many(
            "Split", [name, sizes], rewriter.producers.get(name, self.attention.softmax), names, axis=axis
        )
        for piece in names:
            rewriter.declare(piece, rewriter.dtype(name), piece_shape)
        return names

    def _copy(self, node: NodeProto, known: Mapping[str, str]) -> str:
        shape = self.rewriter.shape(node.output[0])
        piece_shape = None if shape is None else (shape[0], 1, *shape[2:])
        return self.rewriter.add_copy(node, [known.get(name, name) for name in node.input], piece_shape)


@dataclass(frozen=True, slots=True)
class NoInt64(RewriteStep, name="no-int64", reads="structure"):
    """Give indices the type int32 where an operator takes it. Stored indices are converted, and those of an input go
    through one Cast.

    Shapes, axes and repeats stay int64, which ONNX has no other type for.
    """

    def rewrite(self, rewriter: Rewriter) -> PassResult:
        narrow: dict[str, str] = {}
        for node in rewriter.by_op(*TAKES_INT32):
            if node.op_type == "OneHot" and rewriter.dtype(node.input[2]) not in NARROW_FLOATS:
                continue  # onnxruntime has no kernel
            places = [position for position in TAKES_INT32[node.op_type] if input_of(node, position)]
            names = [node.input[position] for position in places]
            if all(rewriter.dtype(name) == TensorProto.INT64 and self._fits(rewriter, name) for name in names):
                for position, name in zip(places, names, strict=True):
                    narrow[name] = narrow.get(name) or _narrow(rewriter, node, name)
                    rewriter.set_input(node, position, narrow[name])
                    rewriter.drop_unread(name)
        said = say_count(len(narrow), "value", "of indices as int32")
        return rewriter.result(said, default="no operator reads indices of int64")

    @staticmethod
    def _fits(rewriter: Rewriter, name: str) -> bool:
        """Whether int32 holds the indices; the largest int64, as the end of a Slice, is cut, and means the same."""
        array = rewriter.constant(name)
        return array is not None or name in rewriter.fed or rewriter.producer(name, "Cast", "Reshape") is not None


def _narrow(rewriter: Rewriter, node: NodeProto, name: str) -> str:
    array = rewriter.constant(name)
    if array is not None:
        limits = np.iinfo(np.int32)
        return rewriter.constant_of(np.clip(array, limits.min, limits.max).astype(np.int32), f"{name}_int32")
    cast = rewriter.producer(name, "Cast")
    if cast is not None and rewriter.dtype(cast.input[0]) == TensorProto.INT32:
        return cast.input[0]
    return rewriter.add("Cast", [name], node, rewriter.shape(name), dtype=TensorProto.INT32, to=TensorProto.INT32)


TAKES_INT32: Final[Mapping[str, tuple[int, ...]]] = {
    **dict.fromkeys(("Gather", "GatherElements", "ScatterElements"), (1,)),
    "Slice": (1, 2, 3, 4),
    "OneHot": (0, 1),
}
"""Operator → its inputs of indices, which are of one type."""
