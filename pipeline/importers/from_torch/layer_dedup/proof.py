"""Prove that all units of a run make equal calls, and that the shortened model makes the same calls around them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any, TypeAlias

from pipeline.importers.from_torch.layer_dedup.layer_runs import TRACED, LayerRun, NotRepeatable
from pipeline.importers.from_torch.layer_dedup.meta_trace import MetaTrace
from pipeline.importers.from_torch.layer_dedup.recorder import Event, Ref

LONGEST = 160
"""Characters of a call that are shown."""


def bare(event: Event) -> Event:
    """The call without its module and without the tensors it reads."""
    return Event(event.function, event.form, ())


def difference(expected: Event | None, found: Event | None) -> str:
    """Describe how `found` differs from `expected`; None is the end of the calls."""
    if expected is None:
        return "it does the same" if found is None else f"it also calls {_call(found)}"
    if found is None:
        return f"it does not call {_call(expected)}"
    if bare(expected) != bare(found):
        return f"it calls {_call(found)} in place of {_call(expected)}"
    for was, now in zip(expected.refs, found.refs, strict=True):
        if was != now:
            place = f" in place of {_source(was)}" if _source(was) != _source(now) else ", but another one"
            return f"{_call(found)} reads {_source(now)}{place}"
    return f"{_call(found)} is called in {found.origin!r} in place of {expected.origin!r}"


def _source(ref: Ref) -> str:
    match ref:
        case ("stored", str(name)):
            return name
        case ("stored", _, str(rest)):
            return f"its own {rest[1:]}"
        case ("given", int(key)):
            return f"the input number {key}"
    what = "constant" if ref[0] == "found" else "result"
    return {"own": f"a {what} of its own", "before": f"a {what} of the layer before"}.get(ref[1], f"an earlier {what}")


def _call(event: Event) -> str:
    """`layer_norm(tensor, (4), eps=1e-06)`; a property of a tensor as `.device`."""
    name = event.name.replace("::", ".").rpartition(".")[2]
    if name == "__get__":
        return f".{getattr(event.function.__self__, '__name__', 'attribute')} of a tensor"
    (_, *args), (_, *kwargs) = event.form
    shown = [*map(_format_argument, args), *(f"{key}={_format_argument(item)}" for key, item in kwargs)]
    text = f"{name}({', '.join(shown)})"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…)"


def _format_argument(form: Any) -> str:
    """An argument in the form in which the recorder keeps it, as text."""
    if not isinstance(form, tuple):
        return repr(form) if isinstance(form, str) else str(form)
    kind, *parts = form
    if issubclass(kind, list | tuple | slice):
        return f"({', '.join(map(_format_argument, parts))})"
    if issubclass(kind, dict):
        return f"{{{', '.join(f'{key!r}: {_format_argument(item)}' for key, item in parts)}}}"
    return str(parts[0]) if isinstance(parts[0], str) else f"a {kind.__name__}"


@dataclass(frozen=True, slots=True)
class RepeatedOutput:
    """An output of `unit`: the counterpart of the output `place` of the shortened model, which its last unit makes."""

    place: int
    unit: int


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """The output `place` of the shortened model, which is made outside of the run or in its first unit."""

    place: int


Leaving: TypeAlias = RepeatedOutput | KeptOutput | Ref
"""An output of the whole model. A Ref, ("stored", name) or ("given", key), is the value after the run."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What has been proven of all units but the first: they make equal calls."""

    inputs: tuple[Mapping[int, int], ...]
    """For each unit {key of an input that unit 1 reads: key of the input that this unit reads instead}."""
    frames: tuple[Frame, ...]
    """For each unit where it is in the meta trace."""


Frame: TypeAlias = tuple[int, range, range]
"""(unit, its events, the events of the unit before): with these, Refs of different units can be compared."""


def prove_equal_units(run: LayerRun, whole: MetaTrace) -> Proof:
    """
    Raises:
        NotRepeatable: a unit does something else than unit 1.
    """
    units = [_unit(run, whole, unit) for unit in range(run.count)]
    if any(before.stop > after.start for before, after in pairwise(units)):
        raise NotRepeatable(f"the layers of {run.path} are not called one after the other")
    if run.led:
        units[0] = range(max(0, units[0].start - (units[1].start - units[0].stop)), units[0].stop)
    frames = tuple((unit, _with_gap(units, unit), _with_gap(units, unit - 1)) for unit in range(1, run.count))
    _check_first_unit(run, whole, units, frames[0])
    return Proof(_match_inputs(run, whole, frames), frames)


def match_outputs(run: LayerRun, whole: MetaTrace, short: MetaTrace, proof: Proof) -> tuple[Leaving, ...]:
    """Express the outputs of the whole model in terms of the shortened model.

    Raises:
        NotRepeatable: before the units, or after them, the shortened model does something else.
    """
    first, last = proof.frames[0], proof.frames[-1]
    where = f"with {TRACED * run.period} layers in place of {run.count * run.period} the model does something else"
    second = first[1].stop
    _expect_equal(list(whole.events[:second]), iter(short.events[:second]), f"{where} up to {run.layer(1, 0)}")
    ending = [_relative(run, event, last) for event in whole.events[last[1].stop :]]
    shorter = (_relative(run, event, first) for event in short.events[second:])
    _expect_equal(ending, shorter, f"{where} after the layers")
    return tuple(_leaving(whole, short, proof.frames))


