"""Resize and Upsample as calls of torch.

Torch has some cases as one operator. Every other case is separable: along each axis the result is a selection of
constant places, or a sum of some with weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pipeline.importers.from_onnx.node import Importer, Node
from pipeline.importers.from_onnx.shape import by_places, move, reshape
from pipeline.ir.graph import Attr, TensorSpec


@dataclass(frozen=True, slots=True)
class Resampling:
    """How places of the output of a Resize follow from places of its input, along one axis."""

    mode: str
    coordinates: str
    nearest: str
    cubic: float
    antialias: bool
    exclude_outside: bool


def resize(node: Node) -> None:
    read, rank = node.attributes, node.spec(0).rank
    node.settle_inputs(1, 3)
    before = node.spec(0).sizes
    if 0 in before:
        raise node.refusal(f"its input has the shape {list(before)}, without an element")
    how = Resampling(
        read.text("mode", "nearest"),
        read.text("coordinate_transformation_mode", "half_pixel" if node.opset >= 11 else "asymmetric"),
        read.text("nearest_mode", "round_prefer_floor" if node.opset >= 11 else SIMPLE),
        read.number("cubic_coeff_a", -0.75),
        read.flag("antialias"),
        read.flag("exclude_outside"),
    )
    if how.mode not in ("nearest", "linear", "cubic") or how.coordinates not in COORDINATES:
        raise node.refusal(f"found mode {how.mode!r} and coordinates {how.coordinates!r}, which it does not have")
    axes = tuple(axis % rank for axis in read.integers("axes") or range(rank))
    resize_by(node, how, chosen_scales(node, axes), axes)


def resize_by(node: Node, how: Resampling, scales: tuple[Fraction, ...], axes: tuple[int, ...]) -> None:
    found = find_operator(how, node.spec(0), node.output(), scales)
    if found is None:
        resample(node, how, scales, axes)
        return
    node.attributes.settle("extrapolation_value")
    operator, attrs = found
    node.emit(operator, [node.operand(0)], {"output_size": node.output().sizes[2:], **attrs})


def find_operator(
    how: Resampling, before: TensorSpec, after: TensorSpec, scales: tuple[Fraction, ...]
) -> tuple[str, dict[str, Attr]] | None:
    """Torch's operator for all axes of an image, and what it takes as well as the sizes; None where it has none."""
    dims = before.rank - 2
    rows = list(zip(before.sizes, after.sizes, scales, strict=True))
    if dims not in (1, 2, 3) or "float" not in before.dtype or any(row[0] != row[1] for row in rows[:2]):
        return None
    if how.mode == "nearest":
        same = how.coordinates in PLAIN and all(
            np.array_equal(nearest_elements(how, old, new, scale), elements_of_torch(old, new))
            for old, new, scale in rows[2:]
        )
        return (f"aten.upsample_nearest{dims}d.default", {}) if same else None
    # An axis that stays would mix a number that is not finite with its neighbours.
    whole = all(scale != 1 and abs(scale * old - new) < 1e-6 for old, new, scale in rows[2:])
    if not whole or how.antialias or how.exclude_outside or how.coordinates not in OF_TORCH:
        return None
    if how.coordinates == "pytorch_half_pixel" and 1 in after.sizes[2:]:
        return None
    align_corners: dict[str, Attr] = {"align_corners": how.coordinates == "align_corners"}
    if how.mode == "linear":
        return f"aten.upsample_{('linear1d', 'bilinear2d', 'trilinear3d')[dims - 1]}.default", align_corners
    return ("aten.upsample_bicubic2d.default", align_corners) if dims == 2 and how.cubic == -0.75 else None


def elements_of_torch(size: int, new_size: int) -> np.ndarray:
    """The elements that torch's nearest mode takes; it counts in float32."""
    places = np.arange(new_size, dtype=np.float32) * np.float32(size / new_size)
    return np.minimum(np.floor(places), size - 1).astype(np.int64)


def chosen_scales(node: Node, axes: tuple[int, ...]) -> tuple[Fraction, ...]:
    """The exact scale of each axis: as given, or as the sizes and the policy about the aspect ratio say."""
    before, after = node.spec(0).sizes, node.output().sizes
    policy = node.attributes.text("keep_aspect_ratio_policy", "stretch")
    # Up to opset 10 the scales are input 1; later input 1 is the region.
    place = 2 if node.opset >= 11 else 1
    given = node.need_constant(place, "scales") if node.has(place) else np.empty(0)
    if "scales" in node.attributes:
        raise node.refusal("it has its scales as an attribute, expected an input")
    if given.size:
        node.check_length("scales", given, len(axes))
        chosen = {axis: positive(node, float(scale)) for axis, scale in zip(axes, given, strict=True)}
        return tuple(chosen.get(axis, Fraction(1)) for axis in range(len(before)))
    if policy == "stretch" or not node.has(3):
        return tuple(Fraction(new, old) for new, old in zip(after, before, strict=True))
    sizes = node.need_constant(3, "sizes")
    ratios = [Fraction(int(size), before[axis]) for axis, size in zip(axes, sizes, strict=True)]
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    return tuple(scale if axis in axes else Fraction(1) for axis in range(len(before)))


