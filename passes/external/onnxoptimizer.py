"""onnxoptimizer: one of its passes a step, on the detached model, since none of them computes with weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import onnx

from passes.base import Workbench
from passes.errors import StepFailed
from passes.external.first_change import first_change
from passes.weights import DetachedModel

__all__ = ["OnnxOptimizerPass", "available", "default_set", "optimize_first", "passes_of"]

NAME: Final = "onnxoptimizer"

REMEMBERED: Final = 4


@dataclass(frozen=True, slots=True)
class OnnxOptimizerPass:
    """Run one named pass of onnxoptimizer once.

    `ahead` names passes that are likely to be next. Most passes change nothing, so the worker tries them on the same
    model in one go, each alone, until one changes something; their turn then costs nothing.
    """

    name: str
    ahead: tuple[str, ...] = field(default=(), compare=False)
    source: str = field(default=NAME, init=False)

    def apply(self, model: DetachedModel, bench: Workbench) -> DetachedModel:
        """A new model, or the very same object when the pass changes nothing."""
        known = _known(bench, model.proto)
        if self.name not in known.idle and self.name not in known.made:
            self._try(known, bench)
        if self.name in known.idle:
            return model
        return model.with_proto(onnx.load_from_string(known.made[self.name]))

    def _try(self, known: _Known, bench: Workbench) -> None:
        """Find out what this pass makes of the model, and which of those ahead do nothing."""
        ahead = [name for name in self.ahead if name not in known.idle] if known.may_look_ahead else []
        source = _bare(known.proto).SerializeToString()
        names = [self.name, *ahead]
        try:
            index, result = bench.worker.call("passes.external.onnxoptimizer:optimize_first", model=source, names=names)
        except StepFailed:
            if not ahead:
                raise
            known.may_look_ahead = False  # one that is not asked for yet may be at fault
            self._try(known, bench)
            return
        known.idle.update(names[:index])
        if result is not None:
            known.made[names[index]] = result


@dataclass(slots=True)
class _Known:
    """What is known of a model: the passes that leave it as it is, and what others make of it."""

    proto: onnx.ModelProto
    idle: set[str] = field(default_factory=set)
    made: dict[str, bytes] = field(default_factory=dict)
    may_look_ahead: bool = True


def _known(bench: Workbench, proto: onnx.ModelProto) -> _Known:
    """A model is known again by identity; a few are remembered, since steps are tried with different pins."""
    remembered: list[_Known] = bench.notes.setdefault(NAME, [])
    found = next((known for known in remembered if known.proto is proto), None) or _Known(proto)
    remembered[:] = [*(known for known in remembered if known is not found), found][-REMEMBERED:]
    return found


def _bare(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Without the metadata of nodes: the library drops it anyway, and to read it takes longer than many a pass."""
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    for node in bare.graph.node:
        del node.metadata_props[:]
    return bare


def passes_of(names: Sequence[str]) -> tuple[OnnxOptimizerPass, ...]:
    """Steps for `names`, each with those behind it as `ahead`."""
    return tuple(OnnxOptimizerPass(name, tuple(names[index + 1 :])) for index, name in enumerate(names))


def available() -> tuple[str, ...]:
    """Every pass of the installed release."""
    import onnxoptimizer

    return tuple(onnxoptimizer.get_available_passes())


def default_set() -> tuple[str, ...]:
    """The fuse-and-eliminate set that `default` stands for, in the library's order."""
    import onnxoptimizer

    return tuple(onnxoptimizer.get_fuse_and_elimination_passes())


def optimize_first(desk: dict[str, Any], model: bytes, names: Sequence[str]) -> tuple[int, bytes | None]:
    """In the worker: run each of `names` alone on a serialized model, up to the first that changes it.

    What changes nothing makes what `nop` makes, byte for byte.

    Returns:
        How many passes changed nothing, and the model that the next one made; None if there is no next one.
    """
    # What onnxoptimizer.optimize calls, which reads and writes the result once more: a third of a pass.
    from onnxoptimizer import onnx_opt_cpp2py_export as library

    key = hashlib.blake2b(model).digest()
    if desk.get("nop", (None, None))[0] != key:
        desk["nop"] = (key, library.optimize(model, ["nop"]))
    nothing = desk["nop"][1]

    def made_by(name: str) -> bytes | None:
        result = library.optimize(model, [name])
        return None if result == nothing else result

    return first_change(names, made_by)
