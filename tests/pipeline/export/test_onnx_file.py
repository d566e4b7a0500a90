"""ONNX files as sources: whole ones, broken ones, and how their inputs are settled."""

from __future__ import annotations

import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from torch.utils import _pytree as pytree

from passes.proof.draws import dtype_named
from pipeline.config import DTYPES, InputConfig, ModelConfig
from pipeline.errors import ConfigError, SourceError, Unsupported
from pipeline.export import InputSpec, OnnxSource, draw_inputs, load_source
from pipeline.export.load import read_onnx_file
from pipeline.export.source import input_spec, named_dims
from pipeline.export.tree import leaves_with_path

Configured = Callable[..., ModelConfig]


def write(
    path: Path, shape: list[int | str | None] | None, dtype: int = TensorProto.FLOAT, external: bool = False
) -> None:
    weight = numpy_helper.from_array(np.ones((4, 300), np.float32), "weight")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [weight],
    )
    graph.input.append(helper.make_tensor_value_info("weight", TensorProto.FLOAT, [4, 300]))  # as old exporters do
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    if external:
        onnx.save(model, path, save_as_external_data=True, location="weights.bin")
    else:
        onnx.save(model, path)


def load(configured: Configured, **model: Any) -> OnnxSource:
    source = load_source(configured(onnx="m.onnx", **model))
    assert isinstance(source, OnnxSource)
    return source


def refusal(configured: Configured, kind: type[Exception] = SourceError, **model: Any) -> str:
    with pytest.raises(kind) as caught:
        load(configured, **model)
    return str(caught.value)


def test_a_static_file_tells_everything(configured: Configured, tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", [2, 4])
    source = load(configured)
    assert [str(spec) for spec in source.inputs] == ["x: float32[2, 4]"]
    assert source.outputs == ("y",)
    assert source.path == tmp_path / "m.onnx"


def test_open_dims_may_be_sized_or_declared(configured: Configured, tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", ["N", 4])
    assert load(configured).inputs[0].shape == ("N", 4)
    assert load(configured, dims={"N": [2]}).inputs[0].shape == ("N", 4)
    assert load(configured, inputs={"x": {"shape": ["batch", 4]}}).inputs[0].shape == ("batch", 4)
    assert load(configured, inputs={"x": {"shape": [1, 4]}}).inputs[0].shape == (1, 4)
    assert load(configured, dims={"N": [2]}, inputs={"x": {"range": [5, 6]}}).inputs[0].low == 5


def test_unnamed_dims_count_as_one(configured: Configured, tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", [None, 4])
    assert [str(spec) for spec in load(configured).inputs] == ["x: float32[?, 4]"]
    write(tmp_path / "m.onnx", None)
    assert refusal(configured) == "input 'x' of m.onnx has no shape, not even a rank; declare model.inputs.x.shape"
    with pytest.raises(SourceError, match="give it one: onnxline fix-shapes MODEL -o OUT --shape x=SIZES"):
        read_onnx_file(str(tmp_path / "m.onnx"))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"xs": {}}, "model.inputs: m.onnx has no input 'xs'; did you mean 'x'?"),
        ({"weight": {}}, "model.inputs: m.onnx has no input 'weight'; it has: x"),
        ({"x": {"shape": [2, 5]}}, "input 'x' of m.onnx has the shape [N, 4], but model.inputs says [2, 5]"),
        ({"x": {"dtype": "int64"}}, "input 'x' of m.onnx is float32, but model.inputs.x says int64"),
    ],
)
def test_declarations_are_checked(configured: Configured, tmp_path: Path, inputs: dict[str, Any], message: str) -> None:
    write(tmp_path / "m.onnx", ["N", 4])
    assert refusal(configured, inputs=inputs, dims={"N": [2]}) == message


