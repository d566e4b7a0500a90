"""What a target cannot take of a model: which nodes, why, and what mends it; and the tables themselves."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from typer.testing import CliRunner

from passes.recipe.recipe import steps_of
from passes.step import flatten
from pipeline.cli import app
from pipeline.config import QuantSimConfig, read_recipe
from pipeline.config.quantsim import ProfileName
from pipeline.errors import UsageError
from pipeline.quantsim.placement import place
from pipeline.quantsim.profiles import TARGETS, OperatorGroup, load_target, rules_of
from pipeline.quantsim.target_check import MENDING, check_target, refuse_formats
from pipeline.quantsim.target_trial import examine
from tests.pipeline.quantsim.pictures_of_qdq import model_of
from tests.support.onnx_models import detached


def obstructions(text: str, target: str, opset: int = 21) -> dict[str, tuple[str, tuple[str, ...]]]:
    """What is found → the advice and the nodes."""
    head = f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]>'
    model = detached(onnx.parser.parse_model(f"{head} {text}"))
    found = check_target(model, load_target(target)).obstructions
    return {one.what: (one.advice, one.places) for one in found}


def test_a_constant_that_a_call_gives_its_value_is_stored() -> None:
    text = """g (float[2] x) => (float[2] y) { y = own.scale <k = 2.0> (x) }
    <opset_import: ["": 21], domain: "own"> scale <k> (x) => (y) {
        c = Constant <value_float: float = @k> ()
        y = Mul (x, c)
    }"""
    head = '<ir_version: 10, opset_import: ["": 21, "own": 1]>'
    model = detached(onnx.parser.parse_model(f"{head} {text}"))
    for target in TARGETS:
        found = {entry.what for entry in check_target(model, load_target(target)).obstructions}
        assert "own::scale" in found and "Constant" not in found


def test_every_node_is_named_with_what_mends_it() -> None:
    text = """g (float[1, 4, 8] x) => (float[1, 4, 8] y) {
        a = com.microsoft.MultiHeadAttention <num_heads = 2> (x, x, x)
        b = com.microsoft.FastGelu (a)
        c = Erf (b)
        d = Erf (c)
        y = Hardmax (d)
    }"""
    assert obstructions(text, "qnn-htp") == {
        "com.microsoft::MultiHeadAttention": ("put decompose-attention into the recipe", ("a",)),
        "com.microsoft::FastGelu": ("skip what writes it (`onnxline passes --group fusions`)", ("b",)),
        "Erf": (
            "put {convert-opset: {to: 20}} and onnxsim into the recipe, whose fuse_gelu makes Gelu of it",
            ("c", "d"),
        ),
        "Hardmax": (
            "no pass of onnxline replaces it: compute it elsewhere, or by other operators in the model",
            ("y",),
        ),
    }
    assert list(obstructions(text, "tensorrt")) == ["com.microsoft::MultiHeadAttention", "com.microsoft::FastGelu"]
    assert obstructions(text, "ort-cpu") == {}


@pytest.mark.parametrize(
    ("author", "advice"),
    [
        ("fuse_gelu", "skip fuse_gelu, the pass that writes it"),
        ("merge-layout", "no pass of onnxline replaces it: compute it elsewhere, or by other operators in the model"),
    ],
)
def test_a_step_that_moves_an_operator_is_not_what_writes_it(author: str, advice: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> g (float[2] x) => (float[2] y) { y = Gelu (x) }'
    )
    model.graph.node[0].metadata_props.add(key="onnxline.pass", value=author)
    (found,) = (one for one in check_target(detached(model), load_target("rknn")).obstructions if one.what == "Gelu")
    assert found.advice == advice


def test_opsets_dtypes_ranks_and_sizes() -> None:
    text = "g (double[N, 2, 2, 2, 2, 2] x) => (double[N, 2, 2, 2, 2, 2] y) { y = Relu (x) }"
    assert obstructions(text, "qnn-htp", 25) == {
        "opset 25": ("put {convert-opset: {to: 24}} into the recipe", ("the model",)),
        "inputs": ("call `onnxline fix-shapes`, or export the model with numbers as their shape", ("x",)),
        "Relu of float64": ("cast before it, or export the model in another dtype", ("y",)),
        "Relu of rank 6": ("put to-4d into the recipe, which writes fixed sizes with four dims", ("y",)),
    }
    assert list(obstructions(text, "tensorrt")) == ["Relu of float64"]
    assert list(obstructions(text, "weight-only", 20)) == ["opset 20"]
    four = "g (float[2, 2, 2, 2, 2] x) => (int64[a, b, c, d, e] y) { y = ArgMax (x) }"
    assert list(obstructions(four, "qnn-htp")) == ["ArgMax of rank 5"]


def test_bodies_and_functions_are_looked_into() -> None:
    text = """g (bool c, float[2] x) => (float[2] y) {
        y = If (c) <then_branch = a () => (float[2] e) { e = Det (x) },
                    else_branch = b () => (float[2] f) { f = Relu (x) }>
    }"""
    found = obstructions(text, "qnn-htp")
    assert list(found) == ["If", "Det"]
    assert found["If"][0].startswith("export the one branch")


def test_data_of_where_is_its_second_input() -> None:
    text = "g (bool[2] c, float[2] x) => (float[2] y) { y = Where (c, x, x) }"
    assert obstructions(text, "tensorrt") == {}
    text = "g (float[2] x, int64[1] i) => (float[1] y) { y = Gather (x, i) }"
    assert obstructions(text, "tensorrt") == {}


def test_no_operator_is_listed_twice_and_each_exists() -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    older = {"ImageScaler", "ParametricSoftplus", "ScaledTanh", "Affine", "Crop", "DynamicSlice", "Scale"}
    older |= {"SimplifiedLayerNormalization"}  # onnxruntime's own, in ONNX's domain
    for target in TARGETS:
        table = load_target(target)
        names = [name for group in table.operators for name in group.names]
        assert len(names) == len(set(names)), target
        assert {name for name in names if "::" not in name} <= known | older, target
        assert {*table.restrictions, *table.ranks} <= set(names), target


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "erf.onnx"
    text = '<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[2] y) { y = Erf (x) }'
    onnx.save(onnx.parser.parse_model(text), path)
    result = CliRunner().invoke(app, ["check", str(path), "--target", "qnn-htp"])
    assert result.exit_code == 1
    assert "Erf (1 place): the target does not have this operator" in result.stdout
    assert "where: y" in result.stdout
    result = CliRunner().invoke(app, ["check", str(path), "--target", "tensorrt"])
    assert (result.exit_code, "takes every operator" in result.stdout) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.onnx", "--target", "qnn-hpt"], "no target named 'qnn-hpt'; did you mean 'qnn-htp'"),
        (["vit.yaml", "--target", "tensorrt"], "expected an ONNX file: run the configuration first"),
        (["model.onnx", "--target", "tensorrt", "--keep", "qkv"], "it takes no other option"),
        (["model.onnx", "--target", "tensorrt", "--fix"], "name its file with -o RECIPE.yaml"),
        (["model.onnx", "--fix", "-o", "a.yaml"], "found --fix without --target"),
    ],
)
def test_mistakes_of_the_command(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["check", *arguments])
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


def test_a_recipe_mends_what_steps_of_ours_mend(tmp_path: Path) -> None:
    path, recipe = tmp_path / "block.onnx", tmp_path / "recipe.yaml"
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[2, 2] x) => (float[2, 2] y) <float zero = {0}> {
        a = Gelu (x) m = MatMul (a, x) b = Softmax (m) n = IsNaN (b) c = Where (n, zero, b) y = Erf (c)
    }"""
    model = onnx.parser.parse_model(text)
    scopes, stack = "['', 'encoder.mlp', 'gelu']", 'File "/src/torch/nn.py", line 3\nFile "/src/mlp.py", line 7, in f\n'
    for key, value in (("name_scopes", scopes), ("class_hierarchy", "['M', 'Mlp', 'gelu']"), ("stack_trace", stack)):
        model.graph.node[0].metadata_props.add(key=f"pkg.torch.onnx.{key}", value=value)
    onnx.save(model, path)
    words = ["check", str(path), "--target", "rknn", "--fix", "-o", str(recipe)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    assert "  from: encoder.mlp (mlp.py:7)" in lines
    assert lines[-1] == "3 reasons left: opset 20, Gelu, Erf"  # the target has no curve that makes a GELU
    items = yaml.safe_load(recipe.read_text(encoding="utf-8"))["recipe"]
    assert items == ["drop-softmax-guard"]
    again = CliRunner().invoke(app, words)
    assert isinstance(again.exception, UsageError) and "is there already" in str(again.exception)


def test_every_step_that_mends_is_one_that_this_installation_has() -> None:
    steps = [step for step, _, _ in MENDING]
    assert len(flatten(steps_of(steps))) >= len(steps)


def test_a_recipe_that_mends_all_is_no_error(tmp_path: Path) -> None:
    path, recipe = tmp_path / "norm.onnx", tmp_path / "recipe.yaml"
    text = """<ir_version: 10, opset_import: ["": 19]> g (float[2, 4] x) => (float[2, 4] y)
        <float[4] s = {1, 2, 3, 4}> { y = LayerNormalization (x, s) }"""
    onnx.save(onnx.parser.parse_model(text), path)
    result = CliRunner().invoke(app, ["check", str(path), "--target", "generic-int8", "--fix", "-o", str(recipe)])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].endswith("takes every operator after these steps")
    assert "  what helps: put {canonical-norm: {form: parts}} into the recipe (--fix writes it)" in result.stdout
    assert read_recipe([str(recipe)]) == ({"canonical-norm": {"form": "parts"}},)


