"""Text-only Kimi-K2.5 for the weight-free benchmark: the module of each graph, and shards that are as large as the
checkpoint and hold nothing.

Experts are one parameter a layer and matrix here, which the checkpoint has in 384 pieces: torch's exporter looks at
every parameter again for each of them, so 70,000 would take it hours (benchmarks/RESULTS.md).
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

from kimi_k25_text_local import KimiK25TextForCausalLM, KimiTextConfig  # noqa: E402
from kimi_k25_text_local.experts import MixtureOfExperts  # noqa: E402
from pipeline.export.parts.pair import (  # noqa: E402
    CacheSizes,
    Decode,
    Prefill,
    cache_specs,
    decode_inputs,
    prefill_inputs,
)

LAYERS: Final = 61
SIZES: Final = CacheSizes(128, 2048)
PREFIX: Final = "language_model."
"""What the checkpoint has before the names of the text model."""
MATRICES: Final = ("gate_proj", "up_proj", "down_proj")
PIECES: Final = {f"*.mlp.stacked.{name}": [f"*.mlp.experts.#.{name}.weight"] for name in MATRICES}


class _Stacked(nn.Module):
    """The parameters of all experts of a layer, (experts, outputs, inputs) each."""

    def __init__(self, experts: nn.ModuleList) -> None:
        super().__init__()
        for name in MATRICES:
            one = experts[0].get_submodule(name).get_parameter("weight")
            shape = (len(experts), *one.shape)
            self.register_parameter(name, nn.Parameter(one.new_empty(shape), requires_grad=False))


def prefill(layers: int = LAYERS) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """(1, 128) token ids → logits, and K and V of every layer."""
    return Prefill(_model(layers)), prefill_inputs(SIZES)


def decode(layers: int = LAYERS) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """One token and caches of 2048 → logits, and the caches."""
    model = _model(layers)
    return Decode(model), decode_inputs(cache_specs(model), SIZES)


def _model(layers: int) -> KimiK25TextForCausalLM:
    model = KimiK25TextForCausalLM(_config(layers))
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            _stack(module)
    return model


def _stack(module: Any) -> None:
    stacked, count = _Stacked(module.experts), len(module.experts)
    del module.experts
    module.stacked, module.experts = stacked, range(count)
    module._stacked = lambda name: module.stacked.get_parameter(name)


def _config(layers: int) -> KimiTextConfig:
    config = KimiTextConfig.from_json(EXAMPLES / "kimi_k25_text_local" / "config.json")
    return replace(config, num_hidden_layers=layers)


def write_sparse_shards(folder: Path, layers: int = LAYERS) -> tuple[int, int, int]:
    """A checkpoint with the names, dtypes and shapes of the real one, in sparse files: headers, and holes for data.

    Returns:
        The number of shards, of tensors, and of bytes that the tensors take.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in KimiK25TextForCausalLM(_config(layers)).state_dict().items():
        parts = name.split(".")
        shards.setdefault(parts[2] if parts[1] == "layers" else "rest", []).append((PREFIX + name, tensor))
    placed, total = {}, 0
    for number, tensors in enumerate(shards.values(), start=1):
        name = f"model-{number:05}-of-{len(shards):06}.safetensors"
        total += _write_sparse(folder / name, tensors)
        placed |= {key: name for key, _ in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return len(shards), len(placed), total


def _write_sparse(path: Path, tensors: list[tuple[str, Tensor]]) -> int:
    header, end = {}, 0
    for key, tensor in tensors:
        begin, end = end, end + math.prod(tensor.shape) * tensor.element_size()
        dtype = SPELLED[tensor.dtype]
        header[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


SPELLED: Final = {torch.bfloat16: "BF16", torch.float32: "F32"}
