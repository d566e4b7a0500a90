"""What the metadata of a node says of its origin: the annotations that onnxline writes, and the torch module path.

Annotations say which pass made a node or a stored tensor, of what, and which passes changed it later. `Descendants`
reads them: the nodes of a later model that replace nodes of the source. `map_names` maps the names of a source to those
of a final model.

The module path is in the keys of torch's exporter, also for nodes that a pass made:

    pkg.torch.onnx.name_scopes       ['', 'encoder', 'encoder.layer.0', 'linear_3']    module paths, then the call
    pkg.torch.onnx.class_hierarchy   ['ViTModel', 'ViTEncoder', 'ViTLayer', 'aten.linear.default']
    pkg.torch.onnx.stack_trace       the frames of the call, outermost first

For a node that a pass made, the name of the pass stands where the call would. The metadata may be a fifth of a small
model's file; `strip_metadata` removes it.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, Final

import onnx
from onnx import ModelProto, NodeProto, TensorProto

from passes.graph.index import computed_values
from passes.graph.inference import FLOATS
from passes.graph.traversal import every_graph
from passes.weights.detached import DetachedModel

AUTHOR_KEY: Final = "onnxline.pass"
"""The pass that made the node. A node of the source has none."""

REPLACED_KEY: Final = "onnxline.from"
"""The names of the source's nodes that the node replaces: a JSON list of at most 8."""

COUNT_KEY: Final = "onnxline.from_count"
"""The number of replaced nodes, if it is more than 8."""

CHANGED_KEY: Final = "onnxline.changed"
"""The passes that gave the node other attributes or other constants since: a JSON list, in order."""

MOST_DIGITS: Final = 18
"""The most digits of a count that is read; Python refuses to read thousands of digits."""

SHOWN: Final = 8
"""How many names of sources are written down."""


@dataclass(frozen=True, slots=True)
class NodeAnnotations:
    """`author` is empty for a node of the source; `replaced` names the first of the `count` replaced nodes;
    `changed_by` are the passes that changed the node since."""

    author: str = ""
    replaced: tuple[str, ...] = ()
    count: int = 0
    changed_by: tuple[str, ...] = ()

    def with_change_by(self, author: str) -> NodeAnnotations:
        return self if author in self.changed_by else replace(self, changed_by=(*self.changed_by, author))


def annotations_of(node: NodeProto | TensorProto) -> NodeAnnotations:
    """The annotations of a node, or of a stored tensor, whose sources are initializers."""
    known = metadata_of(node)
    replaced = _names(known.get(REPLACED_KEY, "[]"))
    count = known.get(COUNT_KEY, "")
    return NodeAnnotations(
        known.get(AUTHOR_KEY, ""),
        replaced,
        max(len(replaced), int(count) if count.isdecimal() and len(count) <= MOST_DIGITS else 0),
        _names(known.get(CHANGED_KEY, "[]")),
    )


def write_metadata(node: NodeProto | TensorProto, entries: Mapping[str, str]) -> None:
    """Give `node` these metadata entries in place of its own of the same keys; an empty text removes one."""
    rest = [entry for entry in node.metadata_props if entry.key not in entries]
    del node.metadata_props[:]
    node.metadata_props.extend(rest)
    for key, value in entries.items():
        if value:
            node.metadata_props.add(key=key, value=value)


def write_annotations(node: NodeProto | TensorProto, marks: NodeAnnotations) -> None:
    """Replace the annotations of `node` by `marks`."""
    lists = {REPLACED_KEY: marks.replaced, CHANGED_KEY: marks.changed_by}
    entries = {AUTHOR_KEY: marks.author, COUNT_KEY: str(marks.count) if marks.count > len(marks.replaced) else ""}
    entries |= {key: json.dumps(names, ensure_ascii=False) if names else "" for key, names in lists.items()}
    write_metadata(node, entries)


def join_annotations(author: str, replaced: Iterable[NodeProto]) -> NodeAnnotations:
    """The annotations of a node that `author` makes of `replaced`; nodes of earlier passes count as their sources."""
    names: dict[str, None] = {}
    unnamed = 0
    for node in replaced:
        marks = annotations_of(node)
        names |= dict.fromkeys(marks.replaced if marks.author else [known_as(node)])
        unnamed += marks.count - len(marks.replaced)
    return NodeAnnotations(author, tuple(names)[:SHOWN], len(names) + unnamed)


def _names(written: str) -> tuple[str, ...]:
    """A JSON list of names; empty if the text is something else."""
    if written == "[]":
        return ()
    try:
        names = json.loads(written)
    except (ValueError, RecursionError):
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


