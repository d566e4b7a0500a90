"""Convolutions by the kernels in C++, beside torch in float64: sizes, strides, pads, sums, norms, and others."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from pipeline.ir.graph import TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.ops.fused import PLAIN, Activation
from pipeline.runtime import compile_graph
from pipeline.runtime.kernels import NativeLibrary
from pipeline.runtime.kernels.fused import conv, pack_conv
from pipeline.runtime.kernels.native.convolutions import pack_native_convolution
from pipeline.runtime.kernels.weight_forms import Convolution, ConvolutionWeight, FusedOperands

CHANNELS = st.sampled_from((1, 3, 15, 16, 17, 32, 33, 64, 70))
SPATIAL = st.integers(1, 17)
AFTER = {PLAIN: lambda x: x, Activation("relu"): torch.relu, Activation("silu"): functional.silu}


def images(*shape: int, seed: int) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.contiguous(memory_format=torch.channels_last)


def pack(library: NativeLibrary, x: torch.Tensor, weight: torch.Tensor, shape: Convolution) -> ConvolutionWeight:
    packed = pack_native_convolution(library, small_image(x, weight), weight, shape, None)
    assert packed is not None
    return packed


def small_image(x: torch.Tensor, weight: torch.Tensor) -> TensorSpec:
    """One image of the size of the kernel, at which few other kernels are faster."""
    return TensorSpec((1, x.shape[1], *weight.shape[2:]), "float32")


def launch(packed: ConvolutionWeight, x, bias, other, out, after=PLAIN) -> None:
    found = packed.launch(FusedOperands(x, out, bias, other, after))
    assert found is not None
    found()


def check(library, x, weight, shape, *, bias=None, other=None, after=PLAIN, in_place=False, roundings=1.0):
    """Each of n additions rounds a sum of about √n by 2^-24, and roundings add up like another √n."""
    wanted = functional.conv2d(x.double(), weight.double(), None if bias is None else bias.double(), *shape_args(shape))
    out = torch.full(wanted.shape, torch.nan).contiguous(memory_format=torch.channels_last)
    if other is not None:
        wanted = wanted + other.double()
        if in_place:
            other = out.copy_(other)
    launch(pack(library, x, weight, shape), x, bias, other, out, after)
    tolerance = roundings * 2**-23 * (weight[0].numel() + 16)
    torch.testing.assert_close(out.double(), AFTER[after](wanted), atol=tolerance, rtol=1e-5)


def shape_args(shape: Convolution):
    return shape.strides, shape.pads, shape.dilations, shape.groups


@settings(max_examples=80, deadline=None)
@given(
    *(st.integers(1, 3), CHANNELS, CHANNELS, SPATIAL, SPATIAL, st.integers(1, 3), st.integers(1, 3)),
    *(
        st.booleans(),
        st.sampled_from(("none", "apart", "in place")),
        st.sampled_from(list(AFTER)),
        st.integers(0, 2**16),
    ),
)
def test_kernels_of_one_pixel(library, count, inner, columns, height, width, down, across, biased, adds, after, seed):
    shape = Convolution((down, across), (0, 0), (1, 1), 1)
    x, weight = images(count, inner, height, width, seed=seed), images(columns, inner, 1, 1, seed=seed + 1)
    size = (count, columns, -(-height // down), -(-width // across))
    other = None if adds == "none" else images(*size, seed=seed + 2)
    bias = images(columns, 1, 1, 1, seed=seed + 3).flatten() if biased else None
    check(library, x, weight, shape, bias=bias, other=other, after=after, in_place=adds == "in place")


def test_one_pixel_and_many_channels(library):
    """Beyond 512 channels partial sums lie in the result, and what is added lies there too."""
    x, weight, other = images(1, 1100, 5, 7, seed=1), images(40, 1100, 1, 1, seed=2), images(1, 40, 3, 4, seed=3)
    shape = Convolution((2, 2), (0, 0), (1, 1), 1)
    for in_place in (False, True):
        check(library, x, weight, shape, other=other, in_place=in_place)


@settings(max_examples=80, deadline=None)
@given(
    *(st.integers(1, 3), CHANNELS, CHANNELS, SPATIAL, SPATIAL, st.integers(0, 3), st.integers(0, 3)),
    *(
        st.booleans(),
        st.sampled_from(("none", "apart", "in place")),
        st.sampled_from(list(AFTER)),
        st.integers(0, 2**16),
    ),
)
def test_kernels_of_three_by_three(
    library, count, inner, columns, height, width, above, left, biased, adds, after, seed
):
    """Winograd's tiles hold sums of four numbers, so each rounding counts up to four times."""
    size = (count, columns, height + 2 * above - 2, width + 2 * left - 2)
    if min(size) < 1:
        return
    shape = Convolution((1, 1), (above, left), (1, 1), 1)
    x, weight = images(count, inner, height, width, seed=seed), images(columns, inner, 3, 3, seed=seed + 1)
    other = None if adds == "none" else images(*size, seed=seed + 2)
    bias = images(columns, 1, 1, 1, seed=seed + 3).flatten() if biased else None
    check(library, x, weight, shape, bias=bias, other=other, after=after, in_place=adds == "in place", roundings=4)


