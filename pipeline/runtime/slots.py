"""Bind tensors to slots: stored values, the arena, and the feed.

Weights are payloads of the graph, or tensors that the caller gives by name; they are bound over their own bytes, once
for all contexts. Arena values are typed views of one buffer of a context. `pipeline.runtime.feeding` says how a feed
reaches its slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from passes.suggest import bytes_text, nearest
from pipeline.errors import SourceError, UsageError
from pipeline.importers.from_torch.tensors import TensorPayload
from pipeline.ir.graph import DTYPE_BITS, Graph, Payload, Role, Value
from pipeline.planning import ExecutionPlan, FeedEntry, FeedSignature, Slot
from pipeline.runtime.devices import CPU, Device
from pipeline.runtime.tensors import as_tensor, dtype_name, is_same, why_unreadable, with_strides

Weights = Mapping[str, torch.Tensor]


def stored_tensor(payload: Payload, strides: Sequence[int] | None = None, device: Device = CPU) -> torch.Tensor:
    """The payload as a tensor on `device` with these strides (None: contiguous); copied only where it is not so."""
    return device.copy_in(payload_tensor(payload), strides)


def payload_tensor(payload: Payload) -> torch.Tensor:
    """The payload as a tensor over its own bytes, where they lie."""
    return payload.tensor.detach() if isinstance(payload, TensorPayload) else as_tensor(payload.numpy())


Lenders = Mapping[int, weakref.ref[torch.Tensor]]
"""By vid, the caller's tensors whose memory the bound weights show; a program keeps the memory, not the tensors."""


def lenders_of(payloads: Mapping[int, Payload], bound: Mapping[int, torch.Tensor]) -> Lenders:
    """The tensors among `payloads` whose memory `bound` shows; what was copied when it was bound lends nothing."""
    return {
        vid: weakref.ref(payload.tensor)
        for vid, payload in payloads.items()
        if vid in bound and isinstance(payload, TensorPayload) and _same_storage(payload.tensor, bound[vid])
    }


def refuse_moved(lenders: Lenders, bound: Mapping[int, torch.Tensor], names: Mapping[int, str]) -> None:
    """Check that the caller's tensors still have the memory that was bound.

    Raises:
        UsageError: one was given other memory, so that the program computes with values that its caller does not see.
    """
    for vid, lender in lenders.items():
        tensor = lender()
        if tensor is not None and not _same_storage(tensor, bound[vid]):
            raise UsageError(
                f"weight {names[vid]!r} was bound to the memory of a tensor that has other memory now (`.data` was "
                "set, or the module was moved); compile the graph again with the weights as they are"
            )


def _same_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def with_weights(graph: Graph, weights: Weights) -> Graph:
    """`graph` with `weights` as payloads; they are matched by any name in `Graph.weight_names`.

    Raises:
        SourceError: names that the graph does not have, tensors that are not what it declares, or different ones under
            two names of one weight: all of them.
    """
    return _with_named(graph, weights, graph.weight_names())


def with_stored(graph: Graph, tensors: Weights) -> Graph:
    """`graph` with `tensors` as payloads, by the names of its values only, never by names in a checkpoint.

    Raises:
        SourceError: as `with_weights`.
    """
    return _with_named(graph, tensors, {vid: (graph.values[vid].name,) for vid in graph.weight_names()})


def _with_named(graph: Graph, tensors: Weights, names: Mapping[int, Sequence[str]]) -> Graph:
    """`names` of each weight: its own names, then the names of the weights that are tied to it."""
    if not tensors:
        return graph
    vids = {name: vid for vid, own in names.items() for name in own}
    found = {vid: given for vid, own in names.items() if (given := [name for name in own if name in tensors])}
    wrong = [problem for name, tensor in tensors.items() if (problem := _wrong(graph, vids, name, tensor))]
    if wrong := wrong or [*_differing_aliases(found.values(), tensors)]:
        listed = "\n".join(f"  - {problem}" for problem in wrong)
        raise SourceError(f"weights that do not belong to graph {graph.name!r}:\n{listed}")
    payloads = {name: TensorPayload(tensor) for name, tensor in tensors.items()}
    return replace(graph, payloads={**graph.payloads, **{vid: payloads[given[0]] for vid, given in found.items()}})


