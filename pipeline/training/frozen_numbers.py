"""Modes that watch a recording: Python values that would freeze, values that Python asks of tensors, and mixed norms.

`CallLog`: a step keeps the Python values of its recording, so `x * random.random()`, a counter or the time would become
a constant of the graph. Forward pass and loss are therefore called twice, and the operators of both calls compared. A
tensor that the first call left somewhere and the second call reads is refused too: no step carries it to the next step.

`KnownValues`: a recording runs on tensors without data. Yet `bool((mask == causal).all())`, as torch's own
TransformerEncoder asks of its mask, follows from a stored mask and constants alone. So values that follow from such
tensors alone are computed during the recording; a question about any other value is refused, with its line.

`MixedNorms`: norms of half precision with weights in float32, as autocast makes them, are computed in float32 and
rounded at the end. torch's fake kernels give the statistics of such a norm the dtype of its input, and the gradient of
the input the dtype of the weights; the CPU's kernels do the opposite, so a recording with fake kernels would not run.
With operands of one dtype both agree, and the values are those of the mixed kernels, which compute in float32 too.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from pipeline.errors import Unsupported

Call: TypeAlias = tuple[str, ...]
"""An operator, and a text for each of its operands and arguments."""


class RandomGuard:
    """The state of torch's random generator. A recording does not change it; code that sets the state is refused.

    A seed, or a `torch.random.fork_rng`, would be no part of a step. To see them, each operator that draws is followed
    by a draw of our own: a state that the code puts back then differs from the expected state.
    """

    def __init__(self) -> None:
        self._expected = self._before = torch.get_rng_state()

    def follow_draw(self) -> None:
        """Called before each operator that draws."""
        with _disable_current_modes():
            self.refuse_changes()
            torch.rand(1)
            self._expected = torch.get_rng_state()

    def refuse_changes(self) -> None:
        """
        Raises:
            Unsupported: the recorded code set the state, or another thread has drawn.
        """
        if not torch.equal(self._expected, torch.get_rng_state()):
            place = place_outside()
            raise Unsupported(
                "the forward pass or the loss sets the state of torch's random generator"
                + (f" ({place})" if place != NO_PLACE else "")
                + ", as torch.manual_seed, fork_rng and torch.utils.checkpoint do, or another thread draws from it "
                "during the recording; a step would do neither: seed before the steps, keep values that are to stay in "
                "a buffer, call what draws outside of a checkpoint, and let other threads draw before or after the "
                "recording"
            )

    def put_back(self) -> None:
        torch.set_rng_state(self._before)


class CallLog(TorchDispatchMode):
    """Logs each operator that is called, and compares it with an earlier log, if there is one."""

    def __init__(
        self,
        random: RandomGuard,
        earlier: CallLog | None = None,
        name_of: Callable[[object], str] = lambda _: "",
        left: Callable[[], Sequence[str]] = list,
    ) -> None:
        """`name_of` names attributes; `left` lists the attributes in which the earlier recording left tensors."""
        super().__init__()
        self.calls: list[Call] = []
        self._random, self._earlier, self._name_of, self._left = random, earlier, name_of, left
        self._constant: Any = WeakIdKeyDictionary()
        """{result of an operator: whether it depends on no operand of the step}."""

    @property
    def are_remains_constant(self) -> bool:
        """Whether all results that are still alive have the same values at each call of the step."""
        return all(self._constant.values())

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the same values at each call of the step."""
        return is_plain(tensor) or self._constant.get(tensor, False)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._random.follow_draw()
        leaves = pytree.tree_leaves((args, kwargs or {}))
        call = (str(func), *map(_text_of, leaves))
        operands = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._earlier is not None:
            self._refuse_results(self._earlier, operands)
            before = self._earlier.calls[len(self.calls)] if len(self.calls) < len(self._earlier.calls) else ()
            if call != before:
                raise Unsupported(_describe_difference(before, call, self._left()))
        self.calls.append(call)
        result = func(*args, **(kwargs or {}))
        is_constant = func in OF_SHAPES or all(map(self.is_constant, operands))
        is_constant = is_constant and torch.Tag.nondeterministic_seeded not in func.tags
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and all(leaf is not operand for operand in operands):
                self._constant[leaf] = is_constant
        for operand in operands if func._schema.is_mutable else ():
            if operand in self._constant:
                self._constant[operand] = is_constant
        return result

    def _refuse_results(self, earlier: CallLog, operands: Sequence[torch.Tensor]) -> None:
        """
        Raises:
            Unsupported: an operand is a result of an earlier recording that the code kept somewhere.
        """
        for name in (self._name_of(operand) for operand in operands if operand in earlier._constant):
            where, key = place_outside(), name.rpartition(".")[2]
            raise Unsupported(
                f"the forward pass sets {name!r}, a tensor that is neither a parameter nor a buffer, and reads it at "
                f"the next call ({where}), to which no step carries it: register it by register_buffer({key!r}, …), "
                "and write to it by copy_"
                if name
                else f"the forward pass or the loss reads a tensor that an earlier call has left ({where}), as a cache "
                "does; it is one of the recording, so clear that cache, and call the module once before it is recorded"
            )


