"""Resolve every value before any op is built: its static spec, and its elements if they are known and few.

One walk in the order of the nodes. A node with known inputs is folded; the output shapes of any other are inferred from
its inputs, or else taken from the model's own value_info. An If whose condition is known is replaced by the branch
that it takes: torch exports `squeeze` as an If on the shape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from passes.provenance.annotations import known_as, module_of
from passes.rewrites.node_writer import NotHandledError
from passes.suggest import join_first, plural
from pipeline.errors import SourceError, Unsupported, UsageError
from pipeline.importers.from_onnx.fold import FOLDERS, fold, foldable, wider_dtype
from pipeline.importers.from_onnx.replacements import (
    PendingNode,
    attention_nodes,
    branch_nodes,
    function_nodes,
    modern_nodes,
    read_names,
)
from pipeline.importers.from_onnx.source import Attributes, Stored, numpy_type, op_key, schema_of
from pipeline.importers.from_onnx.specs import (
    OWN_SHAPES,
    Sizes,
    TensorSequence,
    declared_spec,
    infer,
    split_sequence,
    value_arguments,
)
from pipeline.ir.graph import DTYPE_BITS, TensorSpec


@dataclass(frozen=True, slots=True)
class Scope:
    """What is to be resolved: nodes in order, and what they may read."""

    name: str
    nodes: Sequence[PendingNode]
    inputs: Mapping[str, TensorSpec | None]
    """The specs of inputs from the caller, by name; None if a shape is incomplete."""
    outputs: Sequence[str]
    """The values that are asked for."""
    stored: Mapping[str, Stored]
    fixed: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Inputs with known values."""
    notes: Mapping[str, onnx.ValueInfoProto] = field(default_factory=dict)
    """What the model itself says about shapes."""
    dims: Mapping[str, int] = field(default_factory=dict)
    others: frozenset[str] = frozenset()
    """Names of values that are no tensor of the IR, such as sequences and strings."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be done with a node that no importer takes."""

    known: Collection[str]
    """The op types that have an importer."""
    fallback: bool = False
    """Whether another runtime may run such a node, as an op of its own."""
    stops: bool = False
    """Whether to stop before the first node that cannot be part of a plan, and leave all nodes starting there."""
    refused: Collection[str] = ()
    """Identities of nodes that their importer did not take."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What is known about the values of a model, by name."""

    stored: Mapping[str, Stored]
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    """The spec of every tensor; all static after `resolve` returned."""
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    """The values of Constant nodes and of folded nodes."""
    roots: dict[str, str] = field(default_factory=dict)
    """The output of an Identity → its input, under which the value is known."""
    sequences: dict[str, TensorSequence] = field(default_factory=dict)
    """A sequence that SplitToSequence makes → its tensors."""
    narrow: dict[str, str] = field(default_factory=dict)
    """Values of types below a byte → their types; the graph holds such values in bytes."""
    nodes: list[PendingNode] = field(default_factory=list)
    """In order; an If is replaced by the branch that it takes, a function by its body."""
    fallbacks: set[str] = field(default_factory=set)
    """Identities of the nodes that another runtime computes."""
    rest: list[PendingNode] = field(default_factory=list)
    """The first node that cannot be part of a plan, and all later nodes."""
    needs: list[str] = field(default_factory=list)
    """Values whose elements the first node of `rest` needs, and which are not known so far."""

    def root(self, name: str) -> str:
        return self.roots.get(name, name)

    def constant(self, name: str) -> np.ndarray | None:
        """The elements of `name`, however many, if they are known and may not change."""
        root = self.root(name)
        return self.stored[root].constant() if root in self.stored else self.constants.get(root)

    def small(self, name: str) -> np.ndarray | None:
        """The elements of `name` if it may be folded; a large initializer is not even read."""
        spec = self.specs.get(name)
        if spec is None or not spec.is_static or not foldable(spec.numel, spec.dtype):
            return None
        return self.constant(name)


def resolve(scope: Scope, rules: Rules, sizes: Sizes | None = None) -> Resolved:
    """Specs and constants of every value of `scope`; `sizes` is for messages.

    Raises:
        Unsupported: op types that are not known and do not fold: all of them, with their places.
        UsageError: values whose shape is not static.
        SourceError: a node reads a value that nothing makes, or is invalid.
    """
    return Resolver(scope, rules).run(sizes)


