"""Train steps of the blocks of image models (UNet, VAE) beside plain torch: normalisations, padding, resampling."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as f

from pipeline.runtime import RecordingDevice
from pipeline.training import record_step


class Residual(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(2, channels), nn.GroupNorm(2, out)])
        self.convs = nn.ModuleList([nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)])
        self.skip = nn.Conv2d(channels, out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = conv(f.silu(norm(y)))
        return self.skip(x) + y


class Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(2, channels), nn.Conv2d(channels, 3 * channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2)[:, None].chunk(3, -1)
        return x + f.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    def __init__(self, padding: str, upsampling: str) -> None:
        super().__init__()
        self.begin = nn.Conv2d(3, 4, 3, padding=1, padding_mode=padding)
        self.down = nn.Sequential(Residual(4, 8), nn.Conv2d(8, 8, 3, stride=2, padding=1), Attention(8))
        self.up, self.transposed = (
            nn.Conv2d(8, 4, 3, padding=1, padding_mode="replicate"),
            nn.ConvTranspose2d(8, 4, 2, 2),
        )
        self.end = nn.Sequential(Residual(8, 4), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 3, 3, padding=1))
        self.mode = upsampling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        y = self.down(x)
        y = self.up(f.interpolate(y, scale_factor=2, mode=self.mode)) + self.transposed(y)
        return self.end(torch.cat([x, y], 1))


@pytest.mark.parametrize(
    ("modes", "memory_format", "dtype"),
    [
        (("reflect", "bilinear"), torch.contiguous_format, torch.float64),
        (("circular", "bicubic"), torch.channels_last, torch.float32),
    ],
)
def test_steps_of_a_unet_are_those_of_torch(
    modes: tuple[str, str], memory_format: torch.memory_format, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    module = UNet(*modes).to(dtype=dtype, memory_format=memory_format)
    x = torch.randn(2, 3, 8, 8, dtype=dtype).contiguous(memory_format=memory_format)
    assert_steps_are_those_of_torch(module, (x, torch.randn(2, 3, 8, 8, dtype=dtype)))


def test_steps_of_a_unet_in_bfloat16_are_those_of_torch() -> None:
    """With Adam, and a loss in float32: the plan rounds to bfloat16 where torch does, in other orders of the sums, so
    losses may differ by a rounding of bfloat16 (2⁻⁸, relative). Seen: 5e-4."""
    torch.manual_seed(0)
    module = UNet("zeros", "nearest").bfloat16()
    eager = copy.deepcopy(module)
    x, target = (torch.randn(2, 3, 8, 8).bfloat16() for _ in range(2))

    def loss(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return f.mse_loss(output.float(), wanted.float())

    program = record_step(module, loss, torch.optim.Adam(module.parameters(), lr=1e-3), (x, target))
    optimizer, losses = torch.optim.Adam(eager.parameters(), lr=1e-3), []
    for _ in range(4):
        optimizer.zero_grad()
        value = loss(eager(x), target)
        value.backward()
        optimizer.step()
        losses.append(value.item())
        assert program.step((x, target)).item() == pytest.approx(losses[-1], rel=2**-8)
    assert losses[-1] < 0.97 * losses[0]  # more than the tolerance


class Expanded(nn.Module):
    """Each operator reads an expanded parameter, and has a gradient that is expanded, permuted, or in rows."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(1, 4, 6, 6))
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        total = scale.sum()
        x = self.conv(self.x.expand(2, 4, 6, 6) * scale)
        for at, function in enumerate(FUNCTIONS):
            y = function(self.x.expand(2, 4, 6, 6) if at % 3 == 2 else x)
            weights = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape[::-1]).permute(3, 2, 1, 0) / y.numel()
            total = total + y.sum() + (y * weights).sum()
        return total[None]


