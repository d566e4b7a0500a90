"""The commands for everyday jobs: files in, files out, exit codes and what is printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx.parser
import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.commands import facts
from pipeline.commands.facts import read_size
from pipeline.commands.view import short_names
from tests.support.browser import browser
from tests.support.onnx_models import biased_attention
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(biased_attention(), path)
    return path


def call(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert getattr(result.exception, "exit_code", result.exit_code) == code, (result.output, result.exception)
    return result.output + str(result.exception or "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("extract --to scores", "extract: 22 → 11 nodes, max error 0.0e+00"),
        ("outputs --add scores", "outputs: 22 → 22 nodes"),
        ("rename --value x=images", "rename: 22 → 22 nodes"),
        ("fix-shapes --shape x=2,8,32", "fix-shapes: nothing to change"),
        ("change-batch", "4 Reshapes find the batch now"),
        ("convert-opset --opset 18", "convert-opset: 22 → 22 nodes"),
        ("to-fp16 --keep Softmax", "Softmax: keep names it"),
        ("to-bf16 --proof structure", "to-bf16: 22 → 24 nodes, proven by structure alone"),
    ],
)
def test_a_step(words: str, said: str, model: Path) -> None:
    name, *options = words.split()
    out = model.with_name("out.onnx")
    assert said in call(name, model, "-o", out, *options)
    onnx.checker.check_model(onnx.load(out), full_check=True)


def test_names_may_have_commas(model: Path) -> None:
    out = model.with_name("out.onnx")
    call("rename", model, "-o", out, "--value", "scores=a,b")
    assert "11 nodes" in call("extract", out, "-o", model.with_name("part.onnx"), "--to", "a,b", "--to", "q0")
    assert "22 nodes" in call("outputs", out, "-o", model.with_name("more.onnx"), "--add", "a,b")


def test_a_small_command_loads_what_it_needs(model: Path) -> None:
    """rich and pydantic are for terminals, and for options that are neither text nor path: 0.08 of 0.4 s."""
    absent = "import sys; sys.modules.update(dict.fromkeys(('rich', 'pydantic', 'torch')))"  # an import of them fails
    program = f"{absent}; from pipeline.cli import main; main()"
    words = ["convert-opset", str(model), "-o", str(model.with_name("out.onnx")), "--opset", "18"]
    ended = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert "convert-opset: 22 → 22 nodes" in ended.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("convert-opset --opset seven", "'--opset'"),
        ("to-fp16 --timeout-s 0", "'--timeout-s'"),
        ("to-fp16 --proof no", "'no' is not one of"),
    ],
)
def test_values_of_options_are_checked(words: str, said: str, model: Path) -> None:
    name, *options = words.split()
    assert said in call(name, model, "-o", model.with_name("out.onnx"), *options, code=2)


def test_what_is_not_proven_is_not_written(model: Path) -> None:
    out = model.with_name("out.onnx")
    said = call("convert-opset", model, "-o", out, "--opset", "7", code=1)
    assert "convert-opset" in said
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("extract", "expected --from NAME, --to NAME or both"),
        ("extract --to nope", "the model has no value or node 'nope'"),
        ("outputs", "expected --add VALUE or --drop OUTPUT"),
        ("outputs --drop nope", "the model has no output 'nope'"),
        ("rename --value x", "--value is 'x'; expected OLD=NEW"),
        ("rename --value x=a --value x=b", "found x=a and x=b for one name; leave one of them out"),
        ("fix-shapes --shape x", "--shape is 'x'; expected INPUT=1,3,320,320"),
        ("fix-shapes --shape x=a,b", "--shape is 'x=a,b'; expected INPUT=1,3,320,320"),
        ("fix-shapes --shape y=1,2", "the model has no input 'y'"),
        ("change-batch --size 0", "size is 0; expected a number of 1 or more, or a dim's name"),
        ("convert-opset --opset 1", "convert-opset: found opset 1, expected 7 to"),
        ("to-fp16 --keep Nope", "the model has no node or operator 'Nope'"),
        ("to-fp16 --keep ,", "--keep ',' names nothing; expected a name, or no --keep"),
        ("optimize --keep=", "--keep '' names nothing; expected a name, or no --keep"),
        ("optimize --skip qkv --skip=", "--skip '' names nothing; expected a name, or no --skip"),
    ],
)
def test_mistakes(words: str, said: str, model: Path) -> None:
    name, *options = words.split()
    out = model.with_name("out.onnx")
    assert said in call(name, model, "-o", out, *options, code=2)
    assert not out.exists()


NORMAL = "(float[2] x) => (float[2] y) { n = RandomNormalLike (x) y = Add (x, n) }"
HALF = "(float[2] x) => (float[2] y) { a = Relu (x) b = a.b.Foo (a) y = Relu (b) }"


@pytest.mark.parametrize(
    ("words", "opset", "body", "said", "code"),
    [
        ("convert-opset --opset 22", 21, NORMAL, "since onnxruntime refuses the model", 0),
        ("to-fp16", 22, NORMAL, "CPU provider has no RandomNormalLike of opset 22 for the types", 0),
        ("change-batch", 17, "(float[] x) => (float[] y) { y = Relu (x) }", "input 'x' has no known rank", 2),
        ("change-batch", 17, "(float[2, 3] x) => (int64[] y) { y = NonZero (x) }", "its first axis is no batch", 1),
        ("split --target qnn-htp", 17, HALF, "declare the operator that makes it (--custom-ops", 1),
    ],
)
def test_what_cannot_be_done_or_run_is_said(
    words: str, opset: int, body: str, said: str, code: int, tmp_path: Path
) -> None:
    (name, *options), path = words.split(), tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}, "a.b" : 1]> g {body}'), path)
    out = tmp_path / ("parts" if name == "split" else "out.onnx")
    assert said in call(name, path, "-o", out, *options, code=code)


def test_a_value_of_unknown_rank_has_no_size(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["" : 20]> g (float[] x) => (float[] y) { y = Relu (x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    said = call("inspect", tmp_path / "model.onnx")
    assert "x  float[]  of unknown rank" in said and "largest activations" not in said


def drawn_by(page: Path) -> dict[str, Any]:
    """The data of a page that `view` has written."""
    text = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)
    assert text is not None
    return json.loads(text[1])


def test_the_page_of_a_model(model: Path) -> None:
    page = model.with_name("page.html")
    assert call("view", model, "-o", page) == f"page: {page}\n"
    (scene,) = drawn_by(page)["scenes"]
    assert scene["title"] == model.name
    assert [box["name"] for box in scene["boxes"] if box["op"] in ("input", "output")] == ["x", "y"]
    assert not any("state" in box or "db" in box for box in scene["boxes"])


def test_the_page_of_two_models_with_errors(model: Path) -> None:
    half, page = model.with_name("half.onnx"), model.with_name("page.html")
    call("to-fp16", model, "-o", half, "--keep", "Softmax")
    call("view", model, half, "-o", page, "--errors")
    data = drawn_by(page)
    first, second = data["scenes"]
    ratios = {box["makes"]: box["db"] for box in first["boxes"] if "db" in box}
    assert 40 < ratios["scores"] < 90, "float16 has 11 bits, 6 dB each"
    assert not any("db" in box for box in second["boxes"])
    assert {box["op"] for box in second["boxes"] if box["state"] == "only"} == {"Cast"}
    assert "added" in data["summary"]


def test_the_names_of_two_models_tell_them_apart() -> None:
    assert short_names([Path("a/b/old.onnx"), Path("/c/new.onnx")]) == ["old.onnx", "new.onnx"]
    assert short_names([Path("a/b/m.onnx"), Path("a/c/m.onnx")]) == ["b/m.onnx", "c/m.onnx"]
    assert short_names([Path("m.onnx"), Path("m.onnx")]) == ["m.onnx", "m.onnx"]
    assert short_names([Path()]) == ["."]


def test_values_with_nothing_in_common_are_the_worst(tmp_path: Path) -> None:
    """An error where the first model gives zeros has no ratio of signal and noise; outputs may have other names."""
    for name, end, call_ in (("zeros", "y", "Sub (x, x)"), ("ones", "z", "Exp (x)")):
        body = f"(float[2] x) => (float[2] {end}) {{ a = {call_} {end} = Relu (a) }}"
        graph = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g {body}')
        onnx.save(graph, tmp_path / f"{name}.onnx")
    page = tmp_path / "page.html"
    call("view", tmp_path / "zeros.onnx", tmp_path / "ones.onnx", "-o", page, "--errors")
    ratios = {box["makes"]: box.get("db") for box in drawn_by(page)["scenes"][0]["boxes"] if "makes" in box}
    assert ratios["y"] == -300


@pytest.mark.parametrize("words", ["view -o", "inspect --html"])
def test_a_page_is_a_file(words: str, model: Path) -> None:
    name, option = words.split()
    said = call(name, model, option, model.parent, code=2)
    assert "it is a folder; name a file in it" in said
    assert "parameters" not in said, "nothing is printed before the page can be written"


@pytest.mark.parametrize("words", ["view -o", "inspect --html"])
def test_a_page_that_cannot_be_written_leaves_the_old_one(words: str, model: Path) -> None:
    page = model.with_name("page.html")
    page.write_text("old")
    command = [sys.executable, "-m", "onnxline", *words.split()[:1], str(model), *words.split()[1:], str(page)]
    limited = ["bash", "-c", 'ulimit -f 1; exec "$@"', "limited", *command]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # Python would write half a file, and fail on it
    ended = subprocess.run(limited, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "what was there before is unharmed" in ended.stderr
    assert page.read_text() == "old"


def test_models_that_do_not_run_cannot_be_compared(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["" : 20, "a.b" : 1]> g (float[2] x) => (float[2] y) { y = a.b.Foo (x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "foo.onnx")
    assert "declare the operator" in call("compare", tmp_path / "foo.onnx", tmp_path / "foo.onnx", code=2)


def test_inspect(model: Path, tmp_path: Path) -> None:
    said = call("inspect", model, "--html", tmp_path / "page.html")
    assert "structures   1 qkv, 1 attention" in said
    assert "rknn           opset 20" in said
    assert "<td style='text-align:left'>MatMul</td>" in (tmp_path / "page.html").read_text()
    assert "inspect: x is to be [1, 3]" in call("inspect", model, "--shape", "x=1,3", code=2)
    data = json.loads(call("inspect", model, "--json", "--target", "rknn"))
    assert (data["total_macs"], data["refused"]) == (73_728, {"rknn": ["opset 20"]})


def test_the_page_of_facts_fits_on_a_phone(browser: Browser, model: Path, tmp_path: Path) -> None:
    long = model.rename(model.with_name(f"{'a_long_name' * 9}.onnx"))
    call("inspect", long, "--html", tmp_path / "page.html")
    page = browser.new_page(viewport={"width": 360, "height": 740})
    page.goto((tmp_path / "page.html").as_uri())
    assert page.locator("table").count() > 5
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(
    ("text", "size"), [("1GB", 10**9), ("500MiB", 500 * 2**20), ("2k", 2000), ("1.5 KiB", 1536), ("7", 7)]
)
def test_a_size_of_parts_has_decimal_or_binary_units(text: str, size: int) -> None:
    assert read_size(text) == size


def test_split_and_merge(model: Path, tmp_path: Path) -> None:
    said = call("split", model, "-o", tmp_path / "parts", "--at", "scores")
    assert "2 parts" in said
    first, second = (tmp_path / "parts" / f"part{place}.onnx" for place in (0, 1))
    merged = call("merge", first, second, "-o", tmp_path / "whole.onnx", "--map", "h=h", "--map", "scores=scores")
    assert "max error 0.0e+00" in merged
    twice = call("merge", first, second, "-o", tmp_path / "twice.onnx", "--map", "h=h", "--map", "h=scores", code=2)
    assert "'h' of the first model is" in twice, "one value may feed two inputs, of its type"
    call("split", model, "-o", tmp_path / "parts", "--at", "scores", code=2)  # the folder is not empty
    call("split", model, "-o", tmp_path / "other", code=2)
    call("split", model, "-o", tmp_path / "other", "--max-size", "huge", code=2)
    assert "part" in call("split", model, "-o", tmp_path / "small", "--max-size", "9kB")
    call("split", model, "-o", tmp_path / "target", "--target", "coreml")


def test_a_value_may_feed_several_inputs(tmp_path: Path) -> None:
    first = "g (float[2] x) => (float[2] y) { y = Neg (x) }"
    second = "g (float[2] u, float[2] v, float[2] w) => (float[2] z) { t = Sub (u, v) z = Add (t, w) }"
    for name, text in (("a", first), ("b", second)):
        model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> {text}')
        onnx.save(model, tmp_path / f"{name}.onnx")
    pairs = [word for pair in ("y=u", "x=v", "y=w") for word in ("--map", pair)]
    call("merge", tmp_path / "a.onnx", tmp_path / "b.onnx", "-o", tmp_path / "out.onnx", *pairs)
    merged = onnx.load(tmp_path / "out.onnx").graph
    assert [[*node.input] for node in merged.node] == [["x"], ["y", "x"], ["t", "y"]]
    assert [value.name for value in merged.input] == ["x"]


@pytest.mark.parametrize("place", [".", "/", ""])
def test_a_page_cannot_be_a_folder(place: str, model: Path) -> None:
    assert "it is a folder; name a file in it" in call("view", model, "-o", place, code=2)
    assert "it is a folder; name a file in it" in call("inspect", model, "--html", place, code=2)


def test_sizes_of_many_parts_are_a_range(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["split", model, "--at", "scores", "--no-proof", "-o"]
    assert re.search(r"2 parts \([\d.]+ KiB, [\d.]+ KiB\)", call(*words, tmp_path / "a"))
    monkeypatch.setattr(facts, "MOST_SIZES", 1)
    assert re.search(r"2 parts \([\d.]+ KiB to [\d.]+ KiB\)", call(*words, tmp_path / "b"))


def test_a_split_that_cannot_write_all_parts_leaves_none(model: Path, tmp_path: Path) -> None:
    """The same command was refused once the disk had room, since the folder was not empty."""
    words = ["split", model, "--at", "scores", "--no-proof", "-o"]
    call(*words, tmp_path / "whole")
    first, second = ((tmp_path / "whole" / f"part{place}.onnx").stat().st_size for place in (0, 1))
    assert first < second
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({first}, {first}))"
    code = f"from pipeline.cli import main; {limit}; main()"
    limited = [sys.executable, "-B", "-c", code, *map(str, words), str(tmp_path / "parts")]
    ended = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, "part1.onnx" in ended.stderr) == (2, True), ended.stderr
    assert not list((tmp_path / "parts").iterdir())
    call(*words, tmp_path / "parts")


def test_a_model_that_does_not_run_is_a_mistake_of_its_user(model: Path, tmp_path: Path) -> None:
    """Its parts are not wrong, so the exit code is not that of a failed check."""
    strange = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 17, "com.example" : 1]>
        g (float[1, 4] x) => (float[1, 4] y) { a = Relu(x) b = com.example.Strange(a) y = Relu(b) }"""
    )
    onnx.save(strange, tmp_path / "strange.onnx")
    split = ("split", tmp_path / "strange.onnx", "-o", tmp_path / "parts", "--at", "a")
    assert "does not run as it is" in call(*split, code=2)
    assert "2 parts" in call(*split, "--no-proof")
    merge = ("merge", tmp_path / "strange.onnx", tmp_path / "strange.onnx", "-o", tmp_path / "all.onnx", "--map", "y=x")
    assert "does not run as it is" in call(*merge, code=2)
    assert not (tmp_path / "all.onnx").exists()


