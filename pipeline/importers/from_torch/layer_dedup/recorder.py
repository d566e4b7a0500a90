"""Record the calls that a layer makes of torch, so that two layers can be compared: equal layers make equal calls.

A recorded call has the function, its arguments without tensors, and the origin of each tensor. Calls are seen twice: as
the model makes them (`torch.nn.functional.linear`), where autocast and views are still visible, and as torch dispatches
them (`aten.addmm`), where decompositions have been chosen. Both are recorded, and each becomes an event. Models are on
the device meta here, without data; the results of operators there are cached, since equal layers make the same calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pipeline.importers.from_torch.layer_dedup.layer_runs import NotRepeatable
from pipeline.importers.from_torch.tensors import TensorPayload

TensorFacts: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""A tensor without its data: sizes, strides, dtype, device."""


class MetaResults:
    """Calls operators on the device meta, and caches their results.

    An operator that makes new tensors is called once for equal arguments and equal facts of the tensors among them.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[type, tuple[TensorFacts, ...]]] = {}

    def call(self, operator: Any, form: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """The result of a call, from the cache if possible.

        Args:
            operator: an overload of a torch operator.
            form: the arguments as in `Event.form`.
            tensors: the tensors among the arguments, in order.
            args: the positional arguments of the call.
            kwargs: the keyword arguments of the call.
        """
        if not makes_new_tensors(operator):
            return operator(*args, **kwargs)
        key = operator, form, *map(facts_of, tensors)
        known = self._known.get(key)
        if known is None:
            result = operator(*args, **kwargs)
            parts = result if isinstance(result, list | tuple) else (result,)
            if all(isinstance(part, torch.Tensor) and part.is_meta for part in parts):
                self._known[key] = type(result), tuple(map(facts_of, parts))
            return result
        kind, facts = known
        made = [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype, device in facts]
        return kind(made) if kind in (list, tuple) else made[0]


def facts_of(tensor: torch.Tensor) -> TensorFacts:
    """All that is known of `tensor` without its data."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@cache
def makes_new_tensors(operator: Any) -> bool:
    """Whether the results of `operator` are new tensors, not views of arguments, and no argument is written to."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and not schema.is_mutable and all(result.alias_info is None for result in schema.returns)


Ref: TypeAlias = tuple[Any, ...]
"""Where a tensor comes from.

