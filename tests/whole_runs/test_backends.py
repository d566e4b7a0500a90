"""Backends that nobody chose run a model where they can; a backend that somebody names has to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import onnx
import pytest
import yaml
from typer.testing import CliRunner, Result

from pipeline import Pipeline, RunConfig
from pipeline.baseline import read_baseline
from pipeline.cli import app
from pipeline.config.sections import Fusion
from pipeline.errors import CheckFailed, Unsupported, UsageError
from pipeline.lowering.fusion import CPU_FUSIONS, CUDA_FUSIONS, FUSIONS
from pipeline.runtime.kernels import load_library
from tests.support.native import native_library

MODELS = {
    "GRU": """
        (float[3, 1, 4] x) => (float[3, 1, 1, 2] y)
        <float[1, 6, 4] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2,
                             0.2, 0.1, 0.4, 0.3, 0.6, 0.5, 0.8, 0.7, 1.0, 0.9, 1.2, 1.1},
         float[1, 6, 2] r = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2}>
        { y = GRU <hidden_size = 2> (x, w, r) }""",
    "ReverseSequence": """
        (float[3, 2] x) => (float[3, 2] y) <int64[2] sizes = {2, 3}>
        { y = ReverseSequence (x, sizes) }""",
    "Loop": """
        (float[2] x, int64 count) => (float[2] y) {
            yes = Constant <value = bool {1}> ()
            y = Loop (count, yes, x) <body = body (int64 i, bool on, float[2] a) => (bool still, float[2] b)
                { still = Identity (on) b = Add (a, a) }>
        }""",
    "DequantizeLinear": """
        (float[2, 4] x) => (float[2, 4] y) <float s = {0.1}, uint8 z = {128}>
        { q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z) }""",
}
"""By an operator that not every runtime has."""

INPUTS = {"Loop": {"count": {"shape": [], "dtype": "int64", "range": [1, 4]}}}


def config_of(folder: Path, name: str, text: str, **sections: object) -> Path:
    header = '<ir_version: 10, opset_import: ["": 20]>'
    return config_of_model(folder, name, onnx.parser.parse_model(f"{header} {name} {text}"), **sections)


def config_of_model(folder: Path, name: str, proto: onnx.ModelProto, **sections: object) -> Path:
    onnx.save(proto, folder / f"{name}.onnx")
    model = {"onnx": f"{name}.onnx", "inputs": INPUTS.get(name, {})}
    path = folder / f"{name}.yaml"
    data = {"model": model, "passes": {"recipe": ["eliminate_identity"]}, "verify": {"draws": 1}, **sections}
    path.write_text(yaml.safe_dump(data))
    return path


def unsigned(folder: Path, **sections: object) -> Path:
    """A model with a Sign of uint32, which torch and so the plan does not have."""
    text = """(float[2, 3] x) => (float[2, 3] y) {
        a = Abs (x) c = Cast <to = 12> (a) d = Sign (c) y = Cast <to = 1> (d) }"""
    return config_of(folder, "unsigned", text, passes={"recipe": []}, **sections)


def run(config: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["run", str(config), "--out", str(config.parent / "out"), *words])


def read_report(config: Path) -> dict:
    return json.loads((config.parent / "out" / "report.json").read_text())


@pytest.mark.parametrize("operator", MODELS)
def test_the_default_plan_runs_it(tmp_path: Path, operator: str) -> None:
    config = config_of(tmp_path, operator, MODELS[operator])
    shown = run(config)
    assert shown.exit_code == 0, shown.output
    ran, ours = read_report(config)["runtime"]["backends"]
    assert (ran["name"], ours["name"], ours["status"], ours["fallbacks"]) == ("onnxruntime", "plan", "ran", [])
    # A Loop is no single plan.
    assert (ours["segments"] > 0) == (operator == "Loop")
    assert ((tmp_path / "out" / "plan.json").exists()) == (operator != "Loop")


def test_what_another_runtime_computes_is_said(tmp_path: Path) -> None:
    text = """(float[1, 2, 5, 5] x, float[1, 18, 4, 4] d) => (float[1, 1, 4, 4] y) <float[1, 2, 3, 3] w = {
        1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9}>
        { y = DeformConv <kernel_shape = [3, 3], pads = [1, 0, 0, 1]> (x, w, d) }"""
    config = config_of(tmp_path, "deform", text)
    shown = run(config)
    assert shown.exit_code == 0, shown.output
    assert read_report(config)["runtime"]["backends"][1]["fallbacks"] == ["DeformConv"]
    assert "computed by another runtime: 1 × DeformConv" in shown.output
    assert "1 × DeformConv" in (tmp_path / "out" / "report.html").read_text()
    assert "DeformConv" in (tmp_path / "out" / "plan.json").read_text()


def test_what_the_default_plan_cannot_take_is_reported_and_no_error(tmp_path: Path) -> None:
    config = unsigned(tmp_path)
    shown = run(config)
    assert shown.exit_code == 0, shown.output
    report = read_report(config)
    ran, refused = report["runtime"]["backends"]
    assert (ran["name"], ran["status"], ran["operators"]) == ("onnxruntime", "ran", [])
    assert (refused["name"], refused["status"]) == ("plan", "unsupported")
    assert "op 2 (Sign): torch has no such operator" in refused["reason"]
    assert (report["exit_code"], report["failure"], refused["errors"]) == (0, "", {})
    assert "plan: unsupported: op 2 (Sign)" in shown.output
    assert "unsupported: op 2 (Sign)" in (tmp_path / "out" / "report.html").read_text()
    assert not list((tmp_path / "out").glob("ir.*"))


def test_a_window_larger_than_the_image_is_computed_as_the_reference_does(tmp_path: Path) -> None:
    """A plain CNN with open sizes is drawn at 1 too; there onnxruntime has one window, and ONNX's text none."""
    text = """(float[N, 1, H, W] x) => (float[N, 1, h, w] y) {
        p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) a = Relu (p)
        y = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (a) }"""
    config = config_of(tmp_path, "pooled", text)
    shown = run(config)
    assert shown.exit_code == 0, shown.output
    plan = read_report(config)["runtime"]["backends"][1]
    assert (plan["name"], plan["status"]) == ("plan", "ran")
    named = run(config, "--set", "runtime.backends=[onnxruntime, plan]")
    assert named.exit_code == 0, named.output


