"""Detached weights: nothing is lost, and no two tensors look equal to a pass unless they are."""

from __future__ import annotations

import itertools
import resource
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxoptimizer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from passes.errors import ModelError
from passes.graph.traversal import sort_nodes
from passes.weights.detached import attach, detach, read_model
from passes.weights.stand_ins import DETACH_FROM_BYTES, digest_of, key_of
from tests.support.onnx_models import detached, matrix, model_of

DTYPES = [
    *(np.float32, np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    *(np.int8, np.uint8, np.int32, np.int64, np.uint64),
]


def holding(**arrays: np.ndarray) -> onnx.ModelProto:
    """A model that adds up nothing: it only holds initializers."""
    graph = helper.make_graph([], "g", [], [], [numpy_helper.from_array(a, n) for n, a in arrays.items()])
    return helper.make_model(graph)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_attach_gives_back_every_byte(dtype: type) -> None:
    values = np.arange(-700, 700).astype(np.int64).astype(dtype)
    model = holding(a=values, zeros=np.zeros(1400, dtype), ones=np.ones(1400, dtype), small=values[:3])
    before = [numpy_helper.to_array(tensor).tobytes() for tensor in model.graph.initializer]

    made = detached(model)
    after = attach(made)

    assert len(made.weights) == 3
    assert [numpy_helper.to_array(tensor).tobytes() for tensor in after.graph.initializer] == before
    onnx.checker.check_tensor(after.graph.initializer[0])


def test_a_small_tensor_and_a_bool_stay() -> None:
    model = detached(holding(small=np.ones(2, np.float32), flags=np.ones(4096, np.bool_)))
    assert not model.weights


@given(
    st.lists(st.sampled_from(["zeros", "ones", "negative zeros", "a", "a", "a but one", "b"]), min_size=2, max_size=5)
)
@settings(max_examples=40)
def test_stand_ins_are_equal_exactly_when_tensors_are(kinds: list[str]) -> None:
    base = matrix(20, 20, 0)
    nearly = base.copy()
    nearly[7, 7] = np.nextafter(nearly[7, 7], np.float32(2))
    arrays = {
        "zeros": np.zeros_like(base),
        "ones": np.ones_like(base),
        "negative zeros": -np.zeros_like(base),
        "a": base,
        "a but one": nearly,
        "b": matrix(20, 20, 1),
    }
    model = detached(holding(**{f"t{i}": arrays[kind] for i, kind in enumerate(kinds)}))
    tensors = list(model.proto.graph.initializer)
    for (i, left), (j, right) in itertools.combinations(enumerate(tensors), 2):
        same_bytes = arrays[kinds[i]].tobytes() == arrays[kinds[j]].tobytes()
        assert (model.digest(left) == model.digest(right)) == same_bytes
        if model.weight(left) and model.weight(right):
            assert (key_of(left) == key_of(right)) == same_bytes


PASSES = list(onnxoptimizer.get_fuse_and_elimination_passes())


@pytest.mark.parametrize("name", PASSES)
def test_onnxoptimizer_does_the_same_to_a_detached_model(name: str) -> None:
    """Full of what could fool it: duplicates, zeros, ones, nearly equal weights, Conv + BatchNormalization."""
    model = tricky()
    expected = onnxoptimizer.optimize(model, [name])
    stripped = detached(model)
    assert all(stripped.weight(tensor) for tensor in stripped.proto.graph.initializer), "each has a stand-in"

    result = stripped.with_proto(onnxoptimizer.optimize(stripped.proto, [name]))

    assert stripped.proto.ByteSize() < 0.2 * model.ByteSize()
    assert attach(result).SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)


def tricky() -> onnx.ModelProto:
    base = matrix(32, 32, 0)
    nearly = base.copy()
    nearly[3, 3] += 1e-6
    channels = np.abs(matrix(1, 512, 9)).ravel() + 0.5
    text = """
    g (float[1, 16, 32] x, float[1, 3, 8, 8] image) => (float[1, 16, 32] y, float[1, 512, 6, 6] features) {
        a = Relu (x)
        q = MatMul (a, same)
        k = MatMul (a, same_again)
        v = MatMul (a, nearly)
        qk = Add (q, k)
        sum = Add (qk, v)
        plus = Add (sum, zeros)
        times = Mul (plus, ones)
        y = Add (times, almost_zeros)
        convolved = Conv (image, kernel)
        features = BatchNormalization (convolved, scale, bias, mean, variance)
    }
    """
    almost = np.zeros((1, 16, 32), np.float32)
    almost[0, 0, 0] = 1e-20
    return model_of(
        text,
        same=base,
        same_again=base.copy(),
        nearly=nearly,
        zeros=np.zeros((1, 16, 32), np.float32),
        ones=np.ones((1, 16, 32), np.float32),
        almost_zeros=almost,
        kernel=matrix(512, 27, 2).reshape(512, 3, 3, 3),
        scale=channels,
        bias=vector_of(512, 3),
        mean=vector_of(512, 4),
        variance=channels,
    )


