"""What a decoder needs otherwise than the libraries have it, in its trace and in its reference.

A row is there only where a trace is impossible or wrong without it. A test fails when a library no longer needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CallPatch:
    """`make(original)` takes the place of the attribute `name` of `module` while the decoder is called."""

    module: str
    name: str
    make: Callable[[Any], Any]
    reason: str


def _with_additive_mask(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            lowest = torch.finfo(query.dtype).min
            shown = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
            attn_mask = shown.masked_fill(attn_mask.logical_not(), lowest)
        return attention(query, key, value, attn_mask, **options)

    return attend


PATCHES: Final = (
    CallPatch(
        "torch.nn.functional",
        "scaled_dot_product_attention",
        _with_additive_mask,
        "torch.onnx 2.13 adds the lowest number where torch adds -inf for a mask of bools, so a token of the padding, "
        "which sees no token, has another value in ONNX",
    ),
)


@contextmanager
def apply_patches() -> Iterator[None]:
    """Apply all patches in this block."""
    with ExitStack() as stack:
        for row in PATCHES:
            module = import_module(row.module)
            stack.enter_context(patch.object(module, row.name, row.make(getattr(module, row.name))))
        yield
