"""What cannot be recorded is refused in a sentence, and a step that breaks changes nothing."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.utils.checkpoint import checkpoint

from pipeline.errors import Unsupported, UsageError
from pipeline.training import frozen_numbers, record_step, trace
from pipeline.training.frozen_numbers import NO_PLACE, place_outside
from tests.pipeline.training.steps import LOSS, MODELS, mlp, record

X, LABEL = MODELS["mlp"].batch(0)


def sgd(module: nn.Module, **options: float) -> Optimizer:
    return SGD(module.parameters(), lr=0.1, **options)  # type: ignore[arg-type]


class Forward(nn.Module):
    """An MLP, and a function of it and the input."""

    def __init__(self, forward: Callable[[Forward, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.mlp, self.function = mlp(), forward
        self.register_buffer("history", torch.zeros(1, 16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.plain = torch.ones(10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def forward(function: Callable[[Forward, torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    return lambda: Forward(function)


def rounded(m: Forward, x: torch.Tensor) -> torch.Tensor:
    return m.mlp(x).argmax(1, keepdim=True).float().expand(-1, 10)


def append(m: Forward, x: torch.Tensor) -> torch.Tensor:
    m.history = torch.cat([m.history, x[:1]])
    return m.mlp(x)


def average(m: Forward, x: torch.Tensor) -> torch.Tensor:
    m.count = m.count * 0.5
    return m.mlp(x)


def count(m: Forward, x: torch.Tensor) -> torch.Tensor:
    m.count.add_(1)
    return m.mlp(x) * int(m.count)


def decide_then_count(m: Forward, x: torch.Tensor) -> torch.Tensor:
    result = m.mlp(x) if m.count == 0 else m.mlp(-x)
    m.count.add_(1)
    return result


def write_plain(m: Forward, x: torch.Tensor) -> torch.Tensor:
    m.plain.view(2, 5).add_(1)
    return m.mlp(x) * m.plain


def replace_plain(m: Forward, x: torch.Tensor) -> torch.Tensor:
    m.plain = m.plain + 1
    return m.mlp(x) * m.plain


def decide(m: Forward, x: torch.Tensor) -> torch.Tensor:
    return m.mlp(x) if x.sum() > 0 else m.mlp(-x)


def decide_by_a_draw(m: Forward, x: torch.Tensor) -> torch.Tensor:
    draw = torch.zeros(1).uniform_()
    return m.mlp(x) if draw.sum() > 2 else m.mlp(-x)


def decide_by_a_view(m: Forward, x: torch.Tensor) -> torch.Tensor:
    """What is written to the whole is in its view too."""
    whole = torch.zeros(16)
    view = whole[8:]
    whole.copy_(x[0].detach())
    return m.mlp(x) if view.sum() > 0 else m.mlp(-x)


def decide_by_a_large_mask(m: Forward, x: torch.Tensor) -> torch.Tensor:
    return m.mlp(x) if torch.ones(2**22 + 1).all() else m.mlp(-x)


def words(m: Forward, x: torch.Tensor) -> torch.Tensor:
    """How many rows there are follows from the values in the input."""
    return x[x[:, 0] > 0][:, :10] * m.mlp[2].bias[:10]  # type: ignore[index]


def no_derivative(m: Forward, x: torch.Tensor) -> torch.Tensor:
    return torch.igamma(m.mlp(x).abs() + 1, torch.ones(8, 10))


def invert(m: Forward, x: torch.Tensor) -> torch.Tensor:
    return m.mlp(x) @ torch.linalg.inv(m.mlp[2].weight[:10, :10])  # type: ignore[index]


def divide(m: Forward, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.lstsq(m.mlp[2].weight, m.mlp(x)).solution  # type: ignore[index]


def make_sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 10, sparse=True), nn.Flatten(0, 1))


def make_complex() -> nn.Module:
    module = Forward(lambda m, x: (x.to(torch.complex64) @ m.weight).abs())
    module.weight = nn.Parameter(torch.ones(16, 10, dtype=torch.complex64))
    return module


def make_on_meta() -> nn.Module:
    return mlp().to("meta")


def make_scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        return torch.jit.script(mlp())


def with_hook() -> nn.Module:
    module = mlp()
    next(module.parameters()).register_hook(lambda gradient: gradient * 0.5)
    return module


def hooked_sgd(module: nn.Module) -> Optimizer:
    optimizer = sgd(module)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def repeating_sgd(module: nn.Module) -> Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will refuse it one day
        return SGD([*module.parameters()] * 2, lr=0.1)


def reenter(m: Forward, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(m.mlp[1:], m.mlp[0](x), use_reentrant=True)  # type: ignore[index, operator, no-any-return]


def asks(output: torch.Tensor, label: torch.Tensor) -> float:
    return float(LOSS(output, label))


@dataclass(frozen=True)
class Refused:
    """A step that is refused, and a pattern of what is said."""

    said: str
    module: Callable[[], nn.Module] = mlp
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    loss: Callable[..., Any] = LOSS
    batch: tuple[Any, ...] = (X, LABEL)
    error: type[Exception] = Unsupported


NUMBER = "Python asks for a number of a tensor"

REFUSALS = [
    Refused("the optimizer is an Adagrad; expected a torch.optim.SGD", optimizer=lambda m: Adagrad(m.parameters())),
    Refused("the optimizer is the class SGD; expected a torch.optim.SGD", optimizer=lambda m: SGD),
    Refused("dampening=0.5; only 0", optimizer=lambda m: sgd(m, dampening=0.5, momentum=0.9)),
    Refused("shape .2, 2. that the module has not", optimizer=lambda m: sgd(nn.Linear(2, 2)), error=UsageError),
    Refused("'0.weight' several times", optimizer=lambda m: repeating_sgd(m), error=UsageError),
    Refused("use_reentrant=True", forward(reenter), error=UsageError),
    Refused("the loss is a tensor .8.", loss=nn.CrossEntropyLoss(reduction="none"), error=UsageError),
    Refused(
        "does not depend on any parameter", forward(rounded), loss=nn.MSELoss(), batch=(X, X[:, :10]), error=UsageError
    ),
    Refused("size of a result follows from the values", forward(words), loss=lambda out, _: out.mean()),
    Refused("size of a result follows from the values", forward(divide), loss=lambda out, _: out.mean()),
    Refused(r"^torch\.linalg\.inv checks its own result \(test_refusals\.py:\d+\) and raises where", forward(invert)),
    Refused(r"igamma.*not implemented.*test_refusals\.py:", forward(no_derivative)),
    Refused(rf"{NUMBER} .*test_refusals\.py:", forward(decide)),
    *(Refused(NUMBER, forward(f)) for f in (count, decide_by_a_draw, decide_by_a_view, decide_by_a_large_mask)),
    Refused("by the values of 'count', which", forward(decide_then_count)),
    Refused(r"makes float32\[2, 16\] of 'history', which", forward(append)),
    Refused(r"makes float32\[\] of 'count', which is int64", forward(average)),
    Refused("writes to a tensor that is neither a parameter nor", forward(write_plain)),
    Refused("sets 'plain', a tensor that is neither a param", forward(replace_plain)),
    Refused("gradient of '0.weight' is sparse .*sparse=False", make_sparse, batch=(LABEL[:, None], LABEL)),
    Refused("parameter 'weight' is complex64; expected float32 or", make_complex),
    Refused("is bfloat16; expected float32 or float64", lambda: mlp().bfloat16(), batch=(X.bfloat16(), LABEL)),
    Refused("is float16; expect", lambda: mlp().half(), lambda m: Adam(m.parameters()), batch=(X.half(), LABEL)),
    Refused("parameter '0.weight' is on the device meta", make_on_meta, error=UsageError),
    Refused("'input' of the batch is on the device meta", batch=(X.to("meta"), LABEL), error=UsageError),
    Refused("parameter '0.weight' has a hook on its gradient", with_hook),
    Refused("the optimizer has a hook on its step", optimizer=hooked_sgd),
    Refused("differentiable=True", optimizer=lambda m: Adam(m.parameters(), differentiable=True)),
    Refused("the module is one of torch.jit", make_scripted),
    Refused("comes in a DataParallel; give the module", lambda: nn.DataParallel(mlp())),
    Refused("there is nothing to train", lambda: mlp().requires_grad_(False), error=UsageError),
    Refused("the loss is a tuple", loss=lambda out, label: (LOSS(out, label), out), error=UsageError),
    Refused("is torch.complex64", loss=lambda out, label: LOSS(out, label).to(torch.complex64), error=UsageError),
    Refused("Python asks for a number .*; nor could it after torch.export$", loss=asks),
    Refused("^torch itself cannot .* same dtype, but got Float", lambda: mlp().double(), error=UsageError),
    Refused("^torch itself cannot .* got Int", batch=(X, LABEL.int()), error=UsageError),
    Refused("^torch itself cannot .* to match target batch_size .5.[.]$", batch=(X, LABEL[:5]), error=UsageError),
    Refused(r"expected `\(\*inputs, target\)`", batch=(X,), error=UsageError),
    Refused("'target' of the batch is 3; expected a tensor", batch=(X, 3), error=UsageError),
]


@pytest.mark.parametrize("case", REFUSALS, ids=[case.said for case in REFUSALS])
def test_what_cannot_be_recorded(case: Refused) -> None:
    module = case.module()
    with pytest.raises(case.error, match=case.said):
        record_step(module, case.loss, case.optimizer(module), case.batch)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_layers_that_torch_leaves_out_is_refused(make: Callable[..., nn.Module]) -> None:
    module, batch = nn.Sequential(make(16, 10, 2, dropout=0.7)), (X[:2], LABEL[:2])  # the rows are its steps
    said = rf"module '0' \({make.__name__}\) has 2 layers with dropout=0.7, .* nn.Dropout between them"  # type: ignore[attr-defined]
    with pytest.raises(Unsupported, match=said):
        record_step(module, first_loss, sgd(module), batch)
    module.eval()
    record_step(module, first_loss, sgd(module), batch).step(batch)  # there is no dropout to leave out


def test_a_loss_that_torch_records_wrongly_is_refused() -> None:
    module, labels = nn.Linear(4, 4), torch.tensor([[2, 0, -1, 1]])
    said = r"multilabel_margin_loss .*: a recording of torch counts what stands after the first -1 among the labels"
    with pytest.raises(Unsupported, match=said):
        record_step(module, nn.MultiLabelMarginLoss(), sgd(module), (torch.ones(1, 4), labels))


def first_loss(output: tuple[torch.Tensor, object], label: torch.Tensor) -> torch.Tensor:
    return LOSS(output[0], label)


def set_data(weight: torch.Tensor) -> None:
    weight.data = weight.data.clamp(-0.1, 0.1)


@torch.no_grad()
def clamp(weight: torch.Tensor) -> None:
    weight.clamp_(-0.1, 0.1)


@torch.no_grad()
def copy(weight: torch.Tensor) -> None:
    weight[0].copy_(weight[1])


WRITES: list[tuple[Callable[[torch.Tensor], object], str]] = [
    (clamp, "writes to the parameter"),
    (copy, "writes to the parameter"),
    (lambda weight: weight.data.clamp_(-0.1, 0.1), "writes to the parameter"),
    (set_data, "assigns to .data of"),
]


@pytest.mark.parametrize(("write", "said"), WRITES)
def test_a_write_to_a_parameter_is_refused(write: Callable[[torch.Tensor], object], said: str) -> None:
    module = Forward(lambda m, x: (write(m.mlp[2].weight), m.mlp(x))[1])  # type: ignore[index]
    with pytest.raises(Unsupported, match=f"the forward pass or the loss {said} 'mlp.2.weight'"):
        record_step(module, LOSS, sgd(module), (X, LABEL))


def test_an_embedding_that_scales_its_rows_is_refused() -> None:
    module = nn.Sequential(nn.Embedding(10, 10, max_norm=1.0), nn.Flatten(0, 1))
    with pytest.raises(Unsupported, match=r"writes to the parameter '0\.weight'.*max_norm=None"):
        record_step(module, LOSS, sgd(module), (LABEL[:, None], LABEL))


def test_a_write_of_the_loss_is_refused() -> None:
    module = mlp()
    with pytest.raises(Unsupported, match=r"the loss writes to the parameter '0\.weight'"):
        record_step(module, lambda out, label: (clamp(module[0].weight), LOSS(out, label))[1], sgd(module), (X, LABEL))  # type: ignore[index,arg-type]


def test_a_batch_that_the_module_cannot_take_is_refused_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    module = mlp()
    before = torch.get_rng_state()
    with pytest.raises(UsageError, match=r"^torch itself cannot compute .*8x15 and 16x32") as caught:
        record_step(module, LOSS, sgd(module), (X[:, :15], LABEL))
    assert "torch.export" not in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert capfd.readouterr().err == ""
    assert torch.equal(torch.get_rng_state(), before)


def test_two_limits_are_refused() -> None:
    module = mlp()
    with pytest.raises(UsageError, match="found max_norm and max_value; expected one of them"):
        record_step(module, LOSS, sgd(module), (X, LABEL), max_norm=1.0, max_value=1.0)


@pytest.mark.parametrize("limit", [float("nan"), -1.0, "1", True])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    module = mlp()
    for name in ("max_norm", "max_value"):
        with pytest.raises(UsageError, match=f"found {name}={limit!r}, expected a number that is not below zero"):
            record_step(module, LOSS, sgd(module), (X, LABEL), **{name: limit})
    program = record_step(module, LOSS, sgd(module), (X, LABEL), max_norm=1.0)
    with pytest.raises(UsageError, match=f"found limit={limit!r}, expected"):
        program.limit = limit
    assert program.limit == 1.0


@pytest.mark.parametrize(
    ("module", "loss", "said"),
    [
        (nn.Linear, LOSS, r"the module is the class Linear, which is not called: give Linear\(…\)"),
        (mlp(), nn.CrossEntropyLoss, "the loss is the class CrossEntropyLoss, which is not called"),
        (mlp, LOSS, "the module is a function; expected an nn.Module"),
        (mlp(), "mse", "the loss is 'mse'; expected a function of output and target"),
    ],
)
def test_what_is_no_module_or_no_loss_is_refused(module: Any, loss: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        record_step(module, loss, sgd(mlp()), (X, LABEL))


def test_a_batch_of_another_shape_is_refused() -> None:
    program, *_ = record(MODELS["mlp"], lambda params: SGD(params, lr=0.1))
    with pytest.raises(UsageError, match=r"'input' of the batch is float32\[4, 16\]; expected float32\[8, 16\]"):
        program.step((X[:4], LABEL[:4]))
    with pytest.raises(UsageError, match="the batch is not like the example batch, which is 2 tensors"):
        program.step((X, X, LABEL))


def test_a_parameter_without_a_shape_is_refused() -> None:
    module = nn.LazyLinear(3)
    with pytest.raises(UsageError, match="parameter 'weight' of a lazy module has no shape yet: call the module once"):
        record_step(module, LOSS, SGD(module.parameters(), lr=0.1), (X, LABEL))


def test_inference_mode_is_named() -> None:
    module = nn.Linear(X.shape[1], 3)
    with torch.inference_mode(), pytest.raises(UsageError, match=r"record the step outside of it"):
        record_step(module, LOSS, sgd(module), (X, LABEL))


def test_what_torch_export_says_too_is_said_once() -> None:
    module = forward(decide)()
    with pytest.raises(Unsupported, match="Python asks for a number") as caught:
        record_step(module, lambda output, _: torch.tensor(float(output.sum())), sgd(module), (X, LABEL))
    assert str(caught.value).count("Python asks for a number") == 1


@pytest.mark.parametrize(
    ("files", "place"),
    [
        (["model.py", str(Path(torch.__file__).parent / "functional.py"), "<eval_with_key>.1"], "model.py:7"),
        (["script.py", trace.__file__, frozen_numbers.__file__], NO_PLACE),  # it only called the recording
    ],
)
def test_the_place_is_the_innermost_line_of_the_user_inside_the_recording(files: list[str], place: str) -> None:
    frames = traceback.StackSummary.from_list([(file, 7, "forward", "") for file in files])
    assert place_outside(frames) == place
