"""Resize to the nearest element: the formulas of ONNX's text in exact fractions say which element that is.

Onnxruntime counts in float32 and ONNX's evaluator in float64, so near a half or a whole number each picks another one.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

from pipeline.errors import Unsupported
from pipeline.runtime import compile_graph
from tests.pipeline.importers.from_onnx.import_text import graph_from, ops

HALF = Fraction(1, 2)

ROUNDED = {
    "round_prefer_floor": lambda place: math.ceil(place - HALF),
    "round_prefer_ceil": lambda place: math.floor(place + HALF),
    "floor": math.floor,
    "ceil": math.ceil,
}


def place_by_the_text(coordinates: str, at: int, size: int, new_size: int, scale: Fraction) -> Fraction:
    if coordinates == "asymmetric":
        return at / scale
    if coordinates == "align_corners":
        return Fraction(at * (size - 1), new_size - 1) if new_size > 1 else Fraction(0)
    if coordinates == "pytorch_half_pixel" and new_size == 1:
        return Fraction(0)
    place = (at + HALF) / scale - HALF
    if coordinates == "half_pixel_symmetric":
        place += Fraction(size, 2) * (1 - new_size / (scale * size))
    return place


def resize(size: int, scale: float | None, new_size: int, coordinates: str, nearest: str) -> str:
    given = (
        f"s = Constant <value_floats = [1.0, {scale}]> () "
        if scale
        else f"s = Constant <value_ints = [1, {new_size}]> () "
    )
    return (
        f"g (float[1, {size}] x) => (float[1, n] y) {{ {given}"
        f'y = Resize <mode = "nearest", coordinate_transformation_mode = "{coordinates}", nearest_mode = "{nearest}"> '
        f"(x, , {'s' if scale else ', s'}) }}"
    )


COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")

SIZED = ((7, 9), (10, 6), (7, 1), (3, 9), (4, 2), (6, 4))
SCALED = ((7, 0.3), (4, 0.6), (3, 2.5), (7, 1.5), (4, 2.0), (5, 3.0), (10, 0.7))


@pytest.mark.parametrize("coordinates", COORDINATES)
def test_the_elements_are_those_of_the_formulas(coordinates: str) -> None:
    cases: list[tuple[int, int, float | None, Fraction]] = [
        (size, new_size, None, Fraction(new_size, size)) for size, new_size in SIZED
    ]
    if coordinates != "align_corners":  # with a length that is no whole number ONNX's cases say another than its text
        exact = {scale: Fraction(float(np.float32(scale))) for _, scale in SCALED}
        cases += [(size, math.floor(size * exact[scale]), scale, exact[scale]) for size, scale in SCALED]
    for (size, new_size, scale, exact_scale), nearest in product(cases, ROUNDED):
        places = [place_by_the_text(coordinates, at, size, new_size, exact_scale) for at in range(new_size)]
        wanted = [float(min(max(ROUNDED[nearest](place), 0), size - 1)) for place in places]
        graph = graph_from(resize(size, scale, new_size, coordinates, nearest), 19)
        (y,) = compile_graph(graph).run({"x": torch.arange(float(size))[None]}).values()
        assert y[0].tolist() == wanted, (size, scale, new_size, nearest)


def test_what_torch_s_operators_do_not_take_is_selected() -> None:
    """Torch rounds down and counts in float32; its operators are for images."""
    image = "g (float[1, 2, 4] x) => (float[1, 2, 8] y)"
    nearest = 'mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode'
    size = "s = Constant <value_ints = [1, 2, 8]> ()"
    assert ops(f'{image} {{ {size} y = Resize <{nearest} = "floor"> (x, , , s) }}', 19) == (
        '%1 "y": float32[1, 2, 8] = aten.upsample_nearest1d.default(%0) {output_size: [8]}'
    )
    assert ops(f'{image} {{ {size} y = Resize <{nearest} = "ceil"> (x, , , s) }}', 19).splitlines() == [
        'const %1 "y.value": int64[8]',
        '%2 "y.index": float32[1, 2, 8] = aten.index.Tensor(%0, %1) {indices: [none, none, $1]}',
        '%3 "y": float32[1, 2, 8] = aten.clone.default(%2)',
    ]
    assert ops(resize(7, None, 9, "half_pixel", "floor"), 19).splitlines() == [
        'const %1 "y.value": int64[9]',
        '%2 "y.index": float32[1, 9] = aten.index.Tensor(%0, %1) {indices: [none, $1]}',
        '%3 "y": float32[1, 9] = aten.clone.default(%2)',
    ]


LINEAR = {
    "half_pixel": "aten.upsample_bilinear2d.default(%0) {output_size: [8, 6], align_corners: false}",
    "align_corners": "aten.upsample_bilinear2d.default(%0) {output_size: [8, 6], align_corners: true}",
    "asymmetric": "aten.clone.default(%18)",
}


@pytest.mark.parametrize("coordinates", LINEAR)
def test_linear_over_an_image(coordinates: str) -> None:
    text = f"""g (float[1, 2, 4, 3] x) => (float[1, 2, 8, 6] y) {{ s = Constant <value_ints = [1, 2, 8, 6]> ()
        y = Resize <mode = "linear", coordinate_transformation_mode = "{coordinates}"> (x, , , s) }}"""
    assert ops(text, 19).splitlines()[-1].rpartition(" = ")[2] == LINEAR[coordinates]


@pytest.mark.parametrize("scale", ["0.0", "-2.0"])
def test_a_scale_that_is_not_above_zero_is_refused(scale: str) -> None:
    constant = f"s = Constant <value_floats = [1.0, {scale}]> ()"
    with pytest.raises(Unsupported, match=rf"\(Resize\): it has the scale {scale}, expected a number above 0"):
        graph_from(f"g (float[1, 4] x) => (float[1, 8] y) {{ {constant} y = Resize (x, , s) }}", 19)
