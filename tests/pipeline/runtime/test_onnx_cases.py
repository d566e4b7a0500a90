"""ONNX's own operator cases on the runtime: each is right, or refused in a sentence; none is wrong.

`onnx_cases.txt` lists the cases that are right. It only grows: run this file as a program to write it again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnx.backend.test.case.test_case import TestCase as Case
from onnx.backend.test.loader import load_model_tests

from benchmarks.onnx_decompositions import find_decompositions, read_page
from pipeline.errors import Unsupported
from pipeline.importers import from_onnx
from pipeline.importers.from_onnx.model import FAMILIES
from pipeline.ops import emitter_of
from pipeline.runtime import compile_graph
from pipeline.runtime.tensors import to_numpy

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
LISTED = Path(__file__).parent / "onnx_cases.txt"
NOT_PASSED = Path(__file__).parent.parent / "onnx_cases_not_passed.txt"
"""Cases whose expected numbers are roundings or drawn, each with its reason."""

DRAWING = ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")

ULPS = {"float16": 2 * 2.0**-10, "bfloat16": 2 * 2.0**-7}
"""Two units in the last place: the cases were computed by numpy, which rounds after other steps of a sum."""


def cases() -> list[Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, where the expected values are computed
        return [case for kind in KINDS for case in load_model_tests(kind=kind)]


def outcome(case: Case) -> str:
    """`right`, `refused: …`, or what is wrong."""
    try:
        return next(filter(None, (difference(case, *data) for data in data_of(case))), "right")
    except Unsupported as error:
        return f"refused: {error}"
    except Exception as error:  # the table shows all of them at once
        return f"{type(error).__name__}: {error}"


def difference(case: Case, model: onnx.ModelProto, inputs: list[Any], outputs: list[Any]) -> str:
    feed = {value.name: array for value, array in zip(model.graph.input, map(array_of, inputs), strict=False)}
    tensors = {name: array for name, array in feed.items() if isinstance(array, np.ndarray)}
    program = compile_graph(
        from_onnx(model, shapes={name: array.shape for name, array in tensors.items()}, emitter_of=emitter_of)
    )
    asked = {entry.name for entry in program.feed_signature}
    found = program.run({name: array for name, array in tensors.items() if name in asked})
    for value, wanted in zip(model.graph.output, map(array_of, outputs), strict=True):
        made = to_numpy(found[value.name])
        if (made.dtype, made.shape) != (wanted.dtype, wanted.shape):
            return f"{value.name}: {made.dtype}{made.shape}, expected {wanted.dtype}{wanted.shape}"
        if not draws(model) and not alike(made, wanted, max(case.rtol, ULPS.get(str(wanted.dtype), 0.0)), case.atol):
            return f"{value.name}: other numbers"
    return ""


def draws(model: onnx.ModelProto) -> bool:
    """Whether numbers are drawn: then shapes and dtypes are all that is to be right."""
    return any(node.op_type in DRAWING or is_training(node) for node in model.graph.node)


def is_training(node: onnx.NodeProto) -> bool:
    return node.op_type == "Dropout" and len(node.input) > 2


def alike(made: np.ndarray, wanted: np.ndarray, rtol: float, atol: float) -> bool:
    if wanted.dtype.kind in "biu":
        return np.array_equal(made, wanted)
    wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
    return np.allclose(made.astype(wide), wanted.astype(wide), rtol, atol, equal_nan=True)


def data_of(case: Case) -> Iterator[tuple[onnx.ModelProto, list[Any], list[Any]]]:
    if case.model is not None:
        yield from ((case.model, *data) for data in case.data_sets or ())
        return
    folder = Path(str(case.model_dir))
    model = onnx.load(folder / "model.onnx")
    for data in sorted(folder.glob("test_data_set_*")):
        yield model, *([stored(file) for file in in_order(data, side)] for side in ("input", "output"))


def in_order(folder: Path, side: str) -> list[Path]:
    return sorted(folder.glob(f"{side}_*.pb"), key=lambda file: int(file.stem.rpartition("_")[2]))


def stored(file: Path) -> onnx.TensorProto:
    return onnx.TensorProto.FromString(file.read_bytes())


def array_of(given: Any) -> Any:
    """Cases have arrays, numbers of numpy, tensors, and lists where a sequence is meant."""
    if isinstance(given, onnx.TensorProto):
        return numpy_helper.to_array(given)
    return np.asarray(given) if isinstance(given, np.generic | float | int) else given


@pytest.fixture(scope="module", params=[1, 16], ids=["all", "each sixteenth"])
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    """Of the cases. One thread: they are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {case.name: outcome(case) for case in cases()[:: request.param]}
    finally:
        torch.set_num_threads(threads)


def test_none_is_wrong(outcomes: dict[str, str]) -> None:
    wrong = {name: told for name, told in outcomes.items() if told != "right" and not told.startswith("refused: ")}
    known = {line.split("_cpu | ")[0] for line in NOT_PASSED.read_text().splitlines()}
    assert {name: told for name, told in wrong.items() if name not in known} == {}


def test_refusals_name_the_node_and_what_to_do(outcomes: dict[str, str]) -> None:
    """What was found, what was expected or cannot be had, and what to do."""
    bare = {name: told for name, told in outcomes.items() if told.startswith("refused: ") and ";" not in told}
    assert {name: told for name, told in bare.items() if "Rewrite" not in told and "Run this" not in told} == {}


def test_what_was_right_stays_right(outcomes: dict[str, str]) -> None:
    listed = set(LISTED.read_text().split()) & outcomes.keys()  # another release of onnx may have other cases
    assert len(listed) > len(outcomes) / 2
    assert {name: outcomes[name] for name in listed if outcomes[name] != "right"} == {}


@pytest.mark.filterwarnings("ignore")
def test_the_page_of_decompositions_has_every_operator_and_what_it_becomes() -> None:
    """Of a case in sixteen; `python -m benchmarks.onnx_decompositions` writes the page again."""
    page = read_page()
    assert page.keys() == {name for importers in FAMILIES.values() for name in importers}
    found = find_decompositions(cases()[::16])
    by_name = {name.rpartition("::")[2]: kinds for name, kinds in page.items()}
    assert {name: kinds for name, kinds in found.items() if name in by_name and not kinds <= by_name[name]} == {}


if __name__ == "__main__":
    found = {case.name: outcome(case) for case in cases()}
    right = sorted(name for name, told in found.items() if told == "right")
    refused = sum(told.startswith("refused: ") for told in found.values())
    LISTED.write_text("".join(f"{name}\n" for name in right))
    print(f"{len(found)} cases: {len(right)} right, {refused} refused, {len(found) - len(right) - refused} wrong")