def known_as(node: NodeProto) -> str:
    """The name of a node in annotations: its own, or its first output's."""
    return next((name for name in (node.name, *node.output) if name), "")


def op_and_name(node: NodeProto) -> str:
    """What messages call a node: `Softmax 'probs'`."""
    return f"{node.op_type} {known_as(node)!r}"


class Descendants:
    """The nodes of a later model, by the names of the source's nodes that they replace; annotations are read once."""

    def __init__(self, nodes: Sequence[NodeProto]) -> None:
        self._nodes = nodes
        self._indices: dict[str, list[int]] = defaultdict(list)
        for index, node in enumerate(nodes):
            for name in _sources_of(node):
                self._indices[name].append(index)

    def of(self, sources: Iterable[NodeProto]) -> list[NodeProto]:
        """The nodes, in order, that are one of `sources` or were made of some of them, by one pass or several."""
        names = {known_as(node) for node in sources}
        return [
            self._nodes[index] for index in sorted({index for name in names for index in self._indices.get(name, ())})
        ]


def _sources_of(node: NodeProto) -> tuple[str, ...]:
    """The names of the source's nodes that a node is, or was made of."""
    marks = annotations_of(node)
    return tuple(dict.fromkeys(marks.replaced)) if marks.author else (known_as(node),)


SCOPES_KEY: Final = "pkg.torch.onnx.name_scopes"
CLASSES_KEY: Final = "pkg.torch.onnx.class_hierarchy"
STACK_KEY: Final = "pkg.torch.onnx.stack_trace"
NAMESPACE_KEY: Final = "namespace"

NO_MODULE: Final = "_empty_nn_module_stack"
"""Prefix of a scope that torch makes up for values outside of any module, such as sizes of inputs."""


@dataclass(frozen=True, slots=True)
class ModulePath:
    """The modules around a node, from the root inwards, with their classes, and the stack frames of the call.

    Each path is dotted and complete ('encoder.layer.0'); the root's is empty. There are no paths if torch computed the
    node outside of any module.
    """

    paths: tuple[str, ...]
    classes: tuple[str, ...]
    frames: tuple[str, ...]


def metadata_of(node: NodeProto | TensorProto) -> dict[str, str]:
    """The metadata of a node or tensor by key."""
    return {entry.key: entry.value for entry in node.metadata_props}


def module_path_of(node: NodeProto) -> ModulePath | None:
    """The module path in the metadata of `node`; None if it has none."""
    known = metadata_of(node)
    if SCOPES_KEY not in known:
        return None
    paths, classes = _texts(known[SCOPES_KEY])[:-1], _texts(known.get(CLASSES_KEY, "[]"))[:-1]
    if any(path.startswith(NO_MODULE) for path in paths):
        paths, classes = (), ()
    return ModulePath(paths, classes, _frames(known.get(STACK_KEY, "")))


def module_of(node: NodeProto) -> str:
    """The dotted path of the innermost torch module around `node`; empty at the root, outside of any, or if unknown."""
    module = module_path_of(node)
    return module.paths[-1] if module is not None and module.paths else ""


def common_module(modules: Iterable[ModulePath]) -> ModulePath | None:
    """The innermost module that holds all of `modules`; those outside of any module do not count."""
    inside = [module for module in modules if module.paths]
    if not inside:
        return None
    paths = _common([module.paths for module in inside])
    classes = _common([module.classes for module in inside])[: len(paths)]
    return ModulePath(paths, classes, _common([module.frames for module in inside]))


def write_module_path(node: NodeProto, module: ModulePath, author: str) -> None:
    """Write the module path `module` on `node`, which the pass `author` made."""
    entries = {
        NAMESPACE_KEY: "/".join(
            f"{path}: {kind}"
            for path, kind in zip((*module.paths, author), (*module.classes, node.op_type), strict=False)
        ),
        SCOPES_KEY: repr([*module.paths, author]),
        CLASSES_KEY: repr([*module.classes, author]),
        STACK_KEY: "\n".join(module.frames),
    }
    write_metadata(node, entries)


@lru_cache(maxsize=4096)
def _texts(written: str) -> tuple[str, ...]:
    """A list as the exporter writes it; empty if the text is something else."""
    for read in (_read_plain, ast.literal_eval):
        try:
            items = read(written)
            break
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # the last two: for deep brackets
            items = ()
    return tuple(str(item) for item in items) if isinstance(items, list | tuple) else ()


def _read_plain(written: str) -> Any:
    """A list of texts without quotes and backslashes inside, by JSON, which reads it ten times as fast as Python.

    Raises:
        ValueError: it is something else.
    """
    if '"' in written or "\\" in written:
        raise ValueError("not plain")
    return json.loads(written.replace("'", '"'))


