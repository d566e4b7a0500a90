"""What the installed release of an optimizer has, and clear words about what it does not have."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any, Final

from passes.base import Workbench
from passes.errors import PolicyMistake, StepFailed
from passes.names import nearest

__all__ = ["ask", "refuse_unknown", "require", "texts"]

LISTING_S: Final = 180.0
"""Seconds that a library may take to be imported and listed."""


def require(module: str, step: str, extra: str) -> None:
    """Refuse to go on without an optional package. It is looked for and not imported.

    Raises:
        PolicyMistake: naming the extra that brings it.
    """
    if importlib.util.find_spec(module) is None:
        raise PolicyMistake(f"the pass {step!r} needs {module}, an extra: pip install 'onnxline[{extra}]'")


def ask(bench: Workbench, function: str, step: str, **arguments: Any) -> dict[str, Any]:
    """What `function`, run in the worker, says that the installed release has.

    Raises:
        PolicyMistake: the library cannot be asked; without its names it cannot be told what to leave out.
    """
    try:
        return bench.worker.ask(function, within_s=LISTING_S, **arguments)
    except StepFailed as failure:
        raise PolicyMistake(
            f"{step} cannot be asked for its passes, so it cannot be told what to skip: {failure}"
        ) from failure


def refuse_unknown(names: Iterable[object], known: Iterable[str], title: str) -> None:
    """Raises PolicyMistake for the first of `names` that is not known; `title` as in `onnxslim has no option`."""
    known = tuple(known)
    for name in names:
        if name not in known:
            hint = nearest(str(name), known) or f"; it has: {', '.join(known)}"
            raise PolicyMistake(f"{title} {name!r}{hint}")


def texts(options: Mapping[str, Any], key: str, step: str) -> list[str]:
    """The option `key` of a step as a list of names; empty when it is not given.

    Raises:
        PolicyMistake: it is something else.
    """
    value = options.get(key, [])
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise PolicyMistake(f"{step}: {key} is {value!r}; expected a list of names")
    return list(value)
