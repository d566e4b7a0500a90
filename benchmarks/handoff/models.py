"""The models of the handoff: MiniLM and an attention block, exported by onnxline, plain and prepared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np

from benchmarks.measure import run_child

BlockForm = Literal["merged", "separate", "fused"]

HIDDEN, HEADS, PLACES = 256, 4, 32

PREPARATION: Final = "[onnxscript, default, onnxsim, decompose-attention, clamp-mask, {convert-opset: {to: 21}}]"
"""The default recipe of torch models and the shipped steps that prepare: the standard has 16 bits from opset 21 on, and
Attention hides its inside from quantizers."""


MERGED_RECIPES: Final = {
    "plain": "",
    "prepared": PREPARATION,
    "split": PREPARATION.replace("clamp-mask", "split-qkv, clamp-mask"),
}
"""MiniLM with one Linear for Q, K and V: as it is, prepared with that product, and prepared with the three apart."""


def export_minilm(opset: int, folder: Path, *, prepared: bool = False) -> Path:
    """The trained MiniLM after onnxline's default recipe, or prepared, with Q, K and V kept apart."""
    out = folder / f"minilm_{opset}{'_prepared' if prepared else ''}"
    return _export("configs/minilm.yaml", opset, PREPARATION if prepared else "", out)


def export_merged_minilm(opset: int, folder: Path, form: str) -> Path:
    """The same with one Linear for Q, K and V in each layer, in one of the forms of MERGED_RECIPES."""
    source = "benchmarks/case_studies/merged_minilm.yaml"
    return _export(source, opset, MERGED_RECIPES[form], folder / f"minilm_merged_{opset}_{form}")


def _export(config: str, opset: int, recipe: str, out: Path) -> Path:
    """Run a configuration, with the default recipe where `recipe` is empty."""
    chosen = ["--set", f"passes.recipe={recipe}"] if recipe else []
    _run([config, "--set", f"export.opset={opset}", *chosen, "--out", str(out)])
    return out / "model.onnx"


def optimize_block(path: Path, folder: Path) -> Path:
    """The block after onnxline's default recipe, with Q, K and V kept apart."""
    out = folder / f"{path.stem}_optimized"
    _run([str(path), "--set", "passes.keep=[qkv]", "--out", str(out)])
    return out / "model.onnx"


def prepare_block(path: Path, folder: Path) -> Path:
    """The block after the same recipe and `decompose-attention`."""
    out = folder / f"{path.stem}_prepared"
    recipe = "passes.recipe=[default, onnxsim, decompose-attention]"
    _run([str(path), "--set", "passes.keep=[qkv]", "--set", recipe, "--out", str(out)])
    return out / "model.onnx"


def block_samples(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(seed)
    return [{"x": draw.standard_normal((2, PLACES, HIDDEN)).astype(np.float32)} for _ in range(count)]


def _run(arguments: Sequence[str]) -> None:
    """Always, as only the run itself knows whether what lies there is of this code."""
    run_child(["-m", "onnxline", "run", *arguments], memory=False)


def export_block(opset: int, folder: Path, form: BlockForm) -> Path:
    """An attention block as torch exports it, with three projections, one for all, or torch's own attention."""
    import torch

    from benchmarks.handoff.block import FusedBlock, MergedBlock, make_block

    block = make_block(HIDDEN, HEADS)
    module = {"merged": MergedBlock, "separate": lambda block: block, "fused": FusedBlock}[form](block).eval()
    path = folder / f"block_{form}_{opset}.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    example = torch.from_numpy(block_samples(1)[0]["x"])
    program = torch.onnx.export(module, (example,), dynamo=True, opset_version=opset, verbose=False)
    assert program is not None
    program.save(str(path), external_data=False)
    return path
