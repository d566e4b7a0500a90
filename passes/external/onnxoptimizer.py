"""onnxoptimizer: one of its passes a step, on the detached model, since none of them computes with weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import onnx

from passes.base import Workbench
from passes.errors import StepFailed
from passes.external.first_change import first_change
from passes.external.short_names import ShortNames
from passes.weights import DetachedModel

__all__ = ["OnnxOptimizerPass", "available", "default_set", "optimize_first", "passes_of"]

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
    ticket = bench.worker.post("passes.external.onnxoptimizer:optimize_first", model=source, names=names)
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


def optimize_first(desk: dict[str, Any], model: bytes, names: Sequence[str]) -> tuple[int, bytes | None]:
    """In the worker: run each of `names` alone on a serialized model, up to the first that changes it.

    Returns:
        How many passes changed nothing, and the model that the next one made; None if there is no next one.
    """
    if desk.get(NAME, (b"", None))[0] != model:
        desk[NAME] = (model, _Given(model))
    given: _Given = desk[NAME][1]
    index, made = first_change(names, given.made_by, given.unlikely(names))
    return index, None if made is None else given.restored(made)


class _Given:
    """A model as the library is given it: with short names, in bytes."""

    def __init__(self, model: bytes) -> None:
        proto = onnx.load_from_string(model)
        self._names = ShortNames(proto.graph)
        self._bytes = proto.SerializeToString()
        self._ops = set(_ops(proto.graph))

    @cached_property
    def _nothing(self) -> bytes:
        """What passes that change nothing make of it: what `nop` makes, byte for byte."""
        return _optimized(self._bytes, ["nop"])

    def unlikely(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that act on operators that the model has not, as far as we know the passes."""
        return [name for name in names if not self._ops.issuperset(ACTS_ON.get(name, ()))]

    def made_by(self, names: Sequence[str]) -> bytes | None:
        """What passes make, one after the other; None when that is the same model."""
        made = _optimized(self._bytes, names)
        # A model that the library has written before is nothing new to it, so `nop` is seldom needed.
        return None if made == self._bytes or made == self._nothing else made

    def restored(self, made: bytes) -> bytes:
        proto = onnx.load_from_string(made)
        self._names.restore(proto.graph)
        return proto.SerializeToString()


def _ops(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield node.op_type
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _ops(inner)


def _optimized(model: bytes, names: Sequence[str]) -> bytes:
    # What onnxoptimizer.optimize calls, which reads and writes the result once more: a third of a pass.
    from onnxoptimizer import onnx_opt_cpp2py_export as library  # type: ignore[attr-defined]

    return library.optimize(model, list(names))


ACTS_ON: Final[Mapping[str, tuple[str, ...]]] = {
    "nop": ("",),
    "eliminate_if_with_const_cond": ("If",),
    "eliminate_nop_cast": ("Cast",),
    "eliminate_nop_concat": ("Concat",),
    "eliminate_nop_dropout": ("Dropout",),
    "eliminate_nop_expand": ("Expand",),
    "eliminate_nop_flatten": ("Flatten",),
    "eliminate_nop_monotone_argmax": ("ArgMax",),
    "eliminate_nop_pad": ("Pad",),
    "eliminate_nop_reshape": ("Reshape",),
    "eliminate_nop_split": ("Split",),
    "eliminate_nop_transpose": ("Transpose",),
    "eliminate_shape_gather": ("Shape", "Gather"),
    "eliminate_shape_op": ("Shape",),
    "eliminate_slice_after_shape": ("Shape", "Slice"),
    "extract_constant_to_initializer": ("Constant",),
    "fuse_add_bias_into_conv": ("Conv", "Add"),
    "fuse_bn_into_conv": ("Conv", "BatchNormalization"),
    "fuse_concat_into_reshape": ("Concat", "Reshape"),
    "fuse_consecutive_concats": ("Concat",),
    "fuse_consecutive_log_softmax": ("Softmax", "Log"),
    "fuse_consecutive_reduce_unsqueeze": ("Unsqueeze",),
    "fuse_consecutive_slices": ("Slice",),
    "fuse_consecutive_squeezes": ("Squeeze",),
    "fuse_consecutive_transposes": ("Transpose",),
    "fuse_consecutive_unsqueezes": ("Unsqueeze",),
    "fuse_matmul_add_bias_into_gemm": ("MatMul", "Add"),
    "fuse_pad_into_conv": ("Pad", "Conv"),
    "fuse_pad_into_pool": ("Pad",),
    "fuse_qkv": ("MatMul",),
    "fuse_transpose_into_gemm": ("Transpose", "Gemm"),
    "rewrite_where": ("Where",),
}
"""Pass → operators without which it is not expected to do anything. Only the order of work depends on it: what is
expected is looked at, and a pass that is not listed is tried alone."""
