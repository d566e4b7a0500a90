"""AIMET's files: what is written, and that what is read back is what was written."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest

from passes.encodings.aimet import AimetVersion, from_aimet, to_aimet
from passes.encodings.encoding import BIAS, fit_encodings
from pipeline.config.quantsim import parse_precision
from pipeline.errors import UsageError
from pipeline.quantsim.encodings import Encoding, encode, encode_range, encode_weight
from pipeline.quantsim.placement import place
from pipeline.quantsim.qdq import insert_qdq
from tests.pipeline.quantsim.pictures_of_qdq import mlp, model_of, nodes_of, rule

WEIGHT = np.array([[1.0, 2.0], [-127.0, 3.0]], np.float32)


def encoding(text: str) -> Encoding:
    precision = parse_precision(text)
    assert precision is not None
    if precision.granularity == "tensor":
        return encode_range((-1.0, 3.0), precision)
    return encode_weight(WEIGHT, precision, axis=1)


def is_equal(one: Encoding, other: Encoding) -> bool:
    same = np.array_equal(one.scale, other.scale) and np.array_equal(one.zero_point, other.zero_point)
    return same and one.precision == other.precision


@pytest.mark.parametrize("version", get_args(AimetVersion))
def test_what_is_written_is_read_back(version: AimetVersion) -> None:
    known = {"x": encoding("uint16"), "y": encoding("int8"), "w": encoding("int8/channel")}
    found = from_aimet(to_aimet(known, {"w"}, version))
    assert found.keys() == known.keys()
    assert all(is_equal(found[name], known[name]) for name in known)


def test_an_encoding_up_to_version_1() -> None:
    data = to_aimet({"x": encoding("uint8"), "w": encoding("int8/channel")}, {"w"}, "1.0.0")
    assert data["activation_encodings"] == [
        {
            "bw": 8, "dtype": "INT", "enc_type": "PER_TENSOR", "is_sym": False, "name": "x",
            "offset": [-64], "scale": [pytest.approx(4 / 255)],
        }
    ]  # fmt: skip
    assert data["param_encodings"] == [
        {
            "bw": 8, "dtype": "INT", "enc_type": "PER_CHANNEL", "is_sym": True, "name": "w",
            "offset": [-128, -128], "scale": [1.0, pytest.approx(3 / 127)],
        }
    ]  # fmt: skip


def test_an_encoding_of_version_2() -> None:
    bias = Encoding(BIAS, np.array([0.5, 0.25], np.float32), np.zeros(2, np.int64), 0)
    blocks = encode_weight(WEIGHT, encoding("int4/block2").precision, axis=0)
    data = to_aimet({"x": encoding("uint8"), "b": bias, "w": blocks}, {"w", "b"}, "2.0.0")
    assert data["encodings"] == [
        {"name": "x", "output_dtype": "uint8", "y_scale": pytest.approx(4 / 255), "y_zero_point": 64},
        {"name": "b", "output_dtype": "int32", "y_scale": [0.5, 0.25], "axis": 0},
        {
            "name": "w", "output_dtype": "int4", "y_scale": [[pytest.approx(127 / 7), pytest.approx(3 / 7)]],
            "axis": 0, "block_size": 2,
        },
    ]  # fmt: skip


def of_version_1(**keys: object) -> dict[str, object]:
    """A file with one encoding of an activation."""
    row = {"name": "x", "dtype": "INT", "enc_type": "PER_TENSOR", "bw": 8, "is_sym": False, "scale": [1], "offset": [0]}
    return {"version": "1.0.0", "activation_encodings": [row | keys], "param_encodings": []}


def of_version_2(**keys: object) -> dict[str, object]:
    """A file with one encoding."""
    return {"version": "2.0.0", "encodings": [{"name": "x", "output_dtype": "uint8", **keys}]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"version": "3.0.0"}, "found the version '3.0.0', expected one of 0.6.1, 1.0.0"),
        ({"version": "1.0.0"}, "an entry of the file lacks the key 'activation_encodings', which version 1.0.0 has"),
        ({"version": "2.0.0", "encodings": [3]}, "the file is no whole file of version 2.0.0: TypeError"),
        (of_version_2(y_scale=math.nan), "'x' has a scale that is no positive number: nan"),
        (of_version_2(y_scale=[0.5, -1.0]), "'x' has a scale that is no positive number: -1"),
        (of_version_2(output_dtype="uint1", y_scale=1.0), "'x' has 1 bits, expected 2 to 16, or 32"),
        (of_version_2(y_scale=0.5, y_zero_point=256), "'x' has zero points that uint8 has not, or not one for each"),
        (
            {"version": "2.0.0", "encodings": [{"name": "w", "output_dtype": "float8e4m3fn", "y_scale": 1.0}]},
            "'w' is float8e4m3fn; expected integers with a scale",
        ),
        (of_version_1(offset=[2**70]), "the file is no whole file of version 1.0.0: OverflowError"),
        (of_version_1(is_sym="maybe"), "found 'maybe', expected true or false"),
        (
            of_version_1(scale=[1, 2], offset=[0, 0]),
            r"'x' is PER_TENSOR with scales \[2\]; expected a list of one number",
        ),
        (
            of_version_1() | {"param_encodings": of_version_1(scale=[2])["activation_encodings"]},
            "several entries of 'x', which differ",
        ),
        (
            {
                "version": "0.6.1",
                "param_encodings": {},
                "activation_encodings": {
                    "x": [
                        {"dtype": "int", "bitwidth": bits, "is_symmetric": "False", "scale": 1, "offset": 0}
                        for bits in (8, 16)
                    ]
                },
            },
            "found 2 formats of the channels of 'x'",
        ),
        (
            {"version": "0.6.1", "param_encodings": {}, "activation_encodings": {"x": [{"dtype": "float"}]}},
            "'x' is float; expected integers",
        ),
    ],
)
def test_other_files_are_refused(data: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_aimet(data)


def test_the_first_version_has_no_blocks() -> None:
    with pytest.raises(UsageError, match=r"version 0\.6\.1 has no scales for blocks, as 'w' has them"):
        to_aimet({"w": encoding("int4/block2")}, {"w"}, "0.6.1")


FORMS = [(version, "int8/channel") for version in get_args(AimetVersion)]
FORMS += [(version, weights) for version in get_args(AimetVersion)[1:] for weights in ("int4/block2", "uint4/block3")]
"""Each version with the formats of weights that it can express; blocks of 3 leave a rest of 4 and of 8."""


@pytest.mark.parametrize(("version", "weights"), FORMS)
def test_a_file_quantizes_the_model_that_it_was_made_of(version: AimetVersion, weights: str) -> None:
    model = mlp()
    placement = place(model, [rule("op:*", weights, "uint8")])
    ranges = {placed.site.group: (-1.0, 3.0) for placed in placement.sites}
    made = {
        name: encoding
        for name, encoding in encode(placement, ranges, model).items()
        if name != "bias"  # the earlier versions leave it to its factors
    }
    read = fit_encodings(from_aimet(to_aimet(made, {"first", "second"}, version)), model)
    axis = 0 if "block" in weights else 1
    assert {name: read[name].axis for name in ("first", "second")} == {"first": axis, "second": axis}
    assert nodes_of(insert_qdq(model, read)) == nodes_of(insert_qdq(model, made))
    assert all(is_equal(read[name], made[name]) for name in made)


def test_blocks_of_a_flat_list_have_the_axis_and_the_shape_of_their_weight() -> None:
    """Version 1.0.0 says neither; a weight that no product reads, or of another size, is refused."""
    model = model_of(
        "g (float[2, 4] x) => (float[2, 3] y) { y = Gemm <transB = 1> (x, w) }", w=np.ones((3, 4), np.float32)
    )
    row = {"bw": 4, "dtype": "INT", "enc_type": "PER_BLOCK", "is_sym": True, "name": "w", "block_size": 2}

    def read(count: int) -> Encoding:
        params = [{**row, "offset": [-8] * count, "scale": [float(index + 1) for index in range(count)]}]
        data = {"version": "1.0.0", "activation_encodings": [], "param_encodings": params}
        return fit_encodings(from_aimet(data), model)["w"]

    assert (read(6).axis, read(6).scale.tolist()) == (1, [[1, 2], [3, 4], [5, 6]])
    with pytest.raises(UsageError, match=r"'w' has 8 scales, expected 6: blocks of 2 along axis 1 of \(3, 4\)"):
        read(8)
    wide = {**row, "block_size": 4}
    data = {
        "version": "1.0.0",
        "activation_encodings": [],
        "param_encodings": [{**wide, "offset": [-8], "scale": [1.0]}],
    }
    one = model_of("g (float[2, 4] x) => (float[2, 1] y) { y = MatMul(x, w) }", w=np.ones((4, 1), np.float32))
    assert fit_encodings(from_aimet(data), one)["w"].scale.tolist() == [[1.0]], "one block is one all the same"
    data["param_encodings"] = [{**wide, "enc_type": "PER_GROUP"}]
    with pytest.raises(UsageError, match="'w' is PER_GROUP; expected one of PER_TENSOR, PER_CHANNEL, PER_BLOCK"):
        from_aimet(data)


@pytest.mark.parametrize(
    ("encodings", "message"),
    [
        (
            {"secnod": encoding("uint8"), "x": encoding("uint8")},
            r"1 of 2 are for tensors that the model does not have as float tensors: 'secnod'.*second",
        ),
        ({"shape": encoding("uint8")}, "does not have as float tensors: 'shape'"),
        ({"first": encoding("int8/channel")}, "'first' has 2 scales, expected 8, one for each channel"),
        ({"r": encoding("int8/channel")}, "'r' has 2 scales, and is no weight whose channels are known"),
        ({"r": encoding("int4/block2")}, "'r' has 2 scales, and is no weight whose blocks are known"),
    ],
)
def test_encodings_that_do_not_fit_the_model_are_refused(encodings: dict[str, Encoding], message: str) -> None:
    written = to_aimet(encodings, {"first", "secnod"}, "1.0.0")
    with pytest.raises(UsageError, match=message):
        fit_encodings(from_aimet(written), mlp())


BLOCKS = {
    "MatMul": ("y = MatMul(x, w)", "float[4, 8] x", (8, 3), (1, 0)),
    "a first factor": ("y = MatMul(w, x)", "float[8, 4] x", (3, 8), (0, 1)),
    "Gemm": ("y = Gemm <transB = 1> (x, w)", "float[4, 8] x", (3, 8), (0, 1)),
    "Conv": ("y = Conv(x, w)", "float[1, 8, 5, 5] x", (3, 8, 3, 3), (0, 1)),
    "ConvTranspose": ("y = ConvTranspose(x, w)", "float[1, 8, 5, 5] x", (8, 3, 3, 3), (1, 0)),
    "a weight in turn": ("t = Transpose <perm = [1, 0]> (w) y = MatMul(x, t)", "float[4, 8] x", (3, 8), (0, 1)),
}  # fmt: skip
"""A product, its input, the shape of its weight, and the axes of channels and of sums."""


@pytest.mark.parametrize(("text", "given", "shape", "axes"), BLOCKS.values(), ids=BLOCKS.keys())
@pytest.mark.parametrize("version", ["1.0.0", "2.0.0", "2.1.0"])
def test_scales_of_blocks_lie_as_in_aimet(
    text: str, given: str, shape: tuple[int, ...], axes: tuple[int, int], version: AimetVersion
) -> None:
    """In version 1.0.0 channel by channel for matrices in any layout, and in the order of the axes for kernels, whose
    positions all share one scale; held against the real AIMET by test_aimet_layouts."""
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    model = model_of(f"g ({given}) => (float y) {{ {text} }}", 21, w=weight)
    placement = place(model, [rule("op:*", "int4/block4", "float")])
    made = encode(placement, {}, model)
    data = to_aimet(made, {"w"}, version)
    rows = np.moveaxis(weight, axes, (0, 1)).reshape(3, 2, -1)  # channels, blocks of 4 with all their positions
    wanted = np.abs(rows).max(axis=2) / 7
    if version == "1.0.0":
        listed = wanted.T if "ConvTranspose" in text else wanted
        assert data["param_encodings"][0]["scale"] == pytest.approx(listed.ravel().tolist())
    else:
        ones = [1] * (len(shape) - 2)
        assert np.shape(data["encodings"][0]["y_scale"]) == (*((3, 2) if axes == (0, 1) else (2, 3)), *ones)
    read = fit_encodings(from_aimet(data), model)
    assert is_equal(read["w"], made["w"])
    assert read["w"].axis == made["w"].axis


def test_blocks_of_stacked_matrices_have_no_form_in_version_1() -> None:
    stacked = encode_weight(np.random.default_rng(0).standard_normal((2, 8, 3)), encoding("int4/block4").precision, 1)
    with pytest.raises(UsageError, match=r"'w' has scales for blocks and along further axes .* take 2\.0\.0 or later"):
        to_aimet({"w": stacked}, {"w"}, "1.0.0")
    assert np.shape(to_aimet({"w": stacked}, {"w"}, "2.0.0")["encodings"][0]["y_scale"]) == (2, 2, 3)


def test_an_axis_that_a_file_did_not_say_is_not_written() -> None:
    read = from_aimet(to_aimet({"w": encoding("int8/channel")}, {"w"}, "1.0.0"))
    assert from_aimet(to_aimet(read, {"w"}, "0.6.1")).keys() == {"w"}
    with pytest.raises(UsageError, match="'w' has scales along an axis that its file does not say"):
        to_aimet(read, {"w"}, "2.0.0")
