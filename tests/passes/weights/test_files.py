"""Writing: at every moment the model under the final name is whole."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from passes.weights.detached import read_model
from passes.weights.files import replace_folder_when_done, replace_when_done, save
from tests.support.onnx_models import attention, detached


def arrays(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


@pytest.mark.parametrize("external_from", [0, 2**30], ids=["external", "inline"])
def test_what_is_saved_is_what_is_read(tmp_path: Path, external_from: int) -> None:
    path = tmp_path / "model.onnx"
    save(detached(attention()), path, external_from)
    onnx.checker.check_model(str(path), full_check=True)
    expected = {tensor.name: numpy_helper.to_array(tensor) for tensor in attention().graph.initializer}
    for name, array in arrays(path).items():
        np.testing.assert_array_equal(array, expected[name])
    again = read_model(path)
    assert {weight.digest for weight in again.weights.values()} == {
        weight.digest for weight in detached(attention()).weights.values()
    }
    assert len(list(tmp_path.glob("*.data"))) == (1 if external_from == 0 else 0)


def test_a_new_model_brings_its_own_data_file_and_the_old_one_goes(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    save(detached(attention(32)), path, 0)
    (first,) = tmp_path.glob("*.data")
    save(detached(attention(64)), path, 0)
    (second,) = tmp_path.glob("*.data")
    assert first.name != second.name
    onnx.checker.check_model(str(path), full_check=True)


def test_data_files_of_other_models_stay(tmp_path: Path) -> None:
    names = ("m1.onnx", "m[1].onnx.b.onnx", "m[1].onnx")
    for name in (*names, "m[1].onnx"):
        save(detached(attention(64 if name == names[-1] else 32)), tmp_path / name, 0)
    for name in names:
        onnx.checker.check_model(str(tmp_path / name), full_check=True)
    save(detached(attention(32)), tmp_path / names[-1], 0)
    assert len(list(tmp_path.glob("*.data"))) == len(names)


def test_what_a_killed_save_was_writing_goes_with_the_next_one(tmp_path: Path) -> None:
    path, of_another = tmp_path / "model.onnx", tmp_path / ".model.onnx.b.onnx.12.12.tmp"
    for name in (".model.onnx.12.12.tmp", ".model.onnx.0123456789ab.data.12.12.tmp", of_another.name):
        (tmp_path / name).write_text("half")
    save(detached(attention()), path)
    assert set(tmp_path.iterdir()) == {path, of_another}


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), replace_when_done(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert [file.name for file in tmp_path.iterdir()] == ["file.txt"]
    assert path.read_text() == "old"


def test_a_model_that_fails_its_check_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    save(detached(attention(32)), path, 0)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def check(written: Path) -> None:
        onnx.checker.check_model(str(written), full_check=True)  # with its data file
        raise RuntimeError

    with pytest.raises(RuntimeError):
        save(detached(attention(64)), path, 0, check)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_one_of_two_savers_of_one_path_leaves_a_whole_model(tmp_path: Path) -> None:
    """The second saver ends while the first has written its data file, and its model not yet."""
    path = tmp_path / "model.onnx"
    with ThreadPoolExecutor(1) as pool:
        others = []

        def check(_: Path) -> None:
            others.append(pool.submit(save, detached(attention(64)), path, 0))
            time.sleep(0.3)

        save(detached(attention(32)), path, 0, check)
        others[0].result()
    onnx.checker.check_model(str(path), full_check=True)
    assert len(list(tmp_path.glob("*.data"))) == 1


def digests(path: Path) -> dict[str, str]:
    model = read_model(path)
    return {tensor.name: model.digest(tensor) for tensor in model.proto.graph.initializer}


def test_a_source_shares_the_weights_that_the_final_model_still_has(tmp_path: Path) -> None:
    """Three times, as a run is repeated: the data file that the source points into is another one each time."""
    source, final = tmp_path / "exported.onnx", tmp_path / "model.onnx"
    onnx.save(attention(), source, save_as_external_data=True, location="exported.onnx.data", size_threshold=0)
    before, whole = digests(source), source.with_name("exported.onnx.data").stat().st_size
    for changed in (1, 2, 1):
        model = read_model(source)
        tensors = [tensor for tensor in model.proto.graph.initializer if model.weight(tensor)]
        for place, tensor in enumerate(tensors[:changed]):
            tensor.CopyFrom(numpy_helper.from_array(model.array(tensor) + changed + place, tensor.name))
        expected = {tensor.name: model.digest(tensor) for tensor in model.proto.graph.initializer}
        save(model, final, 0, source=(read_model(source), source))
        assert (digests(source), digests(final)) == (before, expected)
        for path in (source, final):
            onnx.checker.check_model(str(path), full_check=True)
        names = sorted(file.name.replace(file.name.split(".")[-2], "*") for file in tmp_path.glob("*.data"))
        assert names == ["exported.onnx.*.data", "model.onnx.*.data"]
        (own,) = tmp_path.glob("exported.onnx.*.data")
        assert own.stat().st_size < whole / 2


def test_equal_weights_are_written_once(tmp_path: Path) -> None:
    model = attention()
    first = model.graph.initializer[0]
    for name in ("again", "and_again"):
        model.graph.initializer.add().CopyFrom(first)
        model.graph.initializer[-1].name = name
    save(detached(model), tmp_path / "model.onnx", 0)
    save(detached(attention()), tmp_path / "other.onnx", 0)
    (path,), (other,) = tmp_path.glob("model.onnx.*.data"), tmp_path.glob("other.onnx.*.data")
    assert path.read_bytes() == other.read_bytes()
    assert digests(tmp_path / "model.onnx")["again"] == digests(tmp_path / "other.onnx")[first.name]


def test_a_folder_takes_the_place_of_the_old_one_when_it_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    for text in ("first", "second"):
        with replace_folder_when_done(folder) as fresh:
            (fresh / text).write_text(text)
        assert [file.name for file in folder.iterdir()] == [text]
    with pytest.raises(OSError, match="no space"), replace_folder_when_done(folder) as fresh:
        (fresh / "third").write_text("a half")
        raise OSError("no space")
    assert sorted(tmp_path.rglob("*")) == [folder, folder / "second"]