("stored", name) for a parameter or a buffer, ("given", position or keyword) for an argument of the layer, ("made",
event, index of the result), and, for a constant that no call made, ("found", event that reads it first, index among the
tensors of that event, facts of the constant).
"""


@dataclass(frozen=True, slots=True)
class Event:
    """One recorded call.

    function: the function of torch, or the overload of an operator.
    form: the positional and the keyword arguments as nested tuples, with TENSOR in place of each tensor.
    refs: the origins of these tensors, in order.
    origin: the path of the module whose forward made the call.
    """

    function: Any
    form: tuple[Any, ...]
    refs: tuple[Ref, ...]
    origin: str = ""

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__qualname__", None) or self.function)

    def numbers(self) -> list[str]:
        """The arguments that are Python numbers, in order, as text."""
        return [text for part in self.form for text in _numbers_in(part)]


def _numbers_in(form: Any) -> Iterator[str]:
    if isinstance(form, tuple) and len(form) == 2 and form[0] in NUMBERS:
        yield form[1]
    elif isinstance(form, tuple):
        for part in form:
            yield from _numbers_in(part)


class CallRecorder:
    """A context manager that adds the calls of torch made inside it to `events`.

    Args:
        results: calls the operators and caches their results on meta; None to call torch itself.
    """

    def __init__(self, results: MetaResults | None) -> None:
        self._results = results
        self.events: list[Event] = []
        self.origin = ""
        """The path of the module whose forward runs."""
        self._refs: dict[int, Ref] = {}
        self._alive: list[Any] = []
        """Keeps objects alive, so that no other object gets the same id."""
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(_FunctionMode(self))
        self._stack.enter_context(_OperatorMode(self))

    def __exit__(self, *reason: Any) -> None:
        self._stack.__exit__(*reason)

    def ref_of(self, tensor: torch.Tensor) -> Ref | None:
        """The origin of `tensor`; None if it was not recorded."""
        return self._refs.get(id(tensor))

    def call(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], operator: bool) -> Any:
        """Call `function`, and record it.

        A result of an operator that writes to its arguments counts as made by that operator, though it is an argument.
        Calls of `prim.device` are not recorded: autograd makes them in some runs and not in others, and they change
        nothing.
        """
        if function is torch.ops.prim.device.default:
            return function(*args, **kwargs)
        number = len(self.events)
        tensors: list[torch.Tensor] = []
        form = self._form(args, tensors), self._form(dict(kwargs), tensors)
        refs = [self._ref(tensor, number, index) for index, tensor in enumerate(tensors)]
        self.events.append(Event(function, form, tuple(refs), self.origin))
        if operator and self._results is not None:
            result = self._results.call(function, form, tensors, args, kwargs)
        else:
            result = function(*args, **kwargs)
        writes = operator and function._schema.is_mutable
        parts = result if isinstance(result, list | tuple) else (result,)
        for index, part in enumerate(parts):
            if isinstance(part, torch.Tensor) and (writes or id(part) not in self._refs):
                self.set_origin(part, ("made", number, index))
        return result

    def note(self, function: Any, args: tuple[Any, ...]) -> None:
        """Record a call without making it."""
        self.events.append(Event(function, (self._form(args, []), self._form({}, [])), (), self.origin))

    def set_origin(self, tensor: torch.Tensor, ref: Ref) -> None:
        """Set the origin of `tensor`."""
        self._refs[id(tensor)] = ref
        self._alive.append(tensor)

    def _form(self, item: Any, tensors: list[torch.Tensor]) -> Any:
        """An argument as nested tuples (see `Event.form`); its tensors are appended to `tensors`."""
        kind = type(item)
        if isinstance(item, torch.Tensor):
            tensors.append(item)
            return TENSOR
        if kind in BY_VALUE:
            return item
        if kind in NUMBERS or isinstance(item, np.generic):
            return kind, repr(item)  # 1, 1.0 and True are different arguments, and two nan are equal ones
        if kind in SERIES or isinstance(item, tuple):
            return kind, *(self._form(part, tensors) for part in item)
        if kind is dict:
            return kind, *((key, self._form(part, tensors)) for key, part in item.items())
        if kind is slice:
            return kind, *(self._form(part, tensors) for part in (item.start, item.stop, item.step))
        self._alive.append(item)
        return kind, id(item)  # an object of any other type is equal to itself alone

    def _ref(self, tensor: torch.Tensor, number: int, index: int) -> Ref:
        """The origin of `tensor`, which is the tensor at `index` among those that event `number` reads."""
        ref = self._refs.get(id(tensor))
        if ref is None:
            ref = "found", number, index, _facts_of_constant(tensor)
            self.set_origin(tensor, ref)
        return ref


class _FunctionMode(PreDispatchTorchFunctionMode):
    """Records calls as the model makes them; no other mode of torch sees where autocast begins and ends."""

    def __init__(self, recorder: CallRecorder) -> None:
        super().__init__(tracer=None)  # type: ignore[arg-type]
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in AUTOCAST:  # torch has entered or left autocast already; the call only reports it
            return self._recorder.note(func, args)
        return self._recorder.call(func, args, kwargs or {}, operator=False)


class _OperatorMode(TorchDispatchMode):
    """Records calls of operators as torch dispatches them, and refuses higher-order ones with bodies."""

    supports_higher_order_operators = True

    def __init__(self, recorder: CallRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            raise NotRepeatable(
                f"{self._recorder.origin or 'the model'} calls the higher-order operator {func.name()}, whose bodies "
                "a run without data does not enter"
            )
        return self._recorder.call(func, args, kwargs or {}, operator=True)


def _facts_of_constant(tensor: torch.Tensor) -> tuple[Any, ...]:
    """`facts_of` and a digest of the bytes, if `tensor` has data: two constants are equal if these are."""
    facts = facts_of(tensor)
    held = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if held is None or held.is_meta:
        return facts
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return *facts, hashlib.blake2b(TensorPayload(held).numpy().tobytes()).hexdigest()


class _TensorPlaceholder:
    """Marks the position of a tensor among recorded arguments."""

    def __repr__(self) -> str:
        return "tensor"


TENSOR = _TensorPlaceholder()
AUTOCAST = frozenset({torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast})
NUMBERS = frozenset({bool, int, float, complex})
SERIES = frozenset({list, tuple, torch.Size})
BY_VALUE = frozenset({str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format})
