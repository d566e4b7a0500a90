"""An IR on a device of its own, by the recording device."""

from __future__ import annotations

import pytest
import torch

from pipeline.runtime import RecordingDevice
from pipeline.torch_ir import ExecutionError, IRExecutor, execute_ir, extract_ir, verify_ir_with_state_dict
from tests.pipeline.torch_ir.small_modules import Cache, MaskedLinear, cache_call


def test_a_plan_runs_there_and_its_outputs_are_there() -> None:
    device, model, x = RecordingDevice(), torch.nn.Linear(4, 2), torch.randn(3, 4)
    ir = extract_ir(model, (x,), strict=False)
    (found,) = execute_ir(ir, (x,), model.state_dict(), device=device)
    torch.testing.assert_close(found, model(x))
    assert device.holds(found)


def test_states_stay_there_from_run_to_run() -> None:
    model = Cache().eval()
    args, kwargs = cache_call(2)
    ir = extract_ir(model, args, kwargs=kwargs, strict=False)
    valid, report = verify_ir_with_state_dict(
        ir, model.state_dict(), model, args, kwargs=kwargs, device=RecordingDevice()
    )
    assert valid, report


def test_a_run_op_by_op_is_refused_there() -> None:
    model, x = MaskedLinear(), torch.randn(2, 4)
    ir = extract_ir(model, (x,), strict=False)
    executor = IRExecutor(ir, model.state_dict(), planned=False, device=RecordingDevice())
    with pytest.raises(ExecutionError, match=r"this run goes op by op .*, and only a plan runs on a device"):
        executor.execute((x,))
