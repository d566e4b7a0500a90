"""Quantization in a diff: one entry for each quantized tensor, in place of its many nodes and scales.

`find_quantizations`: the tensors that the second model quantizes and the first has as floats. `find_requantizations`:
the tensors that both models quantize, with the difference in format, scales (in ulp), zero points or integers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from onnx import NodeProto, TensorProto

from passes.diff.initializers import Stored
from passes.diff.model_matching import ModelMatching
from passes.diff.types import AttributeChange, InitializerChange, QuantizationChange, QuantizedValue, label_of
from passes.encodings.encoding import Encoding
from passes.encodings.from_qdq import QdqReader
from passes.errors import UsageError
from passes.matching.flat_graph import ABSENT, FlatGraph, Item
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class Quantizations:
    """The tensors that the second model quantizes, with the nodes and stored tensors that only quantize them."""

    found: tuple[QuantizedValue, ...]
    nodes: frozenset[int]
    """Indices of the new nodes."""
    added: frozenset[str]
    """Stored tensors of the second model: integers, scales, zero points."""
    removed: frozenset[str]
    """Stored tensors of the first model that are stored quantized now."""

    def explains(self, change: InitializerChange) -> bool:
        """Whether a change of a stored tensor is a part of these."""
        if not change.before:
            return change.name in self.added
        return not change.after and change.name in self.removed


def find_quantizations(matched: ModelMatching, stored: Sequence[Stored]) -> Quantizations:
    """The quantized tensors of the second model that are in floats in the first.

    Args:
        matched: the matched nodes and values of the two models.
        stored: pairs of ids of constants that matched nodes read, of which one may be computed.
    """
    after, before = matched.nodes.after, matched.nodes.before
    floats = {new: old for old, new in stored if old in before.tensors}
    reader = QdqReader(matched.after)
    values: list[QuantizedValue] = []
    nodes: set[int] = set()
    removed: set[str] = set()
    for node, end in enumerate(after.items):
        chain = _chain_of(matched, node, end)
        if not chain:
            continue
        value = after.items[chain[0]].inputs[0]
        old = floats.get(end.outputs[0], -1)
        if value in after.constants and old < 0:
            continue  # a constant that the first model does not have
        if old >= 0:
            removed.add(before.names[old])
        values.append(_quantization(matched, reader, [after.items[node] for node in chain], old))
        nodes.update(chain)
    read = {value for node in nodes for value in after.items[node].inputs if value != ABSENT}
    alone = [value for value in read if all(consumer in nodes for consumer, _ in after.uses[value])]
    producers = {after.producers[value] for value in alone if value in after.shapes and after.producers[value] >= 0}
    nodes |= {producer for producer in producers if matched.nodes.old_of[producer] < 0}  # a Constant that holds a scale
    added = frozenset(after.names[value] for value in alone if value in after.tensors)
    return Quantizations(tuple(values), frozenset(nodes), added, frozenset(removed))


def _chain_of(matched: ModelMatching, node: int, end: Item) -> list[int]:
    """The indices of the new nodes that quantize a tensor and end with the DequantizeLinear `end`; empty for none."""
    matching, after = matched.nodes, matched.nodes.after
    if end.op[1] != DEQUANTIZE or matching.old_of[node] >= 0:
        return []
    if end.inputs[0] in after.constants and not _made_by(after, end.inputs[0], QUANTIZE):
        return [node]
    start = after.producers[end.inputs[0]]
    if not _made_by(after, end.inputs[0], QUANTIZE) or matching.old_of[start] >= 0:
        return []
    if _encoding(after, after.items[start]) != _encoding(after, end):
        return []
    bound = after.producers[after.items[start].inputs[0]]
    has_bound = bound >= 0 and after.items[bound].op[1] == "Clip" and matching.old_of[bound] < 0
    return [bound, start, node] if has_bound else [start, node]


def _made_by(after: FlatGraph, value: int, op: str) -> bool:
    return after.producers[value] >= 0 and after.items[after.producers[value]].op[1] == op


def _encoding(after: FlatGraph, item: Item) -> list[int]:
    return [after.value_digests[value] for value in item.inputs[1:3] if value != ABSENT]


def _quantization(matched: ModelMatching, reader: QdqReader, chain: Sequence[Item], old: int) -> QuantizedValue:
    """The entry of one tensor; `old` is the id of the first model's stored tensor, negative for a computed value."""
    matching, after = matched.nodes, matched.nodes.after
    value = chain[0].inputs[0]
    known = matching.counterpart(value)
    name = matching.before.names[old if old >= 0 else known] if max(old, known) >= 0 else after.names[value]
    data_type, encoding = reader.read_scales(chain[-1].node)
    error = _largest_error(matched, old, reader.tensor(chain[-1].node.input[0]), encoding) if old >= 0 else ""
    dtype = TensorProto.DataType.Name(data_type).lower()
    return QuantizedValue(name, dtype, _arrangement(chain[-1].node, encoding), old >= 0, error)


