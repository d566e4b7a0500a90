"""Parts of one's own: two modules over one embedding and an ONNX file, in one run, one folder and one report."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import yaml
from typer.testing import CliRunner

from pipeline import Pipeline, RunConfig
from pipeline.baseline import baseline_of, read_baseline, write_baseline
from pipeline.batch import read_configs, run_batch
from pipeline.batch.jobs import jobs_of
from pipeline.cli import app
from pipeline.errors import CheckFailed, SourceError, UsageError
from pipeline.events import Event, Note, PartStarted
from pipeline.jobs import LocalProcesses
from pipeline.parts import PartsResult, TextGenerator
from pipeline.quantsim import QuantSim
from pipeline.quantsim.parts import PartsQuantSimResult
from pipeline.workspace import Workspace

MODULES = """
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, words, layers):
        super().__init__()
        self.words, self.layers = words, layers

    def forward(self, ids):
        return self.layers(self.words(ids))


def make(wide):
    torch.manual_seed(0)
    words = nn.Embedding(40, 16)
    return Encoder(words, nn.Sequential(nn.Linear(16, 8 * wide), nn.GELU()))
"""

HEAD = '<ir_version: 8, opset_import: ["" : 20]> g (float[N, 16] x) => (float[N, 20] y) { y = MatMul(x, w) }'


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "modules.py").write_text(MODULES)
    head = onnx.parser.parse_model(HEAD)
    weight = np.random.default_rng(0).standard_normal((16, 20), np.float32)
    head.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(head, folder / "head.onnx")
    ids = {"ids": {"shape": ["batch", 5], "dtype": "int64", "range": [0, 40]}}
    factory = {"factory": "modules.py:make", "inputs": ids}
    parts = {"encoder": {**factory, "args": {"wide": 2}}, "decoder": {**factory, "args": {"wide": 3}}}
    settings = {
        "name": "own",
        "model": {"parts": {**parts, "head": {"onnx": "head.onnx"}}},
        "export": {"opset": 20},
        "runtime": {"backends": ["onnxruntime"]},
        "parts": {"head": {"passes": {"recipe": ["drop-softmax-guard"]}, "runtime": {"backends": ["plan"]}}},
    }
    settings["passes"] = {"recipe": ["onnxscript"]}
    (folder / "own.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    return folder / "own.yaml"


@pytest.fixture(scope="module")
def result(file: Path) -> PartsResult:
    found = Pipeline(RunConfig.from_yaml(file), file.parent / "out").run()
    assert isinstance(found, PartsResult)
    return found


def places_of(model: Path) -> Iterator[tuple[str, str]]:
    """File and offset of each weight."""
    for tensor in onnx.load(model, load_external_data=False).graph.initializer:
        found = {entry.key: entry.value for entry in tensor.external_data}
        if found:
            yield found["location"], found["offset"]


def test_parts_that_share_lie_together_and_others_alone(result: PartsResult) -> None:
    models = result.models
    files = {file.relative_to(models).as_posix() for file in models.rglob("*") if file.is_file()}
    assert files == {"encoder.onnx", "decoder.onnx", "weights.data", "head/model.onnx", "head/model.onnx_data"}
    encoder, decoder = (set(places_of(models / f"{name}.onnx")) for name in ("encoder", "decoder"))
    assert len(encoder & decoder) == 1 and {name for name, _ in encoder | decoder} == {"weights.data"}
    assert models.joinpath("weights.data").stat().st_size < 2 * 40 * 16 * 4 + 2 * 4096
    for name in ("encoder.onnx", "decoder.onnx", "head/model.onnx"):
        onnx.checker.check_model(models / name, full_check=True)
        onnxruntime.InferenceSession(str(models / name), providers=["CPUExecutionProvider"])
    assert result.model == models / "encoder.onnx"
    opened = {name: part.model.relative_to(models).as_posix() for name, part in result.parts.items()}
    assert opened == {"encoder": "encoder.onnx", "decoder": "decoder.onnx", "head": "head/model.onnx"}
    assert all((part.folder / "model.onnx").is_symlink() for part in result.parts.values())  # which onnxruntime refuses
    assert "part head:" in repr(result)


def test_each_part_is_a_run_with_what_it_has_of_its_own(result: PartsResult) -> None:
    assert [(name, part.export.origin) for name, part in result.parts.items()] == [
        ("encoder", "torch"), ("decoder", "torch"), ("head", "onnx"),
    ]  # fmt: skip
    assert [row.name for row in result.parts["head"].passes] == ["drop-softmax-guard"]
    assert [row.name for row in result.parts["encoder"].passes] == ["onnxscript"]
    backends = {name: [backend.name for backend in part.runtime.backends] for name, part in result.parts.items()}
    assert backends == {"encoder": ["onnxruntime"], "decoder": ["onnxruntime"], "head": ["plan"]}
    report = json.loads((result.folder / "report.json").read_text())
    assert list(report["parts"]) == ["encoder", "decoder", "head"] and report["chain"] == []
    assert "models/head/model.onnx" in report["files"]
    page = (result.folder / "report.html").read_text()
    assert all(f"parts/{name}/report.html" in page for name in result.parts)
    assert "chain: none: model.chain is not given" in re.sub(
        r" [\d.]+ s \(", " ", (result.folder / "log.txt").read_text()
    )
    baseline = baseline_of(result.report)
    assert list(baseline["parts"]) == ["encoder", "decoder", "head"]


def test_a_second_run_takes_up_what_did_not_change(result: PartsResult, file: Path) -> None:
    again = Pipeline(RunConfig.from_yaml(file), result.folder).run()
    stages = [f"{name}: {stage}" for name in result.parts for stage in ("export", "passes", "runtime")]
    assert list(again.cached) == [*stages, "models"]
    settings = yaml.safe_load((result.folder / "run.yaml").read_text())
    third = Pipeline(RunConfig.from_mapping(settings), result.folder).run()  # what it has written is a configuration
    assert set(third.cached) >= {"head: passes", "models"}


def test_a_part_that_shares_no_more_gets_a_folder(file: Path, tmp_path: Path) -> None:
    config = RunConfig.from_yaml(file, ["runtime.backends=[]", "model.parts.head.seed=1"])
    first = Pipeline(config, tmp_path).run()
    shutil.copytree(
        tmp_path / "parts" / "head", tmp_path / "parts" / "old", symlinks=True
    )  # a part with another name then
    other = (file.parent / "modules.py").with_name("others.py")
    other.write_text(MODULES.replace("manual_seed(0)", "manual_seed(1)"))
    changed = Pipeline(
        RunConfig.from_yaml(file, ["runtime.backends=[]", f"model.parts.decoder.factory={other}:make"]), tmp_path
    ).run()
    assert isinstance(first, PartsResult) and isinstance(changed, PartsResult)
    files = sorted(path.relative_to(tmp_path / "models").as_posix() for path in (tmp_path / "models").glob("*/*.onnx"))
    assert files == ["decoder/model.onnx", "encoder/model.onnx", "head/model.onnx"]
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["decoder", "encoder", "head"]
    for part in changed.parts.values():
        onnx.checker.check_model(part.model, full_check=True)
    assert "encoder: passes" in changed.cached and "decoder: passes" not in changed.cached


def test_commands_take_a_part(result: PartsResult, file: Path) -> None:
    folder = str(result.folder)
    shown = CliRunner().invoke(app, ["diff", folder, folder, "--part", "head"])
    assert (shown.exit_code, shown.output.strip()) == (0, "no difference")
    whole = CliRunner().invoke(app, ["diff", folder, folder])
    assert whole.exit_code == 0 and re.findall(r"^part (\w+)", whole.output, re.MULTILINE) == [
        "decoder",
        "encoder",
        "head",
    ]
    assert CliRunner().invoke(app, ["why", folder, "y", "--part", "head"]).exit_code == 0
    for words in (["inspect", folder], ["debug", "compare", "onnxruntime", "plan", folder]):
        refused = CliRunner().invoke(app, words).exception
        assert isinstance(refused, UsageError)
        assert "is a run in parts, and found no --part; expected --part decoder or --part encoder" in str(refused)
    assert "MatMul" in CliRunner().invoke(app, ["inspect", folder, "--part", "head"]).output
    for model in (folder, str(file)):
        compared = ["debug", "compare", "onnxruntime", "plan", model, "--part", "encoder"]
        out = ["--out", folder] if model != folder else []
        assert "no difference" in CliRunner().invoke(app, [*compared, *out]).output
    looked = CliRunner().invoke(app, ["bisect", str(file), "--part", "head", "--error", "1e-3"])
    assert "nothing wrong" in looked.output
    dry = CliRunner().invoke(app, ["run", str(file), "--dry-run"])
    assert re.findall(r"^part (\w+)", dry.output, re.MULTILINE) == ["encoder", "decoder", "head"]


CHAIN = """
calls = []


