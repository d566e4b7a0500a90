"""Where a node comes from: which torch module, which line, which pass. Read from the model alone."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Final

import onnx
from onnx import GraphProto, NodeProto

from passes.errors import PolicyMistake
from passes.load import load_model
from passes.model.weights import DetachedModel
from passes.provenance import Place, marks_of, place_of

__all__ = ["MODEL_FILE", "Origin", "file_of", "why"]

MODEL_FILE: Final = "model.onnx"
"""The model in the folder of a run."""

FRAME: Final = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+), in (?P<function>\S+)\s*(?P<code>[^\n]*)')
OF_TORCH: Final = re.compile(r"(^|(site|dist)-packages[/\\])torch[/\\]|^<")
"""Files of torch itself, and code that it made up."""

NEAREST: Final = 3


@dataclass(frozen=True, slots=True)
class Origin:
    """One node, and what is known of where it comes from."""

    op: str
    """Op type, with its domain where that is not ONNX's own: `com.microsoft::Attention`."""
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    within: tuple[str, ...]
    """The nodes that it lies inside of, outermost first: If, Loop and Scan; for a local function, its name."""
    module: str | None
    """Path of the torch module; empty for the model itself, None where the model holds no torch metadata of it."""
    classes: tuple[str, ...]
    """Classes of the modules from the model inwards, with their Python modules: the last is that of `module`."""
    code: str
    """`FILE:LINE in FUNCTION: CODE` of the innermost frame outside of torch; empty where it is not known."""
    made_by: str
    """The pass that made it; empty if it comes from the export."""
    replaced: tuple[str, ...]
    """The source's nodes that it stands for, at most 8 of them; empty too if the pass only put it between others."""
    replaced_count: int
    changed_by: tuple[str, ...]
    """The passes that gave it other attributes or other constants since."""


def why(model: onnx.ModelProto | DetachedModel | str | Path, node: str) -> tuple[Origin, ...]:
    """The origins of the nodes that `node` means, in graph order.

    Args:
        model: or its file, or the folder of a run. Weights are not read.
        node: a node's name, the name of a value that it makes, or a glob over both. Inner nodes count too.

    Raises:
        ModelMistake: the file cannot be read.
        PolicyMistake: nothing has this name; the nearest are named.
    """
    proto = _proto_of(model)
    nodes = _Nodes(proto)
    found = nodes.meant_by(node)
    if not found:
        raise PolicyMistake(nodes.what_else(node))
    return tuple(nodes.origin(one, within) for one, within in found)


def file_of(model: str | Path) -> Path:
    """The file that `model` means: a folder means the model of the run in it."""
    path = Path(model)
    return path / MODEL_FILE if path.is_dir() else path


def _proto_of(model: onnx.ModelProto | DetachedModel | str | Path) -> onnx.ModelProto:
    if isinstance(model, DetachedModel):
        return model.proto
    if isinstance(model, onnx.ModelProto):
        return load_model(model, may_be_empty=True)
    return load_model(file_of(model), may_be_empty=True)


class _Nodes:
    """All nodes of a model, inner ones behind the node that holds them, each with what it lies inside of."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._proto = proto
        self._all = [*_walk(proto.graph.node, ())]
        for function in proto.functions:
            self._all.extend(_walk(function.node, (function.name,)))

    def meant_by(self, name: str) -> list[tuple[NodeProto, tuple[str, ...]]]:
        exact = [pair for pair in self._all if name in _handles(pair[0])]
        return exact or [pair for pair in self._all if any(fnmatchcase(one, name) for one in _handles(pair[0]))]

    def what_else(self, name: str) -> str:
        """Why `name` means no node."""
        graph = self._proto.graph
        readers = [one.name or one.output[0] for one, _ in self._all if name in one.input]
        stored = {tensor.name for tensor in graph.initializer}
        if name in stored or name in {info.name for info in graph.input}:
            kind = "a stored tensor" if name in stored else "an input of the model"
            return f"{name!r} is {kind} and no node makes it; ask for a node that reads it: {_listed(readers)}"
        made = [(one, marks_of(one)) for one, _ in self._all]
        heirs = [(marks.author, one.name or one.output[0]) for one, marks in made if name in marks.replaced]
        if heirs:
            return f"{name!r} is gone: {heirs[0][0]} made {_listed((heir for _, heir in heirs), 'and')} in its place"
        known = dict.fromkeys(handle for one, _ in self._all for handle in _handles(one))
        close = difflib.get_close_matches(name, known, n=NEAREST, cutoff=0.5)
        return f"no node and no value named {name!r}" + (
            f"; did you mean {_listed(map(repr, close))}?" if close else f" among {len(self._all)} nodes"
        )

    def origin(self, node: NodeProto, within: tuple[str, ...]) -> Origin:
        place, marks = place_of(node), marks_of(node)
        if place is not None and not place.paths:  # outside of any module: the model's own
            place = Place(("",), self._root_classes, place.frames)
        return Origin(
            op=f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type,
            name=node.name,
            inputs=tuple(node.input),
            outputs=tuple(node.output),
            within=within,
            module=place.paths[-1] if place else None,
            classes=place.classes if place else (),
            code=_code(place.frames) if place else "",
            made_by=marks.author,
            replaced=marks.replaced,
            replaced_count=marks.count,
            changed_by=marks.changed,
        )

    @cached_property
    def _root_classes(self) -> tuple[str, ...]:
        places = (place_of(node) for node, _ in self._all)
        return next((place.classes[:1] for place in places if place is not None and place.classes), ())


def _walk(nodes: Iterable[NodeProto], within: tuple[str, ...]) -> Iterator[tuple[NodeProto, tuple[str, ...]]]:
    for node in nodes:
        yield node, within
        for body in _bodies(node):
            yield from _walk(body.node, (*within, node.name or node.output[0]))


def _bodies(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _handles(node: NodeProto) -> tuple[str, ...]:
    return tuple(name for name in (node.name, *node.output) if name)


def _code(frames: Iterable[str]) -> str:
    """The innermost frame that is the user's, or a library's that is not torch."""
    found = [match for match in map(FRAME.search, frames) if match and not OF_TORCH.search(match["file"])]
    if not found:
        return ""
    last = found[-1]
    return f"{last['file']}:{last['line']} in {last['function']}" + (
        f": {last['code'].strip()}" if last["code"] else ""
    )


def _listed(names: Iterable[str], word: str = "or") -> str:
    *first, last = list(names) or ["none"]
    return f"{', '.join(first)} {word} {last}" if first else last
