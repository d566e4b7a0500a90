"""A recorded step does what the step of plain torch does, for a hundred steps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import OneCycleLR

from pipeline.errors import UsageError
from pipeline.ir import Graph
from pipeline.lowering import lower, with_kernels
from pipeline.lowering.memory_order import in_traced_order
from pipeline.planning import make_plan
from pipeline.training import record_step
from tests.pipeline.training.steps import KEY_BIASES, LOSS, MODELS, MakeOptimizer, Model, record, seeded, step_of_torch

STEPS = 100
TOLERANCE = 1e-4
"""Of float32 losses, relative: sums run in another order, and Adam divides by small roots, so single bits grow from
step to step. Seen: up to 3e-7."""

TOLERANCES = {torch.float64: 1e-12, torch.float32: TOLERANCE, torch.bfloat16: 0.03}
"""Of the losses by dtype, relative. Products and sums are the same calls as torch's, but a plan may lay an operand out
otherwise, so that a sum has another order: float64 as float32. In bfloat16 a parameter that is rounded to its
neighbour is off by half of its last bit, 2^-9 relative, and stays so; a loss adds up many of these. Seen over
the five models: up to 5e-16, 3e-7 and 0.018."""

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda params: SGD(params, lr=0.1),
    "SGD with momentum": lambda params: SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Adam": lambda params: Adam(params, lr=1e-3),
    "Adam with AMSGrad": lambda params: Adam(params, lr=1e-3, amsgrad=True, weight_decay=1e-2),
    "AdamW": lambda params: AdamW(params, lr=1e-3),
    "Adam that maximizes": lambda params: Adam(params, lr=1e-4, maximize=True),
}

CASES = [("mlp", optimizer) for optimizer in OPTIMIZERS] + [(model, "AdamW") for model in MODELS if model != "mlp"]


@pytest.mark.parametrize(("model", "optimizer"), CASES)
def test_losses_and_parameters_are_those_of_torch(model: str, optimizer: str) -> None:
    program, module, twin = record(MODELS[model], OPTIMIZERS[optimizer])
    torch.manual_seed(7)
    ours = [program.step(MODELS[model].batch(number)).item() for number in range(STEPS)]
    torch.manual_seed(7)
    theirs = [step_of_torch(module, twin, MODELS[model].batch(number)) for number in range(STEPS)]
    assert ours == pytest.approx(theirs, rel=TOLERANCE)
    assert len(set(theirs)) == STEPS  # the loss moves
    found = program.state_dict()["module"]
    for name, tensor in module.state_dict().items():
        if not name.endswith(KEY_BIASES):
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_losses_are_those_of_torch_in_every_dtype(model: str, dtype: torch.dtype) -> None:
    """Beside torch's fused AdamW, which computes the update of bfloat16 in float32, as we do: the other one rounds
    after each operator. float16 is refused."""
    module, twin = seeded(MODELS[model].make).to(dtype), seeded(MODELS[model].make).to(dtype)
    ours_of, theirs_of = (AdamW(own.parameters(), lr=1e-3, fused=True) for own in (module, twin))

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, label = MODELS[model].batch(number)
        return x if MODELS[model].words else x.to(dtype), label

    program = record_step(module, LOSS, ours_of, batch(0))
    torch.manual_seed(7)
    ours = [program.step(batch(number)).item() for number in range(STEPS)]
    torch.manual_seed(7)
    theirs = [step_of_torch(twin, theirs_of, batch(number)) for number in range(STEPS)]
    assert ours == pytest.approx(theirs, rel=TOLERANCES[dtype])
    assert min(theirs) < 0.99 * theirs[0]


class ToDouble(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


@pytest.mark.parametrize("optimizer", ["SGD with momentum", "AdamW"])
@pytest.mark.parametrize("options", [{}, {"max_norm": 0.05}], ids=["plain", "clipped"])
def test_parameters_of_two_dtypes_are_trained_in_one_group(optimizer: str, options: dict[str, float]) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), ToDouble(), nn.Linear(5, 3).double())

    program, twin, theirs_of = record(Model(make, (4, 6), classes=3), OPTIMIZERS[optimizer], **options)
    x, label = torch.randn(4, 6), torch.randint(0, 3, (4,))

    def clip(module: nn.Module) -> None:
        if options:
            nn.utils.clip_grad_norm_(module.parameters(), options["max_norm"])

    ours = [program.step((x, label)).item() for _ in range(5)]
    theirs = [step_of_torch(twin, theirs_of, (x, label), clip) for _ in range(5)]
    assert ours == pytest.approx(theirs, rel=TOLERANCE)


def test_losses_of_wide_layers_are_those_of_torch_and_repeat() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        module, twin = (
            seeded(lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))) for _ in range(2)
        )
        x, label = torch.randn(8, 512), torch.randint(0, 512, (8,))
        ours_of, theirs_of = (AdamW(own.parameters(), lr=1e-4) for own in (module, twin))
        program = record_step(module, LOSS, ours_of, (x, label))
        begin = program.snapshot()
        ours = [program.step((x, label)).item() for _ in range(STEPS)]
        program.restore(begin)
        again = [program.step((x, label)).item() for _ in range(STEPS)]
        theirs = [step_of_torch(twin, theirs_of, (x, label)) for _ in range(STEPS)]
    finally:
        torch.set_num_threads(before)
    assert ours == pytest.approx(theirs, rel=TOLERANCE)
    assert again == ours


@pytest.mark.parametrize("large", [0, 2**30], ids=["one update each", "one update for all"])
def test_early_updates_change_nothing(large: int) -> None:
    program, module, twin = record(MODELS["mlp"], OPTIMIZERS["Adam"], large=large)
    updates = [op for op in program.graph.ops if op.kind == "Adam"]
    assert len(updates) == (6 if large == 0 else 1)
    ours = [program.step(MODELS["mlp"].batch(number)).item() for number in range(20)]
    theirs = [step_of_torch(module, twin, MODELS["mlp"].batch(number)) for number in range(20)]
    assert ours == pytest.approx(theirs, rel=TOLERANCE)


def test_the_memory_of_a_gradient_is_free_after_its_update() -> None:
    """A layer has 4 KiB, its activations half of one."""
    deep = Model(lambda: nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(12))), (4, 32), classes=32)
    early, late, clipped = (
        live_bytes(record(deep, OPTIMIZERS["Adam"], **options)[0].graph)
        for options in ({"large": 0}, {"large": 2**30}, {"large": 0, "max_norm": 1.0})
    )
    assert late - early > 9 * 4096
    assert clipped - early > 9 * 4096  # the norm needs all gradients


def live_bytes(graph: Graph) -> int:
    lowered = with_kernels(in_traced_order(graph))
    return make_plan(lowered, lower(lowered)).live_bytes


@pytest.mark.parametrize(
    ("options", "clip"),
    [
        ({"max_norm": 0.05}, lambda module: nn.utils.clip_grad_norm_(module.parameters(), 0.05)),
        ({"max_value": 0.002}, lambda module: nn.utils.clip_grad_value_(module.parameters(), 0.002)),
    ],
    ids=["norm", "value"],
)
def test_gradients_are_clipped(options: dict[str, float], clip: Callable[[nn.Module], object]) -> None:
    program, module, twin = record(MODELS["mlp"], OPTIMIZERS["SGD"], **options)
    ours = [program.step(MODELS["mlp"].batch(number)).item() for number in range(20)]
    theirs = [step_of_torch(module, twin, MODELS["mlp"].batch(number), clip) for number in range(20)]
    assert ours == pytest.approx(theirs, rel=TOLERANCE)
    plain, *_ = record(MODELS["mlp"], OPTIMIZERS["SGD"])
    unclipped = [plain.step(MODELS["mlp"].batch(number)).item() for number in range(20)]
    assert unclipped != pytest.approx(ours, rel=TOLERANCE)
    assert plain.limit is None
    assert [program.limit] == pytest.approx(list(options.values()))
    before = program.state_dict()["module"]["0.weight"]
    program.limit = 0.0
    program.step(MODELS["mlp"].batch(0))
    assert torch.equal(program.state_dict()["module"]["0.weight"], before)
    with pytest.raises(UsageError, match="this program clips no gradients"):
        plain.limit = 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_limit_of_gradients_has_their_precision(dtype: torch.dtype) -> None:
    """0.1 in float32 is 0.1 + 1.5e-9, which float64 sees."""
    torch.manual_seed(0)
    module = nn.Linear(4, 3).to(dtype)
    twin, x, label = copy.deepcopy(module), 9 * torch.randn(6, 4, dtype=dtype), torch.tensor([0, 1, 2, 0, 1, 2])
    program = record_step(module, LOSS, SGD(module.parameters(), lr=0.1, momentum=0.9), (x, label), max_norm=0.1)
    optimizer = SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for limit in (0.1, 0.3):
        program.limit = limit
        for _ in range(3):
            optimizer.zero_grad()
            LOSS(twin(x), label).backward()
            nn.utils.clip_grad_norm_(twin.parameters(), limit)
            optimizer.step()
            program.step((x, label))
    found = program.state_dict()["module"]["weight"]
    torch.testing.assert_close(found, twin.weight.detach(), rtol=10 * torch.finfo(dtype).eps, atol=1e-15)


class TwoDtypes(nn.Module):
    """Its logits, and so its loss, are in `last`; the parameters before them are in `first`."""

    def __init__(self, first: torch.dtype, last: torch.dtype) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32, dtype=first), nn.Linear(32, 10, dtype=last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.inner(x.to(self.inner.weight.dtype))).to(self.outer.weight.dtype))


@pytest.mark.parametrize("options", [{"max_norm": 0.05}, {"check_gradients": True}], ids=str)
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64)], ids=str)
def test_gradients_of_two_dtypes_have_one_norm(
    options: dict[str, float], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """The sum of loss and norm was declared in the dtype of the loss, and the graph check refused such a step."""
    module = seeded(lambda: TwoDtypes(*dtypes))
    twin = copy.deepcopy(module)
    optimizer = AdamW(twin.parameters(), lr=1e-2)
    program = record_step(module, LOSS, AdamW(module.parameters(), lr=1e-2), MODELS["mlp"].batch(0), **options)
    limit = options.get("max_norm", torch.inf)
    for number in range(20):
        batch = MODELS["mlp"].batch(number)
        theirs = step_of_torch(twin, optimizer, batch, lambda part: nn.utils.clip_grad_norm_(part.parameters(), limit))
        assert program.step(batch).item() == pytest.approx(theirs, rel=TOLERANCE)


def test_a_scheduler_of_torch_sets_the_learning_rate() -> None:
    program, module, twin = record(MODELS["mlp"], lambda params: SGD(params, lr=0.1))
    ours, theirs = [], []
    for optimizer in (program.optimizer, twin):
        schedule = OneCycleLR(optimizer, max_lr=0.5, total_steps=30, cycle_momentum=False)
        for number in range(30):
            batch = MODELS["mlp"].batch(number)
            if optimizer is twin:
                theirs.append(step_of_torch(module, twin, batch))
            else:
                ours.append(program.step(batch).item())
            schedule.step()
    assert ours == pytest.approx(theirs, rel=TOLERANCE)


def test_a_parameter_without_a_gradient_stays() -> None:
    module = seeded(MODELS["mlp"].make)
    module[0].requires_grad_(False)  # type: ignore[operator]
    program = record_step(module, LOSS, AdamW(module.parameters()), MODELS["mlp"].batch(0))
    program.step(MODELS["mlp"].batch(0))
    found, before = program.state_dict()["module"], module.state_dict()
    assert torch.equal(found["0.weight"], before["0.weight"])
    assert not torch.equal(found["2.weight"], before["2.weight"])


class Teacher(nn.Module):
    """A student, and a teacher that follows its weights in each forward pass, as MoCo and BYOL have it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = MODELS["mlp"].make()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for own, followed in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                own.lerp_(followed, 0.1)
            goal = self.teacher(x)
        return self.student(x) - goal


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_teacher_without_gradients_may_be_written_to(is_frozen: bool) -> None:
    module, twin = seeded(Teacher), seeded(Teacher)
    for model in (module, twin):
        model.teacher.requires_grad_(not is_frozen)  # type: ignore[operator, union-attr]
    program = record_step(module, LOSS, AdamW(module.parameters(), lr=0.01), MODELS["mlp"].batch(0))
    optimizer = AdamW(twin.parameters(), lr=0.01)
    for number in range(10):
        batch = MODELS["mlp"].batch(number)
        assert program.step(batch).item() == pytest.approx(step_of_torch(twin, optimizer, batch), rel=TOLERANCE)
    program.write_back()
    for found, expected in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
