"""Attention in one operator → MatMul, scale, mask, Softmax, MatMul, each of which a quantizer sees.

What each operator says, the standard's and the three that onnxruntime adds, is read as an `AttentionCore`, which
`attention_core.py` writes in parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import onnx
from onnx import NodeProto, TensorProto

from passes.context import PassContext
from passes.graph.op_facts import CONTRIB, domain_of, input_of, opset_of, output_of
from passes.graph.traversal import every_node
from passes.provenance.annotations import op_and_name
from passes.rewrites.attention_core import LOWEST, AttentionCore, Heads, Rotary, write_core
from passes.rewrites.graph_values import GraphValues
from passes.rewrites.node_writer import NodeWriter, NotHandledError, attributes_of
from passes.rewrites.packed_attention import separate_inputs
from passes.rewrites.rewriter import Rewriter
from passes.step import PassResult, Step
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel

FLOATS: Final = tuple(LOWEST)


def read_attention(writer: NodeWriter) -> AttentionCore:
    """What `writer.node` computes. Nodes that prepare its inputs are written.

    Raises:
        NotHandledError: it is of a form that stays as it is.
    """
    node = writer.node
    return READERS[domain_of(node), node.op_type](node, writer)


def is_attention(node: NodeProto) -> bool:
    """Whether `node` is one of the operators that `read_attention` reads."""
    return (domain_of(node), node.op_type) in READERS


def _read_standard(node: NodeProto, writer: NodeWriter) -> AttentionCore:
    known = ("is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale", "softcap")
    settings = attributes_of(node, (*known, "softmax_precision"))
    dtype = _dtype(writer.graph, *node.input[:3])
    merged = writer.graph.rank(node.input[0]) == 3
    counts = (settings.get("q_num_heads"), settings.get("kv_num_heads"))
    query = _heads(writer.graph, node.input[0], merged, counts[0], "query")
    key = _heads(writer.graph, node.input[1], merged, counts[1], "key")
    value = _heads(writer.graph, node.input[2], merged, counts[1], "value")
    mask, lengths = input_of(node, 3), input_of(node, 6)
    scores, scores_at = output_of(node, 3), settings.get("qk_matmul_output_mode", 0)
    is_bool = bool(mask) and writer.graph.dtype(mask) == TensorProto.BOOL
    if mask and not is_bool and writer.graph.dtype(mask) != dtype:
        raise NotHandledError("its mask is neither bool nor of the dtype of the query")
    masked = -math.inf if (mask and not is_bool) or (scores and scores_at == 2) else LOWEST[dtype]
    core = replace(
        _core_of(node, settings, (query, key, value), dtype, writer.graph, past=(4, 5)),
        merged_output=merged,
        masks=((mask, masked),) if is_bool else (),
        biases=(mask,) if mask and not is_bool else (),
        causal=bool(settings.get("is_causal", 0)) and not lengths,
        masked=masked,
        zero_rows=bool(lengths) or (bool(mask) and not _shows_each_row(writer.graph.array(mask))),
        softmax_dtype=settings.get("softmax_precision", 0),
        scores=scores,
        scores_at=scores_at,
    )
    if lengths and settings.get("is_causal", 0):
        raise NotHandledError("it is causal, and the keys of each batch entry end elsewhere (nonpad_kv_seqlen)")
    if mask and not _is_as_wide(writer.graph, mask, core):
        raise NotHandledError("its mask has fewer columns than there are keys, or one of these counts is not known")
    if not lengths:
        return core
    columns = writer.positions(key.length, key.value, 1 if merged else 2, "columns")
    return _with_mask(core, _below(columns, lengths, writer), masked)


def _read_multi_head(node: NodeProto, writer: NodeWriter) -> AttentionCore:
    settings = attributes_of(node, ("mask_filter_value", "num_heads", "scale", "unidirectional"))
    _refuse_inputs(node, {8: "it has past_sequence_length", 9: "it has cache_indirection"})
    if output_of(node, 3):
        raise NotHandledError("it gives its scores as an output")
    dtype = _dtype(writer.graph, *filter(None, node.input[:3]))
    count = settings["num_heads"]
    merged = writer.graph.rank(input_of(node, 1)) != 4
    query, key, value = _separate_heads(writer, (count, count, count), merged)
    if input_of(node, 3):
        if not merged:
            raise NotHandledError("it has a bias, and its keys come from a cache")
        query, key, value = _add_biases(input_of(node, 3), (query, key, value), writer)
    if settings.get("unidirectional", 0) and query.length != key.length:
        raise NotHandledError("it is causal, and has other keys than queries")
    core = replace(
        _core_of(node, settings, (query, key, value), dtype, writer.graph, past=(6, 7)),
        biases=(node.input[5],) if input_of(node, 5) else (),
        causal=bool(settings.get("unidirectional", 0)),
    )
    return _with_contrib_mask(core, input_of(node, 4), settings, writer)


def _read_contrib(node: NodeProto, writer: NodeWriter) -> AttentionCore:
    known = ("mask_filter_value", "num_heads", "qkv_hidden_sizes", "scale", "unidirectional")
    settings = attributes_of(node, (*known, "do_rotary", "past_present_share_buffer"))
    _refuse_inputs(node, {6: "it has past_sequence_length"})
    if settings.get("do_rotary") or settings.get("past_present_share_buffer"):
        raise NotHandledError("it turns positions, or writes its past in place")
    dtype, count = _dtype(writer.graph, *node.input[:2]), settings["num_heads"]
    query, key, value = _separate_heads(writer, (count, count, count))
    past, past_length = None, writer.graph.dim(input_of(node, 4), 3) if input_of(node, 4) else 0
    if input_of(node, 4):
        halves = writer.add_many(
            "Split", [node.input[4], writer.ints([1, 1], "past_sizes")], ["past_k", "past_v"], axis=0
        )
        first = writer.ints([0], "first_axis")
        past = (
            writer.add("Squeeze", halves[0], first, label="past_key"),
            writer.add("Squeeze", halves[1], first, label="past_value"),
        )
    core = replace(
        _core_of(node, settings, (query, key, value), dtype, writer.graph),
        past=past,
        past_length=past_length,
        joined_present=output_of(node, 1),
        biases=(node.input[5],) if input_of(node, 5) else (),
        causal=bool(settings.get("unidirectional", 0)),
    )
    return _with_contrib_mask(core, input_of(node, 3), settings, writer)


def _read_grouped_query(node: NodeProto, writer: NodeWriter) -> AttentionCore:
    known = ("do_rotary", "kv_num_heads", "local_window_size", "num_heads", "rotary_interleaved", "scale", "softcap")
    settings = attributes_of(node, (*known, "causal", "k_quant_type", "v_quant_type", "smooth_softmax", "qk_output"))
    if settings.get("causal", 1) != 1 or settings.get("smooth_softmax", 0) > 0 or settings.get("qk_output"):
        raise NotHandledError("it is not causal, has a smooth softmax, or gives its scores as an output")
    if any(settings.get(name, b"NONE") != b"NONE" for name in ("k_quant_type", "v_quant_type")):
        raise NotHandledError("its cache is quantized")
    _refuse_inputs(node, {11: "its softmax has a sink", 12: "its cache is quantized", 13: "its cache is quantized"})
    _refuse_inputs(node, {14: "it normalizes its query and key", 15: "it normalizes its query and key"})
    count, kv_count = settings["num_heads"], settings["kv_num_heads"]
    dtype = _dtype(writer.graph, node.input[0])
    query, key, value = _separate_heads(writer, (count, kv_count, kv_count))
    core = _core_of(node, settings, (query, key, value), dtype, writer.graph, past=(3, 4))
    if core.past_length != 0:
        if writer.graph.dim(node.input[0], 0) != 1:
            raise NotHandledError("its batch is not of the fixed size 1, so the past of each entry may end elsewhere")
        if core.past_length is not None and core.past_length == writer.graph.dim(output_of(node, 1), 2):
            raise NotHandledError("its past is a buffer that is written in place")
    rotary = None
    if settings.get("do_rotary", 0):
        half = writer.graph.dim(input_of(node, 7), 1)
        if not isinstance(half, int):
            raise NotHandledError("the size of its rotary tables is not known")
        interleaved = bool(settings.get("rotary_interleaved", 0))
        rotary = Rotary(node.input[7], node.input[8], 2 * half, interleaved, input_of(node, 9))
    return replace(
        core,
        biases=(node.input[10],) if input_of(node, 10) else (),
        causal=True,
        window=settings.get("local_window_size", -1),
        rotary=rotary,
    )


def _separate_heads(
    writer: NodeWriter, counts: tuple[int, int, int], merged: bool = True
) -> tuple[Heads, Heads, Heads]:
    """Query, key and value of an operator of onnxruntime, which may have them in one input.

    Args:
        writer: writes the nodes in place of the operator.
        counts: the number of heads of each.
        merged: whether key and value are [batch, length, heads · size].
    """
    inputs = separate_inputs(writer)
    if inputs is None:
        query, key, value = writer.node.input[:3]
        return (
            _heads(writer.graph, query, True, counts[0], "query"),
            _heads(writer.graph, key, merged, counts[1], "key"),
            _heads(writer.graph, value, merged, counts[2], "value"),
        )
    first, second, third = (
        Heads(part.value, True, count, part.width // count, part.length)
        for part, count in zip(inputs.parts, counts, strict=True)
    )
    return first, second, third


def _dtype(graph: GraphValues, *names: str) -> int:
    found = {graph.dtype(name) for name in names}
    if len(found) != 1 or not found <= set(FLOATS):
        raise NotHandledError("the dtype of its inputs is not known, or not that of all of them")
    return found.pop()


def _heads(graph: GraphValues, value: str, merged: bool, count: int | None, role: str) -> Heads:
    """How an input is divided into heads."""
    if graph.rank(value) != (3 if merged else 4):
        raise NotHandledError(f"the rank of its {role} is not known, or differs from the rank of the query")
    number = count if merged else graph.dim(value, 1)
    width = graph.dim(value, 2 if merged else 3)
    if not isinstance(number, int) or not isinstance(width, int):
        raise NotHandledError(f"the number of heads of its {role}, or the size of one, is not known")
    return Heads(value, merged, number, width // number if merged else width, graph.dim(value, 1 if merged else 2))


def _core_of(
    node: NodeProto,
    settings: Mapping[str, Any],
    heads: tuple[Heads, Heads, Heads],
    dtype: int,
    graph: GraphValues,
    past: tuple[int, int] | None = None,
) -> AttentionCore:
    """What the operators say alike. `past`: the inputs with keys and values of the past, of which outputs 1 and 2 are
    the present; None where it is not in two inputs."""
    query, key, value = heads
    core = AttentionCore(
        query,
        key,
        value,
        dtype,
        scale=settings.get("scale") or query.size**-0.5,
        output=node.output[0],
        merged_output=True,
        softcap=settings.get("softcap", 0.0),
        masked=LOWEST[dtype],
    )
    if past is None:
        return core
    keys, values = input_of(node, past[0]), input_of(node, past[1])
    has_past = bool(keys) and bool(values)
    return replace(
        core,
        past=(keys, values) if has_past else None,
        past_length=graph.dim(keys, 2) if has_past else 0,
        present=(output_of(node, 1), output_of(node, 2)),
    )


def _refuse_inputs(node: NodeProto, reasons: Mapping[int, str]) -> None:
    for index, reason in reasons.items():
        if input_of(node, index):
            raise NotHandledError(reason)


def _shows_each_row(mask: np.ndarray | None) -> bool:
    """Whether a constant mask hides no row whole."""
    if mask is None:
        return False
    visible = mask if mask.dtype == np.bool_ else mask > -np.inf
    return bool(visible.any(-1).all())


def _is_as_wide(graph: GraphValues, mask: str, core: AttentionCore) -> bool:
    """Whether a mask has a column for each key; a mask with fewer columns hides the keys it lacks."""
    shape, total = graph.shape(mask), core.total
    if not shape:
        return False
    return shape[-1] == total if isinstance(shape[-1], int) and isinstance(total, int) else True


def _below(columns: str, ends: str, writer: NodeWriter) -> str:
    """Bools [batch, 1, 1, keys]: which keys come before the end of their batch entry."""
    wide = writer.add("Unsqueeze", ends, writer.ints([1, 2, 3], "mask_axes"), label="ends")
    return writer.add("Less", columns, wide, label="before_end")


def _with_mask(core: AttentionCore, mask: str, fill: float) -> AttentionCore:
    return replace(core, masks=(*core.masks, (mask, fill)))


def _with_contrib_mask(
    core: AttentionCore, mask: str, settings: Mapping[str, Any], writer: NodeWriter
) -> AttentionCore:
    """`core` with the mask of an operator of onnxruntime: 1 where a key counts, or the number of keys that count."""
    if not mask:
        return core
    fill = settings.get("mask_filter_value", -10000.0)
    rank = writer.graph.rank(mask)
    if rank in (2, 3):
        axes = writer.ints([1, 2] if rank == 2 else [1], "mask_axes")
        shown = writer.add("Cast", mask, label="mask_bool", to=TensorProto.BOOL)
        return _with_mask(core, writer.add("Unsqueeze", shown, axes, label="mask"), fill)
    is_typed = writer.graph.rank(core.query.value) is not None
    batch = writer.graph.dim(core.query.value if is_typed else writer.node.input[0], 0)
    entries = writer.graph.dim(mask, 0)
    if rank != 1 or batch is None or entries is None:
        raise NotHandledError("its mask is of a form that is not known beforehand")
    columns = writer.constant(np.arange(core.total), "columns") if isinstance(core.total, int) else ""
    if not columns:
        raise NotHandledError("its mask counts keys, whose number is not known")
    ends = writer.add("Cast", mask, label="mask_ends", to=TensorProto.INT64)
    if entries == batch:
        return _with_mask(core, _below(columns, ends, writer), fill)
    if isinstance(batch, int) and entries == 2 * batch:
        halves = writer.ints([batch, batch], "mask_halves")
        end, start = writer.add_many("Split", [ends, halves], ["mask_end", "mask_start"], axis=0)
        core = _with_mask(core, _below(columns, end, writer), fill)
        wide = writer.add("Unsqueeze", start, writer.ints([1, 2, 3], "mask_axes"), label="starts")
        return _with_mask(core, writer.add("GreaterOrEqual", columns, wide, label="behind_start"), fill)
    raise NotHandledError("its mask has the form of cumulated lengths")


def _add_biases(bias: str, parts: tuple[Heads, Heads, Heads], writer: NodeWriter) -> tuple[Heads, Heads, Heads]:
    """Q, K and V with their thirds of a bias: constants of their own where the bias is one."""
    ends = np.cumsum([0, *(part.count * part.size for part in parts)]).tolist()
    whole = writer.graph.array(bias)
    if whole is not None:
        slices = [
            writer.constant(whole[begin:end].copy(), f"{name}_bias")
            for begin, end, name in zip(ends[:3], ends[1:], "qkv", strict=True)
        ]
    else:
        sizes = writer.ints([part.count * part.size for part in parts], "sizes")
        slices = writer.add_many("Split", [bias, sizes], ["q_bias", "k_bias", "v_bias"], axis=0)
    first, second, third = (
        replace(part, value=writer.add("Add", part.value, bias, label=f"{name}_with_bias"))
        for part, bias, name in zip(parts, slices, "qkv", strict=True)
    )
    return first, second, third


READERS: Final[Mapping[tuple[str, str], Callable[[NodeProto, NodeWriter], AttentionCore]]] = {
    ("", "Attention"): _read_standard,
    (CONTRIB, "Attention"): _read_contrib,
    (CONTRIB, "MultiHeadAttention"): _read_multi_head,
    (CONTRIB, "GroupQueryAttention"): _read_grouped_query,
}
"""Domain and operator → the function that reads it."""


OLDEST: Final = 15
"""The opset whose Shape takes `start` and `end`."""

NO_OPERATOR: Final = "no operator of attention"


@dataclass(frozen=True, slots=True)
class DecomposeAttention(Step, name="decompose-attention", reads="structure"):
    """Take attention operators apart into MatMul, scale, mask, Softmax and MatMul. The operators are the standard's
    Attention, and onnxruntime's Attention, MultiHeadAttention and GroupQueryAttention.

    ONNX's own function of Attention is not taken: it has some fifty nodes of casts and shape arithmetic, also where all
    sizes are known. What a form that is not handled lacks stands in the report.
    """

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        work, changed = model, False
        while True:
            work, reasons, replaced = _replace_attention(work)
            changed = changed or replaced
            if not replaced or not reasons:
                break  # otherwise what was replaced has types now, which may be what the others lacked
        inner = _count_in_bodies(model.proto)
        if inner:
            reasons.append(f"{inner} in bodies or functions")
        why = f"left as they are: {'; '.join(reasons)}" if reasons else None if changed else NO_OPERATOR
        return PassResult(work, changed, why)


def _replace_attention(model: DetachedModel) -> tuple[DetachedModel, list[str], bool]:
    """The model without attention nodes in its main graph, why some stay, and whether any were replaced."""
    indices = [index for index, node in enumerate(model.proto.graph.node) if is_attention(node)]
    if not indices:
        return model, [], False
    opset = opset_of(model.proto)
    if opset < OLDEST:
        old = f"all, since opset {opset} is too old: put {{convert-opset: {{to: {OLDEST}}}}} or later before it"
        return model, [old], False
    view = GraphView(model)
    rewriter = Rewriter(view, second=1)
    reasons = []
    for index in indices:
        writer = NodeWriter(view.own[index], rewriter)
        try:
            write_core(read_attention(writer), writer)
        except NotHandledError as reason:
            reasons.append(f"{op_and_name(writer.node)}: {reason}")
            continue
        rewriter.replace_by(writer.node, writer.nodes)
    return (rewriter.to_model(), reasons, True) if rewriter.changes else (model, reasons, False)


def _count_in_bodies(proto: onnx.ModelProto) -> int:
    """How many attention nodes are in bodies or functions."""
    graphs = (proto.graph, *proto.functions)
    every = sum(is_attention(node) for graph in graphs for node in every_node(graph))
    return every - sum(is_attention(node) for node in proto.graph.node)
