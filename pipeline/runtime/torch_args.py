"""Convert attributes of a call to torch's arguments: constants by name, tensors and bodies by their references."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pipeline.errors import SourceError
from pipeline.ir import Attr, BodyRef, InputRef, TorchConst
from pipeline.runtime import own_operators as own_operators  # registers the operators of `onnxline`


def argument(item: Attr, tensors: Sequence[torch.Tensor], bodies: Sequence[Any] = ()) -> Any:
    """`item` as an argument of torch; tuples become lists."""
    match item:
        case tuple():
            return [argument(part, tensors, bodies) for part in item]
        case InputRef(index):
            return tensors[index]
        case BodyRef(index):
            return bodies[index]
        case TorchConst(kind, name) if kind in WORDS:
            return WORDS[kind](name)
    return item


def find_operator(kind: str) -> torch._ops.OpOverload:
    """The operator called `aten.add.Tensor`, or `mylib.op.default`.

    Raises:
        SourceError: torch has no operator of this name, as when the library that registers it is not imported.
    """
    try:
        namespace, name, overload = kind.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except (AttributeError, ValueError) as error:
        raise SourceError(
            f"torch has no operator {kind}; import the module that defines it, or give it an executor"
        ) from error


def tensors_in(result: Any) -> Iterator[torch.Tensor]:
    """The tensors among the results of an operator, in order."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for part in result:
            yield from tensors_in(part)


def _device(name: str) -> torch.device:
    """A graph that was traced on meta runs on the CPU."""
    return torch.device("cpu" if name.startswith("meta") else name)


def _constant(name: str) -> Any:
    return getattr(torch, name)


WORDS: Mapping[str, Callable[[str], Any]] = {
    "dtype": _constant,
    "layout": _constant,
    "memory_format": _constant,
    "device": _device,
    "operator": find_operator,
}


def histc(self: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """histc of integers, which torch has on other devices only (Mixtral's experts in `transformers`)."""
    if self.is_floating_point():
        return torch.histc(self, bins, min, max)
    return torch.histc(self.double(), bins, min, max).to(self.dtype)


CPU_FALLBACKS: Mapping[str, Callable[..., torch.Tensor]] = {"aten.histc.default": histc}
"""Functions with the operator's own arguments, by kind, for operators that torch has on meta but not on the CPU: models
choose operators by device, so traces on meta contain them."""
