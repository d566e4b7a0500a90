"""States: snapshots, files, state dicts, and what may not change them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim import SGD, AdamW

from pipeline.errors import Unsupported, UsageError
from pipeline.runtime.capture import RandomState, Snapshot
from pipeline.training import NotFinite, TrainProgram, record_step
from pipeline.training.state_dict import read_snapshot, write_snapshot
from tests.pipeline.training.steps import LOSS, MODELS, MakeOptimizer, mlp, record, seeded, step_of_torch
from tests.support.processes import run_forked

DROPOUT = MODELS["transformer with dropout"]


def adamw(params: Iterable[nn.Parameter]) -> AdamW:
    return AdamW(params, lr=1e-3)


def sgd(params: Iterable[nn.Parameter]) -> SGD:
    return SGD(params, lr=0.1, momentum=0.9)


def losses(program: TrainProgram, first: int, last: int) -> list[float]:
    return [program.step(DROPOUT.batch(number)).item() for number in range(first, last)]


def test_a_snapshot_continues_to_the_same_bits() -> None:
    program, *_ = record(DROPOUT, adamw)
    losses(program, 0, 3)
    snapshot = program.snapshot()
    once = losses(program, 3, 8)
    ended = program.snapshot()
    program.restore(snapshot)
    assert losses(program, 3, 8) == once
    for name, tensor in program.snapshot().states.items():
        assert torch.equal(tensor, ended.states[name]), name


def test_after_a_step_that_is_not_finite_its_snapshot_continues_to_the_same_bits() -> None:
    def make() -> TrainProgram:
        module = seeded(lambda: nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 10)))
        return record_step(module, LOSS, adamw(module.parameters()), batch)

    batch = MODELS["mlp"].batch(0)
    unbroken, broken = make(), make()
    torch.manual_seed(1)
    expected = [unbroken.step(batch) for _ in range(4)]
    torch.manual_seed(1)
    found = [broken.step(batch)]
    with pytest.raises(NotFinite) as caught:
        broken.step((batch[0] * torch.nan, batch[1]))
    broken.restore(caught.value.snapshot)
    found += [broken.step(batch) for _ in range(3)]
    assert torch.equal(torch.stack(found), torch.stack(expected))


def test_a_recorded_step_begins_where_the_optimizer_is() -> None:
    """Record in the middle of a training by torch, go on, and give the states back to torch in the middle again."""
    model = MODELS["mlp"]
    module, reference = seeded(model.make), seeded(model.make)
    optimizer, twin = adamw(module.parameters()), adamw(reference.parameters())
    for number in range(5):
        step_of_torch(module, optimizer, model.batch(number))
    program = record_step(module, LOSS, optimizer, model.batch(0))
    for number in range(5, 10):
        program.step(model.batch(number))
    program.write_back()
    for number in range(10, 15):
        step_of_torch(module, optimizer, model.batch(number))
    for number in range(15):
        step_of_torch(reference, twin, model.batch(number))
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)
    assert program.steps_done == 10


def test_state_dicts_go_both_ways() -> None:
    program, *_ = record(DROPOUT, adamw)
    losses(program, 0, 3)
    kept, random = program.state_dict(), torch.get_rng_state()
    once = losses(program, 3, 6)
    other, *_ = record(DROPOUT, adamw)
    other.load_state_dict(kept)
    torch.set_rng_state(random)
    assert losses(other, 3, 6) == once
    assert kept["module"]["head.weight"].equal(kept["module"]["embed.weight"])


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_changes_no_state(default: torch.dtype) -> None:
    """The count of steps took torch's default dtype, and the graph refused it."""
    before, module, batch = torch.get_default_dtype(), seeded(mlp), MODELS["mlp"].batch(0)
    try:
        torch.set_default_dtype(default)
        program = record_step(module, LOSS, AdamW(module.parameters(), lr=1e-3), batch)
        program.step(batch)
        program.load_state_dict(program.state_dict())
        assert program.steps_done == 1
        assert program.snapshot().states["optimizer.step"].dtype is torch.float32
    finally:
        torch.set_default_dtype(before)


