"""A custom operator with a shared object of onnxruntime's: its kernel runs at every door, and `compute` at none."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.parser import parse_model as parse

import passes
from passes.custom_ops import declare_ops
from passes.diff import compare_models
from passes.tools import compare
from passes.weights.sessions import Session
from pipeline.cli import main
from tests.support.onnx_models import detached
from tests.support.paths import ROOT

OPS = """
from onnxline import CustomOp

def compute(x, *, beta):
    raise RuntimeError("numpy was asked, and the library has a kernel")

SWISH = CustomOp(
    "com.acme", "SwishBeta", infer=lambda x, *, beta: x, compute=compute, attributes={"beta": 1.0},
    torch_op="acme::swish_beta", shared_library="libswish.so",
)
"""

GATE = """
<ir_version: 10, opset_import: ["" : 20, "com.acme" : 1]>
g (float[N, 4] x) => (float[4, N] y) <float[4] w = {1, 2, 3, 4}> {
    i = Identity (x)
    a = Mul (i, w)
    b = com.acme.SwishBeta <beta = 1.5> (a)
    c = Transpose <perm = [1, 0]> (b)
    d = Transpose <perm = [1, 0]> (c)
    e = com.acme.SwishBeta (d)
    y = Transpose <perm = [1, 0]> (e)
}
"""


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The declaration, with the library next to it."""
    folder, compiler = tmp_path_factory.mktemp("ops"), shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no compiler of C: the library of the operator cannot be made")
    source = ROOT / "examples" / "custom_ops_kernel.c"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", folder / "libswish.so", source, "-lm"]
    subprocess.run(command, check=True, timeout=60)
    (folder / "ops.py").write_text(OPS)
    return folder / "ops.py"


def swish(x: np.ndarray, beta: float) -> np.ndarray:
    return (x / (1 + np.exp(-beta * x.astype(np.float64)))).astype(x.dtype)


def command(*arguments: object) -> int:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr("sys.argv", ["onnxline", *map(str, arguments)])
        main()
    return int(end.value.code or 0)


def test_the_kernel_computes_the_operator(ops: Path) -> None:
    x = np.random.default_rng(0).standard_normal((3, 4), np.float32)
    with declare_ops([ops]):
        found = Session.of(detached(parse(GATE))).run({"x": x})["y"]
    expected = swish(swish(x * np.array([1, 2, 3, 4], np.float32), 1.5), 1.0).T
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)  # one rounding to float32 each


def test_passes_proofs_and_comparisons_run_the_kernel(ops: Path, tmp_path: Path) -> None:
    with declare_ops([ops]):
        run = passes.optimize(parse(GATE), ["eliminate_identity", "fuse_consecutive_transposes", "onnxsim"])
        assert [node.op_type for node in run.to_proto().graph.node] == ["Mul", "SwishBeta", "SwishBeta", "Transpose"]
        assert all(row.errors["y"].max_abs == 0 for row in run.rows if row.changed)
        assert len(compare_models(parse(GATE), run).removed) == 3
        assert compare(parse(GATE), run).ok
        (tmp_path / "wrong.py").write_text(
            "def sharpen(model):\n    model.graph.node[2].attribute[0].f = 1.6\n    return model\n"
        )
        (row,) = passes.optimize(parse(GATE), [f"{tmp_path / 'wrong.py'}:sharpen"]).rows
    assert row.status == "reverted", "an attribute that only the kernel reads is another function"


def test_the_plan_and_the_export_from_torch_run_the_kernel(ops: Path, tmp_path: Path) -> None:
    config, run = tmp_path / "gate.yaml", tmp_path / "run"
    config.write_text(
        f"name: gate\ncustom_ops: {ops}\nmodel: {{factory: '{ROOT / 'examples' / 'custom_ops_model.py'}:make'}}\n"
        "passes: {recipe: [eliminate_identity]}\nruntime: {backends: [onnxruntime, plan]}\n"
    )
    assert command("run", config, "--out", run, "--quiet") == 0
    backends = {row["name"]: row for row in json.loads((run / "report.json").read_text())["runtime"]["backends"]}
    assert {name: row["status"] for name, row in backends.items()} == {"onnxruntime": "ran", "plan": "ran"}
    assert backends["plan"]["fallbacks"] == ["com.acme::SwishBeta"]
    (node,) = (node for node in onnx.load(run / "model.onnx").graph.node if node.domain == "com.acme")
    assert [(attribute.name, attribute.f) for attribute in node.attribute] == [("beta", 1.5)]


def test_a_library_that_is_gone_is_named(ops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ops.py").write_text(OPS)
    onnx.save(parse(GATE), tmp_path / "model.onnx")
    model = tmp_path / "model.onnx"
    assert command("compare", model, model, "--custom-ops", tmp_path / "ops.py") == 2
    assert "onnxruntime cannot load the library" in capsys.readouterr().err
    assert command("compare", model, model, "--custom-ops", ops) == 0