def _differing_aliases(found: Iterable[Sequence[str]], tensors: Weights) -> Iterator[str]:
    """Names of one weight under which different tensors are given: either could be meant."""
    pairs = {frozenset((first, name)): (first, name) for first, *others in found for name in others}
    for first, name in pairs.values():
        if not is_same(tensors[first], tensors[name]):
            yield f"{first!r} and {name!r} are names of one weight, and the two tensors differ: leave one of them out"


def _wrong(graph: Graph, vids: Mapping[str, int], name: str, tensor: torch.Tensor) -> str:
    if name not in vids:
        return f"it has no {name!r}{nearest(name, vids)}"
    if why := why_unreadable(tensor):
        return f"{name!r} {why}"
    value: Value = graph.values[vids[name]]
    if (tuple(tensor.shape), dtype_name(tensor.dtype)) == (value.spec.shape, value.spec.dtype):
        return ""
    found = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
    return f"{name!r} is {found}; the graph declares {value.spec.dtype}{list(value.spec.shape)}"


HAD_ANYWHERE = 2**24
"""Bytes. A smaller arena is made without asking how much memory is free, since that takes longer than to make it."""

STORED = (Role.PARAM, Role.STATE, Role.CONST)

Feed = Mapping[str, torch.Tensor | np.ndarray]


def bind_weights(plan: ExecutionPlan, payloads: Mapping[int, Payload], device: Device) -> dict[int, torch.Tensor]:
    """vid → tensor for params, states and consts that have a payload; bytes are copied only where the strides differ.

    What a run changes is the first value of a state, and only copied from: it stays where it lies, so that a device
    does not hold it a second time.

    Raises:
        SourceError: a payload's shape or dtype is not that of its slot, or a weight that is read has no payload and is
            not fed.
    """
    fed = {entry.name for entry in plan.feed_signature}
    read = {*plan.outputs, *plan.updates.values(), *(vid for call in plan.calls for vid in call.in_vids)}
    missing = [
        slot.name
        for slot in plan.slots
        if slot.role in STORED
        and slot.vid in read
        and slot.vid not in payloads
        and slot.vid not in plan.updates
        and slot.name not in fed
    ]
    if missing:
        raise SourceError(f"weights without bytes: {', '.join(missing)}; the plan expects them with the graph")
    bound: dict[int, torch.Tensor] = {}
    for slot in plan.slots:
        if slot.vid not in payloads or slot.role not in STORED:
            continue
        payload, changes = payloads[slot.vid], slot.vid in plan.updates
        tensor = payload_tensor(payload) if changes else stored_tensor(payload, plan.strides(slot.vid), device)
        if (tuple(tensor.shape), dtype_name(tensor.dtype)) != (slot.spec.sizes, slot.spec.dtype):
            raise SourceError(
                f"{slot.role} {slot.name!r} holds {_describe_tensor(tensor)}, "
                f"but the graph declares {_describe_slot(slot)}; "
                "the model file and its weights do not belong together"
            )
        bound[slot.vid] = tensor
    return bound


def bind_arena(plan: ExecutionPlan, arena: torch.Tensor, device: Device) -> dict[int, torch.Tensor]:
    """vid → part of `arena` (uint8, `plan.arena_bytes` long) for every value that owns storage there.

    Each is a storage of its own, see `Device.view`.
    """
    return {vid: device.view(arena, offset, plan.slots[vid].spec) for vid, offset in plan.offsets.items()}


def new_memory(plan: ExecutionPlan, nbytes: int, device: Device) -> torch.Tensor:
    """Bytes for values of `plan`, with whatever is in them.

    Raises:
        UsageError: this machine does not have so much memory; a plan for another one may be made here all the same.
    """
    try:
        if nbytes <= HAD_ANYWHERE or nbytes <= device.limit():
            return device.allocate(nbytes)
    except RuntimeError:  # torch's allocator
        pass
    own = [slot for slot in plan.slots if slot.role not in STORED and slot.vid not in plan.alias]
    largest = sorted(own, key=_nbytes, reverse=True)
    shown = ", ".join(f"{slot.name!r} {_describe_slot(slot)} of {bytes_text(_nbytes(slot))}" for slot in largest[:3])
    raise UsageError(
        f"graph {plan.graph_name!r} needs {bytes_text(nbytes)} of memory in one piece, and this process may have "
        f"{bytes_text(device.limit())}; its largest values are {shown}: take smaller inputs, or a machine with more "
        "memory"
    )


