"""torch functions that IR tensors handle themselves, and not by the operators that torch would call.

Some check their operands first, to say in a sentence what a layer expects; some depend on the mode (training or not).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch.nn import functional as torch_functional

from pipeline.authoring.tensors import (
    FLOATS,
    EmittingBuilder,
    IRTensor,
    Tensor,
    is_finite_number,
    name_of,
    spec_of,
    text_of,
)
from pipeline.ir import Attr, TensorSpec


def emit_elementwise(compute: Callable[..., Any], builder: EmittingBuilder, *operands: Any, **named: Any) -> Any:
    """Two tensors of one dtype, or a tensor and a number of its dtype: the graph converts no operand unasked."""
    dtypes = {spec_of(operand).dtype for operand in operands if isinstance(operand, IRTensor | torch.Tensor)}
    if len(dtypes) > 1:
        found = " and ".join(spec_of(operand).dtype for operand in operands)
        raise builder.refusal(f"{name_of(compute)} found {found}, expected one dtype: cast() one of them")
    for operand in operands:
        if isinstance(operand, IRTensor | torch.Tensor):
            continue
        if not is_finite_number(operand):
            raise builder.refusal(f"found {operand!r}, expected an IR tensor, a parameter or a finite number")
        if isinstance(operand, float) and dtypes.isdisjoint(FLOATS):
            raise builder.refusal(
                f"found the number {operand} with {dtypes.pop()}, expected a whole one: cast() the tensor"
            )
    return builder.record(compute, operands, named)


def emit_linear(builder: EmittingBuilder, x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Any:
    return emit_product(torch_functional.linear, builder, (x, weight, *rest), named, -1, f"[..., {weight.shape[1]}]")


def emit_conv2d(builder: EmittingBuilder, x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Any:
    groups = named.get("groups", rest[4] if len(rest) > 4 else 1)
    channels = weight.shape[1] * groups
    if len(x.shape) != 4:
        raise builder.refusal(f"found {text_of(x)}, expected [batch, {channels}, height, width]")
    expected = f"[batch, {channels}, height, width]"
    return emit_product(torch.conv2d, builder, (x, weight, *rest), named, 1, expected, groups)


def emit_product(
    compute: Callable[..., Any],
    builder: EmittingBuilder,
    operands: Sequence[Any],
    named: Mapping[str, Any],
    axis: int,
    expected: str,
    groups: int = 1,
) -> Any:
    """A product of x, along an axis, with a weight [out, in, ...], of one dtype."""
    x, weight = (spec_of(operand) for operand in operands[:2])
    if not x.rank or x.shape[axis] != int(weight.sizes[1]) * groups:
        raise builder.refusal(f"found {text_of(operands[0])}, expected {expected}")
    if x.dtype != weight.dtype:
        raise builder.refusal(f"found {text_of(operands[0])}, expected the dtype {weight.dtype}")
    return builder.record(compute, operands, named)


def emit_embedding(builder: EmittingBuilder, ids: Tensor, *rest: Any, **named: Any) -> Any:
    if spec_of(ids).dtype not in ("int64", "int32"):
        raise builder.refusal(f"found {text_of(ids)}, expected the dtype int64 or int32")
    return builder.record(torch_functional.embedding, (ids, *rest), named)


def emit_cross_entropy(builder: EmittingBuilder, output: Tensor, target: Tensor, *rest: Any, **named: Any) -> Any:
    if len(output.shape) < 2:
        raise builder.refusal(f"cross_entropy found logits {text_of(output)}, expected [batch, classes, ...]")
    sizes = (output.shape[0], *output.shape[2:])
    if spec_of(target).dtype not in FLOATS and tuple(target.shape) != sizes:
        raise builder.refusal(
            f"found {text_of(target)}, expected {list(sizes)} as classes of the logits {list(output.shape)}"
        )
    target = target.long() if spec_of(target).dtype == "int32" else target
    return builder.record(torch_functional.cross_entropy, (output, target, *rest), named)


def emit_mse_loss(builder: EmittingBuilder, output: Tensor, target: Tensor, *rest: Any, **named: Any) -> Any:
    if spec_of(target) != spec_of(output):
        raise builder.refusal(f"found {text_of(target)}, expected {text_of(output)} as the output")
    if rest or named.get("weight") is not None or named.get("reduction", "mean") != "mean":
        return builder.record(torch_functional.mse_loss, (output, target, *rest), named)
    difference = output - target
    return (difference * difference).mean(tuple(range(len(output.shape))))


def emit_batch_norm(
    builder: EmittingBuilder,
    x: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    operands = (x, running_mean, running_var, weight, bias)
    if not (training and builder.training) or running_mean is None:
        return builder.record(
            torch_functional.batch_norm, (*operands, training and builder.training, momentum, eps), {}
        )
    if spec_of(x).numel == x.shape[1]:
        raise builder.refusal(f"found {text_of(x)} in training, expected more than one number for each channel")
    # Copies, since torch refuses to differentiate through statistics that are written to before the backward pass.
    before = [running.clone() for running in (running_mean, running_var)]
    call = torch.ops.aten._native_batch_norm_legit_functional.default
    result, _, _, *after = builder.record(call, (x, weight, bias, *before, True, momentum, eps), {})
    for running, value in zip((running_mean, running_var), after, strict=True):
        running.copy_(value)
    return result


def emit_item(builder: EmittingBuilder, x: IRTensor, index: Any) -> Any:
    """Elements of x; a list in the index is a constant, which torch would lose on the device meta."""
    parts = index if isinstance(index, tuple) else (index,)
    own = tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts)
    return builder.record(torch.Tensor.__getitem__, (x, own), {})


def emit_conversion(builder: EmittingBuilder, x: IRTensor, *args: Any, **named: Any) -> Any:
    """x in another dtype; a device has to be that of x."""
    for place in (*args, named.get("device")):
        check_device(builder, x, place)
    rest = [item for item in args if not isinstance(item, str | torch.device)]
    own = {name: item for name, item in named.items() if name != "device"}
    return builder.record(torch.Tensor.to, (x, *rest), own) if rest or own else x


def new_tensor(
    builder: EmittingBuilder, x: IRTensor, data: Any, *, dtype: torch.dtype | None = None, device: Any = None
) -> torch.Tensor:
    """A constant of the dtype of x."""
    check_device(builder, x, device)
    return torch.tensor(data, dtype=dtype or x.dtype)


def refuse_values(name: str, builder: EmittingBuilder, x: IRTensor, *_: object, **__: object) -> NoReturn:
    """
    Raises:
        UsageError: always; torch's own words for a tensor on the device meta advise the user to copy it.
    """
    raise builder.refusal(
        f"{name} found {text_of(x)}: it asks for values of tensors, and a graph has none while it is built; expected "
        "operators of torch"
    )


def check_device(builder: EmittingBuilder, x: IRTensor, place: object) -> None:
    """
    Raises:
        UsageError: `place` is another device than that of x.
    """
    if isinstance(place, str | torch.device) and torch.device(place).type != x.device.type:
        raise builder.refusal(f"found the device {place}, expected {x.device}, on which the graph is")


def emit_recurrent(compute: Callable[..., Any], builder: EmittingBuilder, *args: Any, **named: Any) -> Any:
    """A recurrent layer of torch: (input, states, weights, whether it has biases, layers, dropout, training, …)."""
    layers, dropout, training = args[4:7]
    if training and dropout and layers > 1:
        raise builder.refusal(
            f"found {layers} layers with dropout={dropout} in training, which torch leaves out of a recording; "
            "expected dropout=0, or modules of one layer with Dropout between them"
        )
    return builder.record(compute, args, named)


def emit_dropout(
    builder: EmittingBuilder, x: IRTensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if not 0 <= p < 1:
        raise builder.refusal(f"dropout found p={p!r}, expected 0 ≤ p < 1")
    if not (training and builder.training) or not p:
        return x
    if x.spec.dtype not in FLOATS:
        raise builder.refusal(f"found {text_of(x)}, expected the dtype {' or '.join(FLOATS)}")
    attrs: dict[str, Attr] = {"ratio": float(p), "seed": 0}
    outputs = {"dropout": x.spec, "kept": TensorSpec(x.spec.shape, "bool")}
    return builder.emit_several("onnxline.dropout.default", [x], outputs, attrs)[0]


FORMS: Final[Mapping[Any, Callable[..., Any]]] = {
    **{
        compute: partial(emit_elementwise, compute)
        for name in ("add", "sub", "mul", "div", "true_divide", "__radd__", "__rsub__", "__rmul__", "__rtruediv__")
        for compute in (getattr(torch.Tensor, name), getattr(torch, name, None))
        if compute is not None
    },
    **{
        getattr(torch.Tensor, f"__{name}__"): partial(emit_elementwise, getattr(torch.Tensor, f"__{name}__"))
        for name in ("add", "sub", "mul", "truediv")
    },
    **{
        compute: partial(emit_recurrent, compute) for compute in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
    },
    torch.Tensor.__getitem__: emit_item,
    torch.Tensor.to: emit_conversion,
    torch.Tensor.cpu: lambda builder, x, **named: emit_conversion(builder, x, "cpu", **named),
    **{getattr(torch.Tensor, name): partial(refuse_values, name) for name in ("tolist", "numpy")},
    torch.Tensor.new_tensor: new_tensor,
    torch_functional.linear: emit_linear,
    torch.conv2d: emit_conv2d,
    torch_functional.embedding: emit_embedding,
    torch_functional.cross_entropy: emit_cross_entropy,
    torch_functional.mse_loss: emit_mse_loss,
    torch_functional.batch_norm: emit_batch_norm,
    torch_functional.dropout: emit_dropout,
}
"""torch's function → its form on IR tensors: (builder, and the operands of the call) → the result."""
