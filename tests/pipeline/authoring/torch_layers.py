"""Every layer and loss of torch.nn, with arguments that make a small one, and inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Example:
    """A layer of torch.nn: the shapes of its float inputs, or a function that draws them."""

    inputs: tuple[tuple[int, ...], ...] | Callable[[], tuple[Any, ...]]
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, name: str) -> nn.Module:
        return getattr(nn, name)(*self.args, **self.options)

    def draw(self) -> tuple[Any, ...]:
        return self.inputs() if callable(self.inputs) else tuple(map(torch.randn, self.inputs))


LINE, PLANE, SPACE, ROW = (2, 4, 8), (2, 4, 8, 8), (2, 4, 6, 6, 6), (3, 5)
BY_RANK: Final = ((1, LINE), (2, PLANE), (3, SPACE))


def classes() -> tuple[Tensor, Tensor]:
    return torch.randn(ROW), torch.tensor([1, 0, 4])


def shares() -> tuple[Tensor, Tensor]:
    return torch.rand(ROW) * 0.9 + 0.05, torch.rand(ROW)


def signs(*shapes: tuple[int, ...], of: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (*map(torch.randn, shapes), torch.randint(0, 2, of) * 2.0 - 1)


def ids() -> tuple[Tensor]:
    return (torch.tensor([[1, 4, 0], [2, 2, 3]]),)


def pooled(rank: int, shape: tuple[int, ...]) -> Callable[[], tuple[Tensor, Tensor]]:
    pool = getattr(nn, f"MaxPool{rank}d")(2, return_indices=True)
    return lambda: pool(torch.randn(shape))


ELEMENTWISE: Final = (
    "AlphaDropout CELU Dropout Dropout2d ELU FeatureAlphaDropout Flatten GELU GLU Hardshrink Hardsigmoid Hardswish "
    "Hardtanh Identity LeakyReLU LogSigmoid Mish PReLU RReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax2d Softplus "
    "Softshrink Softsign Tanh Tanhshrink"
)

OF_EACH_RANK: Final[dict[str, tuple[Any, ...]]] = {
    "AdaptiveAvgPool": (2,), "AdaptiveMaxPool": (2,), "AvgPool": (2,), "BatchNorm": (4,), "CircularPad": (1,),
    "ConstantPad": (1, 0.5), "Conv": (4, 6, 3), "ConvTranspose": (4, 6, 3), "InstanceNorm": (4,), "LPPool": (2, 2),
    "LazyBatchNorm": (), "LazyConv": (6, 3), "LazyConvTranspose": (6, 3), "LazyInstanceNorm": (), "MaxPool": (2,),
    "ReflectionPad": (1,), "ReplicationPad": (1,), "ZeroPad": (1,),
}  # fmt: skip
"""The first part of a layer's name → its arguments; the name ends on 1d, 2d or 3d."""

LOSSES: Final[dict[str, Example]] = {
    "BCELoss": Example(shares),
    "BCEWithLogitsLoss": Example(shares),
    "CTCLoss": Example(
        lambda: (
            torch.randn(6, 2, 5).log_softmax(2),
            torch.tensor([[1, 2], [3, 4]]),
            torch.tensor([6, 6]),
            torch.tensor([2, 2]),
        )
    ),
    "CosineEmbeddingLoss": Example(signs(ROW, ROW, of=(3,))),
    "CosineSimilarity": Example((ROW, ROW)),
    "CrossEntropyLoss": Example(classes),
    "GaussianNLLLoss": Example(lambda: (torch.randn(ROW), torch.randn(ROW), torch.rand(ROW))),
    "HingeEmbeddingLoss": Example(signs(ROW, of=ROW)),
    "HuberLoss": Example((ROW, ROW)),
    "KLDivLoss": Example(shares, options={"reduction": "batchmean"}),
    "L1Loss": Example((ROW, ROW)),
    "LinearCrossEntropyLoss": Example(classes, (5, 6)),
    "MSELoss": Example((ROW, ROW)),
    "MarginRankingLoss": Example(signs((3,), (3,), of=(3,))),
    "MultiLabelMarginLoss": Example(lambda: (torch.randn(ROW), torch.tensor([[3, 0, -1, 1, 2]] * 3))),
    "MultiLabelSoftMarginLoss": Example(lambda: (torch.randn(ROW), torch.randint(0, 2, ROW) * 1.0)),
    "MultiMarginLoss": Example(classes),
    "NLLLoss": Example(classes),
    "NLLLoss2d": Example(lambda: (torch.randn(2, 4, 3, 3), torch.randint(0, 4, (2, 3, 3)))),
    "PairwiseDistance": Example((ROW, ROW)),
    "PoissonNLLLoss": Example((ROW, ROW)),
    "SmoothL1Loss": Example((ROW, ROW)),
    "SoftMarginLoss": Example(signs(ROW, of=ROW)),
    "TripletMarginLoss": Example((ROW, ROW, ROW)),
    "TripletMarginWithDistanceLoss": Example((ROW, ROW, ROW)),
}