class RefusedCalls(TorchFunctionMode):
    """Refuses calls that a step would do differently: recurrent layers such as torch.lstm with dropout between their
    layers, draws from a generator other than torch's default, and losses that torch records wrongly."""

    def __init__(self, name_of: Callable[[object], str]) -> None:
        super().__init__()
        self._name_of = name_of

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        for generator in (item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)):
            own = self._name_of(generator)
            raise Unsupported(
                f"torch.{name} draws from {f'the torch.Generator {own!r}' if own else 'a torch.Generator'} "
                f"({place_outside()}), whose state no step would keep: leave generator= out, or draw before each "
                "step and give the values with the batch; values that are to stay belong into a buffer"
            )
        if name in WRONG_WHEN_RECORDED:
            raise Unsupported(f"torch.nn.functional.{name} ({place_outside()}): {WRONG_WHEN_RECORDED[name]}")
        if name in RECURRENT:
            # Both forms of each, for padded and for packed sequences, have these after the list of weights.
            first = next((place for place, item in enumerate(args) if isinstance(item, bool)), len(args))
            given = {
                **dict(zip(("has_biases", "num_layers", "dropout", "train"), args[first:], strict=False)),
                **kwargs,
            }
            if given.get("train") and given.get("dropout", 0) > 0 and given.get("num_layers", 1) > 1:
                raise Unsupported(
                    f"torch.{name} is called with {given['num_layers']} layers and dropout={given['dropout']} "
                    f"({place_outside()}), which torch leaves out of a recording: call it once for each layer with "
                    "torch.nn.functional.dropout between them"
                )
        return func(*args, **kwargs)


def _text_of(leaf: object) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf) if isinstance(leaf, int | float | complex | str | torch.dtype) else type(leaf).__name__
    form = f"{leaf.dtype}{list(leaf.shape)}"
    if not is_plain(leaf) or leaf.layout is not torch.strided or leaf.is_meta:
        return form
    with _disable_current_modes():
        elements = leaf.detach().cpu().contiguous().reshape(-1)
        if leaf.numel() <= SHOWN:
            return f"{form} of {elements.tolist()}"
        digest = hashlib.blake2b(elements.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
    return f"{form} with the digest {digest}"


def _describe_difference(before: Call, now: Call, left: Sequence[str]) -> str:
    if before[:1] == now[:1] and len(before) == len(now):
        old, new = next(pair for pair in zip(before, now, strict=True) if pair[0] != pair[1])
        found = f"computes with another number when it is recorded again: {old}, then {new}, in {now[0]}"
    else:
        found = f"calls other operators when it is recorded again: {before[0] if before else 'none'}, then {now[0]}"
    if left:
        return (
            f"the forward pass or the loss {found} ({place_outside()}), where the first call has left a tensor in "
            f"{' and '.join(map(repr, left))}, which no step carries to the next one: register it by register_buffer "
            "with its first value, before the recording, and write to it by copy_"
        )
    return (
        f"the forward pass or the loss {found} ({place_outside()}); a step would keep the first. Randomness of Python, "
        "counters, times and what an earlier call left are no part of a recording: draw by torch, count and keep in "
        "buffers, or give it with the batch"
    )


OF_SHAPES: Final = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("new_empty", "new_full", "new_ones", "new_zeros", "empty_like", "full_like", "ones_like", "zeros_like")
)
"""Operators whose results do not depend on the values of their operands."""

