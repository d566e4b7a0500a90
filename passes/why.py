"""Where a node or a weight comes from: which torch module, which line, which pass. Read from the model alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import onnx
from onnx import NodeProto, TensorProto

from passes.errors import PolicyError, check_type
from passes.graph.formatting import format_tensor_type
from passes.graph.index import GraphIndex
from passes.graph.op_facts import op_name
from passes.graph.traversal import bodies_in
from passes.load import load_model, to_path
from passes.provenance import ModulePath, annotations_of, form_of, known_as, module_path_of, part_of
from passes.suggest import is_named, join_words, nearest_names, plural
from passes.visible import Table, TableResult, visible_line
from passes.weights.detached import DetachedModel

MODEL_FILE: Final = "model.onnx"
EXPORTED_FILE: Final = "exported.onnx"
"""The model in the folder of a run."""

FRAME: Final = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+), in (?P<function>\S+)\s*(?P<code>[^\n]*)')
OF_TORCH: Final = re.compile(r"(^|(site|dist)-packages[/\\])torch[/\\]|^<")
"""Files of torch itself, and code that it made up."""

ROUNDING: Final = ("QuantizeLinear", "DequantizeLinear")
"""Ops that are a part of how a weight is stored."""

NEAREST: Final = 3


@dataclass(frozen=True, slots=True)
class Origin(TableResult):
    """One node, and what is known of its origin."""

    op: str
    """Op type, with its domain where that is not ONNX's own: `com.microsoft::Attention`."""
    name: str
    """The node's name; empty where it has none."""
    inputs: tuple[str, ...]
    """The names of the values that the node reads, in order; empty for an optional input that is left out."""
    outputs: tuple[str, ...]
    """The names of the node's results, in order."""
    within: tuple[str, ...]
    """The nodes that contain it, outermost first: If, Loop and Scan; for a local function, its name."""
    module: str | None
    """Path of the torch module; empty for the model itself, None where the model holds no torch metadata of it."""
    classes: tuple[str, ...]
    """Classes of the modules from the model inwards, with their Python modules: the last is that of `module`."""
    code: str
    """`FILE:LINE in FUNCTION: CODE` of the innermost frame outside of torch; empty where it is not known."""
    made_by: str
    """The pass that made it; empty if it comes from the export."""
    replaced: tuple[str, ...]
    """The source's nodes that it replaces, at most 8 of them; empty too if the pass only inserted it."""
    replaced_count: int
    """The number of all nodes of the source that it replaces."""
    changed_by: tuple[str, ...]
    """The passes that gave it other attributes or other constants since."""

    def tables(self) -> Iterator[Table]:
        more = self.replaced_count - len(self.replaced)
        facts = {
            "module": "unknown" if self.module is None else self.module or "the model itself",
            "code": self.code,
            "within": ", ".join(self.within),
            "made by": self.made_by or "no pass",
            "in place of": ", ".join(self.replaced) + (f" and {more} more" if more else ""),
            "changed by": ", ".join(self.changed_by),
            "takes": ", ".join(filter(None, self.inputs)),
            "gives": ", ".join(filter(None, self.outputs)),
        }
        yield Table(f"{self.op} {self.name}", [(what, text) for what, text in facts.items() if text])


@dataclass(frozen=True, slots=True)
class WeightOrigin(TableResult):
    """One initializer, and what is known of its origin."""

    name: str
    """The initializer's name."""
    type: str
    """Such as `float32[768,768]`."""
    sources: tuple[str, ...]
    """The source's initializers that it was made of, at most 8: its own name where no pass has touched it, none of a
    constant that a pass made up. Torch's exporter names them after the parameters."""
    source_count: int
    """The number of all initializers of the source that it was made of."""
    form: str
    """What was done to them: reshaped, transposed, cast, merged or folded; empty where nothing was."""
    made_by: str
    """The pass that made it; empty where it is the source's own."""
    readers: tuple[str, ...]
    """Consumers, as `OP NAME`; for a quantized initializer the consumers of its values, as `… through OP NAME`."""
    part: str = ""
    """Which part of a merged weight it is, such as `q`; empty for a whole weight."""

    def tables(self) -> Iterator[Table]:
        more = self.source_count - len(self.sources)
        facts = {
            "made of": ", ".join(self.sources) + (f" and {more} more" if more else ""),
            "by being": self.form,
            "part": self.part,
            "made by": self.made_by or "no pass",
            "read by": ", ".join(self.readers),
        }
        yield Table(f"{self.name} {self.type}", [(what, text) for what, text in facts.items() if text])


@dataclass(frozen=True, slots=True)
class MergedNode:
    """A node of the source that the final model no longer has."""

    name: str
    op: str
    into: tuple[str, ...]
    """The nodes and initializers in its place, as `OP NAME`; none where it was removed, or where one node replaces more
    than 8 and does not list it."""
    made_by: str
    """The pass that made these."""


