"""The torch module path of a node, in the keys of torch's exporter, also for nodes that a pass made.

    pkg.torch.onnx.name_scopes       ['', 'encoder', 'encoder.layer.0', 'linear_3']    module paths, then the call
    pkg.torch.onnx.class_hierarchy   ['ViTModel', 'ViTEncoder', 'ViTLayer', 'aten.linear.default']
    pkg.torch.onnx.stack_trace       the frames of the call, outermost first

For a node that a pass made, the pass takes the place of the call.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from onnx import NodeProto, TensorProto

__all__ = ["ModulePath", "common_module", "metadata_of", "module_path_of", "write_module_path"]

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


def common_module(places: Iterable[ModulePath]) -> ModulePath | None:
    """The innermost module that holds all of `places`; those outside of any module do not count."""
    inside = [place for place in places if place.paths]
    if not inside:
        return None
    paths = _common([place.paths for place in inside])
    return ModulePath(
        paths, _common([place.classes for place in inside])[: len(paths)], _common([place.frames for place in inside])
    )


def write_module_path(node: NodeProto, place: ModulePath, author: str) -> None:
    """Write the module path `place` on `node`, which the pass `author` made."""
    entries = {
        NAMESPACE_KEY: "/".join(
            f"{path}: {kind}"
            for path, kind in zip((*place.paths, author), (*place.classes, node.op_type), strict=False)
        ),
        SCOPES_KEY: repr([*place.paths, author]),
        CLASSES_KEY: repr([*place.classes, author]),
        STACK_KEY: "\n".join(place.frames),
    }
    rest = [entry for entry in node.metadata_props if entry.key not in entries]
    del node.metadata_props[:]
    node.metadata_props.extend(rest)
    for key, value in entries.items():
        if value:
            node.metadata_props.add(key=key, value=value)


@lru_cache(maxsize=4096)
def _texts(written: str) -> tuple[str, ...]:
    """A list as the exporter writes it; empty if the text is something else."""
    try:
        items = ast.literal_eval(written)
    except (ValueError, SyntaxError):
        return ()
    return tuple(str(item) for item in items) if isinstance(items, list | tuple) else ()


def _frames(stack: str) -> tuple[str, ...]:
    return tuple(part.rstrip("\n") for part in re.split(r'^(?=\s*File ")', stack, flags=re.MULTILINE) if part.strip())


def _common(columns: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The longest common prefix of the columns."""
    shared = itertools.takewhile(lambda row: len(set(row)) == 1, zip(*columns, strict=False))
    return tuple(row[0] for row in shared)
