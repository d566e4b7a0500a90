"""The encodings of the final model of a run, from those of its source. Read `carry_encodings` first.

A tensor keeps its encoding only with evidence of equal values. A computed tensor is computed in the same way, or
matched nodes name its tensor of the source and the draws of the run agree. A stored tensor has the elements of stored
tensors that were transposed, cut or joined, or whose channels were multiplied by factors; the factors go into the
scales. Every other tensor is listed with the reason: as lines for people, as data for programs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, Final, Literal

import numpy as np
from onnx import NodeProto, TensorProto

from passes.context import PassContext
from passes.encodings.encoding import Encoding, NoEncoding, encode_bias, share_by_moves
from passes.encodings.stored import CHANGED, EncodedArray, derive_encoding
from passes.encodings.versions import ModelVersion, TracedTensors, find_same, trace_tensors
from passes.graph.inference import FLOATS, float_tensors
from passes.graph.op_facts import BIAS, BIASED, LAYOUT_OPS, MATRIX_PRODUCTS, RESHAPES, moved_inputs
from passes.graph.traversal import reads_of
from passes.provenance import annotations_of, form_of
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from passes.weights.stand_ins import digest_of


@dataclass(frozen=True, slots=True)
class LostEncoding:
    """An encoding of the source that the final model does not have.

    kind: `gone` for a tensor that is not in the model any more; `stale` for a tensor with other values; `unproven`
        for a tensor without evidence that its values are the same.
    by: the step that lost the encoding; empty if it is not known.
    """

    tensor: str
    kind: Literal["gone", "stale", "unproven"]
    by: str
    reason: str


@dataclass(frozen=True, slots=True)
class UncoveredTensor:
    """A float tensor of the final model without an encoding.

    is_due: whether the tensor replaces a tensor of the source that has an encoding.
    """

    tensor: str
    by: str
    reason: str
    is_due: bool


@dataclass(frozen=True, slots=True)
class CarriedEncodings:
    """The encodings of a final model.

    sources: tensor → the tensors of the source whose encoding it has, if these have other names.
    """

    encodings: Mapping[str, Encoding]
    sources: Mapping[str, tuple[str, ...]]
    lost: tuple[LostEncoding, ...]
    uncovered: tuple[UncoveredTensor, ...]


def carry_encodings(
    versions: Sequence[ModelVersion],
    encodings: Mapping[str, Encoding],
    context: PassContext,
    same: Collection[str] = (),
) -> CarriedEncodings:
    """Carry encodings of the first model over to the last one.

    Args:
        versions: the models of a run, in order.
        encodings: each for a float tensor of the first model, as `fit_encodings` returns them.
        context: of the run, whose draws and proof worker are used.
        same: names of values of which the proof of a step has shown that they are the same in the first model and in
            the last, within the tolerance of the step.
    """
    carrier = _EncodingCarrier(versions, encodings, context)
    carrier.carry_stored()
    carrier.carry_same(same)
    carrier.carry_computed()
    carrier.carry_parts()
    carrier.add_biases()
    carrier.add_moved()
    return CarriedEncodings(
        {name: carrier.found[name] for name in carrier.floats if name in carrier.found},
        {name: sources for name, sources in carrier.sources.items() if sources != (name,)},
        tuple(carrier.describe_lost()),
        tuple(carrier.describe_uncovered()),
    )


def join_carried(first: CarriedEncodings, then: CarriedEncodings) -> CarriedEncodings:
    """The encodings of two stages of a run, where the source of the second is the final model of the first."""
    origins = {name: first.sources.get(name, (name,)) for name in first.encodings}

    def back(name: str) -> tuple[str, ...]:
        return origins.get(name, (name,))

    traced = {name: tuple(chain.from_iterable(map(back, then.sources.get(name, (name,))))) for name in then.encodings}
    sources = {name: tuple(dict.fromkeys(olds)) for name, olds in traced.items()}
    carried = set(chain.from_iterable(sources.values()))
    lost = {entry.tensor: entry for entry in first.lost}
    for entry in then.lost:
        lost |= {name: replace(entry, tensor=name) for name in back(entry.tensor) if name not in carried}
    return CarriedEncodings(
        then.encodings,
        {name: olds for name, olds in sources.items() if olds != (name,)},
        tuple(lost.values()),
        tuple(replace(entry, reason=LOST) if entry.tensor in lost else entry for entry in then.uncovered),
    )


LOST: Final = "its encoding was lost"


class _EncodingCarrier:
    """The state while encodings are carried: the encodings found so far, and the reasons for those not found."""

    def __init__(
        self, versions: Sequence[ModelVersion], encodings: Mapping[str, Encoding], context: PassContext
    ) -> None:
        self.versions, self.given, self.context = versions, encodings, context
        self.source, self.final = versions[0].model, versions[-1].model
        self.floats = _float_names(self.final)
        self.traced: TracedTensors = trace_tensors(versions)
        self.known = share_by_moves(self.source.proto.graph, encodings)
        """The encodings of the source, and the encodings of tensors that share them through layout operators."""
        self.before, self.after = self.source.index, self.final.index
        self.made, self.stored = self.after.producers, self.after.initializers
        self.found: dict[str, Encoding] = {}
        self.sources: dict[str, tuple[str, ...]] = {}
        self.refusals: dict[str, str] = {}
        """Final tensor → why it does not get an encoding of its sources."""

    def carry_stored(self) -> None:
        """Carry the encodings of stored tensors: by content, or by the rule that derived the tensor from others."""
        stored = self.before.initializers
        weights = {name: tensor for name, tensor in stored.items() if name in self.known}
        has_halves = any(tensor.data_type == TensorProto.FLOAT16 for tensor in self.stored.values())
        by_digest: dict[str, list[str]] = {}
        by_origin: dict[str, list[str]] = {}
        for name, tensor in weights.items():
            by_digest.setdefault(self.source.digest(tensor), []).append(name)
            if has_halves and tensor.data_type == TensorProto.FLOAT and not self.source.is_unread(tensor):
                rounded = digest_of(self.source.array(tensor).astype(np.float16))
                by_digest.setdefault(rounded, []).append(name)
            for origin in annotations_of(tensor).replaced:  # the source may be the result of a run itself
                by_origin.setdefault(origin, []).append(name)
        for name in self.floats:
            tensor = self.stored.get(name)
            if tensor is None:
                continue
            replaced = annotations_of(tensor).replaced
            origins = [*replaced, *(heir for origin in replaced for heir in by_origin.get(origin, ()))]
            origins += self.traced.candidates[-1].get(name, ())
            same = by_digest.get(self.final.digest(tensor), ())
            same = [source_name for source_name in same if tuple(weights[source_name].dims) == tuple(tensor.dims)]
            if same:
                chosen = min(same, key=lambda known: (known != name, known not in origins))
                self._take(name, self.known[chosen], (chosen,))
            else:
                self._derive(name, tensor, [weights[origin] for origin in dict.fromkeys(origins) if origin in weights])

    def _derive(self, name: str, tensor: TensorProto, sources: Sequence[TensorProto]) -> None:
        """Give a stored tensor the encoding derived from the encodings of its source weights."""
        if not sources:
            return
        if any(map(self.source.is_unread, sources)) or self.final.is_unread(tensor):
            self.refusals[name] = "its weights stay unread"
            return
        arrays = [EncodedArray(source.name, self.source.array(source), self.known[source.name]) for source in sources]
        try:
            self._take(name, *derive_encoding(self.final.array(tensor), arrays))
        except NoEncoding as why:
            form = form_of(tensor)
            of = ", ".join(repr(source.name) for source in sources)
            self.refusals[name] = f"{CHANGED}: {form or 'made'} of {of}" if str(why) == CHANGED else str(why)

    def carry_same(self, names: Collection[str]) -> None:
        """Carry encodings to the values of their names that a proof has compared."""
        for name in self.floats:
            if name in names and name in self.known:
                self._take_known(name, name)

    def carry_computed(self) -> None:
        """Carry encodings to tensors that have the same values as a tensor of the source."""
        candidates = self.traced.candidates[-1]
        for name in self.floats:
            chosen = next((candidate for candidate in self.traced.equal.get(name, ()) if candidate in self.known), None)
            if name not in self.found and chosen is not None:
                self._take_known(name, chosen)
        pairs = [
            (source, name)
            for name in self.floats
            if name not in self.found
            for source in candidates.get(name, ())
            if source in self.known and self.known[source].axis is None
        ]
        for agreeing in find_same(self.source, self.final, pairs, self.context):  # the same first, then parts
            for source, name in pairs:
                if (source, name) in agreeing and name not in self.found:
                    self._take_known(name, source)

    def carry_parts(self) -> None:
        """Carry the encoding of a product with a whole matrix to the products with parts of it.

        Their values are some of the whole product's values, even if there are too few of them to be recognized.
        """
        made = self.before.producers
        for name in self.floats:
            node = self.made.get(name)
            if name in self.found or node is None or node.op_type not in MATRIX_PRODUCTS:
                continue
            for source in self.traced.candidates[-1].get(name, ()):
                if source in self.known and self.known[source].axis is None and self._is_part(node, made, source):
                    self._take(name, self.known[source], (source,))
                    break

    def _is_part(self, node: NodeProto, made: Mapping[str, NodeProto], source: str) -> bool:
        """Whether `node` multiplies the data of the product that makes `source` by parts of its matrix and bias."""
        whole = made.get(source)
        if whole is None or whole.op_type != node.op_type or len(whole.input) != len(node.input):
            return False
        pairs = zip(node.input[1:], whole.input[1:], strict=True)
        are_parts = all(self.sources.get(part) == (self.before.origin_of(name, LAYOUT_OPS),) for part, name in pairs)
        return are_parts and self._is_same_data(node.input[0], made, whole.input[0])

    def _is_same_data(self, name: str, made: Mapping[str, NodeProto], source: str) -> bool:
        """Whether `name` is known to have the elements of `source` in the same order; reshaped alike, for a product."""
        while source not in self.traced.equal.get(name, ()) and self.sources.get(name) != (source,):
            node, before = self.made.get(name), made.get(source)
            if node is None or before is None or not {node.op_type, before.op_type} <= RESHAPES:
                return False
            name, source = node.input[0], before.input[0]
        return True

    def _take_known(self, name: str, source: str) -> None:
        """Take an encoding of the source. An encoding that the source tensor shares through layout operators stays
        shared if the final tensor still passes through them."""
        node = self.made.get(name)
        if source in self.given or node is None or not moved_inputs(node):
            self._take(name, self.known[source], (source,))

    def _take(self, name: str, encoding: Encoding, sources: tuple[str, ...]) -> None:
        self.found[name], self.sources[name] = encoding, sources
        self.refusals.pop(name, None)

    def add_biases(self) -> None:
        """Give biases with new values the scale of their products, unless the file leaves biases without a scale."""
        if any(bias.name not in self.given for bias, *_ in _biases(self.source)):
            return
        for bias, data, weight in _biases(self.final):
            factors = [self.found.get(self.after.origin_of(name, LAYOUT_OPS)) for name in (data, weight)]
            if bias.name in self.found or factors[0] is None or factors[1] is None or factors[1].precision.block:
                continue
            self.found[bias.name] = encode_bias(factors[0], factors[1], len(bias.dims))
            self.refusals.pop(bias.name, None)

    def add_moved(self) -> None:
        """Give each tensor that a step made the encoding of the tensors whose elements it holds.

        AIMET has no quantizers where elements only move, so none is added there unless the file has such quantizers.
        """
        moved = (name for node in self.source.proto.graph.node if moved_inputs(node) for name in node.output)
        has_moved = any(name in self.given for name in moved)
        names = {name for candidates in self.traced.candidates[:1] for name in candidates}
        implied = share_by_moves(self.final.proto.graph, self.found)
        for name in self.floats:
            is_moved = name in self.made and bool(moved_inputs(self.made[name]))
            if name in implied and name not in self.found and name not in names and (has_moved or not is_moved):
                self.found[name] = implied[name]

    def describe_lost(self) -> Iterable[LostEncoding]:
        """The encodings of the source that are in no tensor of the final model."""
        carried = {source for sources in self.sources.values() for source in sources}
        missing = [name for name in self.given if name not in carried]
        stored = self.before.initializers
        present = [name for name in missing if name not in stored and name not in self.traced.gone]
        changed_by, equals = self._follow(present)
        for name in missing:
            if name in stored:
                yield self._describe_stored(stored[name])
            elif name in self.traced.gone:
                by = self.versions[self.traced.gone[name]].author
                yield LostEncoding(name, "gone", by, self.traced.fates.get(name, "nothing computes it any more"))
            elif name in self.made and name not in self.floats:
                yield LostEncoding(name, "gone", self._author(name), "its type now is one that has no encodings")
            elif not self.context.draws():
                yield LostEncoding(name, "unproven", "", "nothing is run, so its values may differ")
            elif name in equals:
                yield LostEncoding(name, "gone", "", _reason_of_equal(equals[name]))
            else:
                yield LostEncoding(name, "stale", changed_by.get(name, ""), "the tensor in its place has other values")

    def _describe_stored(self, tensor: TensorProto) -> LostEncoding:
        """Why a stored tensor of the source has no counterpart in the final model."""
        heirs = [stored for stored in self.stored.values() if tensor.name in annotations_of(stored).replaced]
        for heir in heirs:
            reason = self.refusals.get(heir.name)
            if reason is not None:
                return LostEncoding(tensor.name, "stale", annotations_of(heir).author, f"{heir.name!r}: {reason}")
        digest = self.source.digest(tensor)
        for version in self.versions[1:]:
            if not any(
                self._is_content(version.model, initializer, tensor, digest)
                for initializer in version.model.proto.graph.initializer
            ):
                reason = f"its values are in {heirs[0].name!r} now" if heirs else "nothing reads it any more"
                return LostEncoding(tensor.name, "gone", version.author, reason)
        equal = next(stored for stored in self.stored.values() if self._is_content(self.final, stored, tensor, digest))
        return LostEncoding(tensor.name, "gone", "", _reason_of_equal(equal.name))

    @staticmethod
    def _is_content(model: DetachedModel, stored: TensorProto, tensor: TensorProto, digest: str) -> bool:
        return stored.dims == tensor.dims and stored.data_type == tensor.data_type and model.digest(stored) == digest

    def _follow(self, names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
        """(tensor of the source → the first step after which no tensor has its values; for the other tensors of the
        source → the tensor of the final model with the same values)."""
        changed_by: dict[str, str] = {}
        equals: dict[str, str] = {}
        open_names = set(names) if self.context.draws() else set[str]()
        for index, version in enumerate(self.versions[1:], start=1):
            pairs = [
                (source, name)
                for name, sources in self.traced.candidates[index].items()
                for source in sources
                if source in open_names
            ]
            same = find_same(self.source, version.model, pairs, self.context)[0]
            equals = dict(pair for pair in reversed(pairs) if pair in same)  # of several, the first one
            changed_by |= dict.fromkeys(open_names - equals.keys(), version.author)
            open_names &= equals.keys()
        return changed_by, equals

    def describe_uncovered(self) -> Iterable[UncoveredTensor]:
        """The float tensors of the final model without an encoding, neither their own nor one shared by a move."""
        implied = share_by_moves(self.final.proto.graph, self.found)
        in_source = self.traced.candidates[0]
        for name in self.floats:
            if name in implied:
                continue
            by = self._author(name)
            sources = self.traced.candidates[-1].get(name, ())
            with_encoding = [source for source in sources if source in self.known]
            if name in self.refusals:
                yield UncoveredTensor(name, by, self.refusals[name], True)
            elif name in in_source and name not in self.known:
                yield UncoveredTensor(name, by, "the file has no encoding for it", False)
            elif with_encoding and not self.context.draws():
                yield UncoveredTensor(name, by, "nothing is run, so its values may differ", True)
            elif name in self.known:
                yield UncoveredTensor(name, by, "its values differ from those in the source", True)
            else:
                yield UncoveredTensor(name, by, "no tensor of the source with an encoding has its values", False)

    def _author(self, name: str) -> str:
        """The step that made a tensor of the final model; for a tensor of the source, the last step that changed it."""
        thing: NodeProto | TensorProto | None = self.made.get(name) or self.stored.get(name)
        if thing is None:
            return ""
        marks = annotations_of(thing)
        return marks.author or next(reversed(marks.changed_by), "")


def _reason_of_equal(equal: str) -> str:
    return f"{equal!r} has the same values, and stands for both"


def _biases(model: DetachedModel) -> Iterator[tuple[TensorProto, str, str]]:
    """The stored biases of products, each with the names of the data and of the weight."""
    stored = model.index.initializers
    for node in model.proto.graph.node:
        tensor = stored.get(node.input[BIAS]) if len(node.input) > BIAS else None
        if node.op_type in BIASED and tensor is not None and set(tensor.dims[:-1]) <= {1}:
            yield tensor, node.input[0], node.input[1]


def _float_names(model: DetachedModel) -> tuple[str, ...]:
    """The float tensors that nodes read or make, and inputs, in the order of the graph."""
    index = model.index
    floats = float_tensors(model.proto)
    constants = {name for name, tensor in index.initializers.items() if tensor.data_type in FLOATS}
    names = [*index.inputs]
    for node in index.nodes:
        names += (*reads_of(node), *node.output)
    return tuple(dict.fromkeys(name for name in names if name in floats or name in constants))


FORMAT_VERSION = 1


def summarize_carried(carried: CarriedEncodings) -> str:
    """One sentence: how many encodings the final model has, and how many are missing."""
    stale = sum(lost.kind != "gone" for lost in carried.lost)
    return (
        f"encodings: {plural(len(carried.encodings), 'tensor')} of the final model; "
        f"of the source's, {len(carried.lost) - stale} are gone and {stale} stale; "
        f"{plural(len(carried.uncovered), 'tensor')} without one"
    )


def describe_carried(carried: CarriedEncodings) -> Iterator[str]:
    """A line for each encoding that was not carried, and for each tensor without one."""
    for lost in carried.lost:
        yield f"{lost.kind}: {lost.tensor}{_by(lost.by)}: {lost.reason}"
    for tensor in carried.uncovered:
        yield f"no encoding: {tensor.tensor}{_by(tensor.by)}: {tensor.reason}"


def _by(author: str) -> str:
    return f" (by {author})" if author else ""


def carried_as_data(carried: CarriedEncodings) -> dict[str, Any]:
    """The same as data that JSON can hold; the encodings themselves have a file of their own."""
    return {
        "format_version": FORMAT_VERSION,
        "encodings": len(carried.encodings),
        "sources": {name: list(sources) for name, sources in carried.sources.items()},
        "lost": [asdict(lost) for lost in carried.lost],
        "uncovered": [asdict(tensor) for tensor in carried.uncovered],
    }