def why(model: onnx.ModelProto | DetachedModel | str | Path, node: str) -> tuple[Origin, ...]:
    """The origins of the nodes that `node` means, in graph order.

    Args:
        model: or its file, or the folder of a run. Weights are not read.
        node: the name of a node, the name of a value that it makes, or a glob over both; `module:PATH` for the nodes of
            a torch module and of the modules inside of it, `op:TYPE` for all nodes of an operator (both may be globs).
            Inner nodes count too.

    Returns:
        An Origin for each node: its module, the line of code, and the pass that made it.

    Raises:
        ModelError: the file cannot be read.
        PolicyError: nothing has this name; the nearest are named.
        UsageError: `node` is no text.

    Example:
        >>> import onnxline
        >>> [origin.op for origin in onnxline.why("model.onnx", "op:Soft*")]
        ['Softmax']
    """
    check_type(node, str, "why", "the name of a node or a value")
    nodes = _Nodes(_proto_of(model))
    matches = nodes.meant_by(node)
    if not matches:
        raise PolicyError(nodes.what_else(node))
    return tuple(nodes.origin(match, within) for match, within in matches)


def why_weights(model: onnx.ModelProto | DetachedModel | str | Path, name: str) -> tuple[WeightOrigin, ...]:
    """The origins of the initializers that `name`, which may be a glob, means; none if it means none.

    Args:
        model: as for `why`.
        name: the name of an initializer, or a glob.

    Raises:
        ModelError: the file cannot be read.
    """
    check_type(name, str, "why_weights", "the name of an initializer")
    nodes = _Nodes(_proto_of(model))
    stored = nodes.stored
    tensors = [tensor for tensor in stored if tensor.name == name] or [
        tensor for tensor in stored if is_named(tensor.name, name)
    ]
    return tuple(map(nodes.weight_origin, tensors))


def why_merged(model: str | Path, module: str) -> tuple[MergedNode, ...]:
    """The nodes of a torch module that the final model of a run no longer has, and their replacements.

    Args:
        model: the folder of a run or its `model.onnx`; empty where no `exported.onnx` is next to it.
        module: the path of the module, or a glob.

    Raises:
        ModelError: a file cannot be read.
    """
    file = file_of(model)
    source = file.with_name(EXPORTED_FILE)
    if file.name != MODEL_FILE or not source.is_file():
        return ()
    final = _Nodes(_proto_of(file))
    return tuple(
        MergedNode(known_as(node), node.op_type, *final.heirs_of(known_as(node)))
        for node, _ in _Nodes(_proto_of(source)).meant_by(f"module:{module}")
        if not final.has(known_as(node))
    )


def file_of(model: str | Path) -> Path:
    """The file that `model` means: a folder means the model of the run in it."""
    path = to_path(model)
    return path / MODEL_FILE if path.is_dir() else path


def _proto_of(model: onnx.ModelProto | DetachedModel | str | Path) -> onnx.ModelProto:
    if isinstance(model, DetachedModel):
        return model.proto
    if isinstance(model, onnx.ModelProto):
        return load_model(model, may_be_empty=True)
    return load_model(file_of(model), may_be_empty=True)