class Resolver:
    """The walk, and its results so far."""

    def __init__(self, scope: Scope, rules: Rules) -> None:
        self._scope = scope
        self._rules = rules
        self._found = Resolved(scope.stored)
        self._open: dict[str, str] = {}
        """Tensors without a static shape → their spec as text, for messages."""
        self._made = {name for node in scope.nodes for name in node.proto.output}
        """Names that a body may not take, since a later node makes them."""
        self._read = read_names([node.proto for node in scope.nodes]) | set(scope.outputs)
        self._strange: list[PendingNode] = []
        self._notes = dict(KIND_NOTES)

    def run(self, sizes: Sizes | None) -> Resolved:
        found = self._found
        found.specs.update({name: item.spec for name, item in found.stored.items()})
        found.narrow.update({name: item.narrow for name, item in found.stored.items() if item.narrow})
        self._read |= self._scope.inputs.keys()
        for name, spec in self._scope.inputs.items():
            self._note(name, spec)
        for name, array in self._scope.fixed.items():
            found.constants[name] = array
            self._note(name, TensorSpec(array.shape, array.dtype.name))
        waiting = deque(self._scope.nodes)
        while waiting:
            node = waiting.popleft()
            self._need_order(node)
            if (nodes := self._replacement(node)) is not None:
                self._made.update(name for inner in nodes for name in inner.proto.output)
                self._read |= read_names([inner.proto for inner in nodes])
                waiting.extendleft(reversed(nodes))
                continue
            if not self._take(node):
                found.rest.extend([node, *waiting])
                break
            found.nodes.append(node)
        if self._strange:
            refuse_all([node.proto for node in self._strange], self._scope.name, self._notes)
        if self._open and not self._rules.stops:
            inputs = [name for name in self._scope.inputs if name in self._open and name not in self._scope.others]
            refuse_open(self._open, sizes, inputs)
        return found

    def _replacement(self, node: PendingNode) -> list[PendingNode] | None:
        """The nodes that replace `node`; None if it is not replaced."""
        if node.key == "If":
            condition = self._found.small(node.proto.input[0])
            return None if condition is None else branch_nodes(node, bool(condition.item()), self._fresh)
        modern = modern_nodes(node, self._found.specs, self._fresh)
        if modern is not None:
            return modern
        if self._is_taken(node) or node.key in FOLDERS or node.key in NEVER_EXPANDED:
            return None
        known = {name: spec for name, spec in self._found.specs.items() if spec.is_static}
        try:
            written = attention_nodes(node, known, self._found.constant, self._fresh)
        except NotHandledError as reason:
            written, self._notes[node.key] = None, f" ({reason})"
        return function_nodes(node, known, self._fresh) if written is None else written

    def _is_taken(self, node: PendingNode) -> bool:
        """Whether an importer takes the node."""
        return node.key in self._rules.known and identity(node) not in self._rules.refused

    def _take(self, node: PendingNode) -> bool:
        """Resolve the outputs of `node`; False if the walk stops before it."""
        if not self._rules.stops:
            if not self._fold_node(node):
                self._shapes(node)
            return True
        if not set(filter(None, node.proto.input)) <= self._found.specs.keys() | self._found.sequences.keys():
            return False
        try:
            if self._fold_node(node):
                return True
            needs = [name for name in value_arguments(node.key, node.proto) if self._found.constant(name) is None]
            if needs:
                self._found.needs.extend(needs)
                return False
            before = dict(self._open)
            self._shapes(node)
        except (Unsupported, SourceError):
            return False
        if self._open != before or self._strange:
            self._strange.clear()
            return False
        return True

    def _fresh(self, name: str) -> str:
        while name in self._made or self._exists(name):
            name = f"{name}.branch"
        self._made.add(name)
        return name

    def _fold_node(self, node: PendingNode) -> bool:
        """Resolve `node` if it needs no op at run time: an Identity, a constant, or a small fold of constants."""
        found, proto, key = self._found, node.proto, node.key
        attributes = Attributes(proto)
        if key == "Identity":
            found.roots[proto.output[0]] = found.root(proto.input[0])
            self._note(proto.output[0], found.specs.get(proto.input[0]))
            return True
        if key == "Constant":
            array = attributes.constant()
        elif key in SHAPE_READERS:
            spec = found.specs.get(proto.input[0])
            array = SHAPE_READERS[key](spec, attributes) if spec and spec.is_static else None
        else:
            inputs = self._known_inputs(node)
            if any(array is None and name for array, name in zip(inputs, proto.input, strict=True)):
                return False
            try:
                array = fold(key, inputs, attributes)
            except (ValueError, IndexError, ZeroDivisionError) as error:
                raise SourceError(f"node {proto.name!r} ({key}) cannot be computed: {error}") from error
        if array is None:
            return False
        if unread := attributes.unread(schema_of(proto.op_type, proto.domain, node.opset)):
            raise Unsupported(
                f"node {proto.name or proto.output[0]!r} ({key}): its attribute {unread[0]!r} is not handled where it "
                "is computed beforehand; rewrite the node, or extend its function in "
                "pipeline/importers/from_onnx/fold.py"
            )
        name = proto.output[0]
        if key == "Constant" and (wide := wider_dtype(array.dtype)):
            found.narrow[name], array = array.dtype.name, array.astype(wide)
        if array.dtype.name not in DTYPE_BITS:
            raise Unsupported(
                f"node {proto.name or name!r} ({key}) makes a constant of type {array.dtype}, "
                f"expected one of {', '.join(DTYPE_BITS)}"
            )
        found.constants[name] = array
        found.specs[name] = TensorSpec(array.shape, array.dtype.name)
        return True

    def _known_inputs(self, node: PendingNode) -> list[np.ndarray | None]:
        """The elements of each input, if it may be folded; CastLike reads only the type of its second input."""
        found = self._found
        arrays = [found.small(name) if name else None for name in node.proto.input]
        if node.key == "CastLike":
            like = found.root(node.proto.input[1])
            known = like in found.specs and like not in found.narrow
            arrays[1] = np.empty(0, numpy_type(found.specs[like].dtype)) if known else None
        return arrays

    def _shapes(self, node: PendingNode) -> None:
        """Specs of the outputs of an op that stays."""
        proto = node.proto
        if not self._is_taken(node):
            self._fall_back(node)
        elif node.key == "SplitToSequence":
            self._split(proto)
        elif node.key == "SequenceAt":
            self._pick(proto)
        else:
            self._note_all(proto, self._infer(node))

    def _fall_back(self, node: PendingNode) -> None:
        """Specs of the outputs of a node that no importer takes."""
        proto = node.proto
        specs = self._infer(node) if self._rules.fallback and node.key not in NEVER_EXPANDED else {}
        if specs and all(name in specs and specs[name].is_static for name in filter(None, proto.output)):
            self._found.fallbacks.add(identity(node))
            self._note_all(proto, specs)
            return
        # A Shape of a tensor without static shape is not unknown, nor an If: a static shape would fold it.
        if not (node.key in (*NUMBERS, "If") and any(name in self._open for name in proto.input)):
            self._strange.append(node)
        self._note_all(proto, {})

    def _infer(self, node: PendingNode) -> dict[str, TensorSpec]:
        names = [name for name in dict.fromkeys(node.proto.input) if name]
        specs = {name: self._found.specs[name] for name in names if name in self._found.specs}
        if len(specs) < len(names) or not all(spec.is_static for spec in specs.values()):
            return {}
        small = {name: array for name in names if (array := self._found.small(name)) is not None}
        opsets = node.opsets
        if node.key in POOLS:
            opsets = {**opsets, "": max(node.opset, POOLS_WITHOUT_EXTRA_WINDOW)}
        shapes = OWN_SHAPES.get(node.key)
        is_unknown = shapes and schema_of(node.proto.op_type, node.proto.domain, node.opset) is None
        inferred = {} if is_unknown else infer(node.proto, opsets, specs, small)
        if shapes is None or (inferred and all(spec.is_static for spec in inferred.values())):
            return inferred
        try:
            return {**inferred, **shapes(node.proto, specs, small)}
        except (IndexError, KeyError) as error:
            why = f"it has no input {[*node.proto.input, ''].index('')}, which it needs"
            raise Unsupported(f"node {known_as(node.proto)!r} ({node.key}): {why}") from error

    def _split(self, node: onnx.NodeProto) -> None:
        if any(name in self._open for name in node.input):
            self._note(node.output[0], None)
            return
        given = len(node.input) > 1 and node.input[1] != ""
        sizes = self._found.constant(node.input[1]) if given else None
        if given and sizes is None:
            raise Unsupported(
                f"node {node.name!r} (SplitToSequence) splits by {node.input[1]!r}, expected constant sizes; "
                "rewrite it as a Split"
            )
        if self._rules.stops and not self._is_read_by_places(node.output[0]):
            raise Unsupported(f"the sequence {node.output[0]!r} is read as a whole; read its tensors by SequenceAt")
        self._found.sequences[node.output[0]] = split_sequence(
            Attributes(node), self._found.specs[node.input[0]], sizes
        )

    def _is_read_by_places(self, sequence: str) -> bool:
        """Whether every consumer of the sequence takes one tensor out of it, at a known index."""
        consumers = [node for node in self._scope.nodes if sequence in node.proto.input]
        return sequence not in self._scope.outputs and all(
            node.key == "SequenceAt" and self._found.constant(node.proto.input[1]) is not None for node in consumers
        )

    def _pick(self, node: onnx.NodeProto) -> None:
        if node.input[0] in self._open:
            self._note(node.output[0], None)
            return
        pieces, index = self._found.sequences.get(node.input[0]), self._found.constant(node.input[1])
        if pieces is None or index is None:
            raise Unsupported(
                f"node {node.name!r} (SequenceAt) reads place {node.input[1]!r} of {node.input[0]!r}; expected a "
                "constant place of what SplitToSequence makes; rewrite it as a Split"
            )
        self._found.specs[node.output[0]] = pieces.pick(int(index.item()), node.output[0])

    def _note_all(self, node: onnx.NodeProto, inferred: Mapping[str, TensorSpec]) -> None:
        for name in filter(None, node.output):
            spec = inferred.get(name)
            if (spec is None or not spec.is_static) and name in self._scope.notes:
                spec = declared_spec(self._scope.notes[name], self._scope.dims) or spec
            self._note(name, spec)

    def _note(self, name: str, spec: TensorSpec | None) -> None:
        if spec is not None:
            self._found.specs[name] = spec
        # A value that nothing reads needs no shape, such as the mask of a Dropout.
        if (spec is None or not spec.is_static) and name in self._read:
            self._open[name] = f"{name!r}: {spec.dtype}{list(spec.shape)}" if spec else f"{name!r}: nothing known"

    def _need_order(self, node: PendingNode) -> None:
        """Check that every value is made once, and before it is read."""
        proto = node.proto
        for name in filter(None, (*proto.input, *proto.output)):
            exists = self._exists(name)
            if exists != (name in proto.input):
                wrong = "makes {!r}, which exists already" if exists else "reads {!r}, which nothing before it makes"
                raise SourceError(
                    f"node {proto.name!r} ({proto.op_type}) {wrong.format(name)}; "
                    "sort the nodes, and check the model with onnx.checker.check_model"
                )

    def _exists(self, name: str) -> bool:
        found = self._found
        return name in found.specs or name in self._open or name in found.sequences or name in self._scope.others


