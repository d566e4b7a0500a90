"""Encodings as AIMET's files have them: versions 0.6.1, 1.0.0, 2.0.0 and 2.1.0, in both directions.

Up to 1.0.0 a value is (q + offset) · scale where q begins at zero, so the offset is minus the zero point of the
unsigned format; in 2.0.0 and later the keys are those of QuantizeLinear. Between 2.0.0 and 2.1.0 only the form of
scales that are quantized themselves differs, which are refused here. Source: aimet_onnx 2.42, `qc_quantize_op.py` and
`quantsim.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np

from passes.encodings.encoding import (
    LPBQ_SCALES,
    MATRIX,
    NOWHERE,
    UNKNOWN_AXIS,
    Axes,
    Encoding,
    Precision,
    find_axes,
    refuse_unfitted,
    stored_shapes,
)
from passes.errors import UsageError
from passes.suggest import describe_argument, with_article
from passes.weights.detached import DetachedModel

AimetVersion = Literal["0.6.1", "1.0.0", "2.0.0", "2.1.0"]

PRODUCER: Final = {"package": "onnxline"}

Data = dict[str, Any]


def to_aimet(
    encodings: Mapping[str, Encoding],
    parameters: Collection[str],
    version: AimetVersion = "1.0.0",
    axes: Mapping[str, Axes] | None = None,
) -> Data:
    """The content of a file of AIMET's encodings.

    Args:
        encodings: name of the tensor → its encoding.
        parameters: the tensors that are constants.
        version: the version of the file.
        axes: of the weights; None where they are not known. Up to 1.0.0 a file does not say along which axes its scales
            are: a reader takes these, and no scales but one for another tensor, such as a table that Gather reads.

    Raises:
        UsageError: the version cannot express an encoding, or an encoding lacks the axis that the version names.
    """
    narrow = next((name for name, encoding in encodings.items() if encoding.precision.float_type), None)
    if narrow is not None:
        raise UsageError(
            f"encodings: {narrow!r} is {encodings[narrow].precision}, which AIMET's files have no form for"
        )
    found = {name: None if axes is None else axes.get(name, NOWHERE) for name in encodings}
    unlisted = next((name for name, own in encodings.items() if not is_listed(own, version, found[name])), None)
    if unlisted is not None:
        where = (
            "along other axes than those of channels and blocks"
            if is_listed(encodings[unlisted], version)  # a form for the axes of the weight itself
            else "for blocks and along further axes than that of channels"
        )
        raise UsageError(
            f"encodings: {unlisted!r} has scales {where}, which version {version} of AIMET's files cannot say; "
            "take 2.0.0 or later"
        )
    if version in ("2.0.0", "2.1.0"):
        refuse_unfitted(encodings, "to_aimet")  # whose files of these versions name the axes
        rows = [_with_onnx_keys(name, encoding, version) for name, encoding in encodings.items()]
        return {"encodings": rows, "producer": PRODUCER, "version": version}
    params, activations = ([name for name in encodings if (name in parameters) is wanted] for wanted in (True, False))
    # AIMET makes the encoding of a 32-bit bias of its factors, in these versions.
    params = [name for name in params if encodings[name].precision.bits < 32]
    sections = {"activation_encodings": activations, "param_encodings": params}
    return {
        **{section: _write(encodings, names, version) for section, names in sections.items()},
        "producer": PRODUCER,
        "version": version,
    }


def _write(encodings: Mapping[str, Encoding], names: Collection[str], version: AimetVersion) -> Data | list[Data]:
    if version == "0.6.1":
        return {name: _rows_of_dict(name, encodings[name]) for name in names}
    return [_row_of_list(name, encodings[name]) for name in names]


def read_aimet(path: Path) -> tuple[dict[str, Encoding], AimetVersion]:
    """The encodings of a file of AIMET's by tensor, and its version.

    Raises:
        UsageError: there is no such file, or it is none of encodings.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"encodings: {path}: {error.strerror or error}; expected a file of AIMET's encodings"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"encodings: {path} is not JSON ({error}); expected a file of AIMET's encodings") from error
    if not isinstance(data, Mapping):
        raise UsageError(f"encodings: {path}: found {with_article(type(data).__name__)}, expected AIMET's encodings")
    return from_aimet(data), data["version"]