def test_the_momentum_of_a_training_by_torch_is_kept() -> None:
    """SGD of torch does not count its steps: a program recorded after three of them has a momentum and did no step."""
    module = seeded(mlp)
    optimizer = sgd(module.parameters())
    for number in range(3):
        step_of_torch(module, optimizer, MODELS["mlp"].batch(number))
    program = record_step(module, LOSS, optimizer, MODELS["mlp"].batch(0))
    buffers = {key: state["momentum_buffer"].clone() for key, state in optimizer.state_dict()["state"].items()}
    fresh, *_ = record(MODELS["mlp"], sgd)
    assert fresh.state_dict()["optimizer"]["state"] == {}
    fresh.load_state_dict(program.state_dict())
    program.write_back()
    for found in (optimizer.state_dict(), fresh.state_dict()["optimizer"]):
        assert found["state"].keys() == buffers.keys()
        assert all(torch.equal(found["state"][key]["momentum_buffer"], buffers[key]) for key in buffers)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_state_dict_of_before_the_first_step_empties_the_optimizer(make: MakeOptimizer) -> None:
    program, *_ = record(MODELS["mlp"], make)
    batches = [MODELS["mlp"].batch(number) for number in range(4)]
    kept = program.state_dict()
    once = [program.step(batch).item() for batch in batches]
    program.load_state_dict(kept)
    assert [program.step(batch).item() for batch in batches] == once


def test_moments_of_a_part_of_the_parameters_are_refused() -> None:
    """One number of steps is for all parameters, and Adam divides by it."""
    program, *_ = record(MODELS["mlp"], adamw)
    program.step(MODELS["mlp"].batch(0))
    found = program.state_dict()
    del found["optimizer"]["state"][0]
    with pytest.raises(UsageError, match="did 0 to 1 steps with its parameters"):
        program.load_state_dict(found)


def frozen_in_the_middle() -> tuple[nn.Module, AdamW]:
    """A module whose first layer was trained for three steps, and is frozen since."""
    module = seeded(mlp)
    optimizer = adamw(module.parameters())
    for number in range(3):
        step_of_torch(module, optimizer, MODELS["mlp"].batch(number))
    module[0].requires_grad_(False)  # type: ignore[index]
    return module, optimizer


def test_states_of_frozen_parameters_go_through_a_program_unchanged() -> None:
    """Thaw the layer afterwards and go on by torch: as if all steps had been torch's."""
    module, optimizer = frozen_in_the_middle()
    reference, twin = frozen_in_the_middle()
    kept = {key: value.clone() for key, value in optimizer.state_dict()["state"][0].items()}
    program = record_step(module, LOSS, optimizer, MODELS["mlp"].batch(0))
    for number in range(3, 6):
        program.step(MODELS["mlp"].batch(number))
    found = program.state_dict()
    program.write_back()
    for state in (found["optimizer"]["state"][0], optimizer.state_dict()["state"][0]):
        assert state.keys() == kept.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(state[key], kept[key]) for key in kept)
    program.load_state_dict(found)
    for number in range(3, 6):
        twin.zero_grad(set_to_none=True)
        LOSS(reference(MODELS["mlp"].batch(number)[0]), MODELS["mlp"].batch(number)[1]).backward()
        twin.step()
    for own, own_optimizer in ((module, optimizer), (reference, twin)):
        own[0].requires_grad_(True)  # type: ignore[index]
        for number in range(6, 9):
            step_of_torch(own, own_optimizer, MODELS["mlp"].batch(number))
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)


def test_a_state_dict_of_a_group_that_is_frozen_is_read() -> None:
    module = seeded(MODELS["mlp"].make)
    module[0].requires_grad_(False)  # type: ignore[operator]
    groups = [{"params": part.parameters(), "lr": rate} for part, rate in ((module[0], 0.2), (module[2], 0.1))]  # type: ignore[index]
    program = record_step(module, LOSS, SGD(groups), MODELS["mlp"].batch(0))
    found = program.state_dict()
    losses = [program.step(MODELS["mlp"].batch(0)).item() for _ in range(2)]
    program.load_state_dict(found)
    assert [program.step(MODELS["mlp"].batch(0)).item() for _ in range(2)] == losses
    assert [group["lr"] for group in found["optimizer"]["param_groups"]] == [0.2, 0.1]


