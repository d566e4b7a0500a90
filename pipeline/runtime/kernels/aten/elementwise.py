"""Quick ways of operators that go element by element."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pipeline.runtime.kernels.aten.call import Call, Quick, into
from pipeline.runtime.kernels.base import Launch, Outs

__all__ = ["QUICK"]

nn: Any = vars(torch._C)["_nn"]  # its stubs leave this module out


def relu(call: Call, outs: Outs) -> Launch:
    """What torch's own does; it has no `out=`."""
    return partial(torch.clamp_min, call.args[0], 0, out=outs[0])


def converted(call: Call, outs: Outs) -> Launch:
    """To the dtype of the result, which is that of the graph, and into its order in memory."""
    return partial(outs[0].copy_, call.args[0])


QUICK: dict[str, Quick] = {
    "aten.add.Tensor": into(torch.add),
    "aten.sub.Tensor": into(torch.sub),
    "aten.mul.Tensor": into(torch.mul),
    "aten.div.Tensor": into(torch.div),
    "aten.pow.Tensor_Scalar": into(torch.pow),
    "aten.pow.Tensor_Tensor": into(torch.pow),
    "aten.eq.Tensor": into(torch.eq),
    "aten.eq.Scalar": into(torch.eq),
    "aten.ne.Tensor": into(torch.ne),
    "aten.ne.Scalar": into(torch.ne),
    "aten.lt.Tensor": into(torch.lt),
    "aten.lt.Scalar": into(torch.lt),
    "aten.le.Tensor": into(torch.le),
    "aten.le.Scalar": into(torch.le),
    "aten.gt.Tensor": into(torch.gt),
    "aten.gt.Scalar": into(torch.gt),
    "aten.ge.Tensor": into(torch.ge),
    "aten.ge.Scalar": into(torch.ge),
    "aten.bitwise_and.Tensor": into(torch.bitwise_and),
    "aten.bitwise_or.Tensor": into(torch.bitwise_or),
    "aten.bitwise_not.default": into(torch.bitwise_not),
    "aten.logical_and.default": into(torch.logical_and),
    "aten.logical_or.default": into(torch.logical_or),
    "aten.logical_not.default": into(torch.logical_not),
    "aten.maximum.default": into(torch.maximum),
    "aten.minimum.default": into(torch.minimum),
    "aten.neg.default": into(torch.neg),
    "aten.abs.default": into(torch.abs),
    "aten.exp.default": into(torch.exp),
    "aten.log.default": into(torch.log),
    "aten.sqrt.default": into(torch.sqrt),
    "aten.rsqrt.default": into(torch.rsqrt),
    "aten.reciprocal.default": into(torch.reciprocal),
    "aten.sin.default": into(torch.sin),
    "aten.cos.default": into(torch.cos),
    "aten.erf.default": into(torch.erf),
    "aten.tanh.default": into(torch.tanh),
    "aten.sigmoid.default": into(torch.sigmoid),
    "aten.relu.default": relu,
    "aten.gelu.default": into(nn.gelu),
    "aten.silu.default": into(nn.silu),
    "aten.leaky_relu.default": into(nn.leaky_relu),
    "aten.hardtanh.default": into(nn.hardtanh),
    "aten.hardswish.default": into(nn.hardswish),
    "aten.hardsigmoid.default": into(nn.hardsigmoid),
    "aten.softplus.default": into(nn.softplus),
    "aten.clamp.default": into(torch.clamp),
    "aten.clamp.Tensor": into(torch.clamp),
    "aten.where.self": into(torch.where),
    **dict.fromkeys(
        (
            "aten.to.dtype",
            "aten.to.device",
            "aten.to.dtype_layout",
            "aten.to.other",
            "aten._to_copy.default",
            "aten.clone.default",
            "aten.contiguous.default",
        ),
        converted,
    ),
}