@settings(max_examples=80, deadline=None)
@given(
    *(st.integers(1, 2), st.sampled_from((1, 3, 5, 15)), CHANNELS, st.integers(7, 20), st.integers(7, 20)),
    *(st.integers(2, 7), st.integers(2, 7), st.integers(1, 4), st.integers(1, 4), st.integers(0, 4), st.integers(0, 4)),
    *(
        st.booleans(),
        st.sampled_from(("none", "apart", "in place")),
        st.sampled_from(list(AFTER)),
        st.integers(0, 2**16),
    ),
)
def test_few_channels(
    library, count, inner, columns, height, width, tall, wide, down, across, above, left, biased, adds, after, seed
):
    inner = min(inner, library.lanes - 1)
    size = (count, columns, (height + 2 * above - tall) // down + 1, (width + 2 * left - wide) // across + 1)
    shape = Convolution((down, across), (above, left), (1, 1), 1)
    x, weight = images(count, inner, height, width, seed=seed), images(columns, inner, tall, wide, seed=seed + 1)
    # One column of a whole panel is not packed where wide pads give many pixels: oneDNN is faster.
    assume(pack_native_convolution(library, small_image(x, weight), weight, shape, None) is not None)
    other = None if adds == "none" else images(*size, seed=seed + 2)
    bias = images(columns, 1, 1, 1, seed=seed + 3).flatten() if biased else None
    check(library, x, weight, shape, bias=bias, other=other, after=after, in_place=adds == "in place", roundings=4)


def test_many_tiles_and_many_channels(library):
    """More tiles than are near at a time, and channels of which few tiles are."""
    shape = Convolution((1, 1), (1, 1), (1, 1), 1)
    for channels, size in ((64, 57), (1030, 9), (16, 90)):
        x, weight = images(2, channels, size, size, seed=size), images(24, channels, 3, 3, seed=size + 1)
        check(library, x, weight, shape, roundings=4)


def test_roundings_of_tiles_are_about_those_of_the_definition(library):
    x, weight = images(1, 256, 14, 14, seed=1), images(256, 256, 3, 3, seed=2)
    shape = Convolution((1, 1), (1, 1), (1, 1), 1)
    out = torch.empty(1, 256, 14, 14).contiguous(memory_format=torch.channels_last)
    launch(pack(library, x, weight, shape), x, None, None, out)
    exact = functional.conv2d(x.double(), weight.double(), padding=1)
    ours, torchs = (
        (found - exact).norm() for found in (out.double(), functional.conv2d(x, weight, padding=1).double())
    )
    assert ours < 4 * torchs


@pytest.mark.parametrize(
    ("channels", "panels", "size", "kernel", "is_ours"),
    [
        pytest.param(64, 2, 56, 3, True, id="tiles of full panels"),
        pytest.param(64, 1.25, 56, 3, False, id="tiles of a quarter of a panel"),
        pytest.param(16, 0.5, 112, 3, False, id="tiles of half a panel for few channels"),
        pytest.param(3, 2, 14, 3, True, id="three channels, and less work than a call of oneDNN"),
        pytest.param(3, 2, 224, 7, True, id="three channels of 7 × 7"),
        pytest.param(3, 0.5, 224, 7, False, id="three channels of 7 × 7, and half a panel"),
        pytest.param(64, 8, 56, 1, True, id="one pixel"),
        pytest.param(64, 1.25, 112, 1, False, id="one pixel, and a quarter of a panel"),
        pytest.param(64, 1.25, 14, 1, True, id="one pixel, and less work than a call of oneDNN"),
    ],
)
def test_who_is_faster(library, channels, panels, size, kernel, is_ours):
    columns = int(panels * library.panel)
    spec, weight = TensorSpec((1, channels, size, size), "float32"), torch.ones(columns, channels, kernel, kernel)
    shape = Convolution((1, 1), (kernel // 2, kernel // 2), (1, 1), 1)
    assert (pack_native_convolution(library, spec, weight, shape, None) is not None) == is_ours


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        pytest.param((8, 4, 1, 1), Convolution((1, 1), (0, 0), (1, 1), 2), id="groups of one pixel"),
        pytest.param((8, 16, 1, 1), Convolution((1, 1), (1, 1), (1, 1), 1), id="pads around one pixel"),
        pytest.param((8, 4, 3, 3), Convolution((1, 1), (1, 1), (1, 1), 2), id="groups"),
        pytest.param((8, 16, 3, 3), Convolution((2, 2), (1, 1), (1, 1), 1), id="strides, and many channels"),
        pytest.param((8, 8, 3, 3), Convolution((1, 1), (2, 2), (2, 2), 1), id="dilations"),
        pytest.param((8, 16, 5, 5), Convolution((1, 1), (2, 2), (1, 1), 1), id="5 × 5, and many channels"),
    ],
)
def test_what_other_kernels_compute(library, kernel, shape):
    spec = TensorSpec((1, kernel[1] * shape.groups, 32, 32), "float32")
    assert pack_native_convolution(library, spec, torch.ones(kernel), shape, None) is None


@pytest.mark.parametrize("size", [1, 3, 5])
def test_images_with_channels_first_and_with_gaps(library, size):
    weight, shape = images(40, 3, size, size, seed=1), Convolution((1, 1), (size // 2, size // 2), (1, 1), 1)
    check(library, images(2, 3, 9, 8, seed=0).contiguous(), weight, shape, roundings=4)
    check(library, images(2, 3, 19, 18, seed=0)[:, :, 3:-1:2, :8], weight, shape, roundings=4)
    check(library, images(2, 7, 9, 8, seed=0)[:, 1::2], weight, shape, roundings=4)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_operands_that_lie_otherwise_are_left_to_torch(library, size):
    shape = Convolution((1, 1), (size // 2, size // 2), (1, 1), 1)
    x, out = images(1, 3, 32, 32, seed=0), images(1, 16, 32, 32, seed=0)
    packed = pack(library, x, torch.ones(16, 3, size, size), shape)
    assert packed.launch(FusedOperands(x, out)) is not None
    assert packed.launch(FusedOperands(x, out.contiguous())) is None
    assert packed.launch(FusedOperands(x, out, other=out.contiguous())) is None
    assert packed.launch(FusedOperands(x, out, torch.ones(1).expand(16))) is None
    assert packed.launch(FusedOperands(images(1, 4, 32, 32, seed=0), out)) is None
    assert packed.launch(FusedOperands(x, images(1, 16, 32, 31, seed=0))) is None


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_norm_is_part_of_the_weight(library, size, with_bias):
    x, weight = images(2, 20, 9, 9, seed=1), images(24, 20, size, size, seed=2)
    of = [images(24, 1, 1, 1, seed=seed).flatten() for seed in range(3, 8)]
    bias, scale, shift, mean, variance = of[0] if with_bias else None, of[1], of[2], of[3], of[4].abs() + 0.5
    other, out = images(2, 24, 9, 9, seed=9), images(2, 24, 9, 9, seed=9)
    ins = [x.permute(0, 2, 3, 1), weight, other.permute(0, 2, 3, 1)]
    ins += [tensor for tensor in (bias, scale, shift, mean, variance) if tensor is not None]
    attrs = {
        **{"strides": (1, 1), "pads": (size // 2,) * 2, "dilations": (1, 1), "group": 1, "add": True},
        **{"bias": with_bias, "norm": True, "epsilon": 1e-5, "channels_last": True, "activation": "relu"},
        **{"numbers": (), "native": library},
    }
    specs = [TensorSpec(tuple(tensor.shape), "float32") for tensor in ins]
    stored = {at: tensor for at, tensor in enumerate(ins) if at not in (0, 2)}
    attrs["packed"] = packed = pack_conv(attrs, specs, stored)
    assert type(packed).__name__ == {1: "PointWeight", 3: "TileWeight"}[size]
    conv(ins, [out.permute(0, 2, 3, 1)], attrs)()
    wanted = functional.conv2d(x.double(), weight.double(), None if bias is None else bias.double(), padding=size // 2)
    mean, variance, scale, shift = (tensor.double() for tensor in (mean, variance, scale, shift))
    wanted = functional.batch_norm(wanted, mean, variance, scale, shift, eps=1e-5)
    wanted = torch.relu(wanted + other.double())
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=1e-5)


def test_a_residual_block_in_a_program(library):
    """As a run and as a replay: a convolution of the input, and one that is written over what is added."""
    image, wide = TensorSpec((1, 9, 9, 32), "float32"), TensorSpec((1, 9, 9, 48), "float32")
    builder = GraphBuilder("block")
    x, first = builder.input("x", image), builder.param("first", TensorSpec((32, 32, 3, 3), "float32"))
    second, third = (builder.param(name, TensorSpec((48, 32, 1, 1), "float32")) for name in ("second", "third"))
    fixed = {"strides": (1, 1), "dilations": (1, 1), "group": 1, "epsilon": 0.0, "bias": False, "norm": False}
    fixed |= {"channels_last": True, "activation": "relu", "numbers": ()}
    around, alone = {**fixed, "pads": (1, 1), "add": False}, {**fixed, "pads": (0, 0), "add": False}
    (inner,) = builder.emit("ConvPointwise", [x, first], [("inner", image)], around)
    (other,) = builder.emit("ConvPointwise", [x, third], [("other", wide)], alone)
    (added,) = builder.emit("ConvPointwise", [inner, second, other], [("added", wide)], {**alone, "add": True})
    (y,) = builder.emit("aten.neg.default", [added], [("y", wide)])
    graph = builder.build([y])
    weights = {
        "first": torch.randn(32, 32, 3, 3),
        "second": torch.randn(48, 32, 1, 1),
        "third": torch.randn(48, 32, 1, 1),
    }
    program, feed = compile_graph(graph, weights, native=True), {"x": torch.randn(1, 9, 9, 32)}
    assert program.plan.alias[added] == other
    pixels = feed["x"].permute(0, 3, 1, 2).double()
    inside = functional.conv2d(pixels, weights["first"].double(), padding=1).relu()
    beside = functional.conv2d(pixels, weights["third"].double()).relu()
    wanted = -(functional.conv2d(inside, weights["second"].double()) + beside).relu().permute(0, 2, 3, 1)
    program.capture(feed)
    for found in (program.run(feed), program.replay(feed), program.run(feed), program.replay(feed)):
        torch.testing.assert_close(found["y"].double(), wanted, atol=1e-3, rtol=1e-5)
