"""What the doors of the Python API take: each argument that is something else is refused in one sentence.

@expects(graph=a(Graph, "a Graph, as from_onnx makes"), native=FLAG)
def compile_graph(graph, weights=None, *, native=False): ...
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import wraps
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

import numpy as np

from passes.suggest import describe_argument
from pipeline.errors import UsageError

Params = ParamSpec("Params")
Result = TypeVar("Result")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Check:
    """What an argument has to be, and the words for it."""

    accepts: Callable[[Any], bool]
    words: str

    def or_none(self) -> Check:
        return Check(lambda item: item is None or self.accepts(item), f"{self.words}, or None")


def a(kind: type | tuple[type, ...], words: str) -> Check:
    """An instance of a class."""
    return Check(lambda item: isinstance(item, kind), words)


def several(kind: type | tuple[type, ...], words: str) -> Check:
    """A list or a tuple of instances of a class."""
    return Check(lambda item: isinstance(item, list | tuple) and all(isinstance(entry, kind) for entry in item), words)


def a_mapping(words: str) -> Check:
    """A dict or another mapping."""
    return Check(lambda item: type(item) is dict or isinstance(item, Mapping), words)  # isinstance alone is slow


def expects(place: str = "", /, **checks: Check) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Check the arguments of these names at each call, before anything else is done.

    Args:
        place: what the message begins with, where the name of the argument alone does not say whose it is: `Conv2d: `.

    The decorated function gets a scalar of numpy as the number of Python that it is, where its check accepts that, and
    raises UsageError for an argument that its check does not accept.
    """

    def decorate(function: Callable[Params, Result]) -> Callable[Params, Result]:
        signature = inspect.signature(function)
        places = list(signature.parameters)
        rows = [(places.index(name), name, check) for name, check in checks.items()]

        @wraps(function)
        def call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            for at, name, check in rows:
                if at < len(args):
                    item = args[at]
                elif name in kwargs:
                    item = kwargs[name]
                else:
                    continue
                if check.accepts(item):
                    continue
                if isinstance(item, np.generic) and check.accepts(item.item()):
                    given = signature.bind(*args, **kwargs)
                    given.arguments[name] = item.item()
                    return call(*given.args, **given.kwargs)
                raise UsageError(f"{place}{name} is {describe_argument(item)}; expected {check.words}")
            return function(*args, **kwargs)

        return call

    return decorate


def expects_annotated(kinds: Mapping[str, Check]) -> Callable[[Item], Item]:
    """A decorator like `expects` that reads the checks from the annotations, of a function or a class's `__init__`.

    Args:
        kinds: annotation, as it is written, → the check; `X | None` takes None too. Others are not checked.
    """

    def decorate(item: Any, place: str = "") -> Any:
        if isinstance(item, type):
            item.__init__ = decorate(item.__init__, f"{item.__name__}: ")  # type: ignore[misc]
            return item
        checks = {}
        for name, argument in inspect.signature(item).parameters.items():
            kind = str(argument.annotation)
            check = kinds.get(kind.removesuffix(" | None"))
            if check is not None and argument.kind is not argument.VAR_POSITIONAL:
                checks[name] = check.or_none() if kind.endswith(" | None") else check
        return expects(place, **checks)(item)

    return decorate


def _are_names(item: object) -> bool:
    return isinstance(item, Collection) and not isinstance(item, bytes) and all(type(name) is str for name in item)


def _are_tokens(item: object) -> bool:
    return isinstance(item, Collection) and all(isinstance(token, Integral) for token in item)


def _is_path(item: object) -> bool:
    try:
        return isinstance(item, str | os.PathLike) and b"\0" not in os.fsencode(item)
    except (TypeError, UnicodeEncodeError):  # of a __fspath__ that gives something else; a lone surrogate
        return False


FLAG = Check(lambda item: type(item) is bool, "True or False")
MAPPING = a_mapping("a mapping of names to tensors, such as {'x': tensor}")
NAMES = Check(_are_names, "names, such as ['x']")
A_LIST = a((list, tuple), "a list or a tuple")
COUNT = Check(lambda item: type(item) is int and item > 0, "a number above 0")
WHOLE = Check(lambda item: type(item) is int, "an integer")
SEED = Check(lambda item: type(item) is int and item >= 0, "an integer of 0 or more")
NUMBER = Check(lambda item: isinstance(item, int | float) and type(item) is not bool, "a number")
TEXT = Check(lambda item: type(item) is str, "a text")
TOKENS = Check(_are_tokens, "tokens, such as [1, 2, 3]")
PATH = Check(_is_path, "a path")
FUNCTION = Check(callable, "a function")
