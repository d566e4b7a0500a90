"""Run passes of onnxoptimizer in turn, each alone, and go on with what they make. In the worker."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import onnx

from passes.external.first_change import first_change
from passes.external.numbered import number
from passes.external.pieces import Pieces, can_be_cut
from passes.external.short_names import ShortNames
from passes.graph.traversal import bodies_of

__all__ = ["ACTS_ON", "Change", "changes", "made_together"]


@dataclass(frozen=True, slots=True)
class Change:
    """What the pass at `place` in the list made: a serialized model with numbered nodes, and the names that they had.

    The passes between the last change and this one changed nothing.
    """

    place: int
    model: bytes
    names: Sequence[str]


def changes(desk: dict[str, Any], model: bytes, names: Sequence[str]) -> Generator[Change | None, None, None]:
    """Run `names` alone and in order, from a serialized `model` with numbered nodes on. In the worker.

    Each pass is given what the one before has made, and it is for who asks to see whether that is what he goes on with.
    """
    remembered: dict[bytes, _Given] = desk.setdefault(GIVEN, {})
    given = remembered.get(model) or _Given.read(model)
    begun = 0
    while True:
        _remember(remembered, given)
        count, made = yield from given.first_change(names[begun:])
        if made is None:
            return
        yield Change(begun + count, made.given.source, made.names)
        given, begun = made.given, begun + count + 1


def made_together(model: bytes, names: Sequence[str]) -> Change | None:
    """What `names` make of a serialized `model` with numbered nodes in one call; None for no change. In the worker."""
    made = _Given.read(model).made_by(names)
    return None if made is None else Change(len(names) - 1, made.given.source, made.names)


@dataclass(frozen=True, slots=True)
class _Made:
    given: _Given
    names: Sequence[str]


class _Given:
    """A model as the library is given it: with short names, in bytes."""

    def __init__(self, source: bytes, short: ShortNames, proto: onnx.ModelProto, *, is_written: bool) -> None:
        self.source = source
        self._short = short
        self._bytes = proto.SerializeToString()
        self._pieces = Pieces(proto, self._optimize) if can_be_cut(proto) else None
        self._there = frozenset(_there(proto.graph))
        self._is_written = is_written
        """Whether it is in the form in which the library writes a model."""
        self._idle: set[str] = set()
        self._made: dict[tuple[str, ...], bytes] = {}

    @classmethod
    def read(cls, source: bytes) -> _Given:
        proto = onnx.load_from_string(source)
        return cls(source, ShortNames(proto.graph), proto, is_written=False)

    def first_change(self, names: Sequence[str]) -> Generator[None, None, tuple[int, _Made | None]]:
        """How many of `names` change nothing, and what the next one makes."""
        left = [name for name in names if name not in self._idle]
        count, made = yield from first_change(left, self._run, self._unlikely(left))
        return (len(names), None) if made is None else (names.index(left[count]), self._restored(made))

    def made_by(self, names: Sequence[str]) -> _Made | None:
        """What `names` make, one after the other in one call; None when that is the same model."""
        made = self._run(names)
        return None if made is None else self._restored(made)

    def _unlikely(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that act on what the model has not, as far as we know the passes."""
        return [name for name in names if name in ACTS_ON and self._there.isdisjoint(ACTS_ON[name])]

    def _run(self, names: Sequence[str]) -> bytes | None:
        """What passes make, one after the other; None when that is the same model."""
        key = tuple(names)
        if self._pieces is not None and key not in self._made:
            pieces = self._pieces.run(names)
            if pieces is None:
                self._idle.update(names)
                return None
            self._made[key] = pieces.model.SerializeToString()
        if key not in self._made:
            made = self._nothing if key == ("nop",) else self._optimize(self._bytes, names)
            self._is_written |= made == self._bytes
            if made == self._bytes or (not self._is_written and made == self._nothing):
                self._idle.update(names)
                return None
            self._made[key] = made
        return self._made[key]

    @cached_property
    def _nothing(self) -> bytes:
        """What passes that change nothing make of it: what `nop` makes, byte for byte."""
        return self._optimize(self._bytes, ["nop"])

    def _optimize(self, model: bytes, names: Sequence[str]) -> bytes:
        try:
            return _optimized(model, names)
        except Exception as error:
            error.args = (self._short.quote_own_names(str(error)),)
            raise

    def _restored(self, made: bytes) -> _Made:
        """What a pass has made, with the names that values have outside, and ready for the next pass."""
        proto = onnx.load_from_string(made)
        names = number(proto)
        full = onnx.ModelProto()
        full.CopyFrom(proto)
        self._short.restore(full.graph)
        return _Made(_Given(full.SerializeToString(), self._short, proto, is_written=True), names)


