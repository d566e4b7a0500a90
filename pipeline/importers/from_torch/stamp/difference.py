"""What tells two calls apart, in words for the model's author."""

from __future__ import annotations

from typing import Any

from pipeline.importers.from_torch.stamp.record import Event, Ref

__all__ = ["bare", "difference"]

LONGEST = 160
"""Characters of a call that are shown."""


def bare(event: Event) -> Event:
    """The call alone: not where it is made, and of which tensors."""
    return Event(event.function, event.form, ())


def difference(expected: Event | None, found: Event | None) -> str:
    """What `found` does in the place of `expected`; None where there is no further call."""
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
    shown = [*map(_shown, args), *(f"{key}={_shown(item)}" for key, item in kwargs)]
    text = f"{name}({', '.join(shown)})"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…)"


def _shown(form: Any) -> str:
    """An argument as the recorder has written it down."""
    if not isinstance(form, tuple):
        return repr(form) if isinstance(form, str) else str(form)
    kind, *parts = form
    if issubclass(kind, list | tuple | slice):
        return f"({', '.join(map(_shown, parts))})"
    if issubclass(kind, dict):
        return f"{{{', '.join(f'{key!r}: {_shown(item)}' for key, item in parts)}}}"
    return str(parts[0]) if isinstance(parts[0], str) else f"a {kind.__name__}"
