"""Weights of 4 bits in checkpoints of GPTQ and AWQ, in both directions, with the very same integers.

Both store `qweight`, `qzeros` and `scales` under the name of a module, eight integers in an int32. GPTQ packs the
integers along the inputs and the zero points along the outputs, less one before `gptq_v2`; AWQ packs both along the
outputs, in the order of its kernels. Sources: GPTQModel's `qlinear`, AutoAWQ's `gemm.py`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from passes.errors import UsageError
from passes.graph.index import GraphIndex
from passes.graph.op_facts import attribute_of
from passes.provenance import untransposed_name
from passes.rewrites.file_weights import FileWeights
from passes.rewrites.matmul_nbits import NibbleWeight, read_dequantized
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from passes.weights.files import replace_tensors

NibbleLayout = Literal["gptq", "gptq_v2", "awq"]

SUFFIX: Final = ".safetensors"

IN_ORDER: Final = tuple(range(8))
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs lies in each nibble, the lowest first."""

PARTS: Final = ("qweight", "qzeros", "scales", "g_idx")


def read_checkpoint(model: DetachedModel, path: Path) -> FileWeights:
    """The weights of a checkpoint of GPTQ or AWQ that stand for weights of the float model.

    Args:
        model: the float model of the checkpoint, whose weights keep their names.
        path: safetensors, or what torch.save wrote.

    Returns:
        The weights, by the names of the model.

    Raises:
        UsageError: the file is none of these, or the model lacks a weight of it.
    """
    stored = model.index.initializers
    names = {untransposed_name(name): name for name in stored} | {name: name for name in stored}
    found: dict[str, NibbleWeight] = {}
    turned: set[str] = set()
    for module, weight in read_nibbles(path).items():
        name = names.get(f"{module}.weight", names.get(module))
        dims = None if name is None else tuple(stored[name].dims)
        if name is None or dims not in (weight.integers.shape, weight.integers.shape[::-1]):
            what = "no such weight" if dims is None else f"a weight of {list(dims)}"
            raise UsageError(
                f"{path}: {module} has {weight.integers.shape[0]} inputs and {weight.integers.shape[1]} outputs, and "
                f"the model has {what}; expected the float model of the checkpoint, whose weights keep their names"
            )
        found[name] = weight
        if dims != weight.integers.shape or (dims[0] == dims[1] and not _is_first_axis_summed(model, name)):
            turned.add(name)
    return FileWeights(found, turned, f"{plural(len(found), 'weight')} of 4 bits")


def _is_first_axis_summed(model: DetachedModel, name: str) -> bool:
    """Whether a product reads the square weight `name` as [inputs, outputs]."""
    consumer = model.index.consumers[name][0]
    return consumer.op_type == "MatMul" or (consumer.op_type == "Gemm" and not attribute_of(consumer, "transB"))


def read_nibbles(path: Path) -> dict[str, NibbleWeight]:
    """Module → its weight of 4 bits, from a checkpoint of GPTQ or AWQ; its `config.json` says which.

    Raises:
        UsageError: it cannot be read, has another number of bits, or orders its inputs by a `g_idx`.
    """
    tensors = _read_safetensors(path) if path.suffix == SUFFIX else _read_torch_file(path)
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    if not modules:
        raise UsageError(f"{path}: found no qweight, expected a checkpoint of GPTQ or AWQ")
    for module in modules:
        missing = [part for part in PARTS[:3] if f"{module}.{part}" not in tensors]
        if missing:
            raise UsageError(f"{path}: {module} lacks {', '.join(missing)}")
    layout, group = _layout_of(path, tensors, modules[0])
    found: dict[str, NibbleWeight] = {}
    for module in modules:
        parts = {part: tensors[key] for part in PARTS if (key := f"{module}.{part}") in tensors}
        found[module] = _unpack(path, module, parts, layout, group)
    return found


def _read_safetensors(path: Path) -> Mapping[str, np.ndarray]:
    import safetensors.numpy
    from safetensors import SafetensorError

    try:
        return safetensors.numpy.load_file(path)
    except (OSError, SafetensorError, KeyError) as error:
        raise UsageError(f"{path} is no file of safetensors that numpy reads: {error}") from error


