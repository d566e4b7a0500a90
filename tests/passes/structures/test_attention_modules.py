"""Forms of attention as torch exports them: found, held, and judged by a reader of weights that knows no structure."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from passes.context import PassContext
from passes.run.result import PassRun
from passes.structures import STRUCTURES
from tests.support.onnx_models import detached
from tests.support.structure_models import run

torch = pytest.importorskip("torch")
from tests.passes.structures.modules_with_triple import FORMS, make_zoo  # noqa: E402


@pytest.fixture(scope="module")
def exported() -> onnx.ModelProto:
    module, args = make_zoo()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module, args, dynamo=True, optimize=False, verbose=False, opset_version=20)
    return program.model_proto


@pytest.fixture(scope="module")
def triples(exported: onnx.ModelProto) -> dict[str, list[tuple[str, ...]]]:
    """Form → the weights of the triples that are found in it."""
    found = STRUCTURES["qkv"].find(detached(exported))
    assert found.instead == ""
    by_form: dict[str, list[tuple[str, ...]]] = {}
    for instance in found.instances:
        names = [weight.name.split(".") for weight in instance.weights]
        by_form.setdefault(names[0][1], []).append(tuple(name[2] for name in names))
    return by_form


def products_with(model: onnx.ModelProto, weight: np.ndarray) -> int:
    """How many MatMul and Gemm read the matrix, or its transpose, by itself."""
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Transpose" and node.input[0] in held:
            held[node.output[0]] = held[node.input[0]].T
    products = (node for node in model.graph.node if node.op_type in ("MatMul", "Gemm"))
    read = [held[name] for node in products for name in node.input if name in held]
    return sum(any(np.array_equal(own, each) for each in (weight, weight.T)) for own in read)


@pytest.mark.parametrize("form", FORMS)
def test_each_role_is_found(form: str, triples: dict[str, list[tuple[str, ...]]]) -> None:
    further = [("q2", "k2", "v")] if form == "differential_apart" else []
    assert triples[form] == [("q", "k", "v"), *further]


@pytest.fixture(scope="module")
def kept(exported: onnx.ModelProto, context: PassContext) -> PassRun:
    return run(exported, context, ["fuse_qkv", "onnxsim"], keep=["qkv"])


def test_q_k_and_v_of_every_form_stay_apart(kept: PassRun) -> None:
    final, module = kept.to_proto(), make_zoo()[0]
    assert all(verdict.kept for verdict in kept.structures)
    for form, attention in module.forms.items():
        for name in ("q", "k", "v"):
            assert products_with(final, getattr(attention, name).weight.detach().numpy()) == 1, f"{name} of {form}"


def test_without_keep_they_are_merged(exported: onnx.ModelProto, context: PassContext) -> None:
    """The test above can fail. They are observed all the same, so no note speaks of these merges."""
    merged = run(exported, context, ["fold_constants", "fuse_qkv"])
    assert sum(not verdict.kept for verdict in merged.structures) > len(FORMS) // 2
    assert merged.describe_merges([], []) == ()