def _arrangement(end: NodeProto, encoding: Encoding | None) -> str:
    """How many scales there are, or the only scale and zero point."""
    if encoding is None:
        return "with scales that are not read"
    if encoding.axis is None:
        zero = f", zero point {int(encoding.zero_point)}" if len(end.input) > 2 and end.input[2] else ""
        return f"per tensor, scale {float(encoding.scale):.6g}{zero}"
    block = encoding.precision.block
    return f"in blocks of {block}" if block else f"per channel, {encoding.scale.size} scales"


def _largest_error(matched: ModelMatching, old: int, whole: TensorProto | None, encoding: Encoding | None) -> str:
    """The distance of the dequantized values from the first model's values; empty where they are not compared."""
    tensor = matched.nodes.before.tensors[old]
    if whole is None or encoding is None or tensor.dims != whole.dims or tensor.data_type == TensorProto.STRING:
        return ""
    if matched.before.is_unread(tensor) or matched.after.is_unread(whole):
        return ""
    integers = matched.after.array(whole).astype(np.float64)
    zero, scale = (encoding.spread(integers, part.astype(np.float64)) for part in (encoding.zero_point, encoding.scale))
    distance = np.abs((integers - zero) * scale - matched.before.array(tensor).astype(np.float64))
    return f"off by up to {distance.max():.3g}" if distance.size else ""


QUANTIZE: Final = "QuantizeLinear"

DEQUANTIZE: Final = "DequantizeLinear"


@dataclass(frozen=True, slots=True)
class Requantizations:
    """The tensors that both models quantize in different ways, and those that only the first model quantizes."""

    found: tuple[QuantizationChange, ...]
    removed: frozenset[int]
    """Indices of nodes of the first model that are a part of these."""
    added: frozenset[int]
    """Indices of nodes of the second model that are a part of these."""
    labels: frozenset[str]
    """The labels of the nodes of both models."""
    removed_tensors: frozenset[str]
    added_tensors: frozenset[str]

    def explains(self, change: InitializerChange) -> bool:
        """Whether a change of a stored tensor is a part of these."""
        if change.computed_by in self.labels:
            return True
        return change.name in (self.added_tensors if change.after else self.removed_tensors)

    def explains_attribute(self, change: AttributeChange) -> bool:
        return str(change.node) in self.labels and change.attribute in FORMAT_ATTRIBUTES


@dataclass(frozen=True, slots=True)
class _Quantizer:
    """How one model quantizes a tensor. `nodes`: indices of the nodes that do it. `stored`: the integers, if stored."""

    name: str
    encoding: Encoding
    nodes: tuple[int, ...]
    stored: TensorProto | None


def find_requantizations(matched: ModelMatching) -> Requantizations:
    """Compare the quantizers of both models: at matched nodes, else of tensors with the same name."""
    matching = matched.nodes
    befores = _read_quantizers(matched.before, matching.before)
    afters = _read_quantizers(matched.after, matching.after)
    by_name = {quantizer.name: node for node, quantizer in befores.items()}
    changes: list[tuple[QuantizationChange, _Quantizer | None, _Quantizer | None]] = []
    seen: set[int] = set()
    for node, new in afters.items():
        start = matching.old_of[node]
        start = start if start in befores else by_name.get(new.name, ABSENT)
        if start == ABSENT or start in seen:
            continue
        seen.add(start)
        change = _compare(matched, befores[start], new)
        if change is not None:
            changes.append((change, befores[start], new))
    for node, old in befores.items():
        if node not in seen and matching.is_lost(node):
            kind = _format_of(old.encoding)
            changes.append((QuantizationChange(old.name, kind, "float", old.stored is not None), old, None))
    olds = {node for _, old, _ in changes if old for node in old.nodes}
    news = {node for _, _, new in changes if new for node in new.nodes}
    labels = {str(label_of(matching.before.items[node].node)) for node in olds}
    labels |= {str(label_of(matching.after.items[node].node)) for node in news}
    return Requantizations(
        tuple(change for change, _, _ in changes),
        frozenset(node for node in olds if matching.is_lost(node)),
        frozenset(node for node in news if matching.old_of[node] < 0),
        frozenset(labels),
        frozenset(_own_tensors(matching.before, olds)),
        frozenset(_own_tensors(matching.after, news)),
    )