def test_a_state_of_a_frozen_parameter_that_is_another_is_refused() -> None:
    module, optimizer = frozen_in_the_middle()
    program = record_step(module, LOSS, optimizer, MODELS["mlp"].batch(0))
    for change in (lambda state: state.pop(0), lambda state: state[0]["exp_avg"].add_(1)):
        found = program.state_dict()
        change(found["optimizer"]["state"])
        with pytest.raises(UsageError, match="another state of its parameter 0, which this program does not train"):
            program.load_state_dict(found)


def test_an_optimizer_that_knows_a_part_of_the_parameters_is_refused() -> None:
    """Adam of torch counts the steps of each parameter, a program those of all."""
    module, optimizer = frozen_in_the_middle()
    for part in (0, 1):
        del optimizer.state[optimizer.param_groups[0]["params"][part]]
    module[0].requires_grad_(True)  # type: ignore[index]
    with pytest.raises(Unsupported, match="the optimizer did 0 to 3 steps with its parameters; expected one count"):
        record_step(module, LOSS, optimizer, MODELS["mlp"].batch(0))


def test_a_moment_that_is_missing_is_refused() -> None:
    module = seeded(mlp)
    optimizer = adamw(module.parameters())
    step_of_torch(module, optimizer, MODELS["mlp"].batch(0))
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(UsageError, match=r"did 1 steps with '0.weight', and has no max_exp_avg_sq of it"):
        record_step(module, LOSS, optimizer, MODELS["mlp"].batch(0))


def test_random_states_of_many_kernels_keep_their_order(tmp_path: Path) -> None:
    states = tuple(torch.tensor([number], dtype=torch.uint8) for number in range(12))
    write_snapshot(tmp_path / "states", Snapshot({"w": torch.zeros(2)}, RandomState(states)))
    found = read_snapshot(tmp_path / "states", {"w": torch.zeros(2)})
    assert [int(state) for state in found.random.kernels] == list(range(12))


def test_a_learning_rate_comes_back_as_it_was() -> None:
    """0.001 is no float32: a rate that was rounded on its way would come back as 0.0010000000474974513."""
    program, *_ = record(MODELS["mlp"], adamw)
    assert program.state_dict()["optimizer"]["param_groups"][0]["lr"] == 0.001
    program.optimizer.param_groups[0]["lr"] = 0.0003
    program.step(MODELS["mlp"].batch(0))
    found = program.state_dict()
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.0003
    other, *_ = record(MODELS["mlp"], adamw)
    other.load_state_dict(found)
    assert other.state_dict()["optimizer"]["param_groups"][0]["lr"] == 0.0003


@pytest.fixture(scope="module")
def untouched() -> Iterator[TrainProgram]:
    """A program of which tests ask for what it refuses; at the end it is as it was recorded."""
    program, *_ = record(DROPOUT, adamw)
    before = program.snapshot().states
    yield program
    after = program.snapshot().states
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found["module"].pop("embed.weight"), "lacks .'embed.weight'."),
        (lambda found: found["optimizer"]["param_groups"][0].update(eps=1.0), "has eps=1.0, this program 1e-08"),
        (lambda found: found.update(scheduler={}), "expected 'module', 'optimizer', or both"),
    ],
)
def test_a_state_dict_of_something_else_is_refused(
    change: Callable[[dict[str, Any]], object], said: str, untouched: TrainProgram
) -> None:
    found = untouched.state_dict()
    change(found)
    with pytest.raises(UsageError, match=said):
        untouched.load_state_dict(found)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda program: program.restore("x"), r"found str, expected what snapshot\(\) returned"),
        (lambda program: program.restore(program.state_dict()), "found dict, expected .* load_state_dict"),
        (lambda program: program.load_state_dict(None), "expected a state dict .* found NoneType"),
        (lambda program: program.load_state_dict(program.module.state_dict()), r"found the keys \['embed.weight'"),
        (lambda program: program.load_state_dict({"module": None}), r"found the keys \['module'\]"),
        (lambda program: program.load_state_dict({"optimizer": {}}), "expected 'state' and 'param_groups'"),
        (lambda program: program.save("tests"), "tests is a folder; expected the path of a file in it"),
    ],
)
def test_what_holds_no_states_is_refused(
    act: Callable[[TrainProgram], object], said: str, untouched: TrainProgram
) -> None:
    with pytest.raises(UsageError, match=said):
        act(untouched)