def first_output(node: onnx.NodeProto) -> str:
    return next(filter(None, node.output), "")


def identity(node: PendingNode) -> str:
    """The first output and the kind of a node: the last node of a body has the output of the node it stands for."""
    return f"{node.key} → {first_output(node.proto)}"


def refuse_all(nodes: Iterable[onnx.NodeProto], graph: str, notes: Mapping[str, str]) -> None:
    """Raise Unsupported for `nodes`: each op type with its note, how often it occurs, and where."""
    places: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        places.setdefault(op_key(node.domain, node.op_type), []).append(node)
    lines = [
        f"  - {kind}{notes.get(kind, '')}: {len(found)} × at {list_places(found)}"
        for kind, found in sorted(places.items())
    ]
    raise Unsupported(
        f"the model {graph!r} has {plural(len(places), 'op type')} that onnxline cannot import:\n"
        + "\n".join(lines)
        + "\nExpected ops of the tables in pipeline/importers/from_onnx, or nodes that fold because their inputs are "
        "constants. Rewrite or skip the pass that made them, or add a function to the family file.",
        operators=sorted(places),
    )


def list_places(nodes: list[onnx.NodeProto]) -> str:
    found = [f"{known_as(node)!r}{f' in {path}' if (path := module_of(node)) else ''}" for node in nodes]
    return join_first(found, 3, ", …")


