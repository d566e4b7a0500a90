"""float32 → float16 or bfloat16, with measured exceptions: a node whose values leave the type's range, or whose
rounding shows, stays in float32, and the row of the step says why.

The libraries' converters (onnxruntime.transformers.float16, onnxconverter_common) know float16 alone, cut off what is
out of range, and leave a list of operators in float32 whatever they compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import ml_dtypes
import numpy as np
import onnx
from onnx import NodeProto, TensorProto

from passes.context import PassContext
from passes.errors import PolicyError
from passes.graph.index import GraphIndex, constant_of, copy_of, replace_entries
from passes.graph.inference import infer_types
from passes.graph.op_facts import domain_of, has_body, opset_of
from passes.graph.traversal import bodies_in, is_sparse, reads_of
from passes.proof.noise import FixedNoise
from passes.proof.numbers import DRAWN
from passes.proof.precision import (
    HALVES,
    WIDE,
    HalfFindings,
    ValueRange,
    computed_types,
    measure_halves,
    measure_ranges,
)
from passes.rewrites.rewriter import Rewriter
from passes.step import PassResult, Relation, Step
from passes.structures.view import GraphView
from passes.suggest import is_named, join_first, nearest, plural
from passes.weights.detached import DetachedModel
from passes.weights.sharing import portable, why_not_run


@dataclass(frozen=True, slots=True)
class ToFp16(Step, name="to-fp16", reads="values"):
    """Compute in float16, except for nodes that the draws show to need float32. Nodes out of range or tolerance stay;
    inputs and outputs keep their types.

    Args:
        keep: nodes, operators or globs of them that stay in float32.
        measured: whether draws decide which further nodes stay; without, only what float16 cannot say stays.
    """

    keep: Sequence[str] = ()
    measured: bool = True
    half: ClassVar[str] = "float16"
    makes_reference: ClassVar[bool] = True

    def check(self, context: PassContext) -> None:
        _check_keep(self.name, self.keep)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        return _convert(self.name, model, self.half, self.keep, context, measured=self.measured)


@dataclass(frozen=True, slots=True)
class ToBf16(ToFp16, name="to-bf16", reads="values"):
    """Compute in bfloat16, except for nodes that the draws show to need float32. Inputs and outputs keep their types.

    Args:
        keep: as that of `to-fp16`.
        measured: as that of `to-fp16`.
    """

    half: ClassVar[str] = "bfloat16"


def _check_keep(name: str, keep: object) -> None:
    if not isinstance(keep, list | tuple) or not all(isinstance(entry, str) for entry in keep):
        raise PolicyError(f"{name}: keep is {keep!r}; expected a list of nodes or operators")


def _convert(
    name: str, model: DetachedModel, half: str, keep: Sequence[str], context: PassContext, *, measured: bool
) -> PassResult:
    whole = model.without_functions()
    converter = _HalfConverter(whole, half)
    refuse_unknown(name, keep, whole)
    converter.keep_by(keep)
    converter.keep_out_of_range({})
    draws = list(context.draws()) if measured and not whole.unread() else []
    made = _keep_measured(converter, draws, context) if draws else converter.write()
    if not converter.chosen:
        kept = f"no node can be computed in {half}: {converter.describe()}"
        why = kept if converter.reasons else "no node computes in float32"
        return PassResult(model, changed=False, why=why)
    ends = whole.index.required_inputs, whole.index.outputs
    relation = Relation.between_namesakes(*ends, judged_as=half, runs_as=round_half(made, half))
    refusal = context.proofs.ask(why_not_run, model=portable(made, context.spill)) if draws else ""
    return PassResult(made, why="; ".join(filter(None, (converter.describe(), refusal))), relation=relation)


def _keep_measured(
    converter: _HalfConverter, draws: Sequence[Mapping[str, np.ndarray]], context: PassContext
) -> DetachedModel:
    """Let nodes stay in float32 until the outputs on all `draws` are within the tolerance of the half type.

    As long as they are not, the values inside are measured on the draw on which the outputs are furthest from it.
    """
    noise = FixedNoise.of(converter.model)
    source = noise.apply(converter.model)
    types, before = computed_types(source, source.index.outputs), portable(source, context.spill)
    outputs = [name for name in source.index.outputs if types.get(name) != DRAWN]

    def measure(sizes: Mapping[str, int], draws: Sequence[Mapping[str, np.ndarray]]) -> HalfFindings:
        rounded = portable(noise.apply(round_half(made, converter.half)), context.spill)
        asked = {"sizes": sizes, "outputs": outputs, "half": converter.half, "draws": draws}
        return context.proofs.ask(measure_halves, before=before, after=rounded, **asked)

    ranges = context.proofs.ask(measure_ranges, model=before, names=converter.floats(), draws=draws)
    converter.keep_out_of_range(ranges)
    sizes = {name: found.nbytes for name, found in ranges.items()}
    made, shown = converter.write(), list[Mapping[str, np.ndarray]]()
    for turn in range(ROUNDS):
        if not shown:
            found = measure({}, draws)
            if not found.why:
                break
            shown = [draws[found.worst]]
        found = measure(sizes, shown)
        if converter.keep_worst(found.ratios, found.why, PART if turn < ROUNDS // 2 else 2):
            made = converter.write()
        else:
            shown = []
    return made


ROUNDS: Final = 16
"""Times that a draw is asked for nodes that have to stay."""


def refuse_unknown(name: str, keep: Sequence[str], model: DetachedModel) -> None:
    """Refuse an entry of `keep` that names no node and no operator of `model`.

    Raises:
        PolicyError: the message begins with `name`, and has what is nearest.
    """
    known = {text for node in model.proto.graph.node for text in (node.name, node.op_type)}
    for entry in keep:
        if not any(is_named(text, entry) for text in known):
            raise PolicyError(f"{name}: keep: the model has no node or operator {entry!r}{nearest(entry, known)}")


class _HalfConverter:
    """Decides which nodes compute in the half type, and writes the model."""

    def __init__(self, model: DetachedModel, half: str) -> None:
        self.model, self.half, self.dtype = model, half, HALVES[half]
        graph = infer_types(model.proto)
        self.index = GraphIndex(model.proto.graph)
        types = GraphIndex(graph).types
        kinds = {name: info.type.tensor_type.elem_type for name, info in types.items()}
        stored = {**self.index.initializers, **self.index.constants}
        kinds |= {name: tensor.data_type for name, tensor in stored.items()}
        self.is_float = {name for name, kind in kinds.items() if kind == TensorProto.FLOAT}
        self.uncast = {name for name, info in types.items() if info.type.WhichOneof("value") not in (None, TENSOR)}
        self.uncast |= {sparse.values.name for sparse in graph.sparse_initializer}
        self.uncast |= {node.output[0] for node in self.index.own if is_sparse(node)}
        self.reasons: dict[int, str] = {}
        self.chosen: set[int] = set()
        for position, node in enumerate(self.index.own):
            if self.is_float.isdisjoint((*node.input, *node.output)) or constant_of(node) is not None:
                continue
            why = self._unable(node)
            if why:
                self.reasons[position] = why
            else:
                self.chosen.add(position)

    def floats(self) -> list[str]:
        """The values that nodes make and that are float32."""
        return [name for name in self.index.producers if name in self.is_float]

    def keep_by(self, entries: Sequence[str]) -> None:
        for position in sorted(self.chosen):
            node = self.index.own[position]
            if any(is_named(text, entry) for entry in entries for text in (node.name, node.op_type)):
                self._keep(position, "keep names it")

    def keep_out_of_range(self, ranges: Mapping[str, ValueRange]) -> bool:
        """Let nodes stay that read or make values which the half type cannot hold; whether there were any."""
        out = {name: words for name, found in ranges.items() if (words := found.describe(self.half))}
        for name, tensor in self.index.constants.items():
            if name in self.is_float and (words := ValueRange.of(self.model.array(tensor)).describe(self.half)):
                out[name] = words
        kept = [
            (position, name)
            for position in sorted(self.chosen)
            for name in (*self.index.own[position].input, *self.index.own[position].output)
            if name in self.is_float and name in out
        ]
        for position, name in kept:
            self._keep(position, f"{name} {out[name]}")
        return bool(kept)

    def keep_worst(self, ratios: Mapping[str, float], why: str, part: int) -> bool:
        """Where outputs are out of tolerance, let one in `part` of the nodes stay, those at which the SQNR falls most;
        whether any does."""
        if not why:
            return False
        falls: dict[int, tuple[float, str]] = {}
        for position, node in enumerate(self.index.own):
            made = min((ratios[name] for name in node.output if name in ratios), default=BEST)
            read = min((BEST, *(ratios[name] for name in node.input if name in ratios)))
            words = f"SQNR falls from {read:.0f} to {made:.0f} dB"
            if position in self.chosen:
                falls[position] = max(falls.get(position, (0.0, "")), (read - made, f"its {words}"))
                continue
            for name in node.input:  # a node in float32 that reads what was rounded: its producer has to stay too
                producer = self.index.positions.get(name)
                if producer in self.chosen:
                    reader = (read - made, f"where {node.name or node.op_type} reads it, {words}")
                    falls[producer] = max(falls.get(producer, (0.0, "")), reader)
        worst = sorted(falls, key=lambda position: -falls[position][0])
        kept = [position for position in worst[: max(1, len(falls) // part)] if falls[position][0] > LEAST_FALL]
        for position in kept:
            self._keep(position, falls[position][1])
        if not kept:  # no node is at fault alone
            kept = worst[: len(worst) // PART + 1]
            for position in kept:
                self._keep(position, "small falls of the SQNR at many nodes add up")
        return bool(kept)

    def describe(self) -> str:
        """How many nodes compute in the half type, and why the others do not."""
        groups = defaultdict[str, list[str]](list)
        for position, reason in self.reasons.items():
            node = self.index.own[position]
            groups[reason].append(node.name or node.op_type)
        largest = sorted(groups.items(), key=lambda group: -len(group[1]))
        shown = join_first(
            [f"{join_first(names, NAMED)}: {reason}" for reason, names in largest], MOST, "; and {} more reasons", "; "
        )
        stay = f"; {plural(len(self.reasons), 'node')} in float32: {shown}" if shown else ""
        return f"{plural(len(self.chosen), 'node')} in {self.half}{stay}"

    def write(self) -> DetachedModel:
        """The model with the chosen nodes in the half type; a Cast stands where a value is read in both types."""
        return _HalfWriter(self).write()

    def _keep(self, position: int, reason: str) -> None:
        self.chosen.discard(position)
        self.reasons.setdefault(position, reason)

    def _unable(self, node: NodeProto) -> str:
        """Why a node cannot compute in the half type; empty where it can."""
        if has_body(node) or bodies_in(node):
            return "its body computes in float32"
        if not self.uncast.isdisjoint((*node.input, *node.output)):
            return "it reads or makes a sequence or a sparse tensor, which Cast does not take"
        if node.op_type in SCALED:
            return "its scales are float32"
        opset = opset_of(self.model.proto) if not domain_of(node) else 0
        if not opset or not onnx.defs.has(node.op_type, opset, ""):
            return f"ONNX has no types for {domain_of(node) or 'its domain'}::{node.op_type}"
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        for formals, names in ((schema.inputs, node.input), (schema.outputs, node.output)):
            for at, name in enumerate(names):
                formal = formals[min(at, len(formals) - 1)]
                stays_float = formal.type_str == "tensor(float)"  # whatever the others are: the scales of Resize
                if name in self.is_float and self.half_text not in formal.types and not stays_float:
                    later = onnx.defs.get_schema(node.op_type, onnx.defs.onnx_opset_version(), "")
                    takes = any(self.half_text in entry.types for entry in (*later.inputs, *later.outputs))
                    advice = f"; put convert-opset to {later.since_version} before it" if takes else ""
                    return f"{node.op_type} takes no {self.half} at opset {opset}{advice}"
        if node.op_type != "Cast" and any(entry.name in ("dtype", "value") for entry in node.attribute):
            return "an attribute says that it makes float32"
        return ""

    @property
    def half_text(self) -> str:
        return f"tensor({self.half})"

    def reads_half(self, node: NodeProto, at: int) -> bool:
        """Whether a chosen node takes its input `at` in the half type."""
        schema = onnx.defs.get_schema(node.op_type, opset_of(self.model.proto), "")
        return self.half_text in schema.inputs[min(at, len(schema.inputs) - 1)].types


TENSOR: Final = "tensor_type"
SCALED: Final = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul")
BEST: Final = 60.0
"""dB. What rounding to float16 leaves of an exact value, at most."""
LEAST_FALL: Final = 1.0
"""dB. A node at which the SQNR falls by less is not what is wrong by itself."""
PART: Final = 8
"""In each of the first rounds, one node in this many stays: the nodes at which the SQNR falls most."""
NAMED: Final = 3
MOST: Final = 8


class _HalfWriter:
    """Writes the model of a converter: half values under names of their own where float32 is read too."""

    def __init__(self, converter: _HalfConverter) -> None:
        self.by = converter
        self.graph = Rewriter(GraphView(converter.model), second=1)
        self.halves: dict[str, str] = {}
        """Value that a chosen node makes → its name in the half type."""

    def write(self) -> DetachedModel:
        by, view = self.by, self.graph.view
        needed = set(view.outputs)
        for position, node in enumerate(view.own):
            if position not in by.chosen:
                needed.update(reads_of(node))
            else:
                needed.update(name for at, name in enumerate(node.input) if not by.reads_half(node, at))
        for position in by.chosen:
            for name in view.own[position].output:
                if name in by.is_float:
                    self.halves[name] = self.graph.take_output(name, f"{name}_{by.half}") if name in needed else name
        same = {name for name, half in self.halves.items() if name == half}
        for position, own in enumerate(self.graph.nodes):
            if position in by.chosen:
                self._write_node(position, view.own[position], own)
        made = self.graph.to_model()
        for info in made.proto.graph.value_info:
            if info.name in same:
                info.type.tensor_type.elem_type = by.dtype
        return made

    def _write_node(self, position: int, node: NodeProto, own: NodeProto) -> None:
        """Let `own`, the copy of `node`, compute in the half type, with a Cast for each result that float32 readers
        need."""
        by, self.graph.place = self.by, position
        for at, name in enumerate(node.input):
            if name in by.is_float and by.reads_half(node, at):
                self.graph.set_input(own, at, self._half(name))
        if node.op_type == "Cast" and node.output[0] in by.is_float:
            next(entry for entry in own.attribute if entry.name == "to").i = by.dtype
        self.graph.place += 1
        for name in node.output:
            if self.halves.get(name, name) != name:
                self._cast(self.halves[name], name, TensorProto.FLOAT)

    def _half(self, name: str) -> str:
        """The name of a float32 value in the half type."""
        if name not in self.halves:
            title, tensor = f"{name}_{self.by.half}", self.graph.view.constants.get(name)
            if tensor is None:
                self.halves[name] = half = self.graph.free(title)
                self._cast(name, half, self.by.dtype)
            else:
                array = self.by.model.array(tensor).astype(NUMPY[self.by.half])  # in range: others stay
                self.halves[name] = self.graph.store(array, title)
        return self.halves[name]

    def _cast(self, name: str, to: str, dtype: int) -> None:
        self.graph.enter(onnx.helper.make_node("Cast", [name], [to], name=self.graph.free(f"Cast_{to}"), to=dtype))


NUMPY: Final = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def round_half(model: DetachedModel, half: str) -> DetachedModel:
    """`model` with each node of the half type computing in float32, between operands and results that are rounded: what
    hardware does that adds up in float32.

    The proof runs this model: where onnxruntime's CPU provider has no kernel of float16 it computes in float32 and
    drops the Casts around the node, so nothing is rounded, and it has hardly a kernel of bfloat16."""
    proto, dtype = model.copy_proto(), HALVES[half]
    graph = proto.graph
    kinds = {name: info.type.tensor_type.elem_type for name, info in GraphIndex(infer_types(proto)).types.items()}
    kinds |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    nodes: list[NodeProto] = []
    widened: dict[str, str] = {}
    for node in graph.node:
        if node.op_type == "Cast":
            nodes.append(copy_of(node))
            continue
        wide = copy_of(node)
        for at, name in enumerate(node.input):
            if kinds.get(name) == dtype:
                if name not in widened:
                    widened[name] = f"{name}{WIDE}"
                    cast = onnx.helper.make_node("Cast", [name], [widened[name]], to=TensorProto.FLOAT)
                    nodes.append(cast)
                wide.input[at] = widened[name]
        nodes.append(wide)
        for at, name in enumerate(node.output):
            if kinds.get(name) == dtype:
                wide.output[at] = f"{name}_not_rounded"
                nodes.append(onnx.helper.make_node("Cast", [wide.output[at]], [name], to=dtype))
                widened[name] = f"{name}{WIDE}"
                nodes.append(onnx.helper.make_node("Cast", [name], [widened[name]], to=TensorProto.FLOAT))
    replace_entries(graph.node, nodes)
    del graph.value_info[:]
    return model.with_proto(proto)