def test_an_operator_that_no_table_knows_is_tried_on_the_target(tmp_path: Path) -> None:
    text = """g (float[2, 3] x) => (float[2, 3] y) { a = Relu (x) b = Add (a, w) c = com.acme.Fold (b) y = Gelu (c) }"""
    head = '<ir_version: 10, opset_import: ["": 20, "com.acme": 1]>'
    model = onnx.parser.parse_model(head + text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "w"))
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.FLOAT, [2, 3]))
    table = load_target("ort-cpu")
    table = table.model_copy(update={"operators": (OperatorGroup(names=("Relu", "Gelu")),)})
    report = examine(detached(model), table, tmp_path / "refused")
    version = metadata.version("onnxruntime")
    assert f"Add: the table does not have it; onnxruntime {version} takes it" in report.remarks
    (found,) = report.obstructions
    saved = tmp_path / "refused" / "com-acme-Fold.onnx"
    assert (
        found.what == "com.acme::Fold" and f"refuses it alone ({saved})" in found.reason and "com.acme" in found.reason
    )
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    assert [node.op_type for node in onnx.load(saved).graph.node] == ["Fold"]


def test_what_is_not_installed_is_not_tried(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[2] y) { y = Det (x) }'
    )
    table = load_target("tensorrt")
    remarks = examine(detached(model), table, tmp_path / "refused").remarks
    assert any("were not tried: pip install tensorrt" in remark for remark in remarks)
    assert not (tmp_path / "refused").exists()


