"""Weights of all parts in one file: links in place of the models of each part, which a later run takes up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from passes.weights.detached import attach, read_model
from passes.weights.files import save
from pipeline.parts.folder import remove_other_parts, store_once, write_models
from pipeline.workspace import Workspace, stamp

MODEL = """<ir_version: 10, opset_import: ["": 20]> part (float[TOKENS, 64] x) => (float[TOKENS, 64] y)
{ y = MatMul (x, w) }"""


FILES = {"prefill": "prefill.onnx", "decode": "decode.onnx"}


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, Workspace]:
    """Two runs that have weights in files of their own, and the final models together, as a run leaves them."""
    weight = onnx.numpy_helper.from_array(np.arange(64.0 * 64, dtype=np.float32).reshape(64, 64), "w")
    found = {}
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "weights.data").write_bytes(b"final")
    for name, tokens in (("prefill", "8"), ("decode", "1")):
        proto = onnx.parser.parse_model(MODEL.replace("TOKENS", tokens))
        proto.graph.initializer.append(weight)
        workspace = found[name] = Workspace(tmp_path / "parts" / name)
        workspace.stages.mkdir(parents=True)
        onnx.save(proto, tmp_path / "plain.onnx")
        save(read_model(tmp_path / "plain.onnx"), workspace.folder / "model.onnx", external_from=0)
        save(read_model(tmp_path / "plain.onnx"), workspace.folder / "exported.onnx", external_from=0)
        save(read_model(tmp_path / "plain.onnx"), tmp_path / "models" / f"{name}.onnx")
        for stage, file in (("export", "exported.onnx"), ("passes", "model.onnx")):
            files = sorted(path.name for path in workspace.folder.glob(f"{file}*"))
            assert len(files) == 2
            record = {"files": [(file, *stamp(workspace.folder / file)) for file in files], "nodes": 1}
            (workspace.stages / f"{stage}.json").write_text(json.dumps({"key": "k", "record": record, "notes": ["n"]}))
    return found


def test_models_become_links_to_one_file_of_weights(parts: dict[str, Workspace], tmp_path: Path) -> None:
    exported = {name: attach(read_model(own.folder / "exported.onnx")) for name, own in parts.items()}
    assert store_once(parts, Workspace(tmp_path), FILES)
    places = []
    for name, workspace in parts.items():
        folder = workspace.folder
        assert {path.name for path in folder.iterdir()} == {".stages", "exported.onnx", "model.onnx"}
        assert (folder / "model.onnx").resolve() == tmp_path / "models" / f"{name}.onnx"
        assert attach(read_model(folder / "exported.onnx")) == exported[name]
        (tensor,) = onnx.load(folder / "exported.onnx", load_external_data=False).graph.initializer
        places.append({entry.key: entry.value for entry in tensor.external_data})
    assert places[0] == places[1] and places[0]["location"] == "weights.data"
    assert (tmp_path / "exported" / "weights.data").stat().st_size == 64 * 64 * 4
    assert not store_once(parts, Workspace(tmp_path), FILES)


class SourceConfig:
    """As far as a folder needs a configuration of transformers."""

    model_type = "lfm2"

    def to_json_string(self) -> str:
        return "{}"


def test_the_mapping_has_every_state_of_a_hybrid_cache(tmp_path: Path) -> None:
    states = ["0.conv_state", "1.key", "1.value", "1.indexer_key", "2.recurrent_state"]
    infos = [
        [onnx.helper.make_tensor_value_info(f"{side}.{state}", onnx.TensorProto.FLOAT, [1, 2]) for state in states]
        for side in ("past_key_values", "present")
    ]
    nodes = [onnx.helper.make_node("Relu", [before.name], [after.name]) for before, after in zip(*infos, strict=True)]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", infos[0], infos[1]), ir_version=10)
    for part in ("prefill", "decode"):
        onnx.save(model, tmp_path / f"{part}.onnx")
    finals = {part: tmp_path / f"{part}.onnx" for part in ("prefill", "decode")}
    (tmp_path / "out" / ".stages").mkdir(parents=True)
    write_models(finals, SourceConfig(), None, Workspace(tmp_path / "out"))
    mapping = json.loads((tmp_path / "out" / "models" / "kv_mapping.json").read_text())
    assert mapping["num_layers"] == 1 and [row["layer"] for row in mapping["layers"]] == [1]
    assert [(row["layer"], row["state"]) for row in mapping["states"]] == [
        (0, "conv_state"),
        (1, "indexer_key"),
        (2, "recurrent_state"),
    ]
    assert mapping["states"][0] == {
        "layer": 0,
        "state": "conv_state",
        "prefill_output": "present.0.conv_state",
        "decode_input": "past_key_values.0.conv_state",
        "decode_output": "present.0.conv_state",
    }


def test_a_tokenizer_that_the_source_got_later_is_written(tmp_path: Path) -> None:
    """The files of an earlier run are taken up only as long as what is copied next to them is the same."""
    source, whole = tmp_path / "source", Workspace(tmp_path / "out")
    for folder in (source / "tokenizer", whole.stages):  # a folder is no file of a tokenizer
        folder.mkdir(parents=True)
    text = MODEL.replace("TOKENS, 64", "4").replace("MatMul (x, w)", "Relu (x)")
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    finals = {"encoder": tmp_path / "model.onnx", "decoder": tmp_path / "model.onnx"}
    written = {name: whole.folder / "models" / f"{name}.onnx" for name in finals}
    for files in ({}, {"tokenizer.json": "1"}, {"tokenizer.json": "22"}):
        for name, text in files.items():
            (source / name).write_text(text)
        assert [write_models(paths, SourceConfig(), source, whole)[1] for paths in (finals, written)] == [False, True]
        copied = {path.name: path.read_text() for path in (whole.folder / "models").glob("tokenizer*")}
        assert copied == files
        finals = written


def test_the_run_of_a_part_with_an_earlier_name_is_removed(parts: dict[str, Workspace], tmp_path: Path) -> None:
    store_once(parts, Workspace(tmp_path), FILES)
    (tmp_path / "parts" / "notes").mkdir()  # a user's own
    remove_other_parts(["decode", "first"], Workspace(tmp_path))
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["decode", "notes"]
    assert sorted(path.name for path in (tmp_path / "exported").iterdir()) == ["decode.onnx", "weights.data"]


def test_a_later_run_takes_up_what_is_stored_once(parts: dict[str, Workspace], tmp_path: Path) -> None:
    store_once(parts, Workspace(tmp_path), FILES)
    for stage, folder in (("export", "exported"), ("passes", "models")):
        saved = [json.loads((own.stages / f"{stage}.json").read_text()) for own in parts.values()]
        for is_changed in (False, True):
            for workspace, data in zip(parts.values(), saved, strict=True):
                files = [tuple(row) for row in data["record"]["files"]]
                assert (data["key"], data["notes"], data["record"]["nodes"]) == ("k", ["n"], 1)
                assert len(files) == 2 and files[1][0] == f"../../{folder}/weights.data"
                assert workspace.is_unchanged(files) != is_changed
            (tmp_path / folder / "weights.data").write_bytes(b"changed")
