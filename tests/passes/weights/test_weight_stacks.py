"""Stacks of unread weights: one weight while passes run, pieces before and after."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import passes
from passes.errors import ModelError
from passes.weights.detached import UNREAD, DetachedModel, read_model
from passes.weights.files import save
from passes.weights.mapped import FileMaps, FileRange, find_file_range, release
from passes.weights.stand_ins import Weight, initializer_of, inline
from passes.weights.weight_stacks import collapse, expand
from tests.support.onnx_models import matrix

NESTED = """<ir_version: 10, opset_import: ["": 20]>
experts (float[2, 16] x, int64[1] chosen) => (float[1, 2, 32] y) {
    gates = Concat <axis = 0> (g0, g1)
    ups = Concat <axis = 0> (u0, u1)
    both = Concat <axis = -1> (gates, ups)
    one = Gather <axis = 0> (both, chosen)
    i = Identity (one)
    y = MatMul (x, i)
}"""


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    model = onnx.parser.parse_model(NESTED)
    for seed, name in enumerate(("g0", "g1", "u0", "u1")):
        model.graph.initializer.append(onnx.numpy_helper.from_array(matrix(16, 16, seed)[None], name))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="shard", size_threshold=1024)
    return tmp_path / "m.onnx"


def ops(model: DetachedModel) -> list[str]:
    return [node.op_type for node in model.proto.graph.node]


def test_a_stack_is_one_weight_and_comes_apart_again(experts: Path) -> None:
    model = read_model(experts, unread=True)
    whole, stacks = collapse(model)

    assert ops(whole) == ["Gather", "Identity", "MatMul"]
    [both] = whole.proto.graph.initializer
    assert (both.name, list(both.dims)) == ("both", [2, 16, 32])
    assert whole.nbytes() > 2 * 16 * 32 * 4

    again = expand(whole, stacks, model)
    assert ops(again) == ops(model)
    assert {tensor.name for tensor in again.proto.graph.initializer} == {"g0", "g1", "u0", "u1"}


def test_a_stack_cannot_be_read(experts: Path) -> None:
    whole, _ = collapse(read_model(experts, unread=True))
    [both] = whole.proto.graph.initializer
    weight = whole.weight(both)
    assert weight is not None
    with pytest.raises(ModelError, match="'both' is joined from several unread weights"):
        inline(both, weight.data)
    with pytest.raises(ValueError, match="contiguous"):
        weight.array()


def test_what_somebody_else_reads_too_stays_apart(experts: Path) -> None:
    model = onnx.load(experts, load_external_data=False)
    model.graph.node.append(onnx.helper.make_node("Neg", ["g0"], ["z"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, [1, 16, 16]))
    experts.write_bytes(model.SerializeToString())
    whole, stacks = collapse(read_model(experts, unread=True))
    assert ops(whole).count("Concat") == 2
    assert len(stacks) == 1
    read = read_model(experts, unread=False)
    assert collapse(read) == (read, {})


def test_a_run_gives_the_same_numbers(experts: Path) -> None:
    import onnxruntime

    feeds = {"x": matrix(2, 16, 9), "chosen": np.array([1])}
    before = np.asarray(onnxruntime.InferenceSession(experts).run(None, feeds)[0])
    run = passes.optimize(experts, ["default", "fold_constants"], proof="structure")
    save(run.model, experts, referring=True)
    assert ops(run.model) == ["Concat", "Concat", "Concat", "Gather", "MatMul"]
    assert np.array_equal(np.asarray(onnxruntime.InferenceSession(experts).run(None, feeds)[0]), before)
    assert {path.name for path in experts.parent.iterdir()} == {"m.onnx", "shard"}


# Mapped files: one mapping for all tensors of a file, and each tensor knows where it lies.


def write_numbers(path: Path, count: int) -> str:
    path.write_bytes((np.arange(count) % 251).astype(np.uint8).tobytes())
    return str(path)


def descriptors(path: str) -> int:
    """Those of this process that hold the file."""
    return sum(entry.is_symlink() and str(entry.readlink()) == path for entry in Path("/proc/self/fd").iterdir())


def test_a_thousand_views_of_a_file_take_one_descriptor(tmp_path: Path) -> None:
    path, maps = write_numbers(tmp_path / "w", 9000), FileMaps()

    views = [maps.view(FileRange(path, 9 * place, 9)) for place in range(1000)]

    assert descriptors(path) == 1
    assert all(np.array_equal(view, np.arange(9 * at, 9 * at + 9) % 251) for at, view in enumerate(views))


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 70_001])
def test_a_view_knows_its_place_and_gives_back_its_pages(tmp_path: Path, offset: int) -> None:
    path = write_numbers(tmp_path / "w", 100_000)
    view = FileMaps().view(FileRange(path, offset, 12_345))

    assert find_file_range(view) == FileRange(path, offset, 12_345)
    assert find_file_range(view[100:200]) == FileRange(path, offset + 100, 100)
    release(view)
    assert np.array_equal(view, np.arange(offset, offset + 12_345) % 251)


def test_a_mapping_of_numpys_own_knows_its_place_too(tmp_path: Path) -> None:
    path = write_numbers(tmp_path / "w", 100_000)
    view = np.memmap(path, np.uint8, "r", offset=5000, shape=(60_000,))
    assert find_file_range(view) == FileRange(path, 5000, 60_000)
    release(view[10_000:])
    assert view[30_000] == 35_000 % 251


def test_memory_has_no_place(tmp_path: Path) -> None:
    path = write_numbers(tmp_path / "w", 10)
    view = FileMaps().view(FileRange(path, 0, 10))
    assert find_file_range(np.array(view)) is None
    Path(path).unlink()
    assert find_file_range(view) is None


def test_a_file_that_has_grown_is_mapped_again(tmp_path: Path) -> None:
    path, maps = write_numbers(tmp_path / "w", 10), FileMaps()
    first = maps.view(FileRange(path, 0, 10))
    write_numbers(tmp_path / "w", 20)
    assert maps.view(FileRange(path, 10, 10)).tolist() == list(range(10, 20))
    assert first.tolist() == list(range(10))
    with pytest.raises(ValueError, match="has 20 bytes, and 30 were asked for"):
        maps.view(FileRange(path, 20, 10))


# Unread weights: known by the place where they lie, and never looked at.

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
