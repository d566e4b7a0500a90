"""Resolve every value before any op is built: its static spec, and its numbers where they are small.

One walk in the order of the nodes. A node with known inputs is folded; the output shapes of any other are inferred from
its inputs, or else taken from the model's own value_info. An If whose condition is known is replaced by the branch
that it takes: torch exports `squeeze` as an If on the shape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper

from passes.suggest import plural
from pipeline.errors import SourceError, Unsupported, UsageError
from pipeline.importers.from_onnx.attributes import Attributes, module_path, op_key, schema_of
from pipeline.importers.from_onnx.fold import FOLDERS, fold, foldable
from pipeline.importers.from_onnx.source import ReadModel, Stored
from pipeline.importers.from_onnx.specs import (
    CONTRIB_SHAPES,
    Sizes,
    TensorSequence,
    declared_spec,
    infer,
    split_sequence,
)
from pipeline.ir.graph import DTYPE_BITS, TensorSpec

__all__ = ["Resolved", "resolve"]


@dataclass(frozen=True, slots=True)
class Resolved:
    """What is known about the values of a model, by name."""

    stored: Mapping[str, Stored]
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    """Of every tensor; all static once `resolve` has returned."""
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    """Numbers of Constant nodes and of folded nodes."""
    roots: dict[str, str] = field(default_factory=dict)
    """The output of an Identity → the value that it is another name of."""
    sequences: dict[str, TensorSequence] = field(default_factory=dict)
    """A sequence that SplitToSequence makes → its tensors."""
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    """In order; an If is replaced by the branch that it takes."""

    def root(self, name: str) -> str:
        return self.roots.get(name, name)

    def constant(self, name: str) -> np.ndarray | None:
        """The numbers of `name`, of any size, if they are known and may not change."""
        root = self.root(name)
        return self.stored[root].constant() if root in self.stored else self.constants.get(root)

    def small(self, name: str) -> np.ndarray | None:
        """The numbers of `name` if it may be folded; a large initializer is not even read."""
        spec = self.specs.get(name)
        if spec is None or not spec.is_static or not foldable(spec.numel, spec.dtype):
            return None
        return self.constant(name)


def resolve(source: ReadModel, stored: Mapping[str, Stored], sizes: Sizes, known: Collection[str]) -> Resolved:
    """Specs and constants of every value of `source`; `known` are the op types that can be imported.

    Raises:
        Unsupported: op types that are not known and do not fold: all of them, with their places.
        UsageError: values whose shape is not static.
        SourceError: a node reads a value that nothing makes, or is invalid.
    """
    return Resolver(source, stored, sizes, known).run()


class Resolver:
    """The walk, and its results so far."""

    def __init__(self, source: ReadModel, stored: Mapping[str, Stored], sizes: Sizes, known: Collection[str]) -> None:
        self._graph = source.model.graph
        self._opset = source.opset
        self._sizes = sizes
        self._known = known
        self._found = Resolved(stored)
        self._notes = {value.name: value for value in (*self._graph.value_info, *self._graph.output)}
        self._open: dict[str, str] = {}
        """Tensors without a static shape → their spec as text, for messages."""
        self._made = {name for node in self._graph.node for name in node.output}
        """Names that a branch may not take, since a later node makes them."""
        self._strange: list[onnx.NodeProto] = []

    def run(self) -> Resolved:
        self._found.specs.update({name: item.spec for name, item in self._found.stored.items()})
        for value in self._graph.input:
            # Up to IR version 3 an initializer has to be listed as an input too.
            if value.name not in self._found.stored:
                self._note(value.name, self._sizes.of(value))
        waiting = deque(self._graph.node)
        while waiting:
            node = waiting.popleft()
            self._need_order(node)
            if (taken := self._choose_branch(node)) is not None:
                branch = branch_nodes(node, taken, self._fresh)
                self._made.update(name for inner in branch for name in inner.output)
                waiting.extendleft(reversed(branch))
                continue
            self._found.nodes.append(node)
            if not self._fold_node(node):
                self._shapes(node)
        if self._strange:
            refuse_all(self._strange, self._graph.name)
        if self._open:
            refuse_open(self._open, self._sizes)
        return self._found

    def _choose_branch(self, node: onnx.NodeProto) -> bool | None:
        """Which branch of an If is taken; None for every other node, and where it depends on the run."""
        if op_key(node.domain, node.op_type) != "If":
            return None
        condition = self._found.small(node.input[0])
        return None if condition is None else bool(condition.item())

    def _fresh(self, name: str) -> str:
        while name in self._made or self._exists(name):
            name = f"{name}.branch"
        return name

    def _fold_node(self, node: onnx.NodeProto) -> bool:
        """Resolve `node` if it needs no op at run time: an Identity, a constant, or a small fold of constants."""
        found = self._found
        key = op_key(node.domain, node.op_type)
        attributes = Attributes(node)
        if key == "Identity":
            found.roots[node.output[0]] = found.root(node.input[0])
            self._note(node.output[0], found.specs.get(node.input[0]))
            return True
        if key == "Constant":
            array = attributes.constant()
        elif key in SHAPE_READERS:
            spec = found.specs.get(node.input[0])
            array = SHAPE_READERS[key](spec, attributes) if spec and spec.is_static else None
        else:
            inputs = [found.small(name) if name else None for name in node.input]
            if any(array is None and name for array, name in zip(inputs, node.input, strict=True)):
                return False
            try:
                array = fold(key, inputs, attributes)
            except (ValueError, IndexError, ZeroDivisionError) as error:
                raise SourceError(f"node {node.name!r} ({key}) cannot be computed: {error}") from error
        if array is None:
            return False
        if unread := attributes.unread(schema_of(node.op_type, node.domain, self._opset)):
            raise Unsupported(
                f"node {node.name or node.output[0]!r} ({key}): its attribute {unread[0]!r} is not handled where it is "
                "computed beforehand; rewrite the node, or extend its function in pipeline/importers/from_onnx/fold.py"
            )
        name = node.output[0]
        if array.dtype.name not in DTYPE_BITS:
            raise Unsupported(
                f"node {node.name!r} ({key}) makes a constant of type {array.dtype}, "
                f"expected one of {', '.join(DTYPE_BITS)}"
            )
        found.constants[name] = array
        found.specs[name] = TensorSpec(array.shape, array.dtype.name)
        return True

    def _shapes(self, node: onnx.NodeProto) -> None:
        """Specs of the outputs of an op that stays."""
        key = op_key(node.domain, node.op_type)
        if key not in self._known:
            # A Shape of a tensor without static shape is not unknown, nor an If: a static shape would fold it.
            if not (key in (*NUMBERS, "If") and any(name in self._open for name in node.input)):
                self._strange.append(node)
            self._note_all(node, {})
        elif key == "SplitToSequence":
            self._split(node)
        elif key == "SequenceAt":
            self._pick(node)
        else:
            self._note_all(node, self._infer(node))

    def _infer(self, node: onnx.NodeProto) -> dict[str, TensorSpec]:
        names = [name for name in dict.fromkeys(node.input) if name]
        specs = {name: self._found.specs[name] for name in names if name in self._found.specs}
        if len(specs) < len(names) or not all(spec.is_static for spec in specs.values()):
            return {}
        if (shapes := CONTRIB_SHAPES.get(op_key(node.domain, node.op_type))) is not None:
            return shapes(node, specs)
        small = {name: array for name in names if (array := self._found.small(name)) is not None}
        return infer(node, self._opset, specs, small)

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
        self._found.sequences[node.output[0]] = split_sequence(
            Attributes(node), self._found.specs[node.input[0]], sizes
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
            if (spec is None or not spec.is_static) and name in self._notes:
                spec = declared_spec(self._notes[name], self._sizes.dims) or spec
            self._note(name, spec)

    def _note(self, name: str, spec: TensorSpec | None) -> None:
        if spec is not None:
            self._found.specs[name] = spec
        if spec is None or not spec.is_static:
            self._open[name] = f"{name!r}: {spec.dtype}{list(spec.shape)}" if spec else f"{name!r}: nothing known"

    def _need_order(self, node: onnx.NodeProto) -> None:
        """Check that every value is made once, and before it is read."""
        for name in filter(None, (*node.input, *node.output)):
            exists = self._exists(name)
            if exists != (name in node.input):
                wrong = "makes {!r}, which exists already" if exists else "reads {!r}, which nothing before it makes"
                raise SourceError(
                    f"node {node.name!r} ({node.op_type}) {wrong.format(name)}; "
                    "sort the nodes, and check the model with onnx.checker.check_model"
                )

    def _exists(self, name: str) -> bool:
        return name in self._found.specs or name in self._open or name in self._found.sequences


def branch_nodes(node: onnx.NodeProto, taken: bool, fresh: Callable[[str], str]) -> list[onnx.NodeProto]:
    """Copies of the nodes of the branch that the If `node` takes, to replace it.

    Initializers become Constant nodes, and the If's outputs are Identities of the branch's. `fresh` gives a new
    name for a value of the branch, since the branches of two Ifs may use the same one.
    """
    wanted = "then_branch" if taken else "else_branch"
    branch = next(attribute.g for attribute in node.attribute if attribute.name == wanted)
    made = [tensor.name for tensor in branch.initializer] + [
        name for inner in branch.node for name in inner.output if name
    ]
    names = {name: fresh(name) for name in made}
    nodes = [
        helper.make_node("Constant", [], [names[tensor.name]], name=tensor.name, value=tensor)
        for tensor in branch.initializer
    ]
    nodes += [_with_renamed_values(inner, names) for inner in branch.node]
    nodes += [
        helper.make_node("Identity", [names.get(inner.name, inner.name)], [outer], name=node.name)
        for inner, outer in zip(branch.output, node.output, strict=True)
        if outer
    ]
    return nodes


def _with_renamed_values(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """A copy with new names, also inside its own branches, whose names shadow none in valid ONNX."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    _rename(copy, names)
    return copy


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names.get(name, name) for name in node.output]
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            for inner in graph.node:
                _rename(inner, names)
            for output in graph.output:
                output.name = names.get(output.name, output.name)


