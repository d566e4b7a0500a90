"""Unread weights: known by the place where they lie, and never looked at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from passes.errors import ModelError
from passes.weights.detached import UNREAD, DetachedModel, read_model
from passes.weights.files import save
from passes.weights.stand_ins import Weight, initializer_of

TERABYTES = 4 * 2**40
SIDE = 2**19


def pointing(path: Path, places: dict[str, tuple[str, int]], dtype: int = TensorProto.FLOAT, side: int = 64) -> Path:
    """A model whose square matrices lie in other files: name → (file, offset)."""
    model = onnx.ModelProto(ir_version=10, opset_import=[helper.make_opsetid("", 20)])
    model.graph.name = "far"
    size = helper.tensor_dtype_to_np_dtype(dtype).itemsize
    for name, (location, offset) in places.items():
        tensor = model.graph.initializer.add(name=name, data_type=dtype, dims=[side, side])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", offset), ("length", side * side * size)):
            tensor.external_data.add(key=key, value=str(value))
    model.graph.node.append(helper.make_node("Sum", list(places), ["y"]))
    model.graph.output.append(helper.make_tensor_value_info("y", dtype, [side, side]))
    path.write_bytes(model.SerializeToString())
    return path


def hole(path: Path, size: int) -> Path:
    """A file of `size` bytes that takes no room."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def digests(model: DetachedModel) -> dict[str, str]:
    return {tensor.name: model.digest(tensor) for tensor in model.proto.graph.initializer}


def test_four_terabytes_are_read_and_written_without_a_look_at_them(tmp_path: Path) -> None:
    hole(tmp_path / "shard", TERABYTES)
    path = pointing(tmp_path / "m.onnx", {name: ("shard", at * 2**40) for at, name in enumerate("abcd")}, side=SIDE)

    model = read_model(path, unread=True)
    save(model, path, referring=True)

    assert model.nbytes() > TERABYTES
    assert len(set(digests(model).values())) == 4
    assert path.stat().st_size < 2000
    assert digests(read_model(path)) == digests(model)  # the file says of itself that its weights stay unread


def test_a_place_is_its_identity(tmp_path: Path) -> None:
    for name in ("one", "two"):
        hole(tmp_path / name, 2**16)
    places = {"a": ("one", 0), "again": ("one", 0), "behind": ("one", 2**14), "other": ("two", 0)}
    seen = digests(read_model(pointing(tmp_path / "m.onnx", places), unread=True))

    assert seen["a"] == seen["again"]
    assert len({seen["a"], seen["behind"], seen["other"]}) == 3
    # Read, they are all the same zeros.
    assert len(set(digests(read_model(tmp_path / "m.onnx", unread=False)).values())) == 1


def test_a_turned_weight_is_known_by_where_it_comes_from(tmp_path: Path) -> None:
    hole(tmp_path / "one", 2**16)
    path = pointing(tmp_path / "m.onnx", {"a": ("one", 0), "b": ("one", 2**14)})
    model = read_model(path, unread=True)
    a, b = model.proto.graph.initializer
    turned = {
        model.transposed_digest(a, (1, 0)),
        model.transposed_digest(b, (1, 0)),
        model.transposed_digest(a, (0, 1)),
    }
    assert len(turned | {model.digest(a), model.digest(b)}) == 5


def test_only_what_was_rewritten_is_written(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(np.arange(2 * 4096, dtype=np.float32).tobytes())
    model = read_model(pointing(tmp_path / "m.onnx", {"a": ("shard", 0), "b": ("shard", 2**14)}), unread=True)
    values = np.full((64, 64), 7, np.float32)
    weight = Weight((64, 64), TensorProto.FLOAT, values.view(np.uint8).ravel(), "0" * 32)
    tensor, key = initializer_of("b", weight)
    model.proto.graph.initializer[1].CopyFrom(tensor)
    assert key is not None

    for _ in range(2):  # the second time its own data lies in the folder too, and is written anew
        save(DetachedModel(model.proto, {**model.weights, key: weight}), tmp_path / "out.onnx", referring=True)
        model = read_model(tmp_path / "out.onnx")
        weight = next(weight for weight in model.weights.values() if weight.data[0] == values.view(np.uint8)[0, 0])
        key = next(key for key, stored in model.weights.items() if stored is weight)

    [data] = tmp_path.glob("out.onnx.*.data")
    assert data.stat().st_size == 2**14
    whole = onnx.load(tmp_path / "out.onnx")
    a, b = (onnx.numpy_helper.to_array(tensor) for tensor in whole.graph.initializer)
    assert np.array_equal(a.ravel(), np.arange(4096))
    assert np.array_equal(b, values)
    assert [entry.key for entry in whole.metadata_props] == [UNREAD]
    onnx.checker.check_model(str(tmp_path / "out.onnx"))


def test_float8_stays_unread_and_bool_is_refused(tmp_path: Path) -> None:
    hole(tmp_path / "shard", 2**40)
    path = pointing(tmp_path / "m.onnx", {"a": ("shard", 0)}, TensorProto.FLOAT8E4M3FN, side=SIDE)
    assert read_model(path, unread=True).nbytes() > 2**38
    path = pointing(tmp_path / "m.onnx", {"a": ("shard", 0)}, TensorProto.BOOL, side=SIDE)
    with pytest.raises(ModelError, match=r"'a' has \d+ bytes of bool, which no stand-in can be made for"):
        read_model(path, unread=True)
