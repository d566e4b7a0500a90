"""`verify.inputs`: real data from .npz files and loaders; what fits is compared first, what does not is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import yaml

from passes import Status
from pipeline import Pipeline, RunConfig, RunResult
from pipeline.errors import ConfigError, SourceError
from pipeline.events import Note
from pipeline.export.source import InputSpec
from pipeline.verify.user_inputs import read_inputs
from tests.support.onnx_models import matrix, model_of
from tests.support.paths import TESTS

SPECS = (
    InputSpec("ids", ("batch", "seq"), "int64", 0, 20),
    InputSpec("mask", ("batch", "seq"), "float32", 0, 1),
    InputSpec("scale", (4,), "bfloat16", 0, 1),
)
IDS = np.array([[1, 2, 3]])
FIT: dict[str, Any] = {
    "ids": IDS,
    "mask": np.ones((1, 3), np.float32),
    "scale": np.ones(4, ml_dtypes.bfloat16),
}


def verify_of(inputs: Any, folder: Path, **others: Any) -> Any:
    data = {"model": {"onnx": "m.onnx"}, "verify": {"inputs": inputs, **others}}
    return RunConfig.from_mapping(data, folder).verify


def refusal(inputs: Any, folder: Path) -> str:
    with pytest.raises(SourceError) as caught:
        read_inputs(verify_of(inputs, folder), SPECS)
    return str(caught.value)


def save_inputs(folder: Path, **changes: Any) -> str:
    np.savez(folder / "a.npz", **{name: array for name, array in {**FIT, **changes}.items() if array is not None})
    return "a.npz"


def test_files_globs_and_loaders_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("b", "a"):
        np.savez(tmp_path / f"data/{name}.npz", **FIT)
    (tmp_path / "own.py").write_text(
        "import numpy as np, torch\n"
        "def load():\n"
        "    ids = torch.zeros(2, 1, dtype=torch.int64)\n"
        "    while True:\n"
        "        ids += 1\n"  # what was yielded before stays as it was
        "        yield {'ids': ids, 'mask': torch.ones(2, 1), 'scale': torch.ones(4, dtype=torch.bfloat16)}\n"
    )
    given = read_inputs(verify_of(["own.py:load", "data/*.npz"], tmp_path, max_inputs=2), SPECS)
    assert [draw.draw.label for draw in given.draws] == [
        "inputs of own.py:load[0] (batch=2, seq=1)",
        "inputs of own.py:load[1] (batch=2, seq=1)",
    ]
    assert [draw.feeds["ids"].max() for draw in given.draws] == [1, 2]
    assert given.notes == ("verify.inputs: only the first 2 are taken (verify.max_inputs)",)
    given = read_inputs(verify_of("data/*.npz", tmp_path), SPECS)
    assert [draw.draw.source for draw in given.draws] == ["a.npz", "b.npz"]
    assert given.draws[0].feeds["scale"].dtype == ml_dtypes.bfloat16
    assert given.notes == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": None}, "a.npz: no array for 'scale'"),
        ({"sacle": IDS}, "a.npz: the model has no input 'sacle'; did you mean 'scale'?"),
        ({"ids": IDS.astype(np.int32)}, "'ids' is int32[1, 3], expected int64[batch, seq]: convert it with .astype("),
        ({"ids": IDS[0]}, "'ids' is int64[3], expected int64[batch, seq]"),
        ({"scale": np.ones(5, ml_dtypes.bfloat16)}, "'scale' is bfloat16[5], expected bfloat16[4]; name a dim"),
        ({"mask": np.ones((1, 2), np.float32)}, "the dim 'seq' is 3 in 'ids' and 2 in 'mask'"),
        ({"ids": np.zeros((0, 3), np.int64)}, "'ids' is int64[0, 3], which holds no number"),
        ({"ids": np.array([{}])}, "holds Python objects, and unpickling them is refused"),
    ],
)
def test_arrays_that_do_not_fit_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert message in refusal(save_inputs(tmp_path, **changes), tmp_path)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            "none.npz",
            "no file '{}/none.npz'; relative paths are relative to the configuration file, or to "
            "the working directory where there is none",
        ),
        ("no*.npz", "no file matches '{}/no*.npz'"),
        ("broken.npz", "broken.npz is no whole .npz file"),
        ("text.npz", "text.npz is no whole .npz file (no zip archive); write it again"),
        ("empty", "the folder '{}/empty' holds no file of samples; expected files that numpy.savez"),
        ("own.py", "is no file of samples"),
        ("own.py:lod", "no function 'lod' there; did you mean 'load'?"),
        ("own.py:load", "own.py:load raises ValueError: no data\n  at {}/own.py:2: def load(): raise ValueError"),
        ("own.py:numbers", "own.py:numbers[0] is int, expected a mapping: input → array"),
        ("own.py:nothing", "own.py:nothing gives no inputs; expected at least one draw"),
        ("own.py:number", "own.py:number returns int, expected a generator, a list or a DataLoader of mappings"),
        ("own.py:lists", "own.py:lists[0]: 'ids' is list, expected an array"),
        ("gone.py:load", "no file '{}/gone.py'"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, inputs: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 half of it")
    (tmp_path / "text.npz").write_text("no numbers")
    (tmp_path / "own.py").write_text(
        "import numpy as np\n"
        "def load(): raise ValueError('no data')\n"
        "def numbers(): return [1]\n"
        "def nothing(): return []\n"
        "def number(): return 3\n"
        "def lists(): yield {'ids': [[1]], 'mask': np.ones((1, 1), np.float32), 'scale': np.ones(4)}\n"
    )
    if inputs == "*.npz":
        (tmp_path / "broken.npz").unlink()
    assert message.format(tmp_path) in refusal(inputs, tmp_path)


@pytest.mark.parametrize(
    ("verify", "message"),
    [
        ({"proof": "structure"}, "found verify.inputs with verify.proof structure, which runs nothing"),
        ({"inputs": [], "draws": 0}, "found verify.draws 0 without verify.inputs"),
        ({"inputs": [3]}, "verify.inputs[0]: found 3, expected text"),
        (
            {"inputs": {"x": 1}},
            "verify.inputs: found a mapping, expected a .npz file, a glob or file.py:function, or a list of them",
        ),
    ],
)
def test_settings_that_contradict_each_other(tmp_path: Path, verify: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        verify_of(verify.pop("inputs", "a.npz"), tmp_path, **verify)
    assert message in str(caught.value)


def run(path: Path, *overrides: str) -> tuple[RunResult, list[str]]:
    notes: list[str] = []

    def note(event: Any) -> None:
        notes.extend([event.text] if isinstance(event, Note) else [])

    return Pipeline(RunConfig.from_yaml(path, overrides), path.parent / "out", note).run(), notes


def test_a_torch_module_is_proven_on_real_data(config_file, tmp_path: Path) -> None:
    model = {"inputs": {"x": {"shape": ["batch", 8, 32]}}}
    off = {"passes": {"recipe": []}, "runtime": {"backends": []}}
    path = config_file(model=model, verify={"inputs": "x.npz", "sizes": []}, **off)
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).normal(size=(1, 8, 32)).astype(np.float32))
    result, _ = run(path)
    assert result.export.draws[:2] == ("inputs of x.npz (batch=1)", "draw 0 (batch=2)")
    assert result.export.weights == "as the factory makes them, with seed 0"
    coverage = json.loads((tmp_path / "out/report.json").read_text())["coverage"]
    assert coverage["given"] == ["inputs of x.npz (batch=1)"]
    assert coverage["sizes"]["batch"] == [1, 2, 3]
    assert "1 of " in (tmp_path / "out/report.html").read_text()


def test_an_onnx_file_is_proven_on_real_data_alone(tmp_path: Path) -> None:
    """A pass that is wrong for three rows is taken where only other numbers are drawn, and reverted on such data."""
    text = "g (float[N, 4] x) => (float[N, 4] y) { h = MatMul (x, w1) y = Tanh (h) }"
    onnx.save(model_of(text, w1=matrix(4, 4, 0)), tmp_path / "model.onnx")
    hostile = TESTS / "support" / "hostile_passes.py"
    data = {
        "model": {"onnx": "model.onnx", "dims": {"N": [2]}},
        "passes": {"recipe": [{f"{hostile}:at_size": {"size": 3}}]},
        "runtime": {"backends": ["onnxruntime"]},
        "verify": {"sizes": []},
    }
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(data))
    np.savez(tmp_path / "x.npz", x=np.ones((3, 4), np.float32))
    assert [row.status for row in run(path)[0].optimize.passes] == [Status.RAN]
    result, notes = run(path, f"verify.inputs={tmp_path}/x.npz", "verify.draws=0")
    assert result.export.draws == ("inputs of x.npz (N=3)",)
    assert [row.status for row in result.optimize.passes] == [Status.REVERTED]
    assert notes == []
    assert run(path, f"verify.inputs={tmp_path}/x.npz", "verify.draws=0")[0].cached == ("export", "passes", "runtime")
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 4), np.float32))
    result, _ = run(path, f"verify.inputs={tmp_path}/x.npz", "verify.draws=0")
    assert (result.cached, [row.status for row in result.optimize.passes]) == ((), [Status.RAN])


def test_inputs_that_the_model_does_not_take_are_named(config_file, tmp_path: Path) -> None:
    path = config_file(factory="picky", verify={"inputs": "x.npz"}, runtime={"backends": []})
    np.savez(tmp_path / "x.npz", x=np.full((2, 8, 32), -1, np.float32))
    with pytest.raises(SourceError, match=r"inputs of x.npz: the model raises.*no negative numbers"):
        run(path)