def break_plan(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    from pipeline.verify import backends

    compute = backends.Plan.run
    monkeypatch.setattr(backends.Plan, "run", lambda self, feeds: change(compute(self, feeds)))


def test_a_default_plan_that_fails_is_reported_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_on_three_rows(outputs: dict[str, Any]) -> dict[str, Any]:
        if len(outputs["y"]) == 3:
            raise KeyError("of ours")
        return outputs

    break_plan(monkeypatch, fail_on_three_rows)
    config = config_of(tmp_path, "rows", "(float[n, 2] x) => (float[n, 2] y) { y = Neg (x) }")
    shown = run(config)
    assert shown.exit_code == 0, shown.output
    failed = read_report(config)["runtime"]["backends"][1]
    assert (failed["status"], list(failed["errors"])) == ("failed", ["y"])
    assert re.search(
        r"plan: failed: runs on \d of \d draws, and not on draw \d \(n=3.*\): KeyError: 'of ours'", shown.output
    )
    assert (tmp_path / "out" / "plan.json").exists(), "that of the first draw holds"
    assert isinstance(run(config, "--set", "runtime.backends=[onnxruntime, plan]").exception, KeyError)


def test_a_default_plan_that_differs_is_reported_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.runtime.kernels import aten

    def halve(call: Any, outs: Any) -> Any:
        return lambda: outs[0].copy_(call.args[0].repeat(2) / 2)

    monkeypatch.setattr(aten, "FAST_PATHS", {**aten.FAST_PATHS, "aten.repeat.default": halve})
    text = "(float[2] x) => (float[4] y) <int64[1] n = {2}> { e = Exp (x) r = Tile (e, n) y = Neg (r) }"
    config = config_of(tmp_path, "halved", text)
    shown = run(config)
    assert shown.exit_code == 0, shown.output
    assert re.search(r"^plan: differs: y: max abs error .*; first at 'r' \(Tile\): max abs error", shown.output, re.M)
    report = read_report(config)
    assert report["runtime"]["backends"][1]["status"] == "differs"
    assert "differs: y" in (tmp_path / "out" / "report.html").read_text()
    named = run(config, "--set", "runtime.backends=[onnxruntime, plan]")
    assert isinstance(named.exception, CheckFailed)
    assert "first at 'r' (Tile)" in str(named.exception)


@pytest.mark.parametrize("backends", ["[plan]", "[onnxruntime, plan]", "[torch, plan]"])
def test_a_plan_that_is_named_has_to_be_possible(tmp_path: Path, backends: str) -> None:
    config = unsigned(tmp_path)
    shown = run(config, "--set", f"runtime.backends={backends}")
    assert isinstance(shown.exception, Unsupported)
    assert read_report(config)["exit_code"] == 2
    assert "op 2 (Sign)" in read_report(config)["failure"]


def test_torch_runs_the_final_model_op_by_op(tmp_path: Path) -> None:
    text = """(float[1, 2, 5, 5] x, float[1, 18, 4, 4] d) => (float[1, 1, 4, 4] y) <float[1, 2, 3, 3] w = {
        1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9}>
        { c = DeformConv <kernel_shape = [3, 3], pads = [1, 0, 0, 1]> (x, w, d) y = Elu (c) }"""
    config = config_of(tmp_path, "deform", text, runtime={"backends": ["torch"]})
    shown = run(config)
    assert shown.exit_code == 0, shown.output
    (ran,) = read_report(config)["runtime"]["backends"]
    assert (ran["name"], ran["status"], ran["fallbacks"]) == ("torch", "ran", ["DeformConv"])
    assert ran["seconds"] > 0
    assert ran["errors"]["y"]["excess"] < 1
    assert not list((tmp_path / "out").glob("plan.*"))


def test_a_wrong_result_of_torch_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what torch repeats."""
    from pipeline.runtime import eager

    operators = {**eager.CPU_FALLBACKS, "aten.repeat.default": lambda x, repeats: x.repeat(repeats) / 2}
    monkeypatch.setattr(eager, "CPU_FALLBACKS", operators)
    text = "(float[2] x) => (float[4] y) <int64[1] n = {2}> { e = Exp (x) y = Tile (e, n) }"
    config = config_of(tmp_path, "halved", text)
    assert run(config, "--set", "runtime.backends=[onnxruntime, plan]").exit_code == 0
    failed = run(config, "--set", "runtime.backends=[torch]")
    assert isinstance(failed.exception, CheckFailed)
    assert "torch: y: max abs error" in str(failed.exception)


def test_what_torch_cannot_take_is_reported_and_no_error(tmp_path: Path) -> None:
    """Also where somebody named it: it was free to name before it was a backend."""
    config = config_of(tmp_path, "Loop", MODELS["Loop"], runtime={"backends": ["torch", "onnxruntime"]})
    shown = run(config)
    assert shown.exit_code == 0, shown.output
    refused, ran = read_report(config)["runtime"]["backends"]
    assert (refused["name"], refused["status"], refused["operators"]) == ("torch", "unsupported", ["Loop"])
    assert (ran["name"], ran["status"]) == ("onnxruntime", "ran")
    assert "torch: unsupported: Loop" in shown.output


def test_naming_it_in_a_base_is_naming_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("runtime: {backends: [onnxruntime, plan]}\n")
    config = unsigned(tmp_path, extends="base.yaml")
    assert isinstance(run(config).exception, Unsupported)
    assert run(config, "--set", "runtime.backends=null").exit_code == 0


def test_a_later_run_says_it_again_and_what_is_named_later_is_an_error(tmp_path: Path) -> None:
    config = unsigned(tmp_path)
    run(config)
    again = run(config)
    assert again.exit_code == 0
    assert read_report(config)["cached"] == ["export", "passes", "runtime"]
    assert "plan: unsupported: op 2 (Sign)" in again.output
    assert isinstance(run(config, "--set", "runtime.backends=[onnxruntime, plan]").exception, Unsupported)
    # The settings of the run are those that it runs again with.
    assert run(tmp_path / "out" / "run.yaml").exit_code == 0


def test_sizes_that_depend_on_numbers_run_in_segments(tmp_path: Path) -> None:
    config = config_of(tmp_path, "odd", "(float[2, 4] x) => (int64[2, n] y) { y = NonZero (x) }")
    shown = run(config)
    assert shown.exit_code == 0, shown.output
    assert read_report(config)["runtime"]["backends"][1]["segments"] == 1
    assert "run in 1 segments" not in shown.output
    assert "run in 1 segment: some shapes or branches depend on the data" in shown.output


def test_a_baseline_holds_it(tmp_path: Path) -> None:
    config = unsigned(tmp_path)
    out = ("--out", str(tmp_path / "out"))
    assert CliRunner().invoke(app, ["baseline", "accept", str(config), *out]).exit_code == 0
    assert "unsupported: op 2 (Sign)" in str(read_baseline(tmp_path / "unsigned.baseline")["backends"]["plan"])
    assert CliRunner().invoke(app, ["baseline", "check", str(config), *out]).exit_code == 0
    config_of(tmp_path, "unsigned", "(float[2] x) => (float[2] y) { y = Neg (x) }")
    output = CliRunner().invoke(app, ["baseline", "check", str(config), *out]).output
    assert "backends › plan: unsupported: op 2 (Sign)" in output


def test_a_batch_says_which_runs_had_no_plan(tmp_path: Path) -> None:
    config = unsigned(tmp_path)
    shown = CliRunner().invoke(app, ["batch", str(config), "--out", str(tmp_path / "all"), "--jobs", "1", "--json"])
    (row,) = json.loads(shown.stdout)["runs"]
    assert (row["state"], row["found"]["unsupported"]) == ("done", ["plan"])


def test_from_python(tmp_path: Path) -> None:
    unsigned(tmp_path)
    config = RunConfig.from_mapping({"model": {"onnx": "unsigned.onnx"}, "passes": {"recipe": []}}, tmp_path)
    assert config.runtime.chosen == ("onnxruntime", "plan")
    result = Pipeline(config, tmp_path / "out").run()
    first, second = [(backend.name, backend.shortfall) for backend in result.runtime.backends]
    assert first == ("onnxruntime", "")
    assert second[1].startswith("unsupported: op 2 (Sign)")


def test_a_graph_is_compiled_once_for_draws_of_the_same_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline import runtime

    compiled, compile_graph = [], runtime.compile_graph
    monkeypatch.setattr(
        runtime, "compile_graph", lambda graph, **options: compiled.append(graph) or compile_graph(graph, **options)
    )
    config = config_of(tmp_path, "negated", "(float[2] x) => (float[2] y) { y = Neg (x) }", verify={"draws": 3})
    assert run(config).exit_code == 0
    assert len(compiled) == 1


def test_fusions_that_are_chosen_are_in_the_ir_and_the_results_stay_right(tmp_path: Path) -> None:
    relu = "(float[2,2] x) => (float[2,2] y) <float[2,2] w = {1, 2, 3, 4}> { p = MatMul (x, w) y = Relu (p) }"
    for fusions, kinds in (
        ([], ["aten.matmul.default", "aten.relu.default"]),
        (["linear"], ["LinearPointwise"]),
        ("all", ["LinearPointwise"]),
    ):
        config = config_of(tmp_path, "fused", relu, runtime={"backends": ["plan"], "fusions": fusions})
        assert run(config).exit_code == 0
        text = (tmp_path / "out" / "ir.txt").read_text(encoding="utf-8")
        assert re.findall(r"= ([\w.]+)\(", text) == kinds


def test_kernels_in_cpp_are_counted_in_the_report(tmp_path: Path) -> None:
    native_library()
    relu = (
        "(float[2,2] x) => (float[2,2] y) <float[2,2] w = {1, 2, 3, 4}> { p = MatMul (x, w) r = Neg (p) y = Relu (r) }"
    )
    config = config_of(tmp_path, "native", relu, runtime={"backends": ["plan"], "native": True})
    shown = run(config)
    assert shown.exit_code == 0
    assert read_report(config)["runtime"]["backends"][0]["native_calls"] == 2
    assert "plan: 3 kernel calls (2 in C++, built by this machine's compiler)" in shown.output
    traced = CliRunner().invoke(app, ["plan", "trace", str(tmp_path / "out"), "-o", str(tmp_path / "trace.json")])
    assert traced.exit_code == 0
    compared = CliRunner().invoke(app, ["debug", "compare", "plan", "torch", str(tmp_path / "out")])
    assert compared.exit_code == 0


def test_a_model_in_segments_has_them_too(tmp_path: Path) -> None:
    native_library()
    text = "(float[n] x) => (float[m] y) { i = NonZero (x) f = Cast <to = 1> (i) g = Relu (f) y = Squeeze (g) }"
    config = config_of(tmp_path, "segmented", text, runtime={"backends": ["plan"], "native": True})
    assert run(config).exit_code == 0
    (backend,) = read_report(config)["runtime"]["backends"]
    assert backend["segments"] > 1
    assert backend["native_calls"] > 0


def test_without_a_compiler_a_run_that_asks_for_them_ends_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody named `plan`, which may else be left out."""
    load_library.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = config_of(tmp_path, "native", "(float[2] x) => (float[2] y) { y = Relu (x) }", runtime={"native": True})
    refusal = run(config).exception
    assert isinstance(refusal, UsageError)
    assert "native needs a C++ compiler, and did not find 'no-such-compiler' of $CXX; install one" in str(refusal)
    assert run(config_of(tmp_path, "plain", "(float[2] x) => (float[2] y) { y = Relu (x) }")).exit_code == 0


def test_every_fusion_has_a_name_in_the_configuration() -> None:
    assert get_args(Fusion) == tuple(FUSIONS)
    for device, names in (("cpu", CPU_FUSIONS), ("cuda:1", CUDA_FUSIONS)):
        config = RunConfig.from_mapping({"model": {"onnx": "m.onnx"}, "runtime": {"fusions": "all", "device": device}})
        assert config.runtime.chosen_fusions == names