class _Nodes:
    """All nodes of a model, inner nodes after the node that holds them, each with the nodes that contain it."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._proto = proto
        self.stored = tuple(proto.graph.initializer)
        self._all = [*_walk(proto.graph.node, ())]
        for function in proto.functions:
            self._all.extend(_walk(function.node, (function.name,)))

    def meant_by(self, name: str) -> list[tuple[NodeProto, tuple[str, ...]]]:
        kind, _, wanted = name.partition(":")
        if kind == "op":
            return [pair for pair in self._all if is_named(pair[0].op_type, wanted)]
        if kind == "module":
            return [pair for pair in self._all if any(is_named(path, wanted) for path in _paths(pair[0]))]
        exact = [pair for pair in self._all if name in _handles(pair[0])]
        return exact or [pair for pair in self._all if any(is_named(handle, name) for handle in _handles(pair[0]))]

    def has(self, name: str) -> bool:
        return any(name == known_as(node) for node, _ in self._all)

    def heirs_of(self, name: str) -> tuple[tuple[str, ...], str]:
        """The replacements of a node of the source: nodes and initializers, and the pass that made them."""
        entries = [(f"{node.op_type} {known_as(node)}", annotations_of(node)) for node, _ in self._all]
        entries += [(f"initializer {tensor.name}", annotations_of(tensor)) for tensor in self.stored]
        heirs = [(heir, marks.author) for heir, marks in entries if name in marks.replaced]
        return tuple(heir for heir, _ in heirs), heirs[0][1] if heirs else ""

    def what_else(self, name: str) -> str:
        """Why `name` means no node."""
        graph = self._proto.graph
        readers = [entry.name or entry.output[0] for entry, _ in self._all if name in entry.input]
        if any(tensor.name == name for tensor in self.stored):
            return f"{name!r} is an initializer and no node makes it; `why_weights` says where it comes from"
        if name in GraphIndex(graph).inputs:
            which = join_words(readers)
            return f"{name!r} is an input of the model and no node makes it; ask for a node that reads it: {which}"
        entries = (*(entry for entry, _ in self._all), *self.stored)
        marked = [
            (known_as(entry) if isinstance(entry, NodeProto) else entry.name, annotations_of(entry))
            for entry in entries
        ]
        heirs = [(marks.author, heir) for heir, marks in marked if name in marks.replaced]
        if heirs:
            return f"{name!r} is gone: {heirs[0][0]} made {join_words((heir for _, heir in heirs), 'and')} in its place"
        kind, _, wanted = name.partition(":")
        if kind == "op":
            what, known = f"no {visible_line(wanted)} in this model", {entry.op_type for entry, _ in self._all}
        elif kind == "module":
            what, known = f"no node of a module {wanted!r}", {path for entry, _ in self._all for path in _paths(entry)}
            if not known:
                return f"{what}: the model holds no torch metadata"
        else:
            wanted, what = name, f"no node, value or initializer named {name!r}"
            known = {handle for entry, _ in self._all for handle in _handles(entry)}
            known |= {tensor.name for tensor in self.stored}
            modules = {path for entry, _ in self._all for path in _paths(entry) if f".{path}".endswith(f".{name}")}
            if modules:
                named = [f"module:{path}" for path in sorted(modules)[:NEAREST]]
                return f"{what}; did you mean {join_words(map(repr, named))}?"
        close = nearest_names(wanted, sorted(known), NEAREST, cutoff=0.5)
        return what + (
            f"; did you mean {join_words(map(repr, close))}?" if close else f" among {plural(len(self._all), 'node')}"
        )

    def origin(self, node: NodeProto, within: tuple[str, ...]) -> Origin:
        module, marks = module_path_of(node), annotations_of(node)
        if module is not None and not module.paths:  # outside of any module: the model's own
            module = ModulePath(("",), self._root_classes, module.frames)
        return Origin(
            op=op_name(node),
            name=node.name,
            inputs=tuple(node.input),
            outputs=tuple(node.output),
            within=within,
            module=module.paths[-1] if module else None,
            classes=module.classes if module else (),
            code=_code(module.frames) if module else "",
            made_by=marks.author,
            replaced=marks.replaced,
            replaced_count=marks.count,
            changed_by=marks.changed_by,
        )

    def weight_origin(self, tensor: TensorProto) -> WeightOrigin:
        marks = annotations_of(tensor)
        return WeightOrigin(
            name=tensor.name,
            type=format_tensor_type(tensor),
            sources=marks.replaced or (() if marks.author else (tensor.name,)),
            source_count=marks.count or int(not marks.author),
            form=form_of(tensor),
            part=part_of(tensor),
            made_by=marks.author,
            readers=tuple(self._readers(tensor.name)),
        )

    def _readers(self, name: str, through: tuple[str, ...] = ()) -> Iterator[str]:
        """The consumers of a value. A consumer that only quantizes or dequantizes is replaced by its own consumers."""
        for node, _ in self._all:
            if name in node.input:
                label = f"{node.op_type} {known_as(node)}"
                is_rounded = node.op_type in ROUNDING and node.input[0] == name  # not a scale
                readers = self._readers(node.output[0], (*through, label)) if is_rounded else ()
                yield from tuple(readers) or (f"{label} through {', '.join(through)}" if through else label,)

    @cached_property
    def _root_classes(self) -> tuple[str, ...]:
        modules = (module_path_of(node) for node, _ in self._all)
        return next((module.classes[:1] for module in modules if module is not None and module.classes), ())


def _walk(nodes: Iterable[NodeProto], within: tuple[str, ...]) -> Iterator[tuple[NodeProto, tuple[str, ...]]]:
    for node in nodes:
        yield node, within
        for body in bodies_in(node):
            yield from _walk(body.node, (*within, node.name or node.output[0]))


def _handles(node: NodeProto) -> tuple[str, ...]:
    return tuple(name for name in (node.name, *node.output) if name)


def _paths(node: NodeProto) -> tuple[str, ...]:
    """The torch modules that contain a node, except the model itself, which contains all."""
    module = module_path_of(node)
    return tuple(path for path in module.paths if path) if module is not None else ()


def _code(frames: Iterable[str]) -> str:
    """The innermost frame that is the user's, or a library's that is not torch."""
    matches = [match for match in map(FRAME.search, frames) if match and not OF_TORCH.search(match["file"])]
    if not matches:
        return ""
    last = matches[-1]
    return f"{last['file']}:{last['line']} in {last['function']}" + (
        f": {last['code'].strip()}" if last["code"] else ""
    )