def _unit(run: LayerRun, walk: MetaTrace, unit: int) -> range:
    spans = sorted(walk.span(run.layer(unit, offset)) for offset in run.offsets)
    if any(before[1] > after[0] for before, after in pairwise(spans)):
        raise NotRepeatable(f"the layers of {run.path} are not called one after the other")
    return range(spans[0][0], spans[-1][1])


def _with_gap(units: list[range], unit: int) -> range:
    """The events of a unit from the end of the unit before: calls between two layers belong to the later one."""
    return range(units[unit - 1].stop, units[unit].stop) if unit else units[0]


def _match_inputs(run: LayerRun, walk: MetaTrace, frames: Sequence[Frame]) -> tuple[Mapping[int, int], ...]:
    model = [_relative(run, event, frames[0]) for event in _of(walk, frames[0])]
    order = _inputs_read(walk, frames[0])
    found = []
    for frame in frames:
        where = f"{run.layer(frame[0], 0)} does not do as {run.layer(frames[0][0], 0)} does"
        reads = _inputs_read(walk, frame)
        if len(reads) != len(order):
            raise NotRepeatable(f"{where}: it reads {len(reads)} of the model's inputs, that one {len(order)}")
        renamed = dict(zip(reads, order, strict=True))
        _expect_equal(model, (_relative(run, event, frame, renamed) for event in _of(walk, frame)), where)
        found.append(dict(zip(order, reads, strict=True)))
    return tuple(found)


def _check_first_unit(run: LayerRun, walk: MetaTrace, units: list[range], second: Frame) -> None:
    """Check that the first unit makes the same calls, on other tensors: so each of its results has a counterpart."""
    first = [bare(event) for event in walk.events[units[0].start : units[0].stop]]
    other = [bare(event) for event in walk.events[second[1].stop - len(first) : second[1].stop]]
    _expect_equal(other, iter(first), f"{run.layer(0, 0)} does not do as {run.layer(1, 0)} does")


def _leaving(whole: MetaTrace, short: MetaTrace, frames: Sequence[Frame]) -> Iterator[Leaving]:
    places = {}
    for place, ref in enumerate(ref for ref in short.outputs if ref is not None):
        places.setdefault(_seat(ref, frames[:1]), place)
    for ref in whole.outputs:
        if ref is None:
            continue
        if ref[0] in ("given", "stored"):
            yield ref
            continue
        unit, *seat = _seat(ref, frames)
        place = places.get((None if unit is None else 1, *seat))
        if place is None:
            raise NotRepeatable(f"with {TRACED} layers the model does not give back all that it does with its own")
        yield KeptOutput(place) if unit is None else RepeatedOutput(place, unit)


def _seat(ref: Ref, frames: Sequence[Frame]) -> tuple[Any, ...]:
    """(unit, position in it), or (None, position around the run); equal in both models, and so for the first unit."""
    kind, number, *rest = ref
    if kind in ("given", "stored") or number < frames[0][1].start:
        return None, *ref
    for unit, events, _ in frames:
        if number in events:
            return unit, kind, number - events.stop, *rest
    return None, kind, "after", number - frames[-1][1].stop, *rest


def _of(walk: MetaTrace, frame: Frame) -> tuple[Event, ...]:
    return walk.events[frame[1].start : frame[1].stop]


def _inputs_read(walk: MetaTrace, frame: Frame) -> list[int]:
    """Keys of the inputs that a unit reads, in the order of the first read."""
    return list(dict.fromkeys(ref[1] for event in _of(walk, frame) for ref in event.refs if ref[0] == "given"))


def _relative(run: LayerRun, event: Event, frame: Frame, renamed: Mapping[int, int] | None = None) -> Event:
    refs = tuple(_seen_from(run, ref, frame, renamed or {}) for ref in event.refs)
    return Event(event.function, event.form, refs, _origin_in(run, event.origin, frame))


def _origin_in(run: LayerRun, origin: str, frame: Frame) -> str:
    """The path of a module relative to the unit; unchanged if it is outside of the unit."""
    place = run.locate(origin)
    return f"unit {place[1]}{place[2]}" if place is not None and place[0] == frame[0] else origin


def _seen_from(run: LayerRun, ref: Ref, frame: Frame, renamed: Mapping[int, int]) -> Ref:
    """`ref` relative to its unit; unchanged if it points neither to this unit nor to the unit before."""
    unit, own, before = frame
    if ref[0] == "stored":
        place = run.locate(ref[1])
        return ("stored", *place[1:]) if place is not None and place[0] == unit else ref
    if ref[0] == "given":
        return "given", renamed.get(ref[1], ref[1])
    kind, number, *rest = ref
    if number >= own.start:
        return kind, "own", number - own.start, *rest
    return (kind, "before", number - before.stop, *rest) if number in before else ref


def _expect_equal(model: Iterable[Event], events: Iterable[Event], where: str) -> None:
    for expected, found in zip_longest(model, events):
        if expected != found:
            raise NotRepeatable(f"{where}: {difference(expected, found)}")
