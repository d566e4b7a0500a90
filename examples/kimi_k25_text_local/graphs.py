"""The two graphs as files: written with `extract_ir`, read and run with `load_ir` and `execute_ir`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from onnxline.ir import Graph
from onnxline.static_cache import (
    CacheSizes,
    CacheSpec,
    Decode,
    KVMapping,
    Prefill,
    Program,
    decode_inputs,
    kv_mapping,
    prefill_inputs,
    save_kv_mapping,
)
from onnxline.torch_ir import execute_ir, extract_ir, load_ir


@dataclass(frozen=True, slots=True)
class GraphFiles:
    """prefill, decode and the mapping between their caches, in one folder. Source of the names: seed document 000."""

    folder: Path
    packed: bool = False
    """Whether the graphs are packed with zstd, a fiftieth of the size."""

    @property
    def prefill(self) -> Path:
        return self.folder / f"kimi_k25_text_prefill_ir.json{self._suffix}"

    @property
    def decode(self) -> Path:
        return self.folder / f"kimi_k25_text_decode_ir.json{self._suffix}"

    @property
    def _suffix(self) -> str:
        return ".zst" if self.packed else ""

    @property
    def mapping(self) -> Path:
        return self.folder / "kimi_k25_text_kv_mapping.json"

    def write(self, model: nn.Module, sizes: CacheSizes) -> None:
        """Extract both graphs of a model on meta, and save them and the mapping. The other form, packed or not, goes.

        Raises:
            UsageError: the model cannot be split into prefill and decode.
        """
        first = _written(Prefill(model), prefill_inputs(sizes), "KimiK25_Text_Prefill", self.prefill)
        made = [first.values[vid] for vid in first.outputs]
        caches = [CacheSpec.of(one.spec.sizes, getattr(torch, one.spec.dtype)) for one in made[1:]]
        second = _written(Decode(model), decode_inputs(caches, sizes), "KimiK25_Text_Decode", self.decode)
        taken, given = ([second.values[vid].name for vid in vids] for vids in (second.inputs, second.outputs))
        save_kv_mapping(kv_mapping([one.name for one in made], taken, given), self.mapping)
        others = replace(self, packed=not self.packed)
        for old in (others.prefill, others.decode):  # of another run, and no pair of the mapping
            for file in (old, *self.folder.glob(f"{old.name}.constants.*.safetensors")):
                file.unlink(missing_ok=True)

    def read(self, weights: Mapping[str, Tensor]) -> tuple[Program, Program, KVMapping]:
        """Both programs from the files, running with these weights, and the mapping."""
        mapping = json.loads(self.mapping.read_text(encoding="utf-8"))
        return _read(self.prefill, weights), _read(self.decode, weights), mapping


def _written(wrapper: nn.Module, inputs: tuple[Tensor, ...], name: str, path: Path) -> Graph:
    # Without gradients: with them, layers that turn them off would become regions of the graph.
    with torch.no_grad():
        ir = extract_ir(wrapper, inputs, model_name=name, stamp=True)
    ir.save(path)
    return ir.graph


def _read(path: Path, weights: Mapping[str, Tensor]) -> Program:
    ir = load_ir(path)
    inputs, outputs = (tuple(one.name for one in side) for side in (ir.graph_inputs, ir.graph_outputs))
    return Program(lambda *tensors: execute_ir(ir, tensors, weights=dict(weights)), inputs, outputs)