def test_a_constant_is_no_operator_of_a_target() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[3] x) => (float[3] y) '
        "{ c = Constant <value = float[3] {1, 2, 3}> () y = Add (x, c) }"
    )
    assert check_target(detached(model), load_target("coreml")).obstructions == ()


@pytest.mark.parametrize(
    ("profile", "format_", "runs"),
    [
        *(("tensorrt", text, (True, text != "int4")) for text in ("int8/channel", "int4", "fp8e4m3")),
        ("tensorrt", "nvfp4", (True, None)),
        *(("tensorrt", text, (False, False)) for text in ("uint8", "int16", "uint4", "int8/asymmetric", "int2")),
        *(("tensorrt", text, (False, None)) for text in ("lpbq32", "mxfp8")),
        *(("qnn-htp", text, (True, True)) for text in ("int8/channel", "uint16", "int16/asymmetric")),
        ("qnn-htp-w4a16", "int4/block32", (True, False)),
        ("qnn-htp", "lpbq32", (True, None)),
        *(("qnn-htp", text, (False, False)) for text in ("int2/block32", "uint3", "int6", "fp8e4m3")),
        *(("ort-cpu", text, (True, True)) for text in ("uint8", "int16", "int2/block32", "fp8e4m3")),
        *(("ort-cpu", text, (False, None)) for text in ("mxfp4", "mxfp8", "fp4e2m1/block16")),
    ],
)
def test_formats_that_a_target_runs_as_weights_and_activations(
    profile: ProfileName, format_: str, runs: tuple[bool, bool | None]
) -> None:
    model = model_of("g (float[4, 64] x) => (float[4, 8] y) { y = MatMul(x, w) }", w=np.ones((64, 8), np.float32))
    for kind, expected in zip(("weights", "activations"), runs, strict=True):
        if expected is None:  # no format of activations anywhere
            continue
        config = QuantSimConfig.model_validate({"profile": profile, "rules": {"op:*": {kind: format_}}})
        placement = place(model, rules_of(config, model))
        name = {"weights": "w", "activations": "x"}[kind]
        refusal = f"quantsim.rules: {name} is to be {format_.partition('/')[0]}.*, which .* does not dequantize"
        with nullcontext() if expected else pytest.raises(UsageError, match=refusal):
            refuse_formats(placement, load_target(profile))
