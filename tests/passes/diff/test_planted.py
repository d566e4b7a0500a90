"""A planted change is found and named, under whatever names; what changes nothing is no difference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.diffs import check_checkpoint, names_it
from benchmarks.planted import PLANTS, Planted, plant, renamed, reordered
from passes.diff import Diff, compare_models, diff_text
from pipeline.errors import SourceError
from tests.support.onnx_models import attention, biased_attention, detached, model_of

LAYERS = 4


def deep() -> onnx.ModelProto:
    """Layers that look the same but for their weights, with branches that are computed alike."""
    lines = ["h0 = Identity (x)"]
    weights = {}
    for layer in range(LAYERS):
        h, nxt = f"h{layer}", f"h{layer + 1}"
        lines += [
            f"shape{layer} = Shape <start = 0, end = 2> ({h})",
            f"a{layer} = MatMul ({h}, w{layer})",
            f"b{layer} = Add (a{layer}, bias{layer})",
            f"c{layer} = Relu (b{layer})",
            f"d{layer} = Softmax <axis = 1> (c{layer})",
            f"e{layer} = Reshape (d{layer}, shape{layer})",
            f"{nxt} = Add (e{layer}, {h})",
        ]
        weights[f"w{layer}"] = (np.random.default_rng(layer).standard_normal((32, 32)) / 8).astype(np.float32)
        weights[f"bias{layer}"] = np.zeros(32, np.float32)
    lines.append(f"y = Neg (h{LAYERS})")
    return name_nodes(model_of("g (float[2, 32] x) => (float[2, 32] y) {" + "\n".join(lines) + "}", **weights))


def name_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    for place, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{place}"
    return model


MODELS = {"attention": name_nodes(attention()), "with biases": name_nodes(biased_attention()), "layers": deep()}


def diff_of(before: onnx.ModelProto, after: onnx.ModelProto) -> Diff:
    return compare_models(detached(before), detached(after))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_planted_change_is_found_and_named_and_nothing_else_is(name: str, kind: str, seed: int) -> None:
    planted = plant(kind, MODELS[name], seed)
    assert planted is not None
    diff = diff_of(MODELS[name], planted.model)
    assert names_it(diff, planted), diff_text(diff)
    assert len(list(diff.entries())) == 1, diff_text(diff)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("name", MODELS)
def test_so_it_is_when_everything_else_has_other_names(name: str, kind: str, seed: int) -> None:
    planted = plant(kind, MODELS[name], seed)
    assert planted is not None
    model, names = renamed(reordered(planted.model, seed), seed)
    diff = diff_of(MODELS[name], model)
    again = Planted(kind, names[planted.where], planted.what, model)
    assert names_it(diff, again), diff_text(diff)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_other_names_and_another_order_are_no_difference(name: str, seed: int) -> None:
    model = reordered(MODELS[name], seed)
    assert diff_of(MODELS[name], model).is_empty
    assert diff_of(MODELS[name], renamed(model, seed)[0]).is_empty
    assert diff_of(MODELS[name], onnx.load_from_string(model.SerializeToString())).is_empty


def test_renaming_is_listed() -> None:
    model, names = renamed(MODELS["attention"], 0)
    renames = {(change.kind, change.before): change.after for change in diff_of(MODELS["attention"], model).renamed}
    assert renames["initializer", "wq"] == names["wq"]
    assert renames["value", "q"] == names["q"]


def test_a_configuration_whose_checkpoint_is_missing_is_refused_before_its_export(tmp_path: Path) -> None:
    config = tmp_path / "model.yaml"
    config.write_text("model: {factory: net.py:make, checkpoint: weights.safetensors}\n", encoding="utf-8")
    with pytest.raises(SourceError, match="no file or folder"):
        check_checkpoint(config)
    (tmp_path / "weights.safetensors").touch()
    check_checkpoint(config)