def test_random_outputs_are_said_to_be_random(tmp_path: Path) -> None:
    drawn = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 17]>
        g (float[1, 4] x) => (float[1, 4] y) { a = RandomNormalLike (x) y = Add (a, x) }"""
    )
    onnx.save(drawn, tmp_path / "drawn.onnx")
    said = call("split", tmp_path / "drawn.onnx", "-o", tmp_path / "parts", "--at", "a")
    assert "only shape and dtype of y, which is random" in said


def test_a_full_folder_of_temporary_files(model: Path, tmp_path: Path) -> None:
    """No part is at fault; a limit on the size of files stands for a full disk."""
    large = onnx.load(model)
    large.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((64, 1024), np.float32), "large"))
    large.graph.node.append(onnx.helper.make_node("ReduceSum", ["large"], ["extra"]))
    large.graph.output.append(onnx.helper.make_tensor_value_info("extra", onnx.TensorProto.FLOAT, [1, 1]))
    onnx.save(large, tmp_path / "large.onnx")
    words = ["split", str(tmp_path / "large.onnx"), "-o", str(tmp_path / "parts"), "--at", "scores"]
    script = (
        "import resource, sys; from pipeline import cli; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
        f"sys.argv = ['onnxline', *{words!r}]; cli.main()"
    )
    ended = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "the system refused to go on" in ended.stderr and "TMPDIR" in ended.stderr


def test_compare_on_data_of_the_user(model: Path, tmp_path: Path) -> None:
    """A model that differs where an input is large alone: draws of the user find it, or do not."""
    changed = onnx.load(model)
    relu = next(node for node in changed.graph.node if node.op_type == "Relu")
    relu.op_type = "Identity"
    onnx.save(changed, tmp_path / "other.onnx")
    shape = tuple(dim.dim_value or 2 for dim in changed.graph.input[0].type.tensor_type.shape.dim)
    np.savez(tmp_path / "zeros.npz", x=np.zeros(shape, np.float32))
    np.savez(tmp_path / "large.npz", x=np.random.default_rng(0).standard_normal(shape, np.float32) * 9)
    other = tmp_path / "other.onnx"
    assert "output y" in call("compare", model, other, "--data", tmp_path / "large.npz", code=1)
    data = json.loads(call("compare", model, model, "--data", tmp_path / "zeros.npz", "--json"))
    assert data["ok"] is True
    assert "no file" in call("compare", model, other, "--data", tmp_path / "none.npz", code=2)


def test_encodings_through_split_and_merge(model: Path, tmp_path: Path) -> None:
    encoding = {"bw": 8, "dtype": "INT", "enc_type": "PER_TENSOR", "is_sym": False, "offset": [-128], "scale": [0.1]}
    rows = [{**encoding, "name": name} for name in ("x", "scores", "y")]
    (tmp_path / "e.encodings").write_text(
        json.dumps({"version": "1.0.0", "activation_encodings": rows, "param_encodings": []})
    )
    parts = tmp_path / "parts"
    call("split", model, "-o", parts, "--at", "scores", "--encodings", tmp_path / "e.encodings")
    files = [part for place in (0, 1) for part in ("--encodings", parts / f"part{place}.encodings")]
    ends = ["--map", "h=h", "--map", "scores=scores", "-o", tmp_path / "whole.onnx"]
    call("merge", parts / "part0.onnx", parts / "part1.onnx", *ends, *files)
    found = json.loads((tmp_path / "whole.encodings").read_text())
    assert sorted(row["name"] for row in found["activation_encodings"]) == ["scores", "x", "y"]
    call("merge", parts / "part0.onnx", parts / "part1.onnx", *ends, *files[:2], code=2)