WRONG_WHEN_RECORDED: Final = {
    "multilabel_margin_loss": "a recording of torch counts what stands after the first -1 among the labels as further "
    "labels (torch 2.13); expected another loss, such as multilabel_soft_margin_loss"
}
"""Function of torch → why no step may record it."""

RECURRENT: Final = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})

SHOWN: Final = 4
"""The most elements of a constant that a message shows."""


UNREGISTERED = ""
"""Stands for a tensor that is neither a parameter nor a buffer; it is a constant of the recording."""

LARGEST = 2**22
"""The most elements of a result that is computed."""


class AskedForNumber(Unsupported):
    """Python asked for a value that only the step itself computes."""


@dataclass(frozen=True, slots=True)
class KnownValue:
    """The values of a tensor, and the names of the stored tensors that they follow from."""

    tensor: torch.Tensor
    sources: frozenset[str] = frozenset()


class KnownValues(TorchDispatchMode):
    """Follows each operator of a recording, and answers Python's questions about tensors whose values are known."""

    def __init__(self, name_of: Callable[[object], str] = lambda _: "") -> None:
        """`name_of` names the attribute that holds a tensor."""
        super().__init__()
        self._name_of = name_of
        self.decided_by: set[str] = set()
        """The names of the stored tensors that an answer followed from."""
        self._known: Any = WeakIdKeyDictionary()

    def add(self, traced: torch.Tensor, name: str, stored: torch.Tensor) -> None:
        """Say that `traced` stands for the stored tensor `name`."""
        self._known[traced] = KnownValue(stored, frozenset([name]))

    def numbers_of(self, traced: torch.Tensor) -> torch.Tensor:
        """The values of a tensor of this recording; zeros if they are not known."""
        fact = self._find(traced)
        return torch.zeros(traced.shape, dtype=traced.dtype) if fact is None else fact.tensor.detach().clone()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        facts = [self._find(tensor) for tensor in tensors]
        known = [fact for fact in facts if fact is not None]
        is_known = len(known) == len(facts)
        if torch.Tag.data_dependent_output in func.tags:
            if not is_known:
                raise AskedForNumber(
                    f"Python asks for a number of a tensor ({func}, {place_outside()}), which is only known when the "
                    "step runs: use torch.where or another operator in place of if, float(), int() or .item()"
                )
            self.decided_by |= frozenset().union(*(fact.sources for fact in known))
            return self._compute(func, args, kwargs)
        if func is torch.ops.aten._linalg_check_errors.default:
            raise Unsupported(
                f"torch.{args[1].removeprefix('torch.')} checks its own result ({place_outside()}) and raises where a "
                "matrix has none, which no recorded step does: call inv_ex, solve_ex or cholesky_ex of torch.linalg, "
                "whose last result says whether it failed, or another operator without such a check"
            )
        if func._schema.is_mutable:
            return self._write(func, args, kwargs, is_known)
        try:
            result = func(*args, **kwargs)
        except DynamicOutputShapeException as error:
            raise Unsupported(OPEN_SIZE.format(func, place_outside())) from error
        _refuse_open_sizes(func, result)
        if is_known and torch.Tag.nondeterministic_seeded not in func.tags and _is_small(result):
            sources = frozenset().union(*(fact.sources for fact in known))
            computed = pytree.tree_leaves(self._compute(func, args, kwargs))
            for traced, tensor in zip(pytree.tree_leaves(result), computed, strict=True):
                if isinstance(traced, torch.Tensor):
                    self._known[traced] = KnownValue(tensor, sources)
        return result

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: bool) -> Any:
        """Call an operator that writes to its operands; a written operand stays known only if the recording made it."""
        given = {**dict(zip((entry.name for entry in func._schema.arguments), args, strict=False)), **kwargs}
        targets = [
            given.get(entry.name) for entry in func._schema.arguments if entry.alias_info and entry.alias_info.is_write
        ]
        tensors = [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, torch.Tensor)]
        facts = [self._find(tensor) for tensor in tensors]
        for tensor, fact in zip(tensors, facts, strict=True):
            if fact is not None and UNREGISTERED in fact.sources:
                name = self._name_of(tensor)
                raise Unsupported(
                    f"the step writes to {f'{name!r}, ' if name else ''}a tensor that is neither a parameter nor a "
                    f"buffer when the recording begins ({func}, {place_outside()}), so no step can keep it for the "
                    "next one: register it by register_buffer in __init__, or call the module once before"
                )
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if known and not seeded and all(fact is not None and not fact.sources for fact in facts):
            self._compute(func, args, kwargs)
        else:
            self._forget([fact.tensor for fact in facts if fact is not None])
        return func(*args, **kwargs)

    def _forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """Forget the values of all tensors that share memory with these tensors."""
        memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for traced, fact in list(self._known.items()):
            if fact.tensor.untyped_storage().data_ptr() in memory:
                del self._known[traced]

    def _find(self, tensor: torch.Tensor) -> KnownValue | None:
        return KnownValue(tensor, frozenset([UNREGISTERED])) if is_plain(tensor) else self._known.get(tensor)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        def value_of(leaf: Any) -> Any:
            fact = self._find(leaf) if isinstance(leaf, torch.Tensor) else None
            return leaf if fact is None else fact.tensor

        own_args, own_kwargs = pytree.tree_map(value_of, (args, dict(kwargs)))
        with _disable_current_modes(), torch.no_grad():
            return func(*own_args, **own_kwargs)


