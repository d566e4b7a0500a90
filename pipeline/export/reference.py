"""Runs the torch module: the reference that later stages are compared with, and the inputs that index its tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.errors import OnnxlineError, SourceError
from pipeline.export.call_watch import capture_output, with_state
from pipeline.export.source import TorchSource
from pipeline.export.tree import input_tensors, output_tensors, refill
from pipeline.export.user_code import first_line, where_raised
from pipeline.runtime.tensors import to_numpy, to_torch

SEED = 0
"""Seed of each run, so that a module draws the same values in each run; the user's generator is left alone."""


def switch_to_eval(module: nn.Module) -> None:
    """Put a module into eval mode, in place. What torch.export made refuses the call, and stays as it was traced."""
    try:
        module.eval()
    except NotImplementedError:
        for part in module.modules():
            part.training = False


def run_torch(source: TorchSource, feeds: Mapping[str, np.ndarray | torch.Tensor]) -> dict[str, np.ndarray]:
    """Run the module in eval mode, without gradients.

    Args:
        feeds: one array for every name in `source.inputs`; they are copied, so the module may write into them.

    Returns:
        One array for every name in `source.outputs`, in that order; bfloat16 as ml_dtypes' dtype.

    Raises:
        SourceError: a feed is missing, or the module raises.
    """
    empty = next((name for name, parameter in source.module.named_parameters() if parameter.is_meta), None)
    if empty is not None:
        raise SourceError(
            f"the module has no value for {empty!r}, which is on the meta device; load its weights in the factory, or "
            "prove by structure (export.weights: referenced, verify.proof: structure)"
        )
    own = list(input_tensors(source.module, source.example))  # the module's names; the source may have others
    tensors = {}
    own += [value.before for value in source.lifted if value.is_buffer]
    for name, spec in zip(own, source.inputs, strict=True):
        if spec.name not in feeds:
            raise SourceError(f"no value for the input {spec.name!r}; found {', '.join(feeds) or 'none'}")
        value = feeds[spec.name]
        tensors[name] = value if isinstance(value, torch.Tensor) else to_torch(value)
    example = refill(source.module, source.example, tensors)
    switch_to_eval(source.module)
    try:
        with capture_output(), torch.random.fork_rng(devices=[]), with_state(source, tensors), torch.no_grad():
            torch.manual_seed(SEED)
            outputs = output_tensors(source.module(*example.args, **example.kwargs))
            written = {**input_tensors(source.module, example), **dict(source.module.named_buffers())}
            arrays = [to_numpy(tensor) for tensor in outputs.values()]
            arrays += [to_numpy(written[value.target]) for value in source.lifted]
    except OnnxlineError:
        raise
    except (Exception, SystemExit) as error:  # the user's forward may raise anything
        place = where_raised(error, source.module)
        shapes = ", ".join(f"{name}{list(tensor.shape)}" for name, tensor in tensors.items())
        raise SourceError(f"the model raises{place} on {shapes}: {first_line(error)}") from error
    return dict(zip(source.outputs, arrays, strict=True))


def indexed_rows(source: TorchSource, feeds: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Integer inputs that are indices → the number of rows of the smallest table that they index.

    Raises:
        SourceError: the module raises.
    """
    whole = {name: to_torch(array) for name, array in feeds.items() if array.dtype.kind in "iu"}
    if not whole or any(tensor.is_meta for tensor in source.module.parameters()):
        return {}
    with _Lookups(whole) as lookups:
        run_torch(source, {**feeds, **whole})
    return lookups.rows


class _Lookups(TorchDispatchMode):
    """Follows the inputs through ops that move or cast elements, up to ops that look up rows."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.rows: dict[str, int] = {}
        self._names = {name: {_place(tensor)} for name, tensor in inputs.items()}
        self._alive: list[torch.Tensor] = []
        """Tensors that are followed, kept alive: `data_ptr` identifies a tensor only while it lives."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        lookup = LOOKUPS.get(str(func))
        if lookup is not None:
            indices, axis = lookup
            self._note(args[0], args[indices], 0 if axis is None else args[axis])
        elif str(func).partition(".default")[0] in MOVING and args and isinstance(result, torch.Tensor):
            self._follow(args[1] if str(func) == COPY else args[0], result)
        return result

    def _follow(self, source: Any, result: torch.Tensor) -> None:
        for tensor in pytree.tree_leaves(source):
            for places in self._names.values():
                if isinstance(tensor, torch.Tensor) and _place(tensor) in places:
                    places.add(_place(result))
                    self._alive.append(result)

    def _note(self, table: Any, indices: Any, axis: Any) -> None:
        for position, tensor in enumerate(indices if isinstance(indices, list | tuple) else [indices]):
            if not isinstance(tensor, torch.Tensor) or not isinstance(table, torch.Tensor):
                continue
            rows = table.shape[position if isinstance(indices, list | tuple) else int(axis)]
            for name, places in self._names.items():
                if _place(tensor) in places:
                    self.rows[name] = min(rows, self.rows.get(name, rows))


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


LOOKUPS: Final[Mapping[str, tuple[int, int | None]]] = {
    "aten.embedding.default": (1, None),
    "aten.index.Tensor": (1, None),
    "aten.index_select.default": (2, 1),
    "aten.gather.default": (2, 1),
}
"""Operator, whose first argument is the table → the places of its indices, and of its axis."""

COPY: Final = "aten.copy_.default"
"""It moves its second argument: a count that comes into a buffer."""

MOVING: Final = frozenset(
    {
        *("aten.copy_", "aten._to_copy", "aten.clone", "aten.cat", "aten.select.int", "aten.slice.Tensor"),
        *("aten.expand", "aten.repeat", "aten.unsqueeze", "aten.view", "aten._unsafe_view"),
    }
)
