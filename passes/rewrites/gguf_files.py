"""The weights of a GGUF file in a float model of the same network: the very integers of Q4_0 and Q4_K.

Q4_0 has a scale for 32 values, and Q4_K a scale and a minimum for 32 values, of 6 bits each, scaled by two floats for
256 values. Other quantized types become the floats that they stand for. The library gguf reads the file, knows what its
names are called in transformers, and is the judge: each weight is equal to what gguf dequantizes, bit for bit.
Source: `ggml-quants.c` of llama.cpp, and `gguf/quants.py`.

llama.cpp reorders the rows of Q and K of some networks for its rotary embedding, and files of other networks do not say
so. The order is the one in which the file's values are those of the float model, up to rounding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from onnx import TensorProto

from passes.errors import OnnxlineError, PolicyError, UsageError
from passes.provenance import untransposed_name
from passes.rewrites.file_weights import FileWeights, dequantize
from passes.rewrites.matmul_nbits import NibbleWeight
from passes.suggest import plural
from passes.weights.detached import DetachedModel

BLOCK: Final = 32
MIDDLE: Final = 8

LEAST_DB: Final = 3.0
"""Of a weight of the file against that of the model: with rows in another order the ratio is near -3 dB."""


@dataclass(frozen=True, slots=True)
class GgufWeight:
    """What a file has of one weight: the floats [outputs, inputs] that it stands for; of 4 bits also its integers, and
    the minima [blocks, outputs] of Q4_K."""

    kind: str
    values: np.ndarray
    nibbles: NibbleWeight | None = None
    minima: np.ndarray | None = None

    def select_rows(self, order: np.ndarray) -> GgufWeight:
        nibbles = self.nibbles
        if nibbles is not None:
            integers, zeros, scales = nibbles.integers, nibbles.zero_points, nibbles.scales
            nibbles = NibbleWeight(integers[:, order], zeros[:, order], scales[:, order], nibbles.block)
        minima = None if self.minima is None else self.minima[:, order]
        return replace(self, values=self.values[order], nibbles=nibbles, minima=minima)


def read_gguf(model: DetachedModel, path: Path) -> FileWeights:
    """The weights of a file of GGUF that stand for weights of the float model.

    Args:
        model: the float model that the file was quantized from.
        path: the file.

    Returns:
        The weights, by the names of the model.

    Raises:
        UsageError: the file is no GGUF, or of another network.
        PolicyError: gguf is not installed.
    """
    reader, gguf = _open(path)
    names = _find_names(reader, gguf, model, path)
    heads = [int(_field(reader, f"attention.{key}", 1)) for key in ("head_count", "head_count_kv")]
    nibbles: dict[str, NibbleWeight] = {}
    minima: dict[str, np.ndarray] = {}
    floats: dict[str, np.ndarray] = {}
    turned: set[str] = set()
    kinds: Counter[str] = Counter()
    for name, tensor in names.items():
        stored = model.array(model.index.initializers[name]).astype(np.float32)
        found, is_turned = _fit(_read(tensor, gguf), stored, heads, path, name)
        kinds[found.kind] += 1
        if found.nibbles is None:
            floats[name] = found.values if is_turned else np.ascontiguousarray(found.values.T)
            continue
        nibbles[name] = found.nibbles
        if is_turned:
            turned.add(name)
        if found.minima is not None:
            minima[name] = found.minima
    listing = ", ".join(f"{plural(count, 'weight')} of {kind}" for kind, count in kinds.items())
    as_floats = f"; those of {' and '.join(sorted(kinds.keys() - READ.keys()))} as floats" if floats else ""
    return FileWeights(nibbles, turned, f"{listing}{as_floats}; equal to what gguf dequantizes", minima, floats)


def _open(path: Path) -> tuple[Any, Any]:
    try:
        import gguf  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise PolicyError(f"{path.name} needs gguf, an extra: pip install 'onnxline[gguf]'") from error

    try:
        return gguf.GGUFReader(path), gguf
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UsageError(f"{path} is no file of GGUF that gguf reads: {error}") from error


def _field(reader: Any, key: str, default: Any = None) -> Any:
    """A field of the network, such as its number of heads."""
    general = reader.fields.get("general.architecture")
    network = general.contents() if general is not None else ""
    field = reader.fields.get(f"{network}.{key}")
    return default if field is None else field.contents()


def _find_names(reader: Any, gguf: Any, model: DetachedModel, path: Path) -> dict[str, Any]:
    """Stored tensor of the model → the quantized tensor of the file, by the names of transformers or by its own."""
    general = reader.fields.get("general.architecture")
    network = "" if general is None else general.contents()
    known = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == network), None)
    spelled = gguf.get_tensor_name_map(known, int(_field(reader, "block_count", 0))) if known is not None else None
    floats = {gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "F64")}
    quantized = {tensor.name: tensor for tensor in reader.tensors if tensor.tensor_type not in floats}
    names = {tensor.name for tensor in reader.tensors}
    found: dict[str, Any] = {}
    for name, tensor in model.index.initializers.items():
        is_matrix = len(tensor.dims) == 2 and tensor.data_type == TensorProto.FLOAT
        for part in _endings(untransposed_name(name)) if is_matrix else ():
            own = spelled.get_name(part, try_suffixes=(".weight",)) if spelled is not None else None
            tied = TABLE if own == HEAD and HEAD not in names else None
            entry = next((quantized[key] for key in (own, tied, part) if key in quantized), None)
            if entry is not None:
                found[name] = entry
                break
    lost = quantized.keys() - {tensor.name for tensor in found.values()}
    if lost or not found:
        what = f"{plural(len(lost), 'quantized tensor')} that the model lacks, such as {min(lost)}" if lost else "none"
        raise UsageError(
            f"{path}: found {what}, expected the weights of the float model under the names of transformers or of GGUF"
        )
    return found


HEAD: Final = "output.weight"
TABLE: Final = "token_embd.weight"
"""The table of the embedding is the output projection, too, in a file that has no `HEAD`."""


def _endings(name: str) -> Iterator[str]:
    """The name, and what is left of it without its first parts: a wrapper may have put some there."""
    parts = name.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def _read(tensor: Any, gguf: Any) -> GgufWeight:
    """A tensor of the file.

    Raises:
        OnnxlineError: its integers do not give what gguf dequantizes.
    """
    kind = tensor.tensor_type.name
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    if kind not in READ:
        return GgufWeight(kind, values)
    nibbles, minima = READ[kind](np.asarray(tensor.data))
    found = GgufWeight(kind, values, nibbles, minima)
    if not np.array_equal(dequantize(nibbles, minima), values):
        raise OnnxlineError(
            f"{tensor.name}: the integers of {kind} are not those that gguf dequantizes; report it as a bug"
        )
    return found


def read_q4_0(rows: np.ndarray) -> tuple[NibbleWeight, None]:
    """18 bytes for 32 values: a scale in float16, and 16 bytes, in whose low nibbles the first 16 values lie."""
    blocks = rows.reshape(len(rows), -1, 18)
    scales = blocks[:, :, :2].copy().view(np.float16)[:, :, 0].astype(np.float32)
    packed = blocks[:, :, 2:]
    integers = np.concatenate((packed & 15, packed >> 4), -1).reshape(len(rows), -1)
    return NibbleWeight(integers.T, np.full(scales.T.shape, MIDDLE, np.uint8), scales.T, BLOCK), None


def read_q4_k(rows: np.ndarray) -> tuple[NibbleWeight, np.ndarray]:
    """144 bytes for 256 values: what scales the scales and the minima of 8 blocks, these in 12 bytes, and 128 bytes of
    integers: of each 32 bytes the low nibbles are one block and the high ones the next."""
    blocks = rows.reshape(len(rows), -1, 144)
    outer = blocks[:, :, :4].copy().view(np.float16).astype(np.float32)
    first, second, rest = blocks[:, :, 4:8], blocks[:, :, 8:12], blocks[:, :, 12:16]
    scales = np.concatenate((first & 63, (rest & 15) | ((first >> 6) << 4)), -1)
    minima = np.concatenate((second & 63, (rest >> 4) | ((second >> 6) << 4)), -1)
    steps, bottoms = (
        (outer[:, :, place, None] * part.astype(np.float32)).reshape(len(rows), -1).T
        for place, part in enumerate((scales, minima))
    )
    packed = blocks[:, :, 16:].reshape(len(rows), -1, 4, 1, BLOCK)
    integers = np.concatenate((packed & 15, packed >> 4), -2).reshape(len(rows), -1)
    return NibbleWeight(integers.T, np.zeros(steps.shape, np.uint8), steps, BLOCK), bottoms


READ: Final[Mapping[str, Any]] = {"Q4_0": read_q4_0, "Q4_K": read_q4_k}


def _fit(weight: GgufWeight, stored: np.ndarray, heads: list[int], path: Path, name: str) -> tuple[GgufWeight, bool]:
    """The weight with its rows in the order of the model, and whether that has them along its first axis.

    Raises:
        UsageError: the values are not those of the model in any order.
    """
    best, ratio, is_turned = weight, -math.inf, False
    outputs, inputs = weight.values.shape
    for shape, matrix in (((outputs, inputs), stored), ((inputs, outputs), stored.T)):
        if stored.shape != shape:
            continue
        orders = [np.arange(outputs)]
        orders += [
            orders[0].reshape(count, -1, 2).swapaxes(1, 2).reshape(-1)
            for count in dict.fromkeys(heads)
            if count > 1 and outputs % (2 * count) == 0
        ]
        for order in orders:
            noise = float(np.square(weight.values[order] - matrix, dtype=np.float64).sum())
            signal = float(np.square(matrix, dtype=np.float64).sum())
            found = 10 * math.log10(signal / noise) if signal and noise else math.inf if signal else -math.inf
            if found > ratio:
                best, ratio, is_turned = weight.select_rows(order), found, matrix is stored
    if ratio < LEAST_DB:
        raise UsageError(
            f"{path}: {name}: found values [{outputs}, {inputs}] that are not those of the model's weight "
            f"{list(stored.shape)} ({ratio:.1f} dB), expected the float model that the file was quantized from"
        )
    return best, is_turned