FUNCTIONS = (
    lambda x: f.group_norm(x, 2),
    lambda x: f.instance_norm(x),
    lambda x: f.layer_norm(x, (6,)),
    lambda x: f.batch_norm(x, None, None, training=True),
    *(lambda x, mode=mode: f.pad(x, (1, 2, 2, 1), mode) for mode in ("reflect", "replicate", "circular")),
    *(lambda x, mode=mode: f.interpolate(x, size=(9, 5), mode=mode) for mode in ("nearest", "bilinear", "bicubic")),
    lambda x: f.max_pool2d(x, 3, 2, 1),
    lambda x: f.avg_pool2d(x, 3, 2, 1),
    lambda x: f.adaptive_avg_pool2d(x, (2, 3)),
    lambda x: f.adaptive_max_pool2d(x, (2, 3)),
    lambda x: f.grid_sample(x, x[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False),
    lambda x: f.unfold(x, 3)[..., None],
    lambda x: f.pixel_unshuffle(x, 2),
    lambda x: f.softmax(x, 1),
    lambda x: f.log_softmax(x, 3),
    lambda x: x.cumsum(1),
)


def test_gradients_in_any_order_are_those_of_torch() -> None:
    torch.manual_seed(0)
    batch = torch.randn(2, 4, 6, 6).double(), torch.zeros(1).double()
    assert_steps_are_those_of_torch(Expanded().double(), batch, 1e-6)


class Normalized(nn.Module):
    """Norms with weights in float32 whose inputs autocast makes bfloat16; one in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        norms = (nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.BatchNorm2d(4).eval(), nn.InstanceNorm2d(4, affine=True))
        self.norms = nn.ModuleList([*norms, nn.BatchNorm2d(4, affine=False), nn.LayerNorm(6)])
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return sum((self.conv(norm(self.conv(x))) for norm in self.norms), torch.zeros(())).float()


def test_norms_under_autocast_are_those_of_torch() -> None:
    torch.manual_seed(0)
    batch = torch.randn(2, 4, 6, 6), torch.randn(2, 4, 6, 6)
    # torch's mixed kernel of layer_norm adds up the gradient of its weights in bfloat16; the step does so in float32.
    assert_steps_are_those_of_torch(Normalized(), batch, 1e-3, limit=2e-2)


@pytest.mark.parametrize("trained", [("weight", "bias"), ("weight",), ("bias",)])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4)], ids=["batch", "group"])
def test_a_norm_after_frozen_layers_trains_as_in_torch(norm: nn.Module, trained: tuple[str, ...]) -> None:
    """The gradient of the norm's input is masked out: traces have one of batch_norm all the same, and torch's kernel of
    group_norm dies of such a mask if images have their channels last."""
    torch.manual_seed(0)
    norm = copy.deepcopy(norm)
    for name, parameter in norm.named_parameters():
        parameter.requires_grad_(name in trained)
    stem = nn.Conv2d(3, 4, 3).requires_grad_(False)
    module = nn.Sequential(stem, norm, nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(8, 3)).double()
    assert_steps_are_those_of_torch(module, (torch.randn(2, 3, 6, 6).double(), torch.randn(2, 3).double()))


@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=["in eval", "weight frozen"])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4)], ids=["batch", "group"])
def test_operands_that_a_norm_wants_as_in_the_trace_lie_on_the_device(norm: nn.Module, frozen: tuple[str, ...]) -> None:
    """The images before and after the norm have their channels last, and it reads copies of them."""
    torch.manual_seed(0)
    norm = copy.deepcopy(norm).train(bool(frozen))
    for name, parameter in norm.named_parameters():
        parameter.requires_grad_(name not in frozen)
    stem = nn.Conv2d(3, 4, 3).requires_grad_(False)
    module = nn.Sequential(stem, norm, nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(8, 3)).double()
    batch = (torch.randn(2, 3, 6, 6).double(), torch.randn(2, 3).double())
    assert_steps_are_those_of_torch(module, batch, 0.125, device=RecordingDevice(2**22))  # a rate of float32, too


def assert_steps_are_those_of_torch(
    module: nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor],
    rate: float = 0.1,
    limit: float = 1e-3,
    device: RecordingDevice | None = None,
) -> None:
    eager, loss = copy.deepcopy(module), nn.MSELoss()
    before = [one.detach().clone() for one in eager.parameters()]
    program = record_step(module, loss, torch.optim.SGD(module.parameters(), lr=rate), batch, device=device)
    optimizer = torch.optim.SGD(eager.parameters(), lr=rate)
    for _ in range(2):
        program.step(batch)
        optimizer.zero_grad()
        loss(eager(batch[0]), batch[1]).backward()
        optimizer.step()
    program.write_back()
    # 1e-9 of the change: the order of sums alone may differ. In float32 a sum of 10^4 numbers is off by 1e-4.
    limit = 1e-9 if batch[0].dtype is torch.float64 else limit
    for found, wanted, old in zip(module.parameters(), eager.parameters(), before, strict=True):
        moved = float((wanted - old).detach().abs().max())
        assert float((found - wanted).detach().abs().max()) <= limit * max(moved, 1e-3)


def test_a_gelu_before_a_transposition_that_is_copied_is_that_of_torch() -> None:
    """The result of the gelu is stored in the order of the copy, into which torch's gelu with `out=` writes nothing."""
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LSTM(8, 8, batch_first=True))
    x, target, reference = torch.randn(4, 5, 8), torch.randn(4, 5, 8), copy.deepcopy(module)
    step = record_step(module, loss_of_states, torch.optim.SGD(module.parameters(), lr=0.1), (x, target))
    torch.testing.assert_close(step.step((x, target)), loss_of_states(reference(x), target).detach())


def loss_of_states(found: tuple[torch.Tensor, object], target: torch.Tensor) -> torch.Tensor:
    return f.mse_loss(found[0], target)
