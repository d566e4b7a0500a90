"""Where every node of a real model comes from: tiny transformers, exported by torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, helper

import passes
from passes import PassRun, Status
from passes.context import PassContext
from passes.optimize import draw_feeds
from passes.provenance import annotations_of, carry, module_path_of
from passes.provenance.annotations import is_stripped, strip_metadata
from passes.structures.view import modules_of
from passes.weights.detached import attach, read_model
from tests.support.onnx_models import detached, model_of

SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
IDS = {"input_ids": {"shape": [2, 6], "dtype": "int64", "range": [0, 20]}}
EXPORTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ViTModel": ({**SMALL, "image_size": 16, "patch_size": 8}, {"pixel_values": {"shape": [1, 3, 16, 16]}}),
    "BertModel": ({**SMALL, "vocab_size": 20, "max_position_embeddings": 16}, IDS),
    "LlamaForCausalLM": (
        {**SMALL, "vocab_size": 20, "max_position_embeddings": 16, "num_key_value_heads": 1, "use_cache": False}
        | {"bos_token_id": 0, "eos_token_id": 0},
        IDS,
    ),
}


@pytest.fixture(scope="module", params=EXPORTS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny transformer, as torch exports it."""
    from pipeline.config import ExportConfig, RunConfig
    from pipeline.export import TorchSource, export_onnx, load_source

    config, inputs = EXPORTS[request.param]
    settings = {"model": {"transformers": {"class": request.param, "config": config}, "inputs": inputs}}
    source = load_source(RunConfig.from_mapping(settings).model)
    assert isinstance(source, TorchSource)
    path = tmp_path_factory.mktemp("exported") / f"{request.param}.onnx"
    export_onnx(source, ExportConfig(), path)
    return path


@pytest.fixture(scope="module")
def optimized(exported: Path, context: PassContext) -> PassRun:
    return passes.optimize(exported, recipe=["default", "onnxsim"], context=context)


def test_every_node_of_the_final_model_answers(exported: Path, optimized: PassRun) -> None:
    working = {row.name for row in optimized.rows if row.changed and row.status is Status.RAN}
    source = {node.name for node in onnx.load(exported).graph.node}
    nodes = list(optimized.model.proto.graph.node)
    assert len(nodes) < len(source)
    for node in nodes:
        assert module_path_of(node) is not None, f"{node.name} lies in no module"
        marks = annotations_of(node)
        assert marks.author in working if marks.author else node.name in source
        assert set(marks.changed_by) <= working
        assert set(marks.replaced) <= source
    names = [node.name for node in nodes if node.name]
    assert len(names) == len(set(names))


def test_survivors_keep_the_module_of_the_node_with_the_same_values(exported: Path, optimized: PassRun) -> None:
    """Judged by numbers alone: the exported nodes of one op that compute the very values of the surviving one."""
    before = read_model(exported)
    feeds = draw_feeds(before, 0)
    old_values, values = all_values(attach(before), feeds), all_values(attach(optimized.model), feeds)
    lone = 0
    survivors = [node for node in optimized.model.proto.graph.node if not annotations_of(node).author]
    for node in survivors:
        twins = [
            old
            for old in before.proto.graph.node
            if old.op_type == node.op_type and is_close(old_values[old.output[0]], values[node.output[0]])
        ]
        assert module_path_of(node) in [module_path_of(old) for old in twins], node.name
        assert node.name in [old.name for old in twins]
        lone += len({module_path_of(old) for old in twins}) == 1
    assert lone > len(survivors) / 2, "the values tell most nodes apart"


