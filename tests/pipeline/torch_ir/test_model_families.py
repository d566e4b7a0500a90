"""Every family: traced on meta, saved, loaded, given a checkpoint that it never saw, run, held against torch."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model

from pipeline.torch_ir import IR, IRExecutor, extract_ir, verify_ir
from tests.pipeline.torch_ir.model_families import FAMILIES


@pytest.mark.filterwarnings("ignore")  # the libraries' own, while their models are imported and made
@pytest.mark.parametrize("name", FAMILIES)
def test_from_meta_to_numbers(name: str, tmp_path: Path) -> None:
    if name == "UNet":
        pytest.importorskip("diffusers", reason="diffusers is not installed")
    if name == "LSTM" and torch.__version__ < "2.13":
        pytest.skip("torch before 2.13 traces the states of an LSTM with one dim more than they have")
    make, call = FAMILIES[name]()
    with torch.device("meta"):
        model = make()
    on_meta = {key: tensor.to("meta") for key, tensor in call.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # caches begin as lifted constants without elements
        extract_ir(model, (), kwargs=on_meta, model_name=name).save(tmp_path / "ir.json")

    torch.manual_seed(0)
    real = make()
    save_model(real, tmp_path / "weights.safetensors")  # of tied weights it writes one
    ir = IR.load(tmp_path / "ir.json")
    ok, report = verify_ir(ir, tmp_path / "weights.safetensors", real, (), kwargs=call)
    assert ok, report
    assert report.num_outputs == len(ir.graph_outputs) + len(ir.graph.updates) > 0
    executor = IRExecutor(ir, real.state_dict())
    executor.execute((), kwargs=call)
    assert executor.not_planned == ""
