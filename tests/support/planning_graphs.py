"""Random graphs that make planning hard: views of views, in-place chains, broadcasts, dead values, several outputs,
outputs that are inputs or constants, empty tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from pipeline.ir.builder import Builder
from pipeline.ir.graph import Graph, TensorSpec
from pipeline.lowering import lower
from pipeline.ops import GraphBuilder
from pipeline.planning import ExecutionPlan, make_plan

SHAPES = ((4, 6), (6, 4), (24,), (1, 24), (0, 3), (2, 2, 6))


@dataclass(frozen=True)
class Stored:
    """A payload."""

    array: np.ndarray

    def numpy(self) -> np.ndarray:
        return self.array


@st.composite
def graphs(draw: st.DrawFn, *, least_ops: int = 1, most_ops: int = 20) -> Graph:
    builder = GraphBuilder("random")
    vids = [builder.input(f"in{at}", _spec(draw(st.sampled_from(SHAPES)))) for at in range(draw(st.integers(1, 2)))]
    weight = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
    vids.append(builder.const("weight", _spec(weight.shape), Stored(weight)))
    for at in range(draw(st.integers(least_ops, most_ops))):
        vids += _op(draw, builder, vids, f"v{at}")
    outputs = draw(st.lists(st.sampled_from(vids), min_size=1, max_size=4, unique=True))
    return builder.build([*outputs, vids[-1]] if vids[-1] not in outputs else outputs)


def _op(draw: st.DrawFn, builder: Builder, vids: list[int], name: str) -> tuple[int, ...]:
    x = draw(st.sampled_from(vids))
    spec = builder.spec(x)
    shape = spec.sizes
    peers = [vid for vid in vids if builder.spec(vid) == spec]
    match draw(st.sampled_from(["unary", "binary", "view", "copy", "split", "softmax", "outer", "turn", "cut", "row"])):
        case "unary":
            return builder.emit(
                draw(st.sampled_from(["aten.relu.default", "aten.neg.default", "aten.tanh.default"])),
                [x],
                [(name, spec)],
            )
        case "binary":
            other = draw(st.sampled_from(peers))
            return builder.emit(
                draw(st.sampled_from(["aten.add.Tensor", "aten.mul.Tensor", "aten.sub.Tensor"])),
                [x, other],
                [(name, spec)],
            )
        case "view":
            fits = [shape, (spec.numel,), *(other for other in SHAPES if spec.numel == _spec(other).numel)]
            target = draw(st.sampled_from(fits))
            if target == shape and draw(st.booleans()):
                return builder.emit("aten.clone.default", [x], [(name, spec)])
            return builder.emit("aten.reshape.default", [x], [(name, _spec(target))], {"shape": target})
        case "split" if shape[0] % 2 == 0:
            half = _spec((shape[0] // 2, *shape[1:]))
            first, second = builder.emit(
                "aten.split_with_sizes.default",
                [x],
                [(f"{name}a", half), (f"{name}b", half)],
                {"split_sizes": (shape[0] // 2,) * 2, "dim": 0},
            )
            return builder.emit("aten.cat.default", [second, first], [(name, spec)], {"dim": 0})
        case "turn" if spec.rank > 1:
            perm = draw(st.permutations(range(spec.rank)).map(tuple))
            return builder.emit(
                "aten.permute.default", [x], [(name, _spec(tuple(shape[at] for at in perm)))], {"dims": perm}
            )
        case "cut" if shape[-1] > 1:
            axis, step = draw(st.integers(0, spec.rank - 1)), draw(st.sampled_from([-1, 1, 2]))
            taken = range(shape[axis])[1::step] if step > 0 else range(shape[axis])[::step]
            sizes = (*shape[:axis], len(taken), *shape[axis + 1 :])
            if step < 0:
                return builder.emit("aten.flip.default", [x], [(name, spec)], {"dims": (axis,)})
            attrs = {"dim": axis, "start": 1, "end": 99, "step": step}
            return builder.emit("aten.slice.Tensor", [x], [(name, _spec(sizes))], attrs)
        case "row" if spec.rank == 2 and spec.numel:
            (row,) = builder.emit("aten.slice.Tensor", [x], [(f"{name}r", _spec((1, shape[1])))], {"end": 1})
            return builder.emit("aten.expand.default", [row], [(name, spec)], {"size": shape})
        case "softmax" if spec.numel:
            return builder.emit("aten.softmax.int", [x], [(name, spec)], {"dim": -1})
        case "outer" if spec.rank == 2 and spec.numel:
            turned = _spec(shape[::-1])
            (other,) = builder.emit("aten.permute.default", [x], [(f"{name}t", turned)], {"dims": (1, 0)})
            (square,) = builder.emit("aten.matmul.default", [x, other], [(f"{name}q", _spec((shape[0], shape[0])))])
            return builder.emit("aten.matmul.default", [square, x], [(name, spec)])
        case _:
            return builder.emit("aten.repeat.default", [x], [(name, spec)], {"repeats": (1,) * spec.rank})


def _spec(shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(shape, "float32")


def plan_graph(graph: Graph) -> ExecutionPlan:
    return make_plan(graph, lower(graph))
