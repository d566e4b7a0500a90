"""onnxoptimizer: one of its passes a step, on the detached model, since none of them computes with weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Final

import onnx

from passes.context import PassContext
from passes.errors import StepFailed
from passes.external.call_names import ShortNames, number_nodes, quote_own_names, restore_names
from passes.external.pieces import GraphPieces, can_be_cut
from passes.step import PassResult, Step
from passes.weights.detached import DetachedModel

__all__ = [
    "OnnxOptimizerPass",
    "OnnxOptimizerPasses",
    "PassOutput",
    "available",
    "call_optimize",
    "default_set",
    "optimize",
    "passes_of",
]

NAME: Final = "onnxoptimizer"

DESTROYS: Final[Mapping[str, tuple[str, ...]]] = {
    "fuse_qkv": ("qkv",),
    "fuse_bn_into_conv": ("batchnorm",),
    "fuse_matmul_add_bias_into_gemm": ("residual",),
    "eliminate_common_subexpression": ("qkv",),
    "replace_einsum_with_matmul": ("attention",),
}

DESTROYS_EQUALS: Final = ("eliminate_common_subexpression",)

REMEMBERED: Final = 4
"""Models that are kept as the library is given them, on either side: passes in a row are tried on the same one."""


@dataclass(frozen=True, slots=True)
class OnnxOptimizerPass(Step):
    """Run one named pass of onnxoptimizer once."""

    name: str
    source: str = field(default=NAME, init=False)
    destroys: ClassVar[Mapping[str, tuple[str, ...]]] = DESTROYS
    destroys_equals: ClassVar[tuple[str, ...]] = DESTROYS_EQUALS
    joins_neighbours: ClassVar[bool] = True

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        return _apply([self.name], model, context)

    def join(self, following: Sequence[Step]) -> OnnxOptimizerPasses:
        return OnnxOptimizerPasses((self.name, *(step.name for step in following)))


@dataclass(frozen=True, slots=True)
class OnnxOptimizerPasses(Step):
    """Run several named passes in one call of the library, which reads and writes the model once."""

    names: tuple[str, ...]
    source: str = field(default=NAME, init=False)

    @property
    def name(self) -> str:  # type: ignore[override]
        return ", ".join(self.names)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        return _apply(self.names, model, context)

    def call_library(self, model: onnx.ModelProto) -> onnx.ModelProto:
        return call_optimize(model, self.names)

    def format_call(self) -> str:
        return f"onnxoptimizer.optimize(model, {list(self.names)})"


def passes_of(names: Sequence[str]) -> tuple[OnnxOptimizerPass, ...]:
    """A step for each of `names`."""
    return tuple(map(OnnxOptimizerPass, names))


def available() -> tuple[str, ...]:
    """Every pass of the installed release."""
    import onnxoptimizer

    return tuple(onnxoptimizer.get_available_passes())


def default_set() -> tuple[str, ...]:
    """The fuse-and-eliminate set that `default` stands for, in the library's order."""
    import onnxoptimizer

    return tuple(onnxoptimizer.get_fuse_and_elimination_passes())


def _apply(names: Sequence[str], model: DetachedModel, context: PassContext) -> PassResult:
    nodes = model.proto.graph.node
    try:
        source = _serialize_numbered(model.proto, context)
        output: PassOutput | None = context.worker.call(optimize, model=source, names=list(names))
    except StepFailed as failure:
        failure.args = (quote_own_names(str(failure), nodes),)
        raise
    if output is None:
        return PassResult(model, changed=False)
    proto = onnx.load_from_string(output.model)
    restore_names(proto, output.names, nodes)
    return PassResult(model.with_proto(proto))


def _serialize_numbered(proto: onnx.ModelProto, context: PassContext) -> bytes:
    """The model with numbered nodes, serialized; a model is known again by identity."""
    remembered: list[tuple[onnx.ModelProto, bytes]] = context.cache.setdefault(NAME, [])
    for known, content in remembered:
        if known is proto:
            return content
    numbered = onnx.ModelProto()
    numbered.CopyFrom(proto)
    number_nodes(numbered)
    remembered[:] = [*remembered, (proto, numbered.SerializeToString())][-REMEMBERED:]
    return remembered[-1][1]


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What passes made: a serialized model with numbered nodes, and the names that these had."""

    model: bytes
    names: Sequence[str]


def optimize(desk: dict[str, Any], model: bytes, names: Sequence[str]) -> PassOutput | None:
    """In the worker: what `names` make of a serialized `model` with numbered nodes, in one call; None for no change."""
    remembered: dict[bytes, _PreparedModel] = desk.setdefault(NAME, {})
    prepared = remembered.pop(model, None) or _PreparedModel.read(model)
    remembered[model] = prepared
    content = prepared.run(names)
    output = None
    if content is not None:
        following, its_names = prepared.prepare_next(content)
        remembered[following.source] = following  # most are sound, so the next pass is given this one
        output = PassOutput(following.source, its_names)
    for forgotten in list(remembered)[:-REMEMBERED]:
        del remembered[forgotten]
    return output


def call_optimize(model: onnx.ModelProto, names: Sequence[str], *, fixed_point: bool = False) -> onnx.ModelProto:
    """In the worker: what `onnxoptimizer.optimize` makes of a model, as its users call it."""
    import onnxoptimizer

    return onnxoptimizer.optimize(model, list(names), fixed_point)


class _PreparedModel:
    """A model as the library is given it: with short names, in bytes."""

    def __init__(self, source: bytes, short: ShortNames, proto: onnx.ModelProto, *, is_written: bool) -> None:
        self.source = source
        self._short = short
        self._bytes = proto.SerializeToString()
        self._pieces = GraphPieces(proto, self._optimize) if can_be_cut(proto) else None
        self._is_written = is_written
        """Whether it is in the form in which the library writes a model."""

    @classmethod
    def read(cls, source: bytes) -> _PreparedModel:
        proto = onnx.load_from_string(source)
        return cls(source, ShortNames(proto.graph), proto, is_written=False)

    def run(self, names: Sequence[str]) -> bytes | None:
        """What passes make, one after the other; None when that is the same model."""
        if self._pieces is not None:
            pieces = self._pieces.run(names)
            return None if pieces is None else pieces.model.SerializeToString()
        content = self._optimize(self._bytes, names)
        self._is_written |= content == self._bytes
        is_same = content == self._bytes or (not self._is_written and content == self._rewritten)
        return None if is_same else content

    @cached_property
    def _rewritten(self) -> bytes:
        """The same model as the library writes it: what `nop` makes, byte for byte."""
        return self._optimize(self._bytes, ["nop"])

    def _optimize(self, model: bytes, names: Sequence[str]) -> bytes:
        # What onnxoptimizer.optimize calls, which reads and writes the result once more: a third of a pass.
        from onnxoptimizer import onnx_opt_cpp2py_export as library  # type: ignore[attr-defined]

        try:
            return library.optimize(model, list(names))
        except Exception as error:
            error.args = (self._short.quote_own_names(str(error)),)
            raise

    def prepare_next(self, content: bytes) -> tuple[_PreparedModel, Sequence[str]]:
        """What passes have made, ready for the next one, with the names that values have outside; and the names that
        its nodes had."""
        proto = onnx.load_from_string(content)
        names = number_nodes(proto)
        full = onnx.ModelProto()
        full.CopyFrom(proto)
        self._short.restore(full.graph)
        return _PreparedModel(full.SerializeToString(), self._short, proto, is_written=True), names