def refuse_all(nodes: Iterable[onnx.NodeProto], graph: str) -> None:
    """Raise Unsupported for `nodes`: each op type, how often it occurs, and where."""
    places: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        places.setdefault(op_key(node.domain, node.op_type), []).append(node)
    lines = [
        f"  - {kind}{KIND_NOTES.get(kind, '')}: {len(found)} × at {list_places(found)}"
        for kind, found in sorted(places.items())
    ]
    raise Unsupported(
        f"the model {graph!r} has {plural(len(places), 'op type')} that onnxline cannot import:\n"
        + "\n".join(lines)
        + "\n"
        "Expected ops of the tables in pipeline/importers/from_onnx, or nodes that fold because their inputs are "
        "constants. Rewrite or skip the pass that made them, or add a function to the family file.",
        operators=sorted(places),
    )


def list_places(nodes: list[onnx.NodeProto]) -> str:
    first = [f"{node.name or node.output[0]!r}{f' in {path}' if (path := module_path(node)) else ''}" for node in nodes]
    return ", ".join(first[:3]) + (", …" if len(first) > 3 else "")


def refuse_open(values: Mapping[str, str], sizes: Sizes) -> None:
    left = sizes.missing()
    advice = (
        f"pass dims={{{', '.join(f'{name!r}: …' for name in left)}}}"
        if left
        else "these sizes depend on data: export with fixed sizes, or rewrite the first of them"
    )
    shown = ", ".join(list(values.values())[:5]) + (", …" if len(values) > 5 else "")
    error = UsageError if left else Unsupported
    have = "has" if len(values) == 1 else "have"
    raise error(f"{plural(len(values), 'value')} {have} no static shape ({shown}), expected sizes for all; {advice}")


def read_shape(spec: TensorSpec, attributes: Attributes) -> np.ndarray:
    end = attributes.integer("end", spec.rank)
    return np.array(spec.sizes[attributes.integer("start") : end], np.int64)


def read_size(spec: TensorSpec, _: Attributes) -> np.ndarray:
    return np.array(spec.numel, np.int64)


SHAPE_READERS = {"Shape": read_shape, "Size": read_size}
NUMBERS = frozenset((*SHAPE_READERS, *FOLDERS))
KIND_NOTES = {"If": " (its condition is known only at run time)"}
