"""A checkpoint in bfloat16 through `quantsim.shard_mib`: by processes, without the model in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import torch
import transformers

from pipeline.config import RunConfig
from pipeline.quantsim import QuantSim
from tests.whole_runs.test_weight_free import LLAMA


def test_a_checkpoint_in_bfloat16_is_rounded_by_jobs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    module = module.eval().to(torch.bfloat16)
    module.save_pretrained(tmp_path / "llama", max_shard_size="140KB")
    section = {"class": "LlamaForCausalLM", "config": LLAMA | {"dtype": "bfloat16"}, "checkpoint": "llama"}
    data = {
        "name": "free",
        "model": {
            "transformers": section,
            "inputs": {"input_ids": {"shape": [1, 8], "dtype": "int64", "range": [0, 512]}},
        },
        "export": {"weights": "referenced"},
        "verify": {"proof": "structure"},
        "passes": {"recipe": []},
        "quantsim": {
            "profile": "weight-only",
            "rules": {"op:*": {"weights": "int4/block32"}},
            "shard_mib": 1,
            "shard_jobs": 1,
        },
    }
    result = QuantSim(RunConfig.from_mapping(data, tmp_path), tmp_path / "run", progress=False).run()
    folder = tmp_path / "run/quantized"
    assert "torch has computed a part of each product" in result.report.notes[-1]
    model = onnx.load(folder / "model.onnx")
    scales = [tensor for tensor in model.graph.initializer if tensor.name.endswith("_scale")]
    assert {tensor.data_type for tensor in scales} == {onnx.TensorProto.BFLOAT16}
    ratios = json.loads((folder / "ratios.json").read_text())
    assert len(ratios) == len(scales) == 8 and min(ratios.values()) > 15