def test_a_dim_that_the_file_does_not_have(configured: Configured, tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", ["N", 4])
    message = refusal(configured, ConfigError, dims={"N": [2], "M": [2]})
    assert message == "model.dims: no input has a dim named 'M'; the named dims are: N"


def test_a_missing_file(configured: Configured, tmp_path: Path) -> None:
    assert refusal(configured).startswith(f"no file or folder '{tmp_path}/m.onnx'")


@pytest.mark.parametrize("content", [b"", b"hello, world", b"\x08\x08\x12"])
def test_not_an_onnx_file(configured: Configured, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    assert re.search("is not a readable ONNX file|holds no graph", refusal(configured))


def test_a_truncated_file(configured: Configured, tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", [2, 4])
    data = (tmp_path / "m.onnx").read_bytes()
    (tmp_path / "m.onnx").write_bytes(data[: len(data) // 2])
    assert f"is not a readable ONNX file ({len(data) // 2} bytes" in refusal(configured)


def test_external_data_is_checked(configured: Configured, tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", [2, 4], external=True)
    assert load(configured).outputs == ("y",)
    data = (tmp_path / "weights.bin").read_bytes()
    (tmp_path / "weights.bin").write_bytes(data[:100])
    assert "weights.bin ends before initializer 'weight' does (100 bytes, needs 4800)" in refusal(configured)
    (tmp_path / "weights.bin").unlink()
    assert "weights.bin of initializer 'weight' is missing" in refusal(configured)


def test_external_data_outside_of_the_folder(configured: Configured, tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", [2, 4], external=True)
    data = (tmp_path / "m.onnx").read_bytes()
    (tmp_path / "m.onnx").write_bytes(data.replace(b"weights.bin", b"../etc/pass"))
    assert "initializer 'weight' points to '../etc/pass', outside of the model's folder" in refusal(configured)


def test_inputs_that_cannot_be_drawn(configured: Configured, tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", [2, 4], dtype=TensorProto.STRING)
    said = refusal(configured, Unsupported)
    assert said.startswith("input 'x' is string, expected a tensor of float64")
    assert said.endswith("onnxline extract MODEL -o OUT --from VALUE (--proof structure where it is no tensor)")


# Draws: seeded, in range, of every dtype.

X = InputSpec("x", ("batch", 8), "float32", -1.0, 1.0)


def test_a_draw_depends_on_seed_and_name_and_on_nothing_else() -> None:
    sizes = {"batch": 2}
    first = draw_inputs([X], sizes, 0)["x"]
    beside_another = draw_inputs([replace(X, name="y"), X], sizes, 0)
    np.testing.assert_array_equal(first, beside_another["x"])
    assert not np.array_equal(first, beside_another["y"])
    assert not np.array_equal(first, draw_inputs([X], sizes, 1)["x"])
    assert not np.array_equal(first, draw_inputs([replace(X, seed=5)], sizes, 0)["x"])


def test_the_numbers_are_the_same_on_every_machine() -> None:
    drawn = draw_inputs([InputSpec("ids", (4,), "int64", 0, 1000)], {}, 0)["ids"]
    assert drawn.tolist() == IDS


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_drawn_in_its_range(dtype: str) -> None:
    spec = input_spec("x", InputConfig(), (200,), dtype)
    drawn = draw_inputs([spec], {}, 3)["x"]
    assert drawn.dtype == dtype_named(dtype)
    values = drawn.astype(np.float64)
    if "float" in dtype:
        assert values.min() < -0.5
        assert values.max() > 0.5
        assert np.abs(values).max() <= 1.0
    else:
        assert sorted(set(values)) == [0.0, 1.0]


def test_bfloat16_is_ml_dtypes() -> None:
    assert draw_inputs([replace(X, dtype="bfloat16")], {"batch": 1}, 0)["x"].dtype == ml_dtypes.bfloat16


def test_whole_numbers_stop_before_the_upper_end() -> None:
    spec = input_spec("x", InputConfig(range=(3, 5)), (500,), "int32")
    assert set(draw_inputs([spec], {}, 0)["x"].tolist()) == {3, 4}
    constant = input_spec("x", InputConfig(range=(7, 7)), (3,), "int32")
    assert draw_inputs([constant], {}, 0)["x"].tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("dtype", "bounds", "message"),
    [
        ("int64", (0.5, 2.0), "input 'x': range [0.5, 2] for int64, expected integers"),
        ("uint8", (0.0, 300.0), "input 'x': range [0, 300] leaves uint8, which holds 0 to 255"),
        ("float16", (0.0, 1e6), "input 'x': range [0, 1e+06] leaves float16, which ends at 65504"),
        ("float64", (-1e308, 1e308), "input 'x': range [-1e+308, 1e+308] leaves float64, which ends at 1.79769e+308"),
        ("bool", (0.0, 3.0), "input 'x': range [0, 3] leaves bool, which holds 0 to 1"),
    ],
)
def test_a_range_that_does_not_suit_the_dtype(dtype: str, bounds: tuple[float, float], message: str) -> None:
    with pytest.raises(SourceError) as caught:
        input_spec("x", InputConfig(range=bounds), (1,), dtype)
    assert str(caught.value) == message


def test_named_dims_need_a_size() -> None:
    assert named_dims([X, replace(X, shape=("seq", "batch"))]) == ("batch", "seq")
    with pytest.raises(SourceError) as caught:
        draw_inputs([X], {"seq": 2}, 0)
    assert str(caught.value) == "input 'x': no size for the dim 'batch'; put it into model.dims"


# numpy promises that PCG64 streams stay as they are; a change of our seeding would move every recorded figure.
IDS = [342, 749, 630, 154]


# Paths of leaves, where torch's own walk knows them and where it does not.

Pair = namedtuple("Pair", "first second")


class Row:
    """Entered with two functions only, as a user may."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


class Answer(OrderedDict[str, Any]):
    """As the outputs of transformers were entered before it gave their keys."""


@pytest.fixture
def entered() -> Iterator[None]:
    pytree.register_pytree_node(
        Row, lambda row: (row.parts, None), lambda parts, _: Row(*parts), serialized_type_name="tests.Row"
    )
    pytree.register_pytree_node(
        Answer,
        lambda answer: (list(answer.values()), list(answer)),
        lambda parts, names: Answer(zip(names, parts, strict=True)),
        serialized_type_name="tests.Answer",
    )
    yield
    for kind in (Row, Answer):
        pytree._deregister_pytree_node(kind)


def test_where_torch_knows_the_names() -> None:
    value = {"a": [1, None, Pair(2, {"z": 3})], "b": OrderedDict(q=4)}
    actual = [(".".join(path), leaf) for path, leaf in leaves_with_path(value)]
    assert actual == [("a.0", 1), ("a.1", None), ("a.2.first", 2), ("a.2.second.z", 3), ("b.q", 4)]
    assert [leaf for _, leaf in actual] == pytree.tree_leaves(value)


@pytest.mark.usefixtures("entered")
def test_where_it_does_not() -> None:
    value = (Answer(logits=1, inner=Row(2, [3])), 4)
    with pytest.raises(ValueError, match="flatten_with_keys_fn"):
        pytree.tree_flatten_with_path(value)
    actual = [(".".join(path), leaf) for path, leaf in leaves_with_path(value)]
    assert actual == [("0.logits", 1), ("0.inner.0", 2), ("0.inner.1.0", 3), ("1", 4)]