def _frames(stack: str) -> tuple[str, ...]:
    return tuple(part.rstrip("\n") for part in re.split(r'^(?=\s*File ")', stack, flags=re.MULTILINE) if part.strip())


def _common(columns: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The longest common prefix of the columns."""
    shared = itertools.takewhile(lambda row: len(set(row)) == 1, zip(*columns, strict=False))
    return tuple(row[0] for row in shared)


MARK: Final = "onnxline.metadata"
STRIPPED: Final = "stripped"

OF_ONNXSIM: Final = "onnxsim."
"""Begins the keys under which onnxsim writes a report of its call into the model."""

MISSING: Final = (
    "the model was written without metadata (strip_metadata), so the torch modules, source lines and passes that its "
    "nodes come from are not in it; run again without that to see them"
)


def strip_metadata(model: DetachedModel) -> DetachedModel:
    """`model` without the metadata and doc strings of nodes, values, tensors and graphs, and with a mark that says so.

    The metadata of the model itself stays, since applications read it: labels, say.
    """
    proto = model.copy_proto()
    for graph in every_graph(proto.graph):
        _clear(graph, *graph.input, *graph.output, *graph.value_info, *graph.initializer, *graph.node)
    for function in proto.functions:
        _clear(function, *function.value_info, *function.node)
    written = [index for index, entry in enumerate(proto.metadata_props) if entry.key.startswith(OF_ONNXSIM)]
    for index in reversed(written):
        del proto.metadata_props[index]
    if not is_stripped(proto):
        proto.metadata_props.add(key=MARK, value=STRIPPED)
    return model.with_proto(proto)


def is_stripped(model: onnx.ModelProto) -> bool:
    """Whether `strip_metadata` has made the model."""
    return any((entry.key, entry.value) == (MARK, STRIPPED) for entry in model.metadata_props)


def _clear(*entries: Any) -> None:
    for entry in entries:
        for name in ("metadata_props", "doc_string"):
            entry.ClearField(name)


Names = Mapping[str, tuple[str, ...]]
"""Name in the source → the names in the final model; empty where no counterpart is known."""


@dataclass(frozen=True, slots=True)
class NameMap:
    """Source name → its names in a final model; names that map only to themselves are left out.

    Inputs and outputs of the model are left out, since their names never change.
    """

    nodes: Names = field(default_factory=dict)
    """A node without a name counts by its first output."""
    values: Names = field(default_factory=dict)
    """Values that nodes compute. A value has another name only if the node that computes it survived."""
    weights: Names = field(default_factory=dict)
    """Stored float tensors of two elements or more → the tensors made of them, such as `w.q` or `w_transposed`."""


def map_names(before: ModelProto, after: ModelProto) -> NameMap:
    """Map names of `before` to names of `after`, the model that passes made of it. Both need their annotations."""
    return NameMap(_map_nodes(before, after), _map_values(before, after), _map_weights(before, after))


def _map_nodes(before: ModelProto, after: ModelProto) -> Names:
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for node in after.graph.node:
        for name in _sources_of(node):
            found[name][known_as(node)] = None
    return _without_unchanged((known_as(node), tuple(found.get(known_as(node), ()))) for node in before.graph.node)


def _map_values(before: ModelProto, after: ModelProto) -> Names:
    computed, has = computed_values(before.graph.node), computed_values(after.graph.node)
    survivors = {known_as(node): node for node in after.graph.node if not annotations_of(node).author}
    pairs: list[tuple[str, tuple[str, ...]]] = []
    for node in before.graph.node:
        same = survivors.get(known_as(node))
        outputs = list(same.output) if same is not None and same.op_type == node.op_type else []
        for index, name in enumerate(node.output):
            new = outputs[index] if index < len(outputs) else ""
            names = (name,) if name in has else (new,) if new and new not in computed else ()
            pairs += [(name, names)] if name else []
    return _without_unchanged(pairs)


def _map_weights(before: ModelProto, after: ModelProto) -> Names:
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for tensor in after.graph.initializer:
        for name in dict.fromkeys((*annotations_of(tensor).replaced, tensor.name)):
            found[name][tensor.name] = None
    weights = (weight for weight in before.graph.initializer if weight.data_type in FLOATS and prod(weight.dims) > 1)
    return _without_unchanged((weight.name, tuple(found.get(weight.name, ()))) for weight in weights)


def _without_unchanged(pairs: Iterable[tuple[str, tuple[str, ...]]]) -> Names:
    return {old: news for old, news in pairs if news != (old,)}