def vector_of(size: int, seed: int) -> np.ndarray:
    return matrix(1, size, seed).ravel()


def test_external_data_is_mapped_not_read(tmp_path) -> None:
    path = external_model(tmp_path)
    model = read_model(path)
    (weight,) = model.weights.values()
    assert isinstance(weight.data, np.memmap)
    assert np.array_equal(weight.array(), matrix(32, 32, 0))


@pytest.mark.parametrize("location", ["../w.bin", "/etc/hostname", "sub/../../w.bin"])
def test_external_data_may_not_leave_the_folder(tmp_path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "w.bin").write_bytes(matrix(32, 32, 0).tobytes())
    path = external_model(folder, location)
    with pytest.raises(ModelError, match="outside of the model's folder"):
        read_model(path)


def test_external_data_that_ends_early_is_named(tmp_path) -> None:
    path = external_model(tmp_path)
    (tmp_path / "w.bin").write_bytes(b"too short")
    with pytest.raises(ModelError, match=r"ends before initializer 'w' does \(9 bytes, needs 4096\)"):
        read_model(path)


@pytest.mark.parametrize("content", [b"", b"\x00\x01garbage", b"\x08\x09\x12"], ids=["empty", "garbage", "truncated"])
def test_a_broken_file_is_a_mistake(tmp_path, content: bytes) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"broken\.onnx"):
        read_model(path)


def test_threshold_is_a_kibibyte() -> None:
    just_below = np.arange(DETACH_FROM_BYTES // 4 - 1, dtype=np.float32)
    model = detached(holding(below=just_below, at=np.arange(DETACH_FROM_BYTES // 4, dtype=np.float32)))
    assert [weight.dims for weight in model.weights.values()] == [(256,)]


def external_model(folder, location: str = "w.bin"):
    (folder / "w.bin").write_bytes(matrix(32, 32, 0).tobytes())
    model = model_of("g (float[1, 32] x) => (float[1, 32] y) { y = MatMul (x, w) }", w=matrix(32, 32, 0))
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_detach_keeps_what_is_known() -> None:
    first = detached(holding(a=matrix(32, 32, 0)))
    second = detach(holding(b=matrix(32, 32, 0)), known=first.weights)
    assert next(iter(second.weights.values())) is next(iter(first.weights.values()))


def text_model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')


def test_texts_that_are_no_utf8_are_read() -> None:
    model = detach(holding(a=np.zeros(2, np.float32)))
    tensor = helper.make_tensor("k", TensorProto.STRING, [2, 1], [b"a", b"\xff"])
    assert [text.encode("utf-8", "surrogateescape") for text in model.array(tensor)[:, 0]] == [b"a", b"\xff"]


def test_strings_have_a_digest() -> None:
    model = holding(plain=np.zeros(2, np.float32))
    for name, words in {"a": [b"x", b"yz"], "b": [b"x", b"yz"], "c": [b"xy", b"z"], "no_utf8": [b"\xff", b""]}.items():
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.STRING, [2], words))
    a, b, c, no_utf8 = (detached(model).digest(tensor) for tensor in model.graph.initializer[1:])
    assert a == b
    assert len({a, c, no_utf8}) == 3
    assert digest_of(np.array(["x", "yz"], object)) == a


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("change", ["less", "more", "typed", "dims", "dtype"])
def test_a_tensor_that_does_not_fill_its_shape_is_named(tmp_path, change: str, rows: int) -> None:
    model = model_of("g (float[1, 32] x) => (float[1, 32] y) { y = MatMul (x, w) }", w=matrix(rows, 32, 0))
    tensor = model.graph.initializer[0]
    if change == "dims":
        tensor.dims[0] = -1
    elif change == "dtype":
        tensor.data_type = 999
    elif change == "typed":
        tensor.ClearField("raw_data")
        tensor.float_data.extend([1.0] * 31 * rows)
    else:
        tensor.raw_data = tensor.raw_data[:-4] if change == "less" else tensor.raw_data + b"more"
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"model\.onnx: tensor 'w'"):
        read_model(path)


def test_four_bits_a_number_fill_their_shape() -> None:
    packed = numpy_helper.from_array(np.arange(5).astype(ml_dtypes.int4), "raw")
    typed = helper.make_tensor("typed", TensorProto.INT4, [5], [0, 1, 2, 3, 4])
    model = text_model("g (float[2] x) => (float[2] y) { y = Neg (x) }")
    model.graph.initializer.extend([packed, typed])
    opened = detached(model)
    numbers = [opened.array(tensor).astype(np.int64).tolist() for tensor in opened.proto.graph.initializer]
    assert numbers == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("length", "4", r"model\.onnx: initializer 'w' has 4 bytes .* it takes 4096"),
        ("length", "banana", "initializer 'w' has length 'banana'"),
        ("length", "-4096", "initializer 'w' has length '-4096'"),
        ("offset", "-8", "initializer 'w' has offset '-8'"),
    ],
)
def test_external_data_has_an_offset_and_a_length_that_fit(tmp_path, key: str, value: str, words: str) -> None:
    path = external_model(tmp_path)
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=words):
        read_model(path)


