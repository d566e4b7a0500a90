"""Selectors that can match nothing are refused before the run, and those that a step may make true are not."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import yaml
from typer.testing import CliRunner

from passes.weights.detached import attach
from pipeline.cli import app
from pipeline.config import RunConfig
from pipeline.errors import UsageError
from pipeline.quantsim.rule_checks import check_rules
from tests.pipeline.quantsim.pictures_of_qdq import mlp


def config(folder: Path, selector: str, **sections: object) -> RunConfig:
    model = attach(mlp())
    for node in model.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr(["", "encoder", "encoder.first", "call"]))
        node.metadata_props.add(key="pkg.torch.onnx.class_hierarchy", value=repr(["M", "E", "L", "aten.mm.default"]))
    onnx.save(model, folder / "mlp.onnx")
    settings = {"model": {"onnx": str(folder / "mlp.onnx")}, "quantsim": {"rules": {selector: {"weights": "int8"}}}}
    (folder / "mlp.yaml").write_text(yaml.safe_dump({**settings, **sections}))
    return RunConfig.from_yaml(folder / "mlp.yaml")


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("layer:1", "found 'layer:1', expected op:GLOB"),
        ("qvk", "did you mean 'qkv'"),
        ("op:MatMull", "'op:MatMull' matches no tensor; there is no such op; did you mean 'MatMul'"),
        ("module:encoder.frist", "there is no such module; did you mean 'encoder.first'"),
    ],
)
def test_a_selector_that_nothing_can_have_is_refused_before_the_run(
    selector: str, message: str, tmp_path: Path
) -> None:
    config(tmp_path, selector)
    arguments = ["quantsim", str(tmp_path / "mlp.yaml"), "--out", str(tmp_path / "out")]
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, UsageError)
    assert message in str(error)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("selector", ["op:Conv*", "op:SkipLayerNormalization", "module:*first", "tensor:w_2", "qkv"])
def test_what_a_step_may_make_or_the_file_has_goes_on(selector: str, tmp_path: Path) -> None:
    check_rules(config(tmp_path, selector))


def test_a_module_whose_path_has_brackets_is_meant_by_it(tmp_path: Path) -> None:
    settings = config(tmp_path, "module:layers[0]")
    model = onnx.load(tmp_path / "mlp.onnx")
    for entry in model.graph.node[0].metadata_props:
        entry.value = entry.value.replace("encoder.first", "layers[0]")
    onnx.save(model, tmp_path / "mlp.onnx")
    check_rules(settings)


def test_declared_operators_are_no_mistake(tmp_path: Path) -> None:
    ops = tmp_path / "ops.py"
    ops.write_text("OPS = []\n")
    check_rules(config(tmp_path, "op:SwishBeta", custom_ops=[str(ops)]))