def _read_quantizers(model: DetachedModel, graph: FlatGraph) -> dict[int, _Quantizer]:
    """The quantizers of a model, by the index of QuantizeLinear, or of DequantizeLinear of a stored tensor.

    A quantizer without an integer encoding, such as an 8-bit float, is left to the comparison of nodes.
    """
    reader = QdqReader(model)
    found: dict[int, _Quantizer] = {}
    for node, item in enumerate(graph.items):
        if item.op[1] not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        try:
            is_start = item.op[1] == "QuantizeLinear"
            read = reader.read_quantizer(item.node) if is_start else reader.read_stored(item.node)
        except UsageError:
            continue
        if read is not None:
            stored = None if is_start else graph.tensors.get(item.inputs[0])
            found[node] = _Quantizer(*read, (node, *_surrounding_nodes(graph, node)), stored)
    return found


def _surrounding_nodes(graph: FlatGraph, node: int) -> Iterator[int]:
    """The Clip before a QuantizeLinear, and the DequantizeLinear after it."""
    item = graph.items[node]
    if item.op[1] == "QuantizeLinear":
        consumers = (consumer for consumer, _ in graph.uses[item.outputs[0]])
        yield from (node for node in consumers if graph.items[node].op[1] == "DequantizeLinear")
        bound = graph.producers[item.inputs[0]]
        if bound >= 0 and graph.items[bound].op[1] == "Clip" and len(graph.uses[item.inputs[0]]) == 1:
            yield bound


def _own_tensors(graph: FlatGraph, nodes: Collection[int]) -> Iterator[str]:
    """The stored tensors that these nodes alone read."""
    reads = {value for node in nodes for value in graph.items[node].inputs if value in graph.tensors}
    return (graph.names[value] for value in reads if all(consumer in nodes for consumer, _ in graph.uses[value]))


def _compare(matched: ModelMatching, old: _Quantizer, new: _Quantizer) -> QuantizationChange | None:
    """How one tensor is quantized otherwise; None if it is not."""
    before, after = old.encoding, new.encoding
    kinds = _format_of(before), _format_of(after)
    is_stored = new.stored is not None
    if kinds[0] == kinds[1] and before.axis != after.axis:
        kinds = f"{kinds[0]} along axis {before.axis}", f"{kinds[1]} along axis {after.axis}"
    if kinds[0] != kinds[1] or before.scale.shape != after.scale.shape:
        return QuantizationChange(new.name, *kinds, is_stored)
    parts = [*_scale_change(before.scale, after.scale), *_zero_change(before.zero_point, after.zero_point)]
    parts += _integer_change(matched, old.stored, new.stored)
    return QuantizationChange(new.name, *kinds, is_stored, ", ".join(parts)) if parts else None


def _format_of(encoding: Encoding) -> str:
    """The format as text, without its symmetry: zero points decide that, and are compared themselves."""
    return str(replace(encoding.precision, symmetric=encoding.precision.signed))


def _scale_change(before: np.ndarray, after: np.ndarray) -> Iterator[str]:
    """How scales differ: in ulp of float32 up to `MOST_STEPS`, else as a fraction of the scale."""
    old, new = (scale.astype(np.float32).ravel() for scale in (before, after))
    steps = np.abs(old.view(np.int32).astype(np.int64) - new.view(np.int32))
    if not steps.any():
        return
    part = float(np.max(np.abs(new.astype(np.float64) - old) / np.maximum(np.abs(old), np.finfo(np.float32).tiny)))
    distance = f"{steps.max()} ulp" if steps.max() <= MOST_STEPS else f"{part:.3g} of it"
    what = (
        f"scale {old[0]:.6g} → {new[0]:.6g}"
        if old.size == 1
        else f"{int((steps > 0).sum())} of {old.size} scales differ"
    )
    yield f"{what}, by {'up to ' if old.size > 1 else ''}{distance}"


def _zero_change(before: np.ndarray, after: np.ndarray) -> Iterator[str]:
    count = int((before != after).sum())
    if count and before.size == 1:
        yield f"zero point {int(before.item())} → {int(after.item())}"
    elif count:
        yield f"{count} of {before.size} zero points differ"


def _integer_change(matched: ModelMatching, old: TensorProto | None, new: TensorProto | None) -> Iterator[str]:
    if (
        old is None
        or new is None
        or old.dims != new.dims
        or matched.before.is_unread(old)
        or matched.after.is_unread(new)
    ):
        return
    before, after = (
        model.array(tensor).astype(np.int64) for model, tensor in ((matched.before, old), (matched.after, new))
    )
    apart = np.abs(before - after)
    if apart.any():
        yield f"{int((apart > 0).sum())} of {apart.size} integers differ, by up to {apart.max()}"


MOST_STEPS: Final = 9999

FORMAT_ATTRIBUTES: Final = frozenset({"axis", "block_size", "output_dtype"})
"""Attributes of the operators that are a part of a format."""