def test_external_data_of_any_dtype_is_read(tmp_path) -> None:
    """A bool tensor cannot be detached; it may not go on pointing to a file beside another model either."""
    path = external_model(tmp_path)
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].data_type = TensorProto.BOOL
    path.write_bytes(model.SerializeToString())
    (tmp_path / "w.bin").write_bytes(bytes([0, 1]) * 512)
    (tensor,) = read_model(path).proto.graph.initializer
    assert numpy_helper.to_array(tensor)[:, 1].all()


def test_nodes_in_any_order_are_read(tmp_path) -> None:
    text = """g (bool c, float[2] x) => (float[2] y) {
        y = Neg (d)
        d = If (c) <
            then_branch = t () => (float[2] u) { u = Abs (v) v = Neg (b) },
            else_branch = e () => (float[2] w) { w = Identity (x) }>
        a = Abs (x)
        b = Exp (a)
    }"""
    path = tmp_path / "model.onnx"
    path.write_bytes(text_model(text).SerializeToString())
    nodes = read_model(path).proto.graph.node
    assert [node.op_type for node in nodes] == ["Abs", "Exp", "If", "Neg"]
    assert [node.op_type for node in nodes[2].attribute[0].g.node] == ["Neg", "Abs"]


def test_what_is_in_order_or_in_a_circle_stays() -> None:
    for body in ("b = Abs (x) a = Neg (x) y = Add (b, a)", "a = Abs (b) b = Neg (a) y = Neg (b)"):
        model = text_model(f"g (float[2] x) => (float[2] y) {{ {body} }}")
        before = model.SerializeToString()
        sort_nodes(model.graph)
        assert model.SerializeToString() == before


def test_each_tensor_in_a_file_of_its_own_takes_one_descriptor(tmp_path: Path) -> None:
    """A model of some hundred files is common; a process may have 1,024 of them open."""
    model = onnx.ModelProto(ir_version=9, opset_import=[helper.make_opsetid("", 20)])
    model.graph.name = "many"
    for place in range(FILES):
        (tmp_path / f"w{place}").write_bytes(np.full(512, place, np.float32).tobytes())
        tensor = model.graph.initializer.add(name=f"w{place}", data_type=TensorProto.FLOAT, dims=[512])
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=f"w{place}")
    model.graph.node.append(helper.make_node("Sum", [tensor.name for tensor in model.graph.initializer], ["y"]))
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [512]))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_limit_with_room_for(FILES + 20), hard))
    try:
        assert len(read_model(tmp_path / "model.onnx").weights) == FILES
        resource.setrlimit(resource.RLIMIT_NOFILE, (_limit_with_room_for(FILES // 2), hard))
        with pytest.raises(ModelError, match=r"cannot be mapped .* limit of open files \(ulimit -n\)"):
            read_model(tmp_path / "model.onnx")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


FILES = 100


def _limit_with_room_for(count: int) -> int:
    """The limit holds for the number of a descriptor: the lowest one that is free is taken."""
    taken = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    free = (number for number in itertools.count() if number not in taken)
    return next(itertools.islice(free, count, None))