def _remember(remembered: dict[bytes, _Given], given: _Given) -> None:
    remembered.pop(given.source, None)
    remembered[given.source] = given
    for forgotten in list(remembered)[:-REMEMBERED]:
        del remembered[forgotten]


def _there(graph: onnx.GraphProto) -> Iterator[str]:
    """The operators of a graph and of those inside of it; as `Conv Add`, which of them reads which; and, in more words,
    which of them may do nothing."""
    makers = {name: node.op_type for node in graph.node for name in node.output}
    for node in graph.node:
        yield node.op_type
        for name in node.input:
            if name in makers:
                yield f"{makers[name]} {node.op_type}"
        yield from _in_detail(node, makers)
        for attribute in node.attribute:
            for inner in bodies_of(attribute):
                yield from _there(inner)


def _in_detail(node: onnx.NodeProto, makers: Mapping[str, str]) -> Iterator[str]:
    if node.op_type == "Concat" and len(node.input) == 1:
        yield "Concat of one"
    elif node.op_type in ("Expand", "Reshape") and makers.get(node.input[1], "Constant") == "Constant":
        yield f"{node.op_type} to a constant"
    elif node.op_type == "Transpose" and all(list(one.ints) == sorted(one.ints) for one in node.attribute):
        yield "Transpose in order"


def _optimized(model: bytes, names: Sequence[str]) -> bytes:
    # What onnxoptimizer.optimize calls, which reads and writes the result once more: a third of a pass.
    from onnxoptimizer import onnx_opt_cpp2py_export as library  # type: ignore[attr-defined]

    return library.optimize(model, list(names))


GIVEN: Final = "onnxoptimizer, given"

REMEMBERED: Final = 4

REDUCTIONS: Final = ("L1", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare", "L2")

IDEMPOTENT: Final = ("Ceil", "Floor", "Relu", "Reshape", "Round", "Sign")

ACTS_ON: Final[Mapping[str, tuple[str, ...]]] = {
    "nop": (),
    "eliminate_consecutive_idempotent_ops": tuple(f"{name} {name}" for name in IDEMPOTENT),
    "eliminate_if_with_const_cond": ("If",),
    "eliminate_nop_cast": ("Cast",),
    "eliminate_nop_concat": ("Concat of one",),
    "eliminate_nop_dropout": ("Dropout",),
    "eliminate_nop_expand": ("Expand to a constant",),
    "eliminate_nop_flatten": ("Flatten",),
    "eliminate_nop_monotone_argmax": ("Log ArgMax", "Exp ArgMax", "Sqrt ArgMax", "Softmax ArgMax", "LogSoftmax ArgMax"),
    "eliminate_nop_pad": ("Pad",),
    "eliminate_nop_reshape": ("Reshape to a constant",),
    "eliminate_nop_split": ("Split",),
    "eliminate_nop_transpose": ("Transpose in order",),
    "eliminate_shape_gather": ("Shape Gather",),
    "eliminate_shape_op": ("Shape",),
    "eliminate_slice_after_shape": ("Shape Slice",),
    "extract_constant_to_initializer": ("Constant",),
    "fuse_add_bias_into_conv": ("Conv Add",),
    "fuse_bn_into_conv": ("Conv BatchNormalization",),
    "fuse_concat_into_reshape": ("Concat Reshape",),
    "fuse_consecutive_concats": ("Concat Concat",),
    "fuse_consecutive_log_softmax": ("Softmax Log",),
    "fuse_consecutive_reduce_unsqueeze": tuple(f"Reduce{name} Unsqueeze" for name in REDUCTIONS),
    "fuse_consecutive_slices": ("Slice Slice",),
    "fuse_consecutive_squeezes": ("Squeeze Squeeze",),
    "fuse_consecutive_transposes": ("Transpose Transpose",),
    "fuse_consecutive_unsqueezes": ("Unsqueeze Unsqueeze",),
    "fuse_matmul_add_bias_into_gemm": ("MatMul Add",),
    "fuse_pad_into_conv": ("Pad Conv",),
    "fuse_pad_into_pool": ("Pad AveragePool", "Pad MaxPool"),
    "fuse_qkv": ("MatMul",),
    "fuse_transpose_into_gemm": ("Transpose Gemm",),
    "rewrite_where": ("Not Where",),
}
"""Pass → what it is looking for, in the words of `_there`. Where a model has none of that, the pass is not expected to
do anything. Only the order of work depends on it: what is expected is looked at, and a pass that is not listed is tried
alone."""
