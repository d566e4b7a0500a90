"""The operator `com.acme::SwishBeta`, which no runtime knows; `configs/custom_ops.yaml` declares it by this file."""

from __future__ import annotations

import numpy as np

from onnxline import ArrayType, CustomOp


def infer(x: ArrayType, *, beta: float) -> ArrayType:
    """The output has the dtype and the shape of the input."""
    del beta
    return x


def compute(x: np.ndarray, *, beta: float) -> np.ndarray:
    """x · sigmoid(beta · x), in the dtype of `x`."""
    return (x / (1 + np.exp(-beta * x.astype(np.float64)))).astype(x.dtype)


SWISH = CustomOp(
    "com.acme", "SwishBeta", infer=infer, compute=compute, attributes={"beta": 1.0}, torch_op="acme::swish_beta"
)
