"""onnxoptimizer: one of its passes a step, on the detached model, since none of them computes with weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import onnx

from passes.base import Workbench
from passes.errors import StepFailed
from passes.weights import DetachedModel

__all__ = ["OnnxOptimizerPass", "available", "default_set", "passes_of"]

NAME: Final = "onnxoptimizer"

REMEMBERED: Final = 4

NUMBERED: Final = "onnxline.node/"

BEGUN: Final = "onnxoptimizer, begun"


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
        return model.with_proto(_named(onnx.load_from_string(known.made[self.name]), model.proto))

    def begin(self, model: DetachedModel, bench: Workbench) -> None:
        """Try this pass and those ahead on `model`, without waiting."""
        bench.notes[BEGUN] = _begun(_bare(model.proto), [self.name, *self.ahead], bench)

    def looking_past(self, names: Collection[str]) -> OnnxOptimizerPass:
        """The same pass, which leaves out `names` when it looks ahead."""
        return replace(self, ahead=tuple(name for name in self.ahead if name not in names))

    def _try(self, known: _Known, bench: Workbench) -> None:
        """Find out what this pass makes of the model, and which of those ahead do nothing."""
        ahead = [name for name in self.ahead if name not in known.idle] if known.may_look_ahead else []
        names = [self.name, *ahead]
        try:
            begun: _Begun | None = bench.notes.pop(BEGUN, None)
            if begun is None or not begun.is_of(known.source, names) or not bench.worker.awaits(begun.ticket):
                begun = _begun(known.source, names, bench)
            index, result = bench.worker.collect(begun.ticket)
        except StepFailed:
            if not ahead:
                raise
            known.may_look_ahead = False  # one that is not asked for yet may be at fault
            self._try(known, bench)
            return
        known.idle.update(names[:index])
        if result is not None:
            known.made[names[index]] = result


@dataclass(frozen=True, slots=True)
class _Begun:
    """A search that the worker is at."""

    source: bytes
    names: Sequence[str]
    ticket: int

    def is_of(self, source: bytes, names: Sequence[str]) -> bool:
        return (self.source, self.names) == (source, names)


def _begun(source: bytes, names: Sequence[str], bench: Workbench) -> _Begun:
    ticket = bench.worker.post("passes.external.onnxoptimizer_search:optimize_first", model=source, names=names)
    return _Begun(source, names, ticket)


@dataclass(slots=True)
class _Known:
    """What is known of a model: the passes that leave it as it is, and what others make of it."""

    proto: onnx.ModelProto
    source: bytes
    idle: set[str] = field(default_factory=set)
    made: dict[str, bytes] = field(default_factory=dict)
    may_look_ahead: bool = True


def _known(bench: Workbench, proto: onnx.ModelProto) -> _Known:
    """A model is known again by identity; a few are remembered, since steps are tried with different pins."""
    remembered: list[_Known] = bench.notes.setdefault(NAME, [])
    found = next((known for known in remembered if known.proto is proto), None) or _Known(proto, _bare(proto))
    remembered[:] = [*(known for known in remembered if known is not found), found][-REMEMBERED:]
    return found


def _bare(proto: onnx.ModelProto) -> bytes:
    """The model without what is carried across a pass anyway, and takes longer to read than many a pass to run.

    Nodes are numbered, since their names may still change while a search has begun.
    """
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    del bare.metadata_props[:]
    for index, node in enumerate(bare.graph.node):
        del node.metadata_props[:]
        node.ClearField("doc_string")
        node.name = f"{NUMBERED}{index}"
    return bare.SerializeToString()


def _named(made: onnx.ModelProto, source: onnx.ModelProto) -> onnx.ModelProto:
    """`made`, whose numbered nodes have the names from `source` again."""
    for node in made.graph.node:
        if node.name.startswith(NUMBERED):
            node.name = source.graph.node[int(node.name.removeprefix(NUMBERED))].name
    return made


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