def aimet_text(
    encodings: Mapping[str, Encoding],
    parameters: Collection[str],
    version: AimetVersion,
    axes: Mapping[str, Axes] | None = None,
) -> str:
    """The text of a file of AIMET's encodings; see `to_aimet`."""
    return json.dumps(to_aimet(encodings, parameters, version, axes), indent=1) + "\n"


def aimet_text_of(model: DetachedModel, encodings: Mapping[str, Encoding], version: AimetVersion) -> str:
    """The text of a file of AIMET's encodings of a float model; see `to_aimet`."""
    return aimet_text(encodings, {*model.index.initializers}, version, find_axes(model, stored_shapes(model)))


def from_aimet(data: Mapping[str, Any]) -> dict[str, Encoding]:
    """The encodings of a file of AIMET's.

    Args:
        data: what the JSON file holds; any version of `AimetVersion`.

    Returns:
        Name of the tensor → its encoding, with scales in float32.

    Raises:
        UsageError: no mapping, another version, or an encoding that is not integers with a scale.
    """
    if not isinstance(data, Mapping):
        raise UsageError(f"encodings: data is {describe_argument(data)}, expected the mapping that an AIMET file holds")
    version = data.get("version")
    if version not in get_args(AimetVersion):
        raise UsageError(
            f"encodings: found the version {version!r}, expected one of {', '.join(get_args(AimetVersion))}"
        )
    try:
        found = _read_sections(data, str(version))
    except KeyError as error:
        raise UsageError(
            f"encodings: an entry of the file lacks the key {error}, which version {version} has"
        ) from error
    except (TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise UsageError(f"encodings: the file is no whole file of version {version}: {error!r}") from error
    for name, encoding in found.items():
        _check_numbers(name, encoding)
    return found


def _read_sections(data: Mapping[str, Any], version: str) -> dict[str, Encoding]:
    if version in ("2.0.0", "2.1.0"):
        return {name: _from_onnx_keys(row) for name, row in _by_name((row["name"], row) for row in data["encodings"])}
    sections = (data["activation_encodings"], data["param_encodings"])
    if version == "0.6.1":
        entries = _by_name(entry for section in sections for entry in section.items())
        return {name: _from_dicts(name, rows) for name, rows in entries}
    return {name: _from_list(row) for name, row in _by_name((row["name"], row) for rows in sections for row in rows)}


def _by_name(entries: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
    """The entries, where no two of a name differ.

    Raises:
        UsageError: two do, so that the file does not say which of them counts.
    """
    found: dict[str, Any] = {}
    for name, entry in entries:
        if found.setdefault(name, entry) != entry:
            raise UsageError(f"encodings: the file has several entries of {name!r}, which differ; expected one")
    return found.items()


def _check_numbers(name: str, encoding: Encoding) -> None:
    """Refuse what no quantizer can compute with."""
    precision, scale, zero = encoding.precision, encoding.scale, encoding.zero_point
    if precision.bits not in (*BITS, 32):
        raise UsageError(f"encodings: {name!r} has {precision.bits!r} bits, expected {BITS[0]} to {BITS[-1]}, or 32")
    if not scale.size or not (np.isfinite(scale) & (scale > 0)).all():
        raise UsageError(f"encodings: {name!r} has a scale that is no positive number: {_first_bad(scale)}")
    if zero.shape != scale.shape or (zero < precision.lowest - 1).any() or (zero > precision.highest).any():
        raise UsageError(f"encodings: {name!r} has zero points that {precision} has not, or not one for each scale")


def _first_bad(scale: np.ndarray) -> str:
    bad = scale.ravel()[~(np.isfinite(scale) & (scale > 0)).ravel()]
    return f"{bad[0]:g}" if bad.size else "none"


WITHOUT_QUANTIZER: Final = frozenset(
    {
        *("Col2Im", "Compress", "DepthToSpace", "Dropout", "Expand", "Flatten", "Gather", "GatherElements", "GatherND"),
        *("Identity", "MaxPool", "MaxRoiPool", "NonZero", "Pad", "ReduceMax", "ReduceMin", "Reshape", "Slice"),
        *("SpaceToDepth", "Split", "SplitToSequence", "Squeeze", "Tile", "TopK", "Transpose", "Unsqueeze"),
    }
)
"""Ops after which AIMET has no quantizer, since their results are elements that they read; its strict loader refuses a
file with an encoding there (aimet_onnx 2.42, `_is_grid_preserving_op`)."""

BITS: Final = range(2, 17)
"""The least and the most bits of a tensor; a bias has 32."""


def _rows_of_dict(name: str, encoding: Encoding) -> list[Data]:
    if encoding.precision.granularity == "block":
        raise UsageError(
            f"encodings: version 0.6.1 has no scales for blocks, as {name!r} has them; take 1.0.0 or later"
        )
    bits = encoding.precision.bits
    return [
        {
            "bitwidth": bits,
            "dtype": "int",
            "is_symmetric": str(encoding.precision.symmetric),
            "max": (2**bits - 1 + offset) * scale,
            "min": offset * scale,
            "offset": offset,
            "scale": scale,
        }
        for scale, offset in zip(encoding.scale.ravel().tolist(), _offsets(encoding), strict=True)
    ]


def _from_dicts(name: str, rows: list[Data]) -> Encoding:
    _refuse_floats(name, rows[0]["dtype"])
    forms = {(row["bitwidth"], row["dtype"], row["is_symmetric"]) for row in rows}
    if len(forms) > 1:
        raise UsageError(f"encodings: found {len(forms)} formats of the channels of {name!r}, expected one")
    symmetric = _as_bool(rows[0]["is_symmetric"])
    scale = np.array([row["scale"] for row in rows], np.float32)
    offset = np.array([row["offset"] for row in rows], np.int64)
    return _encoding(rows[0]["bitwidth"], symmetric, scale, offset)


def _row_of_list(name: str, encoding: Encoding) -> Data:
    precision = encoding.precision
    row: Data = {
        "bw": precision.bits,
        "dtype": "INT",
        "enc_type": f"PER_{precision.granularity.upper()}",
        "is_sym": precision.symmetric,
        "name": name,
        "offset": _offsets(_list_channels(encoding)),
        "scale": _list_channels(encoding).scale.ravel().tolist(),
    }
    if precision.scale_type:  # LPBQ, which is_listed lets through alone
        assert encoding.global_scale is not None
        inner = _list_channels(replace(encoding, scale=encoding.inner_scale())).scale.ravel().astype(np.int64)
        outer = encoding.global_scale.ravel().tolist()
        row |= {"enc_type": "LPBQ", "bw": 2 * precision.bits, "compressed_bw": precision.bits, "scale": outer}
        row |= {"offset": [-(2 ** (2 * precision.bits - 1))] * len(outer), "per_block_int_scale": inner.tolist()}
    return {**row, "block_size": precision.block} if precision.block else row


def _from_list(row: Data) -> Encoding:
    _refuse_floats(row["name"], row["dtype"])
    if row["enc_type"] not in LIST_TYPES:
        raise UsageError(f"encodings: {row['name']!r} is {row['enc_type']}; expected one of {', '.join(LIST_TYPES)}")
    scale, offset = np.array(row["scale"], np.float32), np.array(row["offset"], np.int64)
    if row["enc_type"] == "LPBQ":
        bits = (row["compressed_bw"], row["bw"])
        return _lpbq(row, bits, np.array(row["per_block_int_scale"], np.float32), scale, UNKNOWN_AXIS)
    is_whole = row["enc_type"] == "PER_TENSOR"
    if scale.ndim != 1 or (is_whole and scale.size > 1):
        raise UsageError(
            f"encodings: {row['name']!r} is {row['enc_type']} with scales {list(scale.shape)}; expected a list of "
            f"{'one number' if is_whole else 'numbers'}"
        )
    found = _encoding(row["bw"], _as_bool(row["is_sym"]), scale, offset, has_axis=not is_whole)
    if row["enc_type"] != "PER_BLOCK":
        return found
    return replace(found, precision=replace(found.precision, granularity="block", block=int(row["block_size"])))


def _as_bool(value: object) -> bool:
    """Whether a file says so: AIMET writes a bool, and its name as a text in version 0.6.1."""
    text = str(value).lower()
    if text not in ("true", "false"):
        raise ValueError(f"found {value!r}, expected true or false")
    return text == "true"


def _lpbq(row: Data, bits: tuple[int, int], inner: np.ndarray, outer: np.ndarray, axis: int) -> Encoding:
    """Blocks whose scales are integers, each scaled by the scale of its channel.

    Args:
        row: the entry of the file.
        bits: of the weight, and of a weight that has the scales of its channels alone.
        inner: float32, the integers.
        outer: float32, the scale of each channel, which can be broadcast to the integers where the axis is known.
        axis: that the blocks divide; UNKNOWN_AXIS where the file does not say it.

    Raises:
        UsageError: the integers are not those of 4 bits.
    """
    if bits != (4, 8) or not ((inner >= 1) & (inner <= LPBQ_SCALES) & (inner == np.rint(inner))).all():
        raise UsageError(
            f"encodings: {row['name']!r} has {bits[0]} bits and integers from {inner.min():g} to {inner.max():g} as "
            f"scales of blocks; expected 4 bits, 8 with the scales, and integers from 1 to {LPBQ_SCALES}"
        )
    precision = Precision(4, True, True, "block", int(row["block_size"]), scale_type="UINT8")
    scale = inner if axis == UNKNOWN_AXIS else inner * outer
    return Encoding(precision, scale, np.zeros(inner.shape, np.int64), axis, outer)


LIST_TYPES: Final = ("PER_TENSOR", "PER_CHANNEL", "PER_BLOCK", "LPBQ")
"""What shares a scale in version 1.0.0. Scales of blocks are a flat list there: for a matrix the blocks of the first
channel, then those of the second, whatever its layout; for the weight of a convolution in the order of its axes."""


def is_listed(encoding: Encoding, version: AimetVersion, axes: Axes | None = None) -> bool:
    """Whether a file of `version` has a form for an encoding. Floats have none. Up to 1.0.0 blocks have one scale for
    each channel and block, so there is none for those of stacked matrices, whose scales differ from matrix to matrix;
    and a file does not say an axis, so scales are along those of the weight, which are `axes` where they are known.
    """
    if encoding.precision.float_type or version in ("2.0.0", "2.1.0"):
        return not encoding.precision.float_type
    if encoding.axis in (None, UNKNOWN_AXIS):
        return True
    if encoding.precision.granularity != "block":
        return axes is None or axes[0] == encoding.axis
    channel = _channel_axis(encoding)
    return channel is not None and axes in (None, (channel, encoding.axis))


def _channel_axis(encoding: Encoding) -> int | None:
    """The axis along which the scales of blocks differ, besides that of the blocks; None if there are several."""
    scale, axis = encoding.scale, encoding.axis
    for channel in range(scale.ndim):
        others = tuple(at for at in range(scale.ndim) if at not in (channel, axis))
        if channel != axis and (scale.max(others) == scale.min(others)).all():
            return channel
    return None


def _list_channels(encoding: Encoding) -> Encoding:
    """`encoding` with the scales of its blocks in the order of version 1.0.0; as it is where it has no blocks."""
    if encoding.precision.granularity != "block" or encoding.axis is None or encoding.axis == UNKNOWN_AXIS:
        return encoding
    channel = _channel_axis(encoding)
    assert channel is not None
    axes = (channel, encoding.axis) if encoding.scale.ndim == MATRIX else tuple(sorted((channel, encoding.axis)))

    def list_rows(array: np.ndarray) -> np.ndarray:
        rows = np.moveaxis(array, axes, (0, 1))
        return rows.reshape(*rows.shape[:2], -1)[:, :, 0]

    return encoding.with_arrays(list_rows)


def _encoding(bits: int, symmetric: bool, scale: np.ndarray, offset: np.ndarray, *, has_axis: bool = False) -> Encoding:
    """A symmetric encoding is taken as signed. The file does not say the axis of channels or blocks."""
    precision = Precision(bits, signed=symmetric, symmetric=symmetric)
    zero = -offset - (2 ** (bits - 1) if symmetric else 0)
    if len(scale) == 1 and not has_axis:
        return Encoding(precision, scale.reshape(()), zero.reshape(()))
    return Encoding(replace(precision, granularity="channel"), scale, zero, axis=UNKNOWN_AXIS)


def _offsets(encoding: Encoding) -> list[int]:
    shift = 2 ** (encoding.precision.bits - 1) if encoding.precision.signed else 0
    return [-(int(zero) + shift) for zero in encoding.zero_point.ravel()]


def _with_onnx_keys(name: str, encoding: Encoding, version: AimetVersion) -> Data:
    precision = encoding.precision
    row: Data = {"name": name, "output_dtype": f"{'' if precision.signed else 'u'}int{precision.bits}"}
    if precision.scale_type and encoding.global_scale is not None:  # LPBQ
        outer = encoding.global_scale
        inner = _drop_repeats(replace(encoding, scale=encoding.inner_scale())).scale.astype(np.int64)
        row |= {"per_block_int_scale": inner.tolist(), "per_channel_float_scale": outer.tolist()}
        if version == "2.1.0":
            channel = _channel_axis(encoding)
            del row["per_block_int_scale"], row["per_channel_float_scale"]
            row["y_scale"] = {"x": inner.tolist(), "x_scale": outer.ravel().tolist(), "axis": channel}
        return {**row, "axis": encoding.axis, "block_size": precision.block}
    encoding = _drop_repeats(encoding)
    row["y_scale"] = encoding.scale.tolist()
    if encoding.zero_point.any():
        row["y_zero_point"] = encoding.zero_point.tolist()
    if encoding.axis is not None:
        row["axis"] = encoding.axis
    return {**row, "block_size": precision.block} if precision.block else row


def _drop_repeats(encoding: Encoding) -> Encoding:
    """The scales of blocks with one index along axes where they are the same, as AIMET has those of a kernel."""
    channel = _channel_axis(encoding) if encoding.precision.granularity == "block" else None
    if channel is None:
        return encoding
    kept = tuple(slice(None if at in (channel, encoding.axis) else 1) for at in range(encoding.scale.ndim))
    return encoding.with_arrays(lambda array: array[kept])


def _from_onnx_keys(row: Data) -> Encoding:
    scales = row.get("y_scale")
    if "per_block_int_scale" in row or isinstance(scales, Mapping):
        inner, outer = (
            (scales["x"], scales["x_scale"])
            if isinstance(scales, Mapping)
            else (row["per_block_int_scale"], row["per_channel_float_scale"])
        )
        inner, outer = np.array(inner, np.float32), np.array(outer, np.float32)
        if isinstance(scales, Mapping):  # a list of the channels along `axis`
            outer = outer.reshape([-1 if axis == scales["axis"] else 1 for axis in range(inner.ndim)])
        bits = (int(row["output_dtype"].removeprefix("int")), 8)
        return _lpbq(row, bits, inner, outer, int(row["axis"]) % inner.ndim)
    number = re.fullmatch(r"(u?)int(\d+)", row["output_dtype"])
    if number is None or not isinstance(row.get("y_scale"), list | float | int):
        raise UsageError(f"encodings: {row['name']!r} is {row['output_dtype']}; expected integers with a scale")
    signed, block = not number[1], int(row.get("block_size", 0))
    scale = np.array(row["y_scale"], np.float32)
    zero = np.array(row.get("y_zero_point", np.zeros(scale.shape)), np.int64)
    middle = 0 if signed else 2 ** (int(number[2]) - 1)
    granularity = "block" if block else "channel" if scale.ndim else "tensor"
    precision = Precision(int(number[2]), signed, bool((zero == middle).all()), granularity, block)
    axis = row.get("axis")
    return Encoding(precision, scale, zero, axis % scale.ndim if block and axis is not None else axis)


def _refuse_floats(name: str, dtype: str) -> None:
    if dtype.lower() != "int":
        raise UsageError(f"encodings: {name!r} is {dtype}; expected integers with a scale")
