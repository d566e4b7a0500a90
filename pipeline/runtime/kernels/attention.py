"""The kernels that torch has for attention, called by name.

`torch.nn.functional.scaled_dot_product_attention` chooses among them at each call, by settings of the process that
other threads may change. A plan holds the choice, so its calls name the kernel. It is made before operands have
strides, and no kernel but `math` reads a last axis with gaps: such an operand is copied at each call.

On a device each op names the kernel that torch chooses for its sizes, so the plan says which one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch

from pipeline.errors import Unsupported
from pipeline.ir.graph import Graph
from pipeline.lowering.fusion.attention import put_fused
from pipeline.lowering.fusion.op_patterns import FLOATS, Attention, match_attention
from pipeline.lowering.fusion.rewrite import Rewrite
from pipeline.runtime.devices import Device
from pipeline.runtime.operators import flash_attention
from pipeline.runtime.tensors import torch_dtype

AttentionCall: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool, float], torch.Tensor
]
"""(query, key, value, mask, causal, scale) → result, all (batch, heads, tokens, width); the mask is added to scores."""

AttentionOperands: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Query, key, value and mask."""


def attention_call(backend: str, device: str, *, mask: bool) -> AttentionCall:
    """The kernel of a backend of `pipeline.ops.fused.ATTENTION_BACKENDS` on a device of this type, such as "cuda".

    Args:
        backend: its name in the attributes of the op.
        device: the type of the device that the operands lie on.
        mask: whether there is a mask.

    Raises:
        Unsupported: the device has no such kernel, or the kernel takes no mask.
    """
    calls = CALLS_OF_CPU if device == "cpu" else CALLS
    if backend not in calls:
        raise Unsupported(
            f"attention with backend={backend!r}: {device} has no such kernel; expected one of {', '.join(calls)}"
        )
    if mask and calls[backend] is _flash:
        raise Unsupported(
            f"attention with backend={backend!r}: its kernel of {device} takes no mask; expected 'auto' or another one"
        )
    return calls[backend]


def find_backend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> str:
    """The backend that torch chooses for such operands; "auto" where its kernel needs them padded, which torch does.

    Args:
        query: floats (batch, heads, queries, width), whose elements are not read; so are the others.
        key: (batch, heads, keys, width).
        value: (batch, heads, keys, width of the result).
        mask: (batch, heads, queries, keys), which is added to the scores.
        causal: whether a query sees only keys up to its own position.
        scale: the factor of the scores.
    """
    if not query.numel():
        return "math"  # torch chooses a kernel of the CPU for no heads that divides by their number, which ends Python
    chosen = torch.ops.aten._fused_sdp_choice(query, key, value, mask, 0.0, causal, scale=scale)
    backend = BACKENDS.get(int(chosen), "auto")
    on_card = query.device.type != "cpu"
    is_padded = on_card and backend == "flash" and any(tensor.shape[-1] % 8 for tensor in (query, value))
    is_padded |= (
        on_card and backend in ("efficient", "cudnn") and mask is not None and mask.shape[-1] % MASK_ALIGNMENT != 0
    )
    return "auto" if is_padded else backend


def _auto(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale)


def _math(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, mask, 0.0, causal, scale=scale)[0]


def _flash(query: Any, key: Any, value: Any, _: Any, causal: bool, scale: float) -> torch.Tensor:
    """It takes no mask, so torch does not choose it for one."""
    operands = map(in_rows, (query, key, value))
    return torch.ops.aten._scaled_dot_product_flash_attention(*operands, 0.0, causal, False, scale=scale)[0]


def _flash_of_cpu(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float) -> torch.Tensor:
    return flash_attention(*map(in_rows, (query, key, value)), 0.0, causal, attn_mask=mask, scale=scale)[0]


def _efficient(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float) -> torch.Tensor:
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(*map(in_rows, (query, key, value)), in_aligned_rows(mask), False, 0.0, causal, scale=scale)[0]


