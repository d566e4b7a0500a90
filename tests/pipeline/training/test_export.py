"""A trained program goes to ONNX in one call, by the main job with its proof."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from pipeline.errors import UsageError
from pipeline.training import as_module, record_step, with_weights
from tests.pipeline.training.steps import LOSS, seeded
from tests.pipeline.training.test_graph_module import BATCH, attention, find_qkv, optimized, outputs_of
from tests.pipeline.training.test_qdq import BATCH as QUANTIZED_BATCH
from tests.pipeline.training.test_qdq import quantized

STEPS = 5


def test_a_trained_module_is_exported(tmp_path: Path) -> None:
    module = attention().train()
    program = record_step(module, LOSS, AdamW(module.parameters(), lr=1e-2), BATCH)
    for _ in range(STEPS):
        program.step(BATCH)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = program.export(tmp_path / "trained.onnx", keep=["qkv"], out=tmp_path / "run")
    found = onnx.load(tmp_path / "trained.onnx")
    assert [(verdict.kind, verdict.kept) for verdict in result.structures] == [("qkv", True)]
    assert find_qkv(found) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert module.training
    untrained = module(BATCH[0]).detach()
    program.write_back()
    expected = module.eval()(BATCH[0]).detach()
    np.testing.assert_allclose(outputs_of(found, BATCH[0]), expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(untrained, expected, atol=1e-2)


def test_a_model_that_came_from_onnx_goes_back_with_q_k_and_v_apart(tmp_path: Path) -> None:
    onnx.save(optimized(), tmp_path / "before.onnx")
    module = as_module(tmp_path / "before.onnx")
    program = record_step(module, LOSS, SGD(module.parameters(), lr=0.05), BATCH)
    for _ in range(STEPS):
        program.step(BATCH)
    program.export(tmp_path / "trained.onnx", keep=["qkv"])
    found = onnx.load(tmp_path / "trained.onnx")
    assert find_qkv(found) == 1
    program.write_back()
    expected = module(BATCH[0]).detach()
    np.testing.assert_allclose(outputs_of(found, BATCH[0]), expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(outputs_of(optimized(), BATCH[0]), expected, atol=1e-2)
    with pytest.raises(UsageError, match="the module came from ONNX, whose inputs are known"):
        program.export(tmp_path / "trained.onnx", args=(BATCH[0],))


class Counted(nn.Module):
    """Has a buffer that is in no state dict, and that each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(1)
        return self.inner(x) * self.seen


def test_buffers_that_are_in_no_state_dict_go_along(tmp_path: Path) -> None:
    module, x = seeded(Counted), torch.ones(2, 16)
    program = record_step(module, LOSS, SGD(module.parameters(), lr=0.1), (x, torch.tensor([0, 1])))
    for _ in range(STEPS):
        program.step((x, torch.tensor([0, 1])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program.export(tmp_path / "trained.onnx", out=tmp_path / "run")
    program.write_back()
    assert module.seen.item() == STEPS
    found = outputs_of(onnx.load(tmp_path / "trained.onnx"), x)
    np.testing.assert_allclose(found, module.eval()(x).detach(), rtol=1e-5, atol=1e-6)


def test_a_quantized_model_stays_quantized(tmp_path: Path) -> None:
    model = quantized("int4/channel", "uint8")
    module = as_module(model)
    program = record_step(module, LOSS, SGD(module.parameters(), lr=1e-5), QUANTIZED_BATCH)
    program.step(QUANTIZED_BATCH)
    program.export(tmp_path / "trained.onnx")
    found = onnx.load(tmp_path / "trained.onnx")
    kinds = Counter(node.op_type for node in found.graph.node)
    assert (kinds["QuantizeLinear"], kinds["DequantizeLinear"]) == (5, 8)
    assert sum(tensor.data_type == onnx.TensorProto.INT4 for tensor in found.graph.initializer) == 4
    np.testing.assert_array_equal(
        outputs_of(found, QUANTIZED_BATCH[0]), outputs_of(with_weights(model, program), QUANTIZED_BATCH[0])
    )