def positive(node: Node, scale: float) -> Fraction:
    if not 0 < scale < math.inf:
        raise node.refusal(f"it has the scale {scale}, expected a number above 0")
    return Fraction(scale)


def nearest_elements(how: Resampling, size: int, new_size: int, scale: Fraction) -> np.ndarray:
    """The element next to each place, in numbers without rounding."""
    length, half = scale * size, Fraction(1, 2)
    if abs(length - new_size) < 1e-6:  # a scale in float32 that was meant to give an integer
        length = Fraction(new_size)
    offset = -half
    if how.coordinates == "half_pixel_symmetric":
        offset += Fraction(size, 2) * (1 - new_size / length)
    places = [(at + half) / scale + offset for at in range(new_size)]
    if how.coordinates == "align_corners":
        places = [Fraction(at * (size - 1)) / (length - 1) if length != 1 else Fraction(0) for at in range(new_size)]
    elif how.coordinates == "asymmetric":
        places = [at / scale for at in range(new_size)]
    elif how.coordinates == "pytorch_half_pixel" and new_size == 1:
        places = [Fraction(0)]
    smaller = "ceil" if scale < 1 else "floor"
    rounding = ROUNDING[smaller if how.nearest == SIMPLE else how.nearest]
    return np.array([min(max(rounding(place), 0), size - 1) for place in places], np.int64)


def resample(node: Node, how: Resampling, scales: tuple[Fraction, ...], axes: tuple[int, ...]) -> None:
    spec, after = node.spec(0), node.output().sizes
    if how.mode != "nearest" and "float" not in spec.dtype:
        raise node.refusal(f"it interpolates {spec.dtype}, expected floating point")
    rank = spec.rank
    region = [0.0] * rank + [1.0] * rank
    if how.coordinates == "tf_crop_and_resize":
        roi = node.need_constant(1, "the region")
        for place, axis in enumerate(axes):
            region[axis], region[axis + rank] = float(roi[place]), float(roi[place + len(axes)])
    vid, sizes = node.operand(0), list(spec.sizes)
    inside = np.ones([1] * rank, bool)
    for axis in range(rank):
        places = source_places(
            how.coordinates, sizes[axis], after[axis], float(scales[axis]), (region[axis], region[axis + rank])
        )
        if how.coordinates == "tf_crop_and_resize":
            shape = [-1 if at == axis else 1 for at in range(rank)]
            inside = inside & ((places >= 0) & (places <= sizes[axis] - 1)).reshape(shape)
        stays = scales[axis] == 1 and after[axis] == sizes[axis] and how.coordinates != "tf_crop_and_resize"
        if stays or np.array_equal(places, np.arange(sizes[axis])):
            continue
        vid = along_axis(node, vid, axis, how, places, scales[axis])
        sizes[axis] = after[axis]
    value = node.attributes.number("extrapolation_value")
    if inside.all():
        node.emit("aten.clone.default", [vid])
        return
    outside = node.constant_operand(np.array(value, spec.dtype))
    node.emit("aten.where.self", [node.constant_operand(inside), vid, outside])


def along_axis(node: Node, vid: int, axis: int, how: Resampling, places: np.ndarray, scale: Fraction) -> int:
    """`vid` resampled at `places` of one axis."""
    spec, count = node.vid_spec(vid), len(places)
    size = spec.sizes[axis]
    result = TensorSpec((*spec.sizes[:axis], count, *spec.sizes[axis + 1 :]), spec.dtype)
    if how.mode == "nearest":
        picked = (
            nearest_elements(how, size, count, scale)
            if how.coordinates in PLAIN
            else np.array([ROUNDING[how.nearest](Fraction(place)) for place in places.tolist()]).clip(0, size - 1)
        )
        return move(node, vid, by_places(node, spec.sizes, axis, picked))
    near, shares = taps(how, places, size, float(scale))
    if near.shape[1] > MOST_TAPS:
        matrix = np.zeros((count, size))
        np.add.at(matrix, (np.arange(count)[:, None], near), shares)
        return multiply_along(node, vid, axis, matrix, result)
    # One term for each neighbour: a number that is not finite reaches its own neighbours only.
    column = [-1 if at == axis else 1 for at in range(spec.rank)]
    total: int | None = None
    for picked, share in zip(near.T, shares.T, strict=True):
        part = move(node, vid, by_places(node, spec.sizes, axis, picked))
        factor = node.constant_operand(share.astype(spec.dtype).reshape(column))
        part = node.step("aten.mul.Tensor", [part, factor], result)
        total = part if total is None else node.step("aten.add.Tensor", [total, part], result)
    assert total is not None
    return total


