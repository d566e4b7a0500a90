"""The models of the handoff: MiniLM and an attention block, exported by onnxline; and what is prepared in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.measure import run_child

__all__ = [
    "MASK_BOUND", "block_samples", "clamp_masks", "export_block", "export_minilm", "optimize_block", "save_model",
]  # fmt: skip

HIDDEN, HEADS, PLACES = 256, 4, 32

MASK_BOUND: Final = -30.0
"""A score that is less by 30 weighs 1e-13 of the others in softmax, which float32 does not tell from zero."""


def export_minilm(opset: int, folder: Path) -> Path:
    """The trained MiniLM after onnxline's default recipe, with Q, K and V kept apart."""
    out = folder / f"minilm_{opset}"
    if not (out / "model.onnx").exists():
        _run(["configs/minilm.yaml", "--set", f"export.opset={opset}", "--out", str(out)])
    return out / "model.onnx"


def clamp_masks(proto: onnx.ModelProto, bound: float = MASK_BOUND) -> onnx.ModelProto:
    """A copy whose mask constants end at `bound`. Stands in for the pass `clamp-mask`, which proves the bound."""
    copy = onnx.ModelProto.FromString(proto.SerializeToString())
    for tensor in copy.graph.initializer:
        array = numpy_helper.to_array(tensor) if tensor.data_type == onnx.TensorProto.FLOAT else np.zeros(0)
        if array.size and array.min() < -1e30:
            tensor.CopyFrom(numpy_helper.from_array(np.maximum(array, np.float32(bound)), tensor.name))
    return copy


def save_model(proto: onnx.ModelProto, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(proto, path)
    return path


def optimize_block(path: Path, folder: Path) -> Path:
    """The block after onnxline's default recipe, with Q, K and V kept apart."""
    out = folder / f"{path.stem}_optimized"
    if not (out / "model.onnx").exists():
        _run([str(path), "--set", "passes.keep=[qkv]", "--out", str(out)])
    return out / "model.onnx"


def block_samples(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(seed)
    return [{"x": draw.standard_normal((2, PLACES, HIDDEN)).astype(np.float32)} for _ in range(count)]


def _run(arguments: Sequence[str]) -> None:
    run_child(["-m", "onnxline", "run", *arguments], memory=False)


def export_block(opset: int, folder: Path, *, merged: bool) -> Path:
    """An attention block as torch exports it, with three projections or one for all."""
    import torch

    from benchmarks.handoff.block import MergedBlock, make_block

    block = make_block(HIDDEN, HEADS)
    module = MergedBlock(block).eval() if merged else block
    path = folder / f"block_{'merged' if merged else 'separate'}_{opset}.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    example = torch.from_numpy(block_samples(1)[0]["x"])
    program = torch.onnx.export(module, (example,), dynamo=True, opset_version=opset, verbose=False)
    assert program is not None
    program.save(str(path), external_data=False)
    return path