def use(parts, generator):
    ids = generator.integers(0, 40, (2, 5))
    return parts["head"]({"x": parts["encoder"]({"ids": ids})["output"][0]})["y"]


def count(parts, generator):
    calls.append(use(parts, generator))
    return {"calls": calls[-1] + len(calls)}


def fail(parts, generator):
    return parts["nowhere"]


def text(parts, generator):
    return "text"
"""


def test_a_chain_is_proven_by_a_function(result: PartsResult, file: Path, tmp_path: Path) -> None:
    (tmp_path / "chain.py").write_text(CHAIN)
    settings = ["runtime.backends=[onnxruntime, plan]", "parts.head.runtime={}"]

    def run(name: str) -> PartsResult:
        config = RunConfig.from_yaml(file, [*settings, f"model.chain={tmp_path / 'chain.py'}:{name}"])
        found = Pipeline(config, tmp_path / "out").run()
        assert isinstance(found, PartsResult)
        return found

    found = run("use")
    assert [(chain.backend, chain.is_right) for chain in found.chain] == [("onnxruntime", True), ("plan", True)]
    assert found.chain[0].why == "model.chain calls no decoder; each part is proven by itself"
    assert baseline_of(found.report)["chain"]["plan"] == "1 result as from the sources"
    assert re.search(
        r"plan 1 result as from the sources, off by \S+ at most", (tmp_path / "out/report.html").read_text()
    )
    with pytest.raises(
        CheckFailed, match=r"the parts together do not give what their sources give on onnxruntime: calls"
    ):
        run("count")
    with pytest.raises(SourceError, match=r"the chain .*:fail raises KeyError: 'nowhere'"):
        run("fail")
    with pytest.raises(
        SourceError, match=r"the chain .*:text returns str, expected an array of numpy, or arrays by na"
    ):
        run("text")
    with pytest.raises(SourceError, match=r"the chain .*: no function 'uze' there; did you mean 'use'\?"):
        run("uze")


def test_own_parts_have_no_chain_to_generate_by(result: PartsResult) -> None:
    for folder in (result.folder, result.models):
        with pytest.raises(
            UsageError, match=r"found the parts encoder, decoder, head of model\.parts, which are no ch"
        ):
            TextGenerator(folder)


def test_a_part_that_fails_leaves_the_others(file: Path, tmp_path: Path) -> None:
    config = RunConfig.from_yaml(file, ["model.parts.decoder.args={wide: many}", "runtime.backends=[]"])
    with pytest.raises(
        SourceError, match=r"(?s)^part decoder: .*; the other parts are in parts/encoder and parts/head$"
    ):
        Pipeline(config, tmp_path).run()
    assert (tmp_path / "parts" / "head" / "model.onnx").is_file()


def test_a_part_runs_alone_to_where_the_run_takes_it_from(result: PartsResult, file: Path) -> None:
    run = Pipeline(RunConfig.from_yaml(file), result.folder)
    found = run.run_part("head")
    assert found.folder == result.folder / "parts" / "head" and "passes" in found.cached
    with pytest.raises(UsageError, match="found the part 'nose', expected one of the parts: encoder, decoder, head"):
        run.run_part("nose")
    with Workspace(result.folder).hold(shared=True):  # as another part has it
        assert run.run_part("head").export == found.export
        with pytest.raises(UsageError, match="another run is writing to"):
            run.run()
    with Workspace(result.folder).hold(), pytest.raises(UsageError, match="another run is writing to"):
        run.run_part("head")


def test_a_batch_sees_the_files_of_all_parts(file: Path, tmp_path: Path) -> None:
    (planned,) = read_configs([str(file)])
    [job] = jobs_of(planned, tmp_path)
    files = job.arguments["files"]
    assert {Path(name).name for name in files} == {"modules.py", "head.onnx"}


def test_a_batch_has_the_sums_and_the_worst_of_all_parts(result: PartsResult, file: Path) -> None:
    planned = read_configs([str(file)])
    shutil.copytree(result.folder, file.parent / "batch" / "own", symlinks=True)
    (row,) = run_batch(planned, file.parent / "batch", LocalProcesses(1))
    parts = row.found["parts"]
    assert list(parts) == ["encoder", "decoder", "head"] and row.exit_code == 0
    nodes = [part.export.nodes for part in result.parts.values()]
    assert row.found["nodes_before"] == sum(nodes) and [part["nodes_before"] for part in parts.values()] == nodes
    assert row.found["nodes_after"] == sum(part["nodes_after"] for part in parts.values()) > nodes[-1]
    assert row.found["worst_error"] == max(part["worst_error"] for part in parts.values())
    lines = [line.split() for line in (file.parent / "batch" / "batch.txt").read_text().splitlines()]
    assert [line[1] for line in lines if line[:1] == ["part"]] == list(parts)
    assert next(line for line in lines if line[:1] == ["own"])[2:5] == [
        str(sum(nodes)),
        "→",
        str(row.found["nodes_after"]),
    ]


def test_a_baseline_has_an_entry_of_each_part_s_graph(result: PartsResult, file: Path, tmp_path: Path) -> None:
    baseline = tmp_path / "own.baseline"
    words = [str(file), "--out", str(result.folder), "--file", str(baseline)]
    assert CliRunner().invoke(app, ["baseline", "accept", *words]).exit_code == 0
    data = read_baseline(baseline)
    assert {name: part["graph"]["cost"]["macs"] > 0 for name, part in data["parts"].items()} == dict.fromkeys(
        ("encoder", "decoder", "head"), True
    )
    assert CliRunner().invoke(app, ["baseline", "check", *words]).exit_code == 0
    data["parts"]["head"]["graph"]["cost"]["macs"] += 1
    del data["parts"]["encoder"]["graph"]  # as an earlier release wrote it
    write_baseline(data, baseline)
    checked = CliRunner().invoke(app, ["baseline", "check", *words])
    assert isinstance(checked.exception, CheckFailed)
    assert re.findall(r"^parts › .*", checked.output, re.MULTILINE) == [
        line for line in checked.output.splitlines() if line.startswith("parts › head › graph › cost › macs")
    ]


def test_each_part_is_simulated_on_its_own_data(file: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "ids.npz", ids=np.arange(20).reshape(4, 5))
    config = RunConfig.from_yaml(
        file,
        [
            "verify.draws=1",
            f"parts.encoder.quantsim={{calibration: {{data: [{tmp_path / 'ids.npz'}]}}, sensitivity: false}}",
            "parts.head.quantsim={profile: qnn-htp, sensitivity: false}",
            "parts.decoder.quantsim={sensitivity: false}",
        ],
    )
    events = list[Event]()
    found = QuantSim(config, tmp_path / "out", events.append).run()
    assert isinstance(found, PartsQuantSimResult) and found.chain is None
    assert list(found.parts) == ["encoder", "decoder", "head"]
    random, part = set[str](), ""
    for event in events:
        part = event.name if isinstance(event, PartStarted) else part
        random |= {part} if isinstance(event, Note) and "no calibration data is given" in event.text else set()
    assert random == {"decoder", "head"}
    for name in found.parts:
        assert (tmp_path / "out" / "parts" / name / "model.qdq.onnx").is_file()
    quantized = onnx.load(tmp_path / "out" / "parts" / "head" / "model.qdq.onnx")
    assert "QuantizeLinear" in {node.op_type for node in quantized.graph.node}
