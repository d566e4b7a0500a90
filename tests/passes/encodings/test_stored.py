"""A stored tensor that was made of others becomes the whole numbers that they become, moved in the same way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from passes.encodings.encoding import Encoding
from passes.encodings.stored import EncodedArray, NoEncoding, derive_encoding
from pipeline.config.precision import parse_precision
from pipeline.quantsim.encodings import encode_weight, quantize

WEIGHT = np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32)
OTHER = 3 * np.random.default_rng(1).standard_normal((8, 12)).astype(np.float32)
KERNEL = np.random.default_rng(2).standard_normal((4, 6, 3, 3)).astype(np.float32)


def encode(array: np.ndarray, text: str, axis: int) -> Encoding:
    precision = parse_precision(text)
    assert precision is not None
    return encode_weight(array, precision, axis)


def source(array: np.ndarray, text: str, axis: int, name: str = "w") -> EncodedArray:
    return EncodedArray(name, array, encode(array, text, axis))


MOVES: dict[str, tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]] = {
    "turned": (WEIGHT, lambda array: array.T),
    "rows": (WEIGHT, lambda array: array[4:]),
    "columns": (WEIGHT, lambda array: array[:, 4:8]),
    "turned columns": (WEIGHT, lambda array: array[:, 4:8].T),
    "mixed columns": (WEIGHT, lambda array: array[:, [0, 3, 6, 9]]),
    "with axes of one": (WEIGHT, lambda array: array.T[:, :, None, None]),
    "a kernel's channels": (KERNEL, lambda array: array[2:4]),
    "a kernel turned": (KERNEL, lambda array: array.transpose(1, 0, 2, 3)),
}
FORMATS = [("int8", 0), ("int8/channel", 0), ("int8/channel", 1), ("uint8/channel", 1), ("int4/block2", 0)]


@pytest.mark.parametrize(("text", "axis"), FORMATS)
@pytest.mark.parametrize("move", MOVES)
def test_whole_numbers_move_as_the_floats_do(move: str, text: str, axis: int) -> None:
    array, change = MOVES[move]
    before = source(array, text, axis)
    encoding, sources = derive_encoding(np.ascontiguousarray(change(array)), [before])
    assert sources == ("w",)
    wanted = change(quantize(array, before.encoding))
    np.testing.assert_array_equal(quantize(np.ascontiguousarray(change(array)), encoding), wanted)
    back = change(before.encoding.spread(array, before.encoding.scale) * np.ones_like(array))
    moved = np.ascontiguousarray(change(array))
    np.testing.assert_array_equal(encoding.spread(moved, encoding.scale) * np.ones_like(moved), back)


@pytest.mark.parametrize(("text", "axis"), [("int8/channel", 1), ("int4/block4", 1), ("int4/block4", 0)])
def test_weights_side_by_side_keep_their_scales(text: str, axis: int) -> None:
    sources = [source(WEIGHT, text, axis, "q"), source(OTHER, text, axis, "k")]
    joined = np.concatenate([OTHER, WEIGHT], axis=1)
    encoding, names = derive_encoding(joined, sources)
    assert names == ("k", "q")
    wanted = np.concatenate([quantize(one.array, one.encoding) for one in reversed(sources)], axis=1)
    np.testing.assert_array_equal(quantize(joined, encoding), wanted)


@pytest.mark.parametrize(
    ("array", "sources", "why"),
    [
        (2 * WEIGHT, [source(WEIGHT, "int8/channel", 1)], "its numbers are changed"),
        (np.concatenate([WEIGHT, OTHER], 1), [source(WEIGHT, "int8", 1, "q"), source(OTHER, "int8", 1, "k")],
         "it is joined of 'q', 'k', which have other scales"),
        (np.concatenate([WEIGHT, OTHER], 0),
         [source(WEIGHT, "int8/channel", 1, "q"), source(OTHER, "int8/channel", 1, "k")],
         "it is joined of 'q', 'k', which have other scales"),
        (WEIGHT[:, 2:8], [source(WEIGHT, "int4/block4", 1)], "it is cut through blocks of 4"),
        (WEIGHT.reshape(8, 3, 4), [source(WEIGHT, "int8/channel", 1)], "are no axis of it any more"),
    ],
)  # fmt: skip
def test_what_has_no_encoding_says_why(array: np.ndarray, sources: list[EncodedArray], why: str) -> None:
    with pytest.raises(NoEncoding, match=why):
        derive_encoding(np.ascontiguousarray(array), sources)