def _refuse_open_sizes(func: Any, result: Any) -> None:
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in leaf.shape):
            raise Unsupported(OPEN_SIZE.format(func, place_outside()))


OPEN_SIZE: Final = (
    "the size of a result follows from the values in the input ({}, {}); expected sizes that stay from step to step: "
    "use torch.where or multiply by a mask in place of a selection"
)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has data, so that it comes from outside of the recording."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _is_small(result: Any) -> bool:
    return all(leaf.numel() <= LARGEST for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))


def place_outside(frames: traceback.StackSummary | None = None) -> str:
    """The line of the user's code that is being recorded: the innermost one that belongs neither to torch nor to us.

    Args:
        frames: the frames of an error; by default, the current frames.
    """
    for frame in reversed(traceback.extract_stack() if frames is None else frames):
        path = Path(frame.filename)
        if path.parent == HERE and path.name != WATCHING:
            break  # the recording itself; the frames outside of it only called it
        if not frame.filename.startswith("<") and not any(path.is_relative_to(home) for home in HOMES):
            return f"{path.name}:{frame.lineno}"
    return NO_PLACE


NO_PLACE = "no place known"

HERE = Path(__file__).parent

WATCHING = Path(__file__).name
"""This file, whose modes stand between an operator and the code that called it."""

HOMES = (Path(torch.__file__).parent, HERE.parent)
"""Folders whose code is not the user's."""


class MixedNorms(TorchDispatchMode):
    """Calls norms that mix operands of half precision and float32 with all operands in float32."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        halves, saved = HALVES.get(name, 0), SAVED.get(name, ())
        others = [arg for at, arg in enumerate(args) if at >= halves and at not in saved]
        if not halves or args[0].dtype not in (torch.bfloat16, torch.float16) or not _has_float32(others):
            return func(*args, **kwargs)
        result, *more = func(*(half.float() for half in args[:halves]), *args[halves:], **kwargs)
        return None if result is None else result.to(args[0].dtype), *more


def _has_float32(args: Sequence[Any]) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float32 for arg in args)


HALVES: Final[Mapping[str, int]] = {
    "native_group_norm": 1,
    "native_group_norm_backward": 2,
    "native_layer_norm": 1,
    "native_layer_norm_backward": 2,
    "native_batch_norm": 1,
    "native_batch_norm_backward": 2,
    "_native_batch_norm_legit": 1,
    "_native_batch_norm_legit_functional": 1,
    "_native_batch_norm_legit_no_training": 1,
}
"""Operator → how many of its first operands are the input and its gradient, which may be of half precision."""

SAVED: Final[Mapping[str, Sequence[int]]] = {
    "native_group_norm_backward": (2, 3),
    "native_layer_norm_backward": (3, 4),
    "native_batch_norm_backward": (5, 6),
}
"""Gradient → its operands that the forward pass has saved: in float32 on CUDA, whatever the other operands are."""