def multiply_along(node: Node, vid: int, axis: int, matrix: np.ndarray, result: TensorSpec) -> int:
    """The matrix times `vid` along one axis."""
    spec, (count, size) = node.vid_spec(vid), matrix.shape
    operand = node.constant_operand(matrix.astype(spec.dtype))
    outer, inner = math.prod(spec.sizes[:axis]), math.prod(spec.sizes[axis + 1 :])
    made = TensorSpec((outer, count, inner), spec.dtype)
    vid = node.step("aten.matmul.default", [operand, reshape(node, vid, (outer, size, inner))], made)
    return reshape(node, vid, result.sizes)


def source_places(coordinates: str, size: int, new_size: int, scale: float, region: tuple[float, float]) -> np.ndarray:
    """The place of each new element among the old ones, by the formulas of ONNX's Resize."""
    at, length = np.arange(new_size, dtype=np.float64), scale * size
    begin, end = region
    match coordinates:
        case "align_corners":
            return at * 0 if length == 1 else at * ((size - 1) / (length - 1))
        case "asymmetric":
            return at / scale
        case "tf_crop_and_resize":
            step = at * (end - begin) * (size - 1) / (length - 1) if length != 1 else (end - begin) * (size - 1) / 2
            return begin * (size - 1) + step + at * 0
        case "tf_half_pixel_for_nn":  # ONNX's reference has no such mode; TensorFlow and onnxruntime count in float32
            return ((at + 0.5).astype(np.float32) / np.float32(scale)).astype(np.float64)
        case "pytorch_half_pixel" if new_size == 1:
            return at * 0
        case "half_pixel_symmetric":
            return size / 2 * (1 - new_size / length) + (at + 0.5) / scale - 0.5
    return (at + 0.5) / scale - 0.5


def taps(how: Resampling, places: np.ndarray, size: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """For each new element the old ones around its place, and their weights; one outside is the nearest inside."""
    stretch = min(scale, 1.0) if how.antialias else 1.0
    reach = 2 if how.mode == "cubic" else 1
    first = math.floor(-reach / stretch) + 1
    low = np.ceil(places).astype(np.int64) - 1  # so that the distance to it is above 0, and at most 1
    near = low[:, None] + np.arange(first, 2 - first)
    shares = KERNELS[how.mode]((near - places[:, None]) * stretch, how.cubic)
    if how.exclude_outside:
        shares = np.where((near < 0) | (near >= size), 0, shares)
    if how.antialias or how.exclude_outside:
        shares = shares / shares.sum(1, keepdims=True)
    return np.clip(near, 0, size - 1), shares


def triangle(distance: np.ndarray, _: float) -> np.ndarray:
    return np.clip(1 - np.abs(distance), 0, 1)


def cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Keys' kernel, which reaches 2 elements to each side."""
    x = np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


KERNELS: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {"linear": triangle, "cubic": cubic}

ROUNDING: dict[str, Callable[[Fraction], int]] = {
    "round_prefer_floor": lambda place: math.ceil(place - Fraction(1, 2)),
    "round_prefer_ceil": lambda place: math.floor(place + Fraction(1, 2)),
    "floor": math.floor,
    "ceil": math.ceil,
}

SIMPLE = "simple"
"""The rounding of opset 10, which the standard leaves open: up where the result is smaller, as in onnxruntime."""

MOST_TAPS = 8
"""Neighbours of which each is a term of a sum; more of them are a product with a matrix."""

PLAIN = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")
OF_TORCH = ("half_pixel", "pytorch_half_pixel", "align_corners")
COORDINATES = (*PLAIN, "tf_crop_and_resize", "tf_half_pixel_for_nn")


def upsample(node: Node, *, mode: str = "nearest") -> None:
    """Resize up to opset 9: asymmetric, and down to the nearest element."""
    if mode not in ("nearest", "linear"):
        raise node.refusal(f"found mode {mode!r}, expected nearest or linear")
    how = Resampling(mode, "asymmetric", "floor", -0.75, antialias=False, exclude_outside=False)
    axes = tuple(range(node.spec(0).rank))
    scales = tuple(positive(node, float(scale)) for scale in node.need_constant(1, "scales"))
    resize_by(node, how, scales, axes)


IMPORTERS: dict[str, Importer] = {"Resize": resize, "Upsample": upsample}
