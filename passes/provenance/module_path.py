"""Where in the torch module a node lies: in the keys of torch's exporter, for nodes that a pass made too.

    pkg.torch.onnx.name_scopes       ['', 'encoder', 'encoder.layer.0', 'linear_3']    module paths, then the call
    pkg.torch.onnx.class_hierarchy   ['ViTModel', 'ViTEncoder', 'ViTLayer', 'aten.linear.default']
    pkg.torch.onnx.stack_trace       the frames of the call, outermost first

A node that a pass made has the pass in the place of the call.
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

__all__ = ["ModulePath", "common", "metadata_of", "module_path_of", "write_module_path"]

SCOPES_KEY: Final = "pkg.torch.onnx.name_scopes"
CLASSES_KEY: Final = "pkg.torch.onnx.class_hierarchy"
STACK_KEY: Final = "pkg.torch.onnx.stack_trace"
NAMESPACE_KEY: Final = "namespace"

NO_MODULE: Final = "_empty_nn_module_stack"
"""How a scope begins that torch made up for what it computes outside of any module: sizes of inputs."""


@dataclass(frozen=True, slots=True)
class ModulePath:
    """The modules that a node lies in, from the root inwards, with their classes, and the frames that led there.

    A path is dotted and whole ('encoder.layer.0'); the root's is empty. No paths: torch computed it outside of any
    module.
    """

    paths: tuple[str, ...]
    classes: tuple[str, ...]
    frames: tuple[str, ...]


def metadata_of(node: NodeProto | TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in node.metadata_props}


def module_path_of(node: NodeProto) -> ModulePath | None:
    """None where nothing is known of a torch module."""
    known = metadata_of(node)
    if SCOPES_KEY not in known:
        return None
    paths, classes = _texts(known[SCOPES_KEY])[:-1], _texts(known.get(CLASSES_KEY, "[]"))[:-1]
    if any(path.startswith(NO_MODULE) for path in paths):
        paths, classes = (), ()
    return ModulePath(paths, classes, _frames(known.get(STACK_KEY, "")))


def common(places: Iterable[ModulePath]) -> ModulePath | None:
    """The innermost module that holds all of `places`; those outside of any module do not count."""
    inside = [place for place in places if place.paths]
    if not inside:
        return None
    paths = _common([place.paths for place in inside])
    return ModulePath(
        paths, _common([place.classes for place in inside])[: len(paths)], _common([place.frames for place in inside])
    )


def write_module_path(node: NodeProto, place: ModulePath, author: str) -> None:
    """Say that `node`, which the pass `author` made, lies at `place`; replaces what it says of that."""
    told = {
        NAMESPACE_KEY: "/".join(
            f"{path}: {kind}"
            for path, kind in zip((*place.paths, author), (*place.classes, node.op_type), strict=False)
        ),
        SCOPES_KEY: repr([*place.paths, author]),
        CLASSES_KEY: repr([*place.classes, author]),
        STACK_KEY: "\n".join(place.frames),
    }
    rest = [entry for entry in node.metadata_props if entry.key not in told]
    del node.metadata_props[:]
    node.metadata_props.extend(rest)
    for key, value in told.items():
        if value:
            node.metadata_props.add(key=key, value=value)


@lru_cache(maxsize=4096)
def _texts(written: str) -> tuple[str, ...]:
    """A list as the exporter writes it; empty if it is not one."""
    try:
        items = ast.literal_eval(written)
    except (ValueError, SyntaxError):
        return ()
    return tuple(str(item) for item in items) if isinstance(items, list | tuple) else ()


def _frames(stack: str) -> tuple[str, ...]:
    return tuple(part.rstrip("\n") for part in re.split(r'^(?=\s*File ")', stack, flags=re.MULTILINE) if part.strip())


def _common(columns: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """What they all begin with."""
    alike = itertools.takewhile(lambda row: len(set(row)) == 1, zip(*columns, strict=False))
    return tuple(row[0] for row in alike)
