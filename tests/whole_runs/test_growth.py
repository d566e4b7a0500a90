"""Work grows with the layers of a model, and not with their square: lines of Python are counted, no time is taken."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import onnx
import pytest

import passes
import pipeline
from benchmarks.growth import layers
from passes.context import open_context
from passes.diff import compare_models, diff_text
from passes.run.result import PassRun
from passes.structures import structure_of
from passes.weights.sharing import detached_copy
from pipeline.importers import from_onnx
from pipeline.ir.text import to_text
from pipeline.ops import emitter_of
from pipeline.planning import to_json
from pipeline.runtime import compile_graph
from pipeline.stages.pictures import BrokenStructures, take_pictures
from tests.support.onnx_models import detached, matrix, model_of

SIZES: Final = (2, 4, 16)
"""Layers of the models. From the second to the third, six times as many layers are added as from the first to the
second: so what a model has but once does not count."""
MOST: Final = 1.2 * 6
"""How many more lines they may run. A part that runs the square of the layers, and with two layers a thirtieth of the
lines, adds more than that; the rest is room for sorting."""

OURS: Final = (*passes.__path__, *pipeline.__path__, __file__)
"""The folders whose lines are counted: libraries may lie in a .venv next to them."""


def test_import_plan_and_its_check(tmp_path: Path) -> None:
    """The residual stream is added to in place, so its chain of aliases is as long as the model."""
    growth = _growth([_lines_of_plan(count, tmp_path / f"{count}.onnx") for count in SIZES])
    assert growth < MOST, growth


def test_passes_pictures_and_diff() -> None:
    lines = [_lines_of_run(count) for count in SIZES]
    growths = {stage: _growth([each[stage] for each in lines]) for stage in lines[0]}
    assert max(growths.values()) < MOST, growths


def test_the_search_for_q_k_and_v_looks_at_few_projections_after_each() -> None:
    """A square projection may turn the heads of those after it. To ask each of them the same took exponential time."""
    structure = structure_of("qkv")
    assert structure is not None
    small, large = (detached(layers(count)) for count in (6, 48))
    most = 10 * _lines_of(lambda: structure.find(small))
    assert _lines_of(lambda: structure.find(large), most) < most


@pytest.mark.parametrize("step", ["delta rule", "softmax"])
def test_the_search_for_q_k_and_v_in_an_unrolled_recurrence(step: str) -> None:
    """Each state is made from all products before it, and is read by further products."""
    structure = structure_of("qkv")
    assert structure is not None
    models = [detached(_recurrence(count, RECURRENCES[step])) for count in SIZES]
    assert [len(structure.find(model).instances) for model in models] == [1, 1, 1]
    growth = _growth([_lines_of(partial(structure.find, model)) for model in models])
    assert growth < MOST, growth


def _recurrence(count: int, step: str) -> onnx.ModelProto:
    pieces = {name: ", ".join(f"{name}{at}" for at in range(count)) for name in "qkv"}
    lines = [f"{name} = MatMul (x, w{name})" for name in "qkv"]
    lines += [f"{pieces[name]} = Split <axis = 1, num_outputs = {count}> ({name})" for name in "qkv"]
    lines += [step.replace("NEXT", str(at + 1)).replace("AT", str(at)) for at in range(count)]
    lines.append(f"y = Concat <axis = 1> ({', '.join(f'o{at}' for at in range(count))})")
    text = f"g (float[1, {count}, 8] x) => (float[1, {count}, 8] y) {{ {' '.join(lines)} }}"
    weights = {f"w{name}": matrix(8, 8, seed) for seed, name in enumerate("qkv")}
    return model_of(text, s0=np.zeros((1, 8, 8), np.float32), **weights)


RECURRENCES: Final = {
    "delta rule": """tAT = Transpose <perm = [0, 2, 1]> (kAT) rAT = MatMul (kAT, sAT) dAT = MatMul (tAT, rAT)
        aAT = MatMul (tAT, vAT) eAT = Sub (sAT, dAT) sNEXT = Add (eAT, aAT) oAT = MatMul (qAT, sNEXT)""",
    "softmax": """tAT = Transpose <perm = [0, 2, 1]> (kAT) aAT = MatMul (tAT, qAT) sNEXT = Add (sAT, aAT)
        pAT = Softmax (sNEXT) oAT = MatMul (vAT, pAT)""",
}
"""A step of a recurrence with the state `s`."""


def test_the_lines_of_a_loop_over_all_pairs_do_not_pass() -> None:
    """The count sees what goes on inside of a comprehension."""
    assert _growth([_lines_of(lambda count=count: _pairs(count)) for count in SIZES]) > MOST


def _pairs(count: int) -> int:
    return sum([left < right for left in range(count) for right in range(count)])


def _growth(lines: Sequence[int]) -> float:
    """How many lines are added from the second to the third of `SIZES`, for each from the first to the second."""
    small, middle, large = lines
    return (large - middle) / (middle - small)


def _lines_of(work: Callable[[], object], most: int = sys.maxsize) -> int:
    """How many lines of this project `work` runs in this process; a line that loops counts for each turn.

    `work` is ended by an AssertionError when it runs more than `most`.
    """
    counted = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal counted
        del argument
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        counted += event == "line"
        assert counted <= most, f"more than {most} lines"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return counted


def _lines_of_plan(count: int, path: Path) -> int:
    onnx.save(layers(count), path)

    def plan() -> None:
        graph = from_onnx(path, shapes={"x0": (1, 2, 16)}, emitter_of=emitter_of)
        to_text(graph)
        to_json(compile_graph(graph).plan)

    return _lines_of(plan)


def _lines_of_run(count: int) -> dict[str, int]:
    """By stage. The recipe has a step that changes every layer."""
    model = layers(count)
    runs: list[PassRun] = []
    with open_context() as context:
        source = detached_copy(model, context.spill)
        recipe = ["extract_constant_to_initializer", "eliminate_deadend"]
        lines = {
            "passes": _lines_of(lambda: runs.append(passes.optimize(model, recipe, keep=["qkv"], context=context))),
            "pictures": _lines_of(lambda: take_pictures(runs[0], source, BrokenStructures())),
            "diff": _lines_of(lambda: diff_text(compare_models(source, runs[0].model), most=sys.maxsize)),
        }
    assert any(row.changed for row in runs[0].rows)
    assert len(runs[0].structures) == count
    return lines