def _cudnn(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float) -> torch.Tensor:
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    return kernel(*map(in_rows, (query, key, value)), in_aligned_rows(mask), False, 0.0, causal, False, scale=scale)[0]


def in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy of it, whose last axis has no gaps."""
    return tensor if tensor.stride(-1) == 1 else tensor.clone(memory_format=torch.contiguous_format)


def in_aligned_rows(mask: torch.Tensor | None) -> torch.Tensor | None:
    """`mask`, or a copy of it, each row of which begins at a multiple of `MASK_ALIGNMENT` elements.

    The copy repeats nothing that `mask` only shows several times.
    """
    if mask is None or (mask.stride(-1) == 1 and not any(stride % MASK_ALIGNMENT for stride in mask.stride()[:-1])):
        return mask
    once = [slice(1) if stride == 0 else slice(None) for stride in mask.stride()[:-1]]
    return mask[tuple(once)].clone(memory_format=torch.contiguous_format).expand_as(mask)


CALLS: Final[Mapping[str, AttentionCall]] = {
    "auto": _auto,
    "math": _math,
    "flash": _flash,
    "efficient": _efficient,
    "cudnn": _cudnn,
}

CALLS_OF_CPU: Final[Mapping[str, AttentionCall]] = {"auto": _auto, "math": _math, "flash": _flash_of_cpu}

MASK_ALIGNMENT: Final = 16
"""Elements of a mask that the kernels of a GPU load at once."""

BACKENDS: Final = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""Numbers of `torch.nn.attention.SDPBackend`."""


def write_attention_backends(graph: Graph, device: Device) -> Graph:
    """`graph` with a backend in each attention whose sizes are known.

    torch's own operator becomes the kind that holds a backend. It stays where it has dropout, heads that share keys, or
    a mask of truth values: then torch chooses at each call.

    Args:
        graph: a graph whose values are on the CPU, before its operands have strides.
        device: where torch is asked for its choice.
    """
    rewrite = Rewrite(graph)
    for op in graph.ops:
        if op.kind == "ScaledDotProductAttention" and op.attrs["backend"] == "auto":
            causal, scale = bool(op.attrs["causal"]), float(op.attrs["scale"])  # type: ignore[arg-type]
            backend = _find_backend(graph, device, op.inputs, causal=causal, scale=scale)
            rewrite.replace(op, op.kind, op.inputs, op.outputs, {**op.attrs, "backend": backend})
        found = match_attention(op)
        operands = [] if found is None else _find_operands(graph, found)
        if found is not None and operands:
            scale = found.scale_of(graph)
            backend = _find_backend(graph, device, operands, causal=found.causal, scale=scale)
            put_fused(rewrite, op, operands, scale, causal=found.causal, backend=backend)
    return rewrite.build()


def _find_operands(graph: Graph, found: Attention) -> list[int]:
    """The operands of a call of torch's attention; empty where the kind with a backend does not take them."""
    operands = [found.query, found.key, found.value, *([] if found.mask is None else [found.mask])]
    specs = [graph.values[vid].spec for vid in operands]
    query, key, value = specs[:3]
    fits = all(
        spec.is_static and spec.rank == 4 and spec.dtype == query.dtype and spec.dtype in FLOATS for spec in specs
    )
    return operands if fits and query.shape[:2] == key.shape[:2] == value.shape[:2] else []


def _find_backend(graph: Graph, device: Device, operands: Sequence[int], *, causal: bool, scale: float) -> str:
    """What torch chooses for memory of these sizes; its elements are not read."""
    tensors = [
        torch.empty(value.spec.sizes, dtype=torch_dtype(value.spec.dtype), device=device.place)
        for value in (graph.values[vid] for vid in operands)
    ]
    query, key, value, *masks = tensors
    mask = masks[0].expand(*query.shape[:3], key.shape[2]) if masks else None
    return find_backend(query, key, value, mask, causal, scale)
