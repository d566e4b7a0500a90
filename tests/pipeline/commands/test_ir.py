"""`onnxline ir extract|info|visualize|verify|run`: files in, files out, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline import cli
from pipeline.config import ModelConfig
from pipeline.export.factory import make_from_factory
from pipeline.torch_ir import load_ir
from tests.support.run_fixtures import FACTORIES

FACTORY = f"{FACTORIES}:attention_with_example"


class Asked:
    """Runs the command line in this process: (exit code, stdout, stderr)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *words: str | Path) -> tuple[int, str, str]:
        self._monkeypatch.setattr("sys.argv", ["onnxline", "ir", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = self._capsys.readouterr()
        return int(ended.value.code or 0), out, err


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Asked:
    monkeypatch.chdir(tmp_path)
    return Asked(monkeypatch, capsys)


def test_the_whole_way(ask: Asked, config_file) -> None:
    config = config_file(model={"inputs": {"x": {"shape": ["batch", 8, 32], "dtype": "float32"}}})
    code, out, err = ask("extract", config, "-o", "m.json.zst")
    assert (code, out.splitlines()[-1], err) == (0, "written to m.json.zst", "")
    assert load_ir("m.json.zst").graph_inputs[0].shape == ("batch", 8, 32)

    code, out, _ = ask("info", "m.json.zst", "--json")
    actual = json.loads(out)
    assert (code, actual["input_shapes"], actual["num_nodes"]) == (
        0,
        {"x": ["batch", 8, 32]},
        len(load_ir("m.json.zst").nodes),
    )
    assert "Op distribution:" in ask("info", "m.json.zst")[1]
    code, out, _ = ask("visualize", "m.json.zst", "--max-nodes", "2", "--no-weights", "-o", "m.md")
    assert (code, out) == (0, "written to m.md\n")
    assert Path("m.md").read_text().startswith("```mermaid\nflowchart TD\n")

    assert ask("verify", "m.json.zst", config)[0] == 0
    source = make_from_factory(ModelConfig(factory=FACTORY))
    state = source.module.state_dict()
    save_file(state, "w.safetensors")
    assert "PASSED" in ask("verify", "m.json.zst", FACTORY, "--weights", "w.safetensors")[1]
    x = torch.randn(5, 8, 32)
    np.savez("in.npz", x=x.numpy())
    code, out, err = ask("run", "m.json.zst", "in.npz", "--weights", "w.safetensors", "-o", "out.safetensors")
    assert (code, err) == (0, "")
    (actual,) = load_file("out.safetensors").values()
    torch.testing.assert_close(actual, source.module(x))
    assert ask("run", "m.json.zst", "in.npz", "--weights", "w.safetensors", "--no-planned", "-o", "out.npz")[0] == 0
    (actual,) = np.load("out.npz").values()
    torch.testing.assert_close(torch.from_numpy(actual), source.module(x))


def test_without_a_weight_on_meta(ask: Asked) -> None:
    code, _, err = ask("extract", FACTORY, "--meta", "--dynamic", "x.0=batch", "--name", "Block")
    assert (code, err) == (0, "")
    ir = load_ir("Block_ir.json")
    assert (ir.model_name, ir.graph_inputs[0].shape[0]) == ("Block", "batch")
    assert ask("verify", "Block_ir.json", FACTORY)[0] == 0


LIFTS = """
import torch
from torch import nn

class Lifts(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(4)
    def forward(self, x):
        return x * self.scale

def make():
    return Lifts().eval(), (torch.ones(1, 4),)
"""


def test_warnings_are_lines(ask: Asked) -> None:
    Path("lifts.py").write_text(LIFTS)
    code, _, err = ask("extract", "lifts.py:make", "--meta")
    said = "Skipping 1 meta-device constant(s) (shape/dtype already in weights): ['scale']"
    assert (code, err) == (0, f"onnxline: {said}\n")


def test_a_difference_is_exit_code_1_and_the_node_is_named(ask: Asked) -> None:
    ask("extract", FACTORY, "-o", "m.json")
    Path("m.json").write_text(Path("m.json").read_text().replace("aten.softmax.int", "aten.log_softmax.int"))
    code, _, err = ask("verify", "m.json", FACTORY, "--localize")
    assert code == 1
    assert "Verification FAILED" in err
    assert "First divergence: node 'softmax' (aten.log_softmax.int; " in err


MODES = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), (torch.randn(4, 3),)

def bare():
    return nn.ReLU()
"""


def test_the_mode_is_eval_and_says_so_or_the_models_own(ask: Asked) -> None:
    Path("modes.py").write_text(MODES)
    code, _, err = ask("extract", "modes.py:make", "-o", "eval.json")
    assert (code, "put into eval mode, which changes 1; --train keeps" in err) == (0, True), err
    assert ask("extract", "modes.py:make", "-o", "train.json", "--train")[::2] == (0, "")
    assert [len(load_ir(file).graph.updates) for file in ("eval.json", "train.json")] == [0, 3]
    assert ask("verify", "train.json", "modes.py:make", "--train")[::2] == (0, "")
    code, _, err = ask("verify", "train.json", "modes.py:make")
    assert (code, "which changes 1; --train keeps" in err) == (1, True), err


def test_mistakes_are_exit_code_2_and_one_sentence(ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    ask("extract", FACTORY, "-o", "m.json")
    np.savez("in.npz", y=np.zeros(3))
    np.savez("words.npz", x=np.array(["a"]))
    Path("no.npz").write_text("x")
    Path("no.pt").write_text("x")
    Path("folder").mkdir()
    Path("modes.py").write_text(MODES)
    Path("sparse.py").write_text("import torch\ndef make():\n    return torch.nn.ReLU(), (torch.eye(3).to_sparse(),)\n")
    state = make_from_factory(ModelConfig(factory=FACTORY)).module.state_dict()
    save_file(state, "w.safetensors")
    lacking = sorted(state)[0]
    save_file({name: tensor for name, tensor in state.items() if name != lacking}, "part.safetensors")
    save_file({f"{'model.' * (name == lacking)}{name}": tensor for name, tensor in state.items()}, "moved.safetensors")
    np.savez("x.npz", x=np.zeros((4, 8, 32), np.float32))
    weights = ("--weights", "w.safetensors")
    wrong = {
        ("extract", FACTORY, "-o", "folder"): "folder is a folder; expected a file, as in folder/name.json",
        ("extract", FACTORY, "-o", "none/m.json"): "there is no folder none; make it first",
        ("extract", FACTORY, "-o", "m.onnx"): "m.onnx: expected .json or .json.zst",
        ("extract", FACTORY, "--name", "a/b"): "there is no folder a; make it first",
        ("extract", "none.py:make"): "no file 'none.py'; its path is relative to the folder that you are in",
        ("extract", "modes.py:bare"): "modes.py:bare gives a module and no example; expected (module, args tuple)",
        ("extract", "sparse.py:make"): "found a sparse tensor (torch.sparse_coo), expected a dense",
        ("info", "m.json", "--out", "folder"): "folder is a folder",
        ("visualize", "m.json", "-o", "m.pdf"): "m.pdf: expected .mmd, .md, .mermaid, .txt, .png or .svg",
        ("verify", "m.json", FACTORY, "--weights", "part.safetensors"): f"lacks '{lacking}'; is it whole",
        ("verify", "m.json", FACTORY, "--weights", "no.pt"): "no file of torch.save",
        ("verify", "m.json", FACTORY, "--constants", "none.npz"): "there is no such file",
        ("run", "m.json", "words.npz", *weights, "-o", "out.npz"): "the array 'x' holds no numeric values",
        ("run", "m.json", "no.npz", *weights, "-o", "out.npz"): "no.npz is no whole .npz file",
        ("run", "m.json", "in.npz", *weights, "-o", "out.txt"): "out.txt: expected .npz or .safetensors",
        ("run", "m.json", "in.npz", *weights, "-o", "none/out.safetensors"): "there is no folder none",
        (
            "run",
            "m.json",
            "in.npz",
            *weights,
            "-o",
            "out.npz",
        ): "Weight/input 'x' not found in registry for node 'linear'",
        ("run", "m.json", "x.npz", "--weights", "moved.safetensors", "-o", "out.npz"): "prefix 'model.'; remove it",
        ("info", "none.json"): "none.json cannot be read: there is no such file or folder",
        ("visualize", "m.json", "-o", "m.png"): "needs the command mmdc, which is not installed",
        ("extract", "somewhere"): "expected file.py:make, package.module:make, or a configuration (.yaml)",
        ("extract", FACTORY, "--dynamic", "x=batch"): "expected INPUT.AXIS=DIM, as in x.0=batch",
        ("extract", FACTORY, "--dynamic", "x.2=width"): "check shapes, dtypes and ranges in model.inputs",
        (
            "run",
            "m.json",
            "in.npz",
            "-o",
            "out.npz",
        ): "Weights not loaded: the IR holds none; name their file by --weights",
        ("run", "m.json", "in.txt", *weights, "-o", "out.npz"): "expected .npz or .safetensors",
    }
    for words, said in wrong.items():
        code, _, err = ask(*words)
        assert (code, said in err) == (2, True), (words, err)
        assert err.startswith("onnxline: ") and "Traceback" not in err