def _nbytes(slot: Slot) -> int:
    return slot.spec.nbytes


def placeholders(plan: ExecutionPlan, entries: Mapping[int, FeedEntry], device: Device) -> dict[int, torch.Tensor]:
    """vid → a tensor in place of the fed one; each has its own storage over the same memory, which is never touched."""
    sizes = [_extent(entry) * DTYPE_BITS[entry.spec.dtype] // 8 for entry in entries.values()]
    memory = new_memory(plan, max(sizes, default=0), device)
    return {vid: device.view(memory, 0, entry.spec, entry.strides) for vid, entry in entries.items()}


def accept_feed(signature: FeedSignature, feed: Feed, device: Device) -> list[torch.Tensor]:
    """The caller's tensors in the order of the signature, checked; copied only where the strides differ.

    Raises:
        UsageError: a name, shape, dtype or device is not that of the signature.
    """
    refuse_names(signature, feed)
    return [accept_tensor(entry, feed[entry.name], device) for entry in signature]


def refuse_names(signature: FeedSignature, feed: Feed) -> None:
    """Check that the feed has every name of the signature, and no other.

    Raises:
        UsageError: a name is missing or unknown.
    """
    wanted = {entry.name: None for entry in signature}
    inputs = ", ".join(wanted)
    unknown = [name for name in feed if name not in wanted]
    if unknown:
        hint = nearest(unknown[0], wanted)
        raise UsageError(f"the feed has {unknown[0]!r}, which is no input; inputs: {inputs}{hint}")
    missing = [name for name in wanted if name not in feed]
    if missing:
        raise UsageError(f"the feed lacks {', '.join(map(repr, missing))}; inputs: {inputs}")


def refuse_unreadable(feed: Feed) -> None:
    """Refuse tensors that have no plain memory; this is asked once a run has failed, since it costs more than a copy.

    Raises:
        UsageError: a tensor is sparse, fake, or inside of a transform such as torch.vmap.
    """
    for name, given in feed.items():
        if isinstance(given, torch.Tensor) and (why := why_unreadable(given)):
            raise UsageError(f"input {name!r} {why}")


def accept_tensor(entry: FeedEntry, given: torch.Tensor | np.ndarray, device: Device) -> torch.Tensor:
    """The caller's tensor on `device` or on the CPU, checked; copied only where the strides differ.

    Raises:
        UsageError: a shape, dtype or device is not that of the entry.
    """
    if not isinstance(given, torch.Tensor | np.ndarray):
        raise UsageError(f"input {entry.name!r} is a {type(given).__name__}; expected a torch tensor or a numpy array")
    refuse_unreadable({entry.name: given})
    tensor = as_tensor(given) if isinstance(given, np.ndarray) else given.detach()
    spec = entry.spec
    found = (tuple(tensor.shape), dtype_name(tensor.dtype))
    if found != (spec.sizes, spec.dtype) or not (device.holds(tensor) or tensor.is_cpu):
        raise UsageError(
            f"input {entry.name!r} is {_describe_tensor(tensor)}; "
            f"expected {spec.dtype}{list(spec.shape)} on {spec.device}: "
            "convert it, or compile the graph for this signature"
        )
    return with_strides(tensor, entry.strides)


def _extent(entry: FeedEntry) -> int:
    """How many elements lie between the first and the end of the last one."""
    sizes = entry.spec.sizes
    if entry.strides is None or 0 in sizes:
        return entry.spec.numel
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, entry.strides, strict=True))


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)} on {tensor.device.type}"


def _describe_slot(slot: Slot) -> str:
    return f"{slot.spec.dtype}{list(slot.spec.shape)}"
