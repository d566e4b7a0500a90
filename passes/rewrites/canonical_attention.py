"""Write every attention in one form: three products for Q, K and V, MatMul, one scale, the mask's Add, Softmax, MatMul.

The other steps do most of the work: operators of attention are taken apart, merged projections too, guards and layouts
that no form needs go. Left to do are the place of the scale, masks that are chosen by a Where, and the names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from onnx import NodeProto

from passes.context import PassContext
from passes.graph.op_facts import attribute_of
from passes.rewrites.attention_operators import NO_OPERATOR, DecomposeAttention
from passes.rewrites.fold_scale import ScaleFolder
from passes.rewrites.merge_layout import MergeLayout
from passes.rewrites.rewriter import Rewriter, is_float
from passes.rewrites.softmax_guard import DropSoftmaxGuard
from passes.rewrites.split_merged import NOTHING_MERGED, SplitQkv
from passes.step import PassResult, Step
from passes.structures.qkv import find_separate_qkv
from passes.structures.view import GraphView
from passes.suggest import plural
from passes.weights.detached import DetachedModel

SINCE: Final = 23
"""The opset that has Attention."""


@dataclass(frozen=True, slots=True)
class CanonicalAttention(Step, name="canonical-attention", reads="values"):
    """Write every attention as three products, MatMul, one scale, the mask's Add, Softmax and MatMul. The values of Q,
    K and V are named after their module: `MODULE.Q`.

    Args:
        fused: write one Attention for scores, scale, mask, Softmax and context, which opset 23 has; the projections
            stay three products.
    """

    fused: bool = False
    makes_structures: ClassVar[tuple[str, ...]] = ("qkv",)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        current, notes = model, list[str]()
        for step in (DecomposeAttention(), SplitQkv(), DropSoftmaxGuard(), MergeLayout()):
            if not self.fused or not isinstance(step, DecomposeAttention):
                result = step.apply(current, context)
                current = result.model
                is_told = step.name in TOLD and result.why not in (None, "", NO_OPERATOR, NOTHING_MERGED)
                notes += [result.why or ""] if is_told else []
        rewriter = Rewriter.of(current, context)
        for softmax in rewriter.by_op("Softmax"):
            _split_batch_of_scores(rewriter, softmax)
            _split_batch_of_context(rewriter, softmax)
        if rewriter.changes:
            rewriter = Rewriter.of(MergeLayout().apply(rewriter.result().model, context).model, context)
        attentions = list(find_attentions(rewriter))
        folder = ScaleFolder(rewriter)
        for attention in attentions:
            folder.move_to_result(rewriter.producers[attention.scores])
        for attention in list(find_attentions(rewriter)):
            _write_mask_as_sum(rewriter, attention.softmax)
        if self.fused:
            fused = [_fuse(rewriter, attention) for attention in find_attentions(rewriter)]
            notes += [f"{plural(sum(fused), 'attention')} as one operator"] if fused else []
            if rewriter.opset < SINCE:
                notes += [f"opset {rewriter.opset} has no Attention, opset {SINCE} has"]
        current = rewriter.result().model
        if self.fused and rewriter.changes:
            current = MergeLayout().apply(current, context).model
        current = _name_projections(current, context)
        said = f"{plural(len(attentions), 'attention')} in one form" if attentions else why_no_attention(rewriter)
        return PassResult(current, current is not model, "; ".join([said, *notes]))


TOLD: Final = ("decompose-attention", "split-qkv")
"""Steps whose remarks are remarks of this step."""


@dataclass(frozen=True, slots=True)
class SoftmaxAttention:
    """A Softmax over the last axis with the product of two computed values before it and after it."""

    scores: str
    softmax: NodeProto
    context: NodeProto
    scale: float
    mask: str
    """The value that is added to the scaled scores; "" for none, `UNCLEAR` for several, or one that is scaled too."""


UNCLEAR: Final = "?"


def find_attentions(rewriter: Rewriter) -> Iterator[SoftmaxAttention]:
    """Each attention that is written as Softmax between two products."""
    for softmax in rewriter.by_op("Softmax"):
        contexts = [node for node in rewriter.consumers[softmax.output[0]] if node.op_type == "MatMul"]
        shape = rewriter.shape(softmax.input[0])
        is_last = shape is not None and attribute_of(softmax, "axis", -1) in (-1, len(shape) - 1)
        if len(contexts) != 1 or contexts[0].input[0] != softmax.output[0] or not is_last:
            continue
        name, scale, masks = softmax.input[0], 1.0, list[str]()
        while (node := rewriter.producer(name, "Add", "Mul", "Div", "Where")) is not None:
            if node.op_type == "Where":
                data = [read for read in node.input[1:] if rewriter.constant(read) is None]
            elif node.op_type == "Add":
                data = sorted(node.input, key=lambda read: not _leads_to_product(rewriter, read))[:1]
                masks += [read if scale == 1.0 else UNCLEAR for read in node.input if read not in data]
            else:
                numbers = [number for read in node.input if (number := rewriter.scalar(read)) is not None]
                data = [read for read in node.input if rewriter.scalar(read) is None]
                data = data if numbers else []
                scale *= 1.0 if not numbers else 1 / numbers[0] if node.op_type == "Div" else numbers[0]
            if len(data) != 1:
                break
            name = data[0]
        if rewriter.producer(name, "MatMul") is not None:
            mask = "".join(masks) if len(masks) < 2 else UNCLEAR
            yield SoftmaxAttention(name, softmax, contexts[0], scale, mask)


def why_no_attention(rewriter: Rewriter) -> str:
    """Why `find_attentions` finds none."""
    softmax = next(rewriter.by_op("Softmax"), None)
    if softmax is None:
        return "no attention is in parts"
    label = softmax.name or softmax.output[0]
    return f"no attention is in parts, {label}: more than a scale and a mask is between it and two products"


def _leads_to_product(rewriter: Rewriter, name: str) -> bool:
    """Whether a value is a product of two computed values, scaled or chosen from."""
    while (node := rewriter.producer(name, "Mul", "Div", "Add", "Where", "Reshape")) is not None:
        computed = [read for read in node.input if rewriter.constant(read) is None]
        if not computed:
            return False
        name = computed[-1] if node.op_type == "Where" else computed[0]
    return rewriter.producer(name, "MatMul") is not None


def _split_batch_of_scores(rewriter: Rewriter, softmax: NodeProto) -> None:
    """Give a product for [batch · heads], whose scores a Reshape splits before `softmax`, the axes of the Softmax."""
    name, between, reshape = softmax.input[0], list[tuple[NodeProto, int]](), None
    while (node := rewriter.producer(name, "Add", "Mul", "Div", "Where", "Reshape")) is not None:
        if rewriter.is_shared(name) or (node.op_type == "Reshape" and reshape is not None):
            return
        if node.op_type == "Reshape":
            reshape, name = node, node.input[0]
            continue
        ways = [at for at, read in enumerate(node.input) if _leads_to_product(rewriter, read)]
        if len(ways) != 1:
            return
        between += [(node, ways[0])] if reshape is not None else []
        name = node.input[ways[0]]
    product = rewriter.own_producer(name, "MatMul")
    if reshape is None or product is None:
        return
    axes = _BatchAxes.of(rewriter, reshape.input[0], reshape.output[0])
    operands = [*product.input, *(read for node, way in between for at, read in enumerate(node.input) if at != way)]
    if axes is None or not all(axes.have_batch(read) for read in product.input) or not all(map(axes.fits, operands)):
        return
    split = axes.add_product(product)
    for node, way in reversed(between):
        inputs = [split if at == way else axes.split(read, node) for at, read in enumerate(node.input)]
        split = rewriter.add_copy(node, inputs, rewriter.shape(reshape.output[0]))
    rewriter.replace(reshape.output[0], split)


def _split_batch_of_context(rewriter: Rewriter, softmax: NodeProto) -> None:
    """Give the product with V, before which a Reshape joins batch and heads, the axes of `softmax`."""
    joined = [node for node in rewriter.consumers[softmax.output[0]] if node.op_type == "Reshape"]
    products = rewriter.consumers[joined[0].output[0]] if len(joined) == 1 else []
    if len(products) != 1 or products[0].op_type != "MatMul" or rewriter.is_shared(softmax.output[0]):
        return
    axes = _BatchAxes.of(rewriter, joined[0].output[0], softmax.output[0])
    shape = rewriter.fixed_shape(products[0].output[0])
    if axes is None or shape is None or not all(axes.have_batch(read) for read in products[0].input):
        return
    split = axes.add_product(products[0])
    rewriter.replace(products[0].output[0], rewriter.reshape(split, shape, products[0]))


@dataclass(frozen=True, slots=True)
class _BatchAxes:
    """The axes of a batch of matrices, `joined` and `apart`: [batch · heads] and [batch, heads]."""

    rewriter: Rewriter
    joined: tuple[int, ...]
    apart: tuple[int, ...]

    @classmethod
    def of(cls, rewriter: Rewriter, joined: str, apart: str) -> _BatchAxes | None:
        """The axes of two values with the same matrices; None where sizes are open, or the matrices are others."""
        shapes = rewriter.fixed_shape(joined), rewriter.fixed_shape(apart)
        if shapes[0] is None or shapes[1] is None or shapes[0][-2:] != shapes[1][-2:]:
            return None
        return cls(rewriter, shapes[0][:-2], shapes[1][:-2])

    def have_batch(self, name: str) -> bool:
        return (self.rewriter.fixed_shape(name) or ())[:-2] == self.joined

    def fits(self, name: str) -> bool:
        """Whether an operand has a matrix for each of the batch, or the same for all."""
        shape = self.rewriter.fixed_shape(name)
        return shape is not None and (shape[:-2] == self.joined or all(size == 1 for size in shape[:-2]))

    def split(self, name: str, like: NodeProto) -> str:
        """The operand with the axes apart."""
        rewriter = self.rewriter
        if not self.have_batch(name):
            return name
        shape, array = (*self.apart, *(rewriter.fixed_shape(name) or ())[-2:]), rewriter.constant(name)
        if array is not None:
            return rewriter.constant_of(array.reshape(shape), f"{name}/heads")
        for reader in rewriter.consumers[name]:
            if reader.op_type == "Reshape" and rewriter.ints(reader.input[1]) == list(shape):
                return reader.output[0]
        return rewriter.reshape(name, shape, like)

    def add_product(self, product: NodeProto) -> str:
        """The product with the axes apart."""
        shape = (*self.apart, *(self.rewriter.fixed_shape(product.output[0]) or ())[-2:])
        return self.rewriter.add_copy(product, [self.split(read, product) for read in product.input], shape)


def _write_mask_as_sum(rewriter: Rewriter, softmax: NodeProto) -> None:
    """Write `Where(seen, scores, low)` before a Softmax as a sum with `Where(seen, 0, low)`."""
    choice = rewriter.own_producer(softmax.input[0], "Where")
    if choice is None:
        return
    seen, *branches = choice.input
    low = [rewriter.constant(name) for name in branches]
    position = 1 if low[1] is not None else 0
    array, scores = low[position], branches[1 - position]
    is_low = array is not None and array.size == 1 and is_float(array) and (array < 0).all()
    if array is None or not is_low or low[1 - position] is not None:
        return
    zero = np.zeros_like(array)
    condition = rewriter.constant(seen)
    pair = (zero, array) if position else (array, zero)
    if condition is not None:
        bias = rewriter.constant_of(np.where(condition, *pair).astype(array.dtype), f"{choice.output[0]}/bias")
    else:
        names = [rewriter.constant_of(number, f"{choice.output[0]}/choice") for number in pair]
        bias = rewriter.add("Where", [seen, *names], choice, rewriter.shape(seen))
    rewriter.replace(choice.output[0], rewriter.add("Add", [scores, bias], choice, rewriter.shape(choice.output[0])))


def _fuse(rewriter: Rewriter, attention: SoftmaxAttention) -> bool:
    """Write one Attention; false where the opset has none, or the operands are no four axes."""
    product = rewriter.producers[attention.scores]
    query, key = product.input
    value, result = attention.context.input[1], attention.context.output[0]
    shapes = [rewriter.shape(name) for name in (query, key, value)]
    if rewriter.opset < SINCE or attention.mask == UNCLEAR or any(shape is None or len(shape) != 4 for shape in shapes):
        return False
    if rewriter.producer(attention.softmax.input[0], "Where") is not None:
        return False
    inputs = [query, rewriter.transpose(key, [0, 1, 3, 2], product), value]
    inputs += [attention.mask] if attention.mask else []
    name = rewriter.add("Attention", inputs, attention.softmax, rewriter.shape(result), scale=attention.scale)
    rewriter.replace(result, name)
    return True


def _name_projections(model: DetachedModel, context: PassContext) -> DetachedModel:
    """Name the values of Q, K and V after their module, where they are no outputs."""
    view = GraphView(model)
    names = {
        site.tight.name: f"{instance.module or instance.name}.{weight.role}"
        for instance in find_separate_qkv(view).instances
        for weight, site in zip(instance.weights, instance.pins, strict=False)
    }
    rewriter = Rewriter.of(model, context)
    for old, new in names.items():
        if old in rewriter.producers and old not in rewriter.held and not old.startswith(new):
            rewriter.rename(old, new)
    return rewriter.result().model