def _read_torch_file(path: Path) -> Mapping[str, np.ndarray]:
    """The tensors that torch.save wrote, as AutoGPTQ and AutoAWQ did before safetensors. Only such a file needs torch,
    which everything else here does without."""
    if find_spec("torch") is None:
        raise UsageError(f"{path} is read by torch: pip install 'onnxline[torch]', or save the tensors as safetensors")
    torch = import_module("torch")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many classes for a broken file
        first = str(error).partition("\n")[0]
        raise UsageError(
            f"{path}: torch reads no tensors there with weights_only=True ({first}); expected what torch.save wrote of "
            "a mapping from names to tensors"
        ) from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UsageError(f"{path}: found {type(state).__name__}, expected a mapping from names to tensors alone")
    wide = {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in state.items()}
    try:
        return {name: value.detach().numpy() for name, value in wide.items()}
    except (RuntimeError, TypeError) as error:  # NotImplementedError is one of the first
        raise UsageError(f"{path}: {error}; expected dense tensors of dtypes that numpy has") from error


def _layout_of(path: Path, tensors: Mapping[str, np.ndarray], module: str) -> tuple[NibbleLayout, int]:
    """The layout and the size of its groups, by the configuration next to the file. Where there is none GPTQ is of its
    first version, and the size is 0."""
    settings: dict[str, Any] = {}
    for name in ("config.json", "quantize_config.json"):
        file = path.parent / name
        if file.is_file():
            data = json.loads(file.read_text(encoding="utf-8"))
            settings |= data.get("quantization_config", data if name.startswith("quantize") else {})
    if settings.get("bits", settings.get("w_bit", 4)) != 4:
        raise UsageError(f"{path}: found {settings.get('bits', settings.get('w_bit'))} bits, expected 4")
    group = int(settings.get("group_size", settings.get("q_group_size", 0)))
    words, columns = tensors[f"{module}.qweight"].shape[1], tensors[f"{module}.scales"].shape[1]
    if words == -(-columns // 8) < columns:
        return "awq", group
    return "gptq_v2" if settings.get("checkpoint_format") == "gptq_v2" else "gptq", group


def _unpack(path: Path, module: str, parts: Mapping[str, np.ndarray], layout: NibbleLayout, group: int) -> NibbleWeight:
    """The weight of a module. The last words may have nibbles that belong to no output, or to no input."""
    scales, index = parts["scales"], parts.get("g_idx")
    order = AWQ_ORDER if layout == "awq" else IN_ORDER
    integers = unpack_words(parts["qweight"], order) if layout == "awq" else unpack_words(parts["qweight"].T, order).T
    zeros = unpack_words(parts["qzeros"], order)
    packed, columns = integers.shape, scales.shape[1]
    if index is not None:
        integers = integers[: len(index)]
    if all(0 <= array.shape[1] - columns < 8 for array in (integers, zeros)):
        integers, zeros = integers[:, :columns], zeros[:, :columns]
    if layout == "gptq":
        zeros = (zeros + 1) & 15
    rows = len(integers)
    block = group if 0 < group < rows else -(-rows // len(scales))
    if integers.shape[1] != columns or zeros.shape != scales.shape or -(-rows // block) != len(scales):
        raise UsageError(
            f"{path}: {module}: found integers {list(packed)}, scales {list(scales.shape)} and zero points "
            f"{list(zeros.shape)}, which do not fit each other in 4 bits{f' and groups of {group}' if group else ''}"
        )
    if index is not None and (index != np.arange(rows) // block).any():
        raise UsageError(
            f"{path}: {module} orders its inputs by g_idx (desc_act); DequantizeLinear has blocks in order"
        )
    return NibbleWeight(integers, zeros, scales, block)


def write_nibbles(model: DetachedModel, path: Path, layout: NibbleLayout) -> int:
    """Write the weights of 4 bits of a quantized model as a checkpoint, and its configuration next to it.

    Scales are float16 where that keeps their bits, and float32 otherwise. Returns how many weights there are.

    Raises:
        UsageError: there is none, a weight that the layout cannot hold, or a place that cannot be written.
    """
    import safetensors.numpy

    packed, group = pack_nibbles(model, layout)
    settings: dict[str, Any] = {"bits": 4, "group_size": group}
    tensors = {f"{module}.{part}": array for module, parts in packed.items() for part, array in parts.items()}
    if layout == "awq":
        settings |= {"quant_method": "awq", "version": "gemm", "zero_point": True}
    else:
        settings |= {"quant_method": "gptq", "checkpoint_format": layout, "desc_act": False, "sym": False}
    with replace_tensors(path) as temporary:
        safetensors.numpy.save_file(tensors, temporary, metadata={"format": "pt"})
    (path.parent / "quantize_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    return len(packed)


def pack_nibbles(model: DetachedModel, layout: NibbleLayout) -> tuple[dict[str, dict[str, np.ndarray]], int]:
    """Module → the tensors that a checkpoint has of its weight; and the size of blocks, -1 for whole channels.

    Raises:
        UsageError: there is no weight of 4 bits, or one that the layout cannot hold.
    """
    weights = find_nibbles(model)
    if not weights:
        raise UsageError("encodings: found no product whose weight has 4 bits in blocks or by channel")
    group = _common_group(weights.values())
    return {module: _pack(module, weight, layout) for module, weight in weights.items()}, group


def _common_group(weights: Collection[NibbleWeight]) -> int:
    """The one size of blocks that a checkpoint has for all weights; -1 where each channel is one block.

    Raises:
        UsageError: the weights have several.
    """
    sizes = {weight.block for weight in weights if len(weight.scales) > 1}
    group = max(sizes, default=-1)
    if sizes:  # a weight of one block has no more inputs than that
        sizes |= {weight.block for weight in weights if len(weight.scales) == 1 and weight.block > group}
    if len(sizes) > 1:
        listed = " and ".join(map(str, sorted(sizes)))
        raise UsageError(f"encodings: found blocks of {listed}, expected one size, which a checkpoint has for all")
    return group


def find_nibbles(model: DetachedModel) -> dict[str, NibbleWeight]:
    """Module → its weight of 4 bits in a quantized model, in the order of the products.

    Raises:
        UsageError: a product has a weight of 4 bits in another form than blocks or channels.
    """
    return dict(_find_weights(model))


def _find_weights(model: DetachedModel) -> Iterator[tuple[str, NibbleWeight]]:
    index = GraphIndex(model.proto.graph)
    for node in model.proto.graph.node:
        weight, why = read_dequantized(node, index, model, 0)
        if weight is None and why:
            raise UsageError(f"encodings: {node.name or node.output[0]}: {why}")
        if weight is not None:
            name = node.input[1]
            producer = index.producers[name]
            name = producer.input[0] if producer.op_type == "Transpose" else name
            for ending in ("_dequantized", "_DequantizeLinear_Output"):
                name = name.removesuffix(ending)
            yield untransposed_name(name).removesuffix(".weight"), weight


def _pack(module: str, weight: NibbleWeight, layout: NibbleLayout) -> dict[str, np.ndarray]:
    rows, columns = weight.integers.shape
    if columns % 8 or rows % 8 or rows % weight.block:
        raise UsageError(
            f"encodings: {module} has {rows} inputs and {columns} outputs, expected multiples of 8, and whole blocks"
        )
    zeros = weight.zero_points
    if layout == "gptq":
        if not zeros.all():
            raise UsageError(f"encodings: {module} has a zero point of 0, which gptq has no form for; take gptq_v2")
        zeros = zeros - 1
    half = weight.scales.astype(np.float16)
    scales = half if (half.astype(weight.scales.dtype) == weight.scales).all() else weight.scales.astype(np.float32)
    order = AWQ_ORDER if layout == "awq" else IN_ORDER
    words = pack_words(weight.integers, order) if layout == "awq" else pack_words(weight.integers.T, order).T
    found = {"qweight": words, "qzeros": pack_words(zeros, order), "scales": scales}
    if layout != "awq":
        found["g_idx"] = (np.arange(rows) // weight.block).astype(np.int32)
    return {part: np.ascontiguousarray(array) for part, array in found.items()}


def pack_words(rows: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """Eight integers of 4 bits in an int32 along the last axis; `order[i]` of each eight lies in the nibble i."""
    parts = rows.astype(np.uint32).reshape(len(rows), -1, 8)[:, :, list(order)]
    shifts = np.arange(8, dtype=np.uint32) * 4
    return np.bitwise_or.reduce(parts << shifts, axis=-1).view(np.int32)


def unpack_words(words: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """The integers of `pack_words`, as uint8."""
    shifts = np.arange(8, dtype=np.uint32) * 4
    nibbles = (np.ascontiguousarray(words).view(np.uint32)[:, :, None] >> shifts) & 15
    return nibbles[:, :, np.argsort(order)].reshape(len(words), -1).astype(np.uint8)
