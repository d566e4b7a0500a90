"""The kernels that torch has for attention, called by name.

`torch.nn.functional.scaled_dot_product_attention` chooses among them at each call, by settings of the process that
other threads may change. A plan holds the choice, so its calls name the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch

AttentionCall: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool, float], torch.Tensor
]
"""(query, key, value, mask, causal, scale) → result, all (batch, heads, tokens, width); the mask is added to scores."""


def attention_call(backend: str, device: str) -> AttentionCall:
    """The kernel of a backend of `pipeline.ops.fused.ATTENTION_BACKENDS` on a device of this type, such as "cuda"."""
    return CALLS_OF_CPU.get(backend, CALLS[backend]) if device == "cpu" else CALLS[backend]


def find_backend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> str:
    """The backend that torch chooses for such operands; "auto" where its kernel needs them padded, which torch does."""
    chosen = torch._fused_sdp_choice(query, key, value, mask, 0.0, causal, scale=scale)  # pyright: ignore[reportAttributeAccessIssue]
    backend = BACKENDS.get(int(chosen), "auto")
    on_card = query.device.type != "cpu"
    is_padded = on_card and backend == "flash" and any(tensor.shape[-1] % 8 for tensor in (query, value))
    is_padded |= on_card and backend in ("efficient", "cudnn") and mask is not None and mask.shape[-1] % 16 != 0
    return "auto" if is_padded else backend


def _auto(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale)


def _math(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, mask, 0.0, causal, scale=scale)[0]


def _flash(query: Any, key: Any, value: Any, _: Any, causal: bool, scale: float) -> torch.Tensor:
    """It takes no mask, so torch does not choose it for one."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)[0]


def _flash_of_cpu(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float) -> torch.Tensor:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)[0]


def _efficient(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float) -> torch.Tensor:
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, mask, False, 0.0, causal, scale=scale)[0]


def _cudnn(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float) -> torch.Tensor:
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    return kernel(query, key, value, mask, False, 0.0, causal, False, scale=scale)[0]


CALLS: Final[Mapping[str, AttentionCall]] = {
    "auto": _auto,
    "math": _math,
    "flash": _flash,
    "efficient": _efficient,
    "cudnn": _cudnn,
}

CALLS_OF_CPU: Final[Mapping[str, AttentionCall]] = {"flash": _flash_of_cpu}

BACKENDS: Final = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""Numbers of `torch.nn.attention.SDPBackend`."""
