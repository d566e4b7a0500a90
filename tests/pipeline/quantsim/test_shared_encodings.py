"""Which tensors share an encoding, and what a weight or a bias is to each of its readers."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.quantsim.encodings import encode
from pipeline.quantsim.placement import place
from pipeline.quantsim.range_notes import (
    describe_divisors,
    describe_mask_constants,
    describe_masks,
    describe_ties,
    describe_unmeasured,
)
from tests.pipeline.quantsim.pictures_of_qdq import model_of, picture, rule


@pytest.mark.parametrize(
    ("boxes", "scores", "groups"),
    [
        ("Relu", "Tanh", ["boxes", "boxes", "boxes", "boxes"]),
        # Scores lie between zero and one whatever the model reads: with the boxes' scale, all of them would be zero.
        ("Relu", "Sigmoid", ["boxes", "scores", "scores", "boxes"]),
        ("Sigmoid", "Softmax", ["boxes", "boxes", "boxes", "boxes"]),
    ],
)
def test_the_inputs_of_a_concat_share_an_encoding_unless_a_range_is_known(
    boxes: str, scores: str, groups: list[str]
) -> None:
    model = model_of(
        f"""g (float[2, 4] a, float[4, 2] b) => (float[2, 8] y) {{
            boxes = {boxes}(a)
            scores = {scores}(b)
            moved = Transpose <perm = [1, 0]> (scores)
            y = Concat <axis = 1> (boxes, moved)
        }}"""
    )
    placement = place(model, [rule("op:*", None, "uint8")])
    assert [placed.site.group for placed in placement.sites][2:] == groups


def test_a_concat_in_float_leaves_its_inputs_their_own_ranges() -> None:
    model = model_of(
        """g (float[2, 4] a, float[2, 4] b) => (float[8, 2] moved) {
            boxes = Relu(a)
            scores = Tanh(b)
            y = Concat <axis = 1> (boxes, scores)
            moved = Transpose <perm = [1, 0]> (y)
        }"""
    )
    placement = place(model, [rule("op:*", None, "uint8"), rule("op:Concat", None, "float")])
    assert [(placed.site.tensor, placed.site.group) for placed in placement.quantized_sites()][2:] == [
        ("boxes", "boxes"), ("scores", "scores")
    ]  # fmt: skip
    assert [placed.site.tensor for placed in placement.left_in_float()] == ["y", "moved"]


@pytest.mark.parametrize("update", ["present = Concat <axis = 1> (past, k)", "present = ScatterND(past, places, k)"])
def test_a_cache_has_one_encoding(update: str) -> None:
    model = model_of(
        f"""g (float[2, 4] past, float[2, 4] x, int64[2, 1] places) => (float[a, b] present) {{
            k = Relu(x)
            {update}
        }}"""
    )
    groups = {placed.site.tensor: placed.site.group for placed in place(model, [rule("op:*", None, "uint8")]).sites}
    assert groups == {"past": "past", "x": "x", "k": "past", "present": "past"}


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((8,), "bias bias: int32"),
        ((1, 8), "bias bias: int32"),
        ((1,), "bias bias: one value serves 8 channels"),
        ((2, 8), "constant bias: uint8"),  # one for each row: added, and no bias
    ],
)
def test_a_bias_may_be_a_row(shape: tuple[int, ...], found: str) -> None:
    ones = {"first": np.ones((4, 8), np.float32), "bias": np.ones(shape, np.float32)}
    model = model_of("g (float[2, 4] x) => (float[2, 8] y) { y = Gemm(x, first, bias) }", **ones)
    placement = place(model, [rule("op:*", "int8/channel", "uint8")])
    assert found in picture(placement)
    encodings = encode(placement, {"x": (-1.0, 1.0), "y": (-1.0, 1.0), "bias": (-1.0, 1.0)}, model)
    if found.endswith("int32"):
        assert encodings["bias"].axis == len(shape) - 1


@pytest.mark.parametrize(("bits", "is_named"), [("int4/channel", True), ("int16/channel", False)])
def test_a_tied_table_of_few_bits_is_named(bits: str, is_named: bool) -> None:
    model = model_of(
        """g (int64[1, 4] ids) => (float[1, 4, 6] y) {
            e = Gather(table, ids)
            t = Transpose <perm = [1, 0]> (table)
            y = MatMul(e, t)
        }""",
        table=np.ones((6, 3), np.float32),
    )
    notes = list(place(model, [rule("op:*", bits, "uint16"), rule("op:Gather", None, "float")]).notes())
    named = [
        note for note in notes if note.startswith("table has 4 bits as the weight of y, and the same values make e")
    ]
    assert bool(named) is is_named


@pytest.mark.parametrize(
    ("text", "channel"),
    [
        ("int4/block32", "int4/channel"),
        ("mxfp4", "fp4e2m1/channel"),
        ("nvfp4", "fp4e2m1/channel"),
        ("lpbq32", "int4/channel"),
    ],
)
def test_a_block_that_is_a_whole_channel_is_a_channel(text: str, channel: str) -> None:
    """As of a depthwise convolution, whose kernels read one channel each: a scale for each number would be larger than
    the float."""
    model = model_of(
        "g (float[1, 4, 5, 5] x) => (float[1, 4, 3, 3] y) { y = Conv <group = 4> (x, w) }",
        w=np.ones((4, 1, 3, 3), np.float32),
    )
    (weight,) = (found for found in place(model, [rule("op:*", text, "float")]).quantized_sites())
    assert str(weight.precision) == channel


@pytest.mark.parametrize(("greatest", "is_named"), [(6.0, True), (100.0, False)])
def test_a_tensor_that_a_shared_scale_leaves_few_numbers_is_named(greatest: float, is_named: bool) -> None:
    """Of 256 numbers for 0 to 640, a tensor up to 6 uses two and one up to 100 uses forty."""
    model = model_of(
        """g (float[2, 4] a, float[2, 4] b) => (float[2, 8] y) {
            boxes = Relu(a)
            scores = Relu(b)
            y = Concat <axis = 1> (boxes, scores)
        }"""
    )
    placement = place(model, [rule("op:*", None, "uint8")])
    ranges = dict.fromkeys((placed.site.group for placed in placement.sites), (0.0, 640.0))
    notes = list(describe_ties(placement, {"boxes": (0.0, 640.0), "scores": (0.0, greatest)}, ranges))
    assert [note.partition(",")[0] for note in notes] == (
        ["scores uses 2 of the 256 values of its format"] if is_named else []
    )
    assert all("node:y: {activations: float}" in note for note in notes)


@pytest.mark.parametrize("moves", ["", "scores = Reshape(first, shape)"])
def test_a_tensor_with_a_range_of_its_own_is_named_where_a_concat_rounds_it_away(moves: str) -> None:
    result = "first" if moves else "scores"
    model = model_of(
        f"""g (float[2, 4] a, float[2, 4] b) => (float[2, 8] y) {{
            boxes = Relu(a)
            {result} = Sigmoid(b)
            {moves}
            y = Concat <axis = 1> (boxes, scores)
        }}""",
        shape=np.array([2, 4]),
    )
    placement = place(model, [rule("op:*", None, "uint8")])
    reached = {"boxes": (0.0, 640.0), result: (0.0, 0.9), "a": (-640.0, 640.0), "b": (-3.0, 3.0), "y": (0.0, 640.0)}
    ranges = {placed.site.group: reached[placed.site.group] for placed in placement.sites}
    (note,) = describe_ties(placement, reached, ranges)
    assert note.startswith("scores uses 0 of the 256 values of its format, since Concat")


def test_tensors_without_elements_in_the_data_are_named() -> None:
    model = model_of("g (float[b, 4] x, float[2, 4] z) => (float[b, 4] y, float[2, 4] r) { y = Relu(x) r = Relu(z) }")
    placement = place(model, [rule("op:*", None, "uint8")])
    (note,) = describe_unmeasured(placement, {"z": (-1.0, 1.0), "r": (0.0, 1.0)})
    assert note.startswith("no sample has an element of 2 tensors (x, …), so the scale is 1 there")
    assert not list(describe_unmeasured(placement, dict.fromkeys("xyzr", (0.0, 0.0))))


def test_a_float_mask_that_is_an_input_is_named() -> None:
    model = model_of("g (float[2, 4] x, float[2, 4] mask) => (float[2, 4] y) { s = Add (x, mask) y = Softmax (s) }")
    placement = place(model, [rule("op:*", None, "uint16")])
    reached = {"x": (-3.0, 3.0), "mask": (-1e4, 0.0), "s": (-1e4, 3.0), "y": (0.0, 1.0)}
    (note,) = describe_masks(placement, reached)
    assert note.startswith("the input mask reaches -10000, as a mask does that is added to scores")
    assert not list(describe_masks(placement, reached | {"mask": (-30.0, 0.0)}))


@pytest.mark.parametrize("mask", [-3.4e38, -1e4, -30.0])
def test_a_mask_that_is_a_constant_names_clamp_mask(mask: float) -> None:
    model = model_of(
        "g (float[2, 4] x) => (float[2, 4] y) { s = Add (x, mask) y = Softmax (s) }",
        mask=np.array([0, 0, 0, mask], np.float32),
    )
    placement = place(model, [rule("op:*", None, "uint16")])
    limits = {"x": (-3.0, 3.0), "mask": (mask, 0.0), "s": (mask, 3.0), "y": (0.0, 1.0)}
    notes = list(
        describe_mask_constants(
            model, placement, {site.site.group: limits[site.site.group] for site in placement.sites}
        )
    )
    if mask == -30.0:
        assert not notes
    else:
        (note,) = notes
        assert note.startswith(f"the constant mask masks attention with {mask:g}, which is in the range of 2 tensors (")
        assert "put clamp-mask into quantsim.prepare" in note


def test_a_weight_whose_channels_lie_along_no_axis_has_one_scale_and_is_named() -> None:
    model = model_of(
        "g (float[1, 8, 5, 5] x) => (float[1, 8, 7, 7] y) { y = ConvTranspose <group = 2> (x, w) }",
        w=np.ones((8, 4, 3, 3), np.float32),
    )
    placement = place(model, [rule("op:*", "int4/block32", "float")])
    assert list(placement.notes()) == [
        "1 weight of ConvTranspose (w) has one scale: the channels lie along no single axis"
    ]


@pytest.mark.parametrize(
    ("least", "form", "count"), [(1e-3, "uint16", 1), (100.0, "uint16", 0), (20.0, "uint8", 1), (20.0, "fp8e4m3", 0)]
)
def test_a_divisor_with_elements_of_few_steps_is_named(least: float, form: str, count: int) -> None:
    scale = np.array([least, 1000.0], np.float32)
    model = model_of("g (float[1, 2] x) => (float[1, 2] y) { [ratio] y = Div(x, scale) }", scale=scale)
    placement = place(model, [rule("op:*", "int8", form)])
    notes = [*describe_divisors(model, placement, {"scale": (0.0, 1000.0)})]
    assert len(notes) == count
    assert all("the divisor scale of ratio has 1 element of 2 below" in note for note in notes)