def test_a_file_continues_to_the_same_bits(tmp_path: Path) -> None:
    program, *_ = record(DROPOUT, adamw)
    losses(program, 0, 3)
    program.save(tmp_path / "states.safetensors")
    once = losses(program, 3, 6)
    other, *_ = record(DROPOUT, adamw)
    other.load(tmp_path / "states.safetensors")
    assert losses(other, 3, 6) == once
    assert [file.name for file in tmp_path.iterdir()] == ["states.safetensors"]


@pytest.mark.parametrize(("content", "said"), [(None, "there is no file"), (b"{}", "is no safetensors file")])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    program, *_ = record(MODELS["mlp"], adamw)
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    with pytest.raises(UsageError, match=said):
        program.load(tmp_path / "x")


def test_a_file_with_a_damaged_random_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    program, *_ = record(DROPOUT, adamw)
    program.save(path)
    with safetensors.safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        metadata = file.metadata()
    for damaged in (torch.zeros(5, dtype=torch.uint8), torch.zeros_like(tensors["random.default"])):
        safetensors.torch.save_file(tensors | {"random.default": damaged}, path, metadata)
        with pytest.raises(UsageError, match="torch refuses the random state of a snapshot"):
            program.load(path)
    safetensors.torch.save_file(tensors | {"random.kernel.x": torch.zeros(5)}, path, metadata)
    with pytest.raises(UsageError, match=r"is of another program: 'random\.kernel\.x' is only in one"):
        program.load(path)


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    program, *_ = record(MODELS["mlp"], adamw)
    other, *_ = record(MODELS["mlp"], lambda params: SGD(params, lr=0.1))
    other.save(tmp_path / "x")
    with pytest.raises(UsageError, match=r"is of another program: 'optimizer\.0\.bias\.exp_avg' is only in one"):
        program.load(tmp_path / "x")


KILLED = """
import os, signal, sys
from tests.pipeline.training.steps import MODELS, record
from tests.pipeline.training.test_states import adamw
import torch
torch.manual_seed(3)
program, *_ = record(MODELS["transformer with dropout"], adamw)
for number in range(6):
    print(program.step(MODELS["transformer with dropout"].batch(number)).item(), flush=True)
    program.save(sys.argv[1])
    if number == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_was_killed_between_steps_goes_on(tmp_path: Path) -> None:
    def run(kill_after: int) -> tuple[list[float], int]:
        done = run_forked("-c", KILLED, tmp_path / "states", str(kill_after))
        return [float(line) for line in done.stdout.splitlines()], done.returncode

    whole, code = run(99)
    assert (len(whole), code) == (6, 0)
    begun, code = run(2)
    assert (begun, code) == (whole[:3], -signal.SIGKILL)
    program, *_ = record(DROPOUT, adamw)
    program.load(tmp_path / "states")
    assert losses(program, 3, 6) == whole[3:]


def test_what_is_fed_for_a_state_is_ignored_with_one_warning() -> None:
    module = seeded(mlp)

    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return LOSS(output, batch["label"])

    x, label = MODELS["mlp"].batch(0)
    program = record_step(module, loss, SGD(module.parameters(), lr=0.1), {"input": x, "label": label})
    first = program.step({"input": x, "label": label})
    with pytest.warns(UserWarning, match=r"'(0\.weight|step)', which is a state of the step") as warned:
        for _ in range(2):
            second = program.step(
                {"input": x, "label": label, "0.weight": torch.zeros(32, 16), "step": torch.zeros(())}
            )
    assert len(warned) == 2  # one for each name
    assert program.steps_done == 3
    assert second < first
    with pytest.raises(UsageError, match="'lable', which the step does not read; did you mean 'label'"):
        program.step({"input": x, "lable": label, "label": label})