def refuse_open(values: Mapping[str, str], sizes: Sizes | None, inputs: Sequence[str]) -> None:
    """Raise the error for `values` without static shapes, of which `inputs` are tensors that the caller gives."""
    left = sizes.missing() if sizes else []
    if left:
        advice = f"pass dims={{{', '.join(f'{name!r}: …' for name in left)}}}"
    elif inputs:
        advice = f"pass shapes={{{', '.join(f'{name!r}: […]' for name in inputs)}}}"
    else:
        advice = "these sizes depend on data: export with fixed sizes, or rewrite the first of them"
    count = f"{plural(len(values), 'value')} {'has' if len(values) == 1 else 'have'}"
    shown = join_first([*values.values()], 5, ", …")
    error = UsageError if left or inputs else Unsupported
    raise error(f"{count} no static shape ({shown}), expected sizes for all; {advice}")


def read_shape(spec: TensorSpec, attributes: Attributes) -> np.ndarray:
    end = attributes.integer("end", spec.rank)
    return np.array(spec.sizes[attributes.integer("start") : end], np.int64)


def read_size(spec: TensorSpec, _: Attributes) -> np.ndarray:
    return np.array(spec.numel, np.int64)


SHAPE_READERS = {"Shape": read_shape, "Size": read_size}
NUMBERS = frozenset((*SHAPE_READERS, *FOLDERS))
POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})
POOLS_WITHOUT_EXTRA_WINDOW = 22
"""Before this opset ONNX infers, with ceil_mode, a window that begins after the input; no runtime computes it."""
NEVER_EXPANDED = frozenset({"Constant", "Identity", "If", "Loop", "Range", "Scan", *SHAPE_READERS})
"""Operators that are resolved beforehand or decide what runs. The body of Range is a loop."""
KIND_NOTES = {"If": " (its condition is known only at run time)"}