EXAMPLES: Final[dict[str, Example]] = {
    **{name: Example((PLANE,)) for name in ELEMENTWISE.split()},
    **{f"{name}{rank}d": Example((shape,), args) for name, args in OF_EACH_RANK.items() for rank, shape in BY_RANK},
    **{f"MaxUnpool{rank}d": Example(pooled(rank, shape), (2,)) for rank, shape in BY_RANK},
    **LOSSES,
    "AdaptiveLogSoftmaxWithLoss": Example(lambda: (torch.randn(3, 8), torch.tensor([1, 0, 7])), (8, 9, [3, 6])),
    "Bilinear": Example(((3, 4), (3, 5)), (4, 5, 2)),
    "ChannelShuffle": Example((PLANE,), (2,)),
    "CrossMapLRN2d": Example((PLANE,), (2,)),
    "Dropout1d": Example((LINE,)),
    "Dropout3d": Example((SPACE,)),
    "Embedding": Example(ids, (5, 3)),
    "EmbeddingBag": Example(ids, (5, 3)),
    "Fold": Example(((2, 12, 9),), ((4, 4), 2)),
    "FractionalMaxPool2d": Example((PLANE,), (2,), {"output_size": 3}),
    "FractionalMaxPool3d": Example((SPACE,), (2,), {"output_size": 3}),
    "GRU": Example(((3, 2, 8),), (8, 5)),
    "GRUCell": Example(((2, 8),), (8, 5)),
    "GroupNorm": Example((PLANE,), (2, 4)),
    "LSTM": Example(((3, 2, 8),), (8, 5)),
    "LSTMCell": Example(((2, 8),), (8, 5)),
    "LayerNorm": Example((LINE,), (8,)),
    "LazyLinear": Example((LINE,), (5,)),
    "Linear": Example((LINE,), (8, 5)),
    "LocalResponseNorm": Example((PLANE,), (2,)),
    "LogSoftmax": Example((LINE,), (1,)),
    "MultiheadAttention": Example(((3, 2, 8), (3, 2, 8), (3, 2, 8)), (8, 2)),
    "PixelShuffle": Example((PLANE,), (2,)),
    "PixelUnshuffle": Example((PLANE,), (2,)),
    "RMSNorm": Example((LINE,), (8,)),
    "RNN": Example(((3, 2, 8),), (8, 5)),
    "RNNCell": Example(((2, 8),), (8, 5)),
    "Softmax": Example((LINE,), (1,)),
    "Softmin": Example((LINE,), (1,)),
    "SyncBatchNorm": Example((PLANE,), (4,)),
    "Threshold": Example((LINE,), (0.1, 3.0)),
    "Transformer": Example(((3, 2, 8), (4, 2, 8)), (8, 2, 1, 1, 16)),
    "TransformerDecoder": Example(((3, 2, 8), (4, 2, 8)), (nn.TransformerDecoderLayer(8, 2, 16), 2)),
    "TransformerDecoderLayer": Example(((3, 2, 8), (4, 2, 8)), (8, 2, 16)),
    "TransformerEncoder": Example(((3, 2, 8),), (nn.TransformerEncoderLayer(8, 2, 16), 2)),
    "TransformerEncoderLayer": Example(((3, 2, 8),), (8, 2, 16)),
    "Unflatten": Example((LINE,), (1, (2, 2))),
    "Unfold": Example((PLANE,), (2,)),
    "Upsample": Example((PLANE,), (None, 2)),
    "UpsamplingBilinear2d": Example((PLANE,), (None, 2)),
    "UpsamplingNearest2d": Example((PLANE,), (None, 2)),
}

NO_LAYERS: Final = (
    "Container DataParallel Module ModuleDict ModuleList ParameterDict ParameterList RNNBase RNNCellBase Sequential"
)
"""Containers and bases, which compute nothing of their own."""
