# pyright: reportArgumentType=false
"""The kernels of ours that are fixed, in Triton, which gives its constants other types than Python would: Adam over all
parameters, and the check of indices. Imported only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def update(
    table,  # int64[tensors, 6]: addresses of parameter, gradient and moments (0 for no largest second one); elements
    blocks,  # int64[blocks, 2]: the tensor of a block, and its first element
    step,  # float32[1]: how many updates there were, this one included
    rate,  # float[1]
    skip,  # float32[1]: 1 where nothing is updated
    beta1: tl.constexpr,
    beta2: tl.constexpr,
    log_beta1: tl.constexpr,
    log_beta2: tl.constexpr,
    epsilon: tl.constexpr,
    decay: tl.constexpr,
    dtype: tl.constexpr,
    decoupled: tl.constexpr,
    maximize: tl.constexpr,
    has_largest: tl.constexpr,
    length: tl.constexpr,
):
    block = tl.program_id(0)
    row = table + tl.load(blocks + 2 * block) * 6
    places = tl.load(blocks + 2 * block + 1) + tl.arange(0, length)
    inside = places < tl.where(tl.load(skip) == 0.0, tl.load(row + 5), 0)
    parameter = tl.load(row).to(tl.pointer_type(dtype)) + places
    gradient = tl.load(row + 1).to(tl.pointer_type(dtype)) + places
    first = tl.load(row + 2).to(tl.pointer_type(dtype)) + places
    second = tl.load(row + 3).to(tl.pointer_type(dtype)) + places

    # 1 - beta ** step is close to 0 at first, so it is computed in float64.
    updates, wide_rate = tl.load(step).to(tl.float64), tl.load(rate).to(tl.float64)
    of_first = 1.0 - tl.exp(updates * log_beta1)
    of_second = 1.0 - tl.exp(updates * log_beta2)
    size, root = (wide_rate / of_first).to(tl.float32), tl.sqrt(of_second).to(tl.float32)

    p = tl.load(parameter, inside, 0.0).to(tl.float32)
    g = tl.load(gradient, inside, 0.0).to(tl.float32)
    if maximize:
        g = -g
    if decoupled:
        p -= wide_rate.to(tl.float32) * decay * p
    else:
        g += decay * p
    m = tl.load(first, inside, 0.0).to(tl.float32)
    m += (1.0 - beta1) * (g - m)
    v = tl.load(second, inside, 0.0).to(tl.float32)
    v = beta2 * v + (1.0 - beta2) * g * g
    tl.store(first, m.to(dtype), inside)
    tl.store(second, v.to(dtype), inside)
    if has_largest:
        largest = tl.load(row + 4).to(tl.pointer_type(dtype)) + places
        v = tl.maximum(tl.load(largest, inside, 0.0).to(tl.float32), v)
        tl.store(largest, v.to(dtype), inside)
    p -= size * m / (tl.sqrt(v) / root + epsilon)
    tl.store(parameter, p.to(dtype), inside)


@triton.jit
def clamp(
    index,  # int[count]
    safe,  # int[count]: the same indices within low and high, or equal to `ignored`
    flag,  # uint8[1]: 1 afterwards if an index was wrong, else as before
    low,
    high,
    ignored,
    count,
    has_ignored: tl.constexpr,
    length: tl.constexpr,
):
    places = tl.program_id(0) * length + tl.arange(0, length)
    inside = places < count
    given = tl.load(index + places, inside, 0)
    found = tl.minimum(tl.maximum(given, low), high)
    if has_ignored:
        found = tl.where(given == ignored, given, found)
    tl.store(safe + places, found, inside)
    tl.store(flag + places * 0, tl.full([length], 1, tl.uint8), inside & (found != given))