def all_values(model: ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every value that onnxruntime computes on the way, its own optimization off."""
    import onnxruntime as ort

    given = {output.name for output in model.graph.output}
    inner_values = [name for node in model.graph.node for name in node.output if name and name not in given]
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in inner_values)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, (np.asarray(array) for array in session.run(names, feeds)), strict=True))


def is_close(first: np.ndarray, other: np.ndarray) -> bool:
    """A pass may drop an axis of 1 and may change the order of a sum."""
    if first.size != other.size or first.dtype != other.dtype:
        return False
    return np.allclose(first.ravel(), other.ravel(), atol=1e-5) if first.dtype.kind == "f" else (first == other).all()


def drop_everything(model: ModelProto) -> None:
    for node in model.graph.node:
        del node.metadata_props[:]
        node.name = ""


def number_afresh(model: ModelProto) -> None:
    """As a tool does that writes its own names."""
    drop_everything(model)
    rename(model, [f"t{i}" for i in range(len(model.graph.node))], {})


def permute_names(model: ModelProto) -> None:
    """Every name there was is another node's of the same op now: the worst that numbering can do."""
    draw = random.Random(0)
    nodes = list(model.graph.node)
    names = [node.name for node in nodes]
    values: dict[str, str] = {}
    outputs = {output.name for output in model.graph.output}
    for op in dict.fromkeys(node.op_type for node in nodes):
        places = [place for place, node in enumerate(nodes) if node.op_type == op]
        shuffled = draw.sample(places, len(places))
        for place, other in zip(places, shuffled, strict=True):
            nodes[place].name = names[other]
        inner_values = [nodes[place].output[0] for place in places if nodes[place].output[0] not in outputs]
        values |= dict(zip(inner_values, draw.sample(inner_values, len(inner_values)), strict=True))
    for node in nodes:
        del node.metadata_props[:]
    rename(model, [node.name for node in nodes], values)


def rename(model: ModelProto, names: list[str], values: dict[str, str]) -> None:
    outputs = {output.name for output in model.graph.output}
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
        for value in node.output:
            if value not in outputs:
                values.setdefault(value, f"{name}_{len(values)}")
    for node in model.graph.node:
        node.input[:] = [values.get(name, name) for name in node.input]
        node.output[:] = [values.get(name, name) for name in node.output]


@pytest.mark.parametrize("disturb", [drop_everything, number_afresh, permute_names])
@pytest.mark.parametrize("with_change", [False, True], ids=["same graph", "another input"])
def test_whatever_the_nodes_are_called(exported: Path, disturb: Callable[..., None], with_change: bool) -> None:
    """Nodes are known by what they compute and where; also if the first of all has changed, and all after it."""
    before = read_model(exported)
    after = onnx.ModelProto()
    after.CopyFrom(before.proto)
    known = [(node.op_type, paths_of(node)) for node in after.graph.node]
    disturb(after)
    if with_change:
        first = after.graph.input[0].name
        for node in after.graph.node:
            node.input[:] = ["changed" if name == first else name for name in node.input]
        after.graph.node.insert(0, helper.make_node("Abs", [first], ["changed"]))
    result = carry(before, before.with_proto(after), "some_pass").proto.graph.node
    new_nodes = [node for node in result if annotations_of(node).author]
    assert [node.op_type for node in new_nodes] == ["Abs"] * with_change
    unknown = [(node.op_type, paths_of(node)) for node in result if not annotations_of(node).author]
    assert unknown == known


def paths_of(node: NodeProto) -> tuple[str, ...]:
    place = module_path_of(node)
    assert place is not None
    return place.paths


# Metadata: dropped where that is asked for, and taken whatever its text is.

SCOPES = "pkg.torch.onnx.name_scopes"


def annotated(scopes: str) -> onnx.ModelProto:
    model = model_of("g (float[4] x) => (float[4] y) { y = Relu (x) }")
    model.graph.node[0].metadata_props.add(key=SCOPES, value=scopes)
    model.metadata_props.add(key="labels", value="cat, dog")
    return model


def test_nodes_lose_their_metadata_and_the_model_keeps_its_own() -> None:
    stripped = strip_metadata(detached(annotated("['', 'layer', 'relu']"))).proto
    assert not stripped.graph.node[0].metadata_props
    assert {entry.key for entry in stripped.metadata_props} == {"labels", "onnxline.metadata"}
    assert is_stripped(stripped)
    assert strip_metadata(detached(stripped)).proto == stripped


@pytest.mark.parametrize("text", ["[/red]", "null", "['x'", "{}", "-5", "[" * 5000, "\x00"])
def test_scopes_that_are_no_list_name_no_module(text: str) -> None:
    node = annotated(text).graph.node[0]
    module = module_path_of(node)
    assert modules_of(node) == ()
    assert module is not None and module.paths == ()


def test_a_scope_that_is_no_text_is_taken_as_its_text() -> None:
    assert modules_of(annotated("['', [], 3]").graph.node[0]) == ("[]",)


def test_scopes_of_the_exporter_are_modules() -> None:
    assert modules_of(annotated("['', 'layer', 'relu']").graph.node[0]) == ("layer",)
