"""Doors: the `__init__` of a package names each public thing once, next to the module that has it.

    if TYPE_CHECKING:
        from passes.errors import ModelError as ModelError
    else:
        __all__, __getattr__ = open_door(__name__, __file__)

A type checker takes what is imported `as` its own name for public, and so does `public_names`; a shorter name is an
assignment, `diff = compare_models`. The module is loaded when one of its names is first used: a part of a package must
not load the whole. A door whose modules belong together loads them at once, and ends with `list_names(__name__)`.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from typing import Any, Final


def public_names(file: str) -> dict[str, tuple[str, str]]:
    """What a door shows.

    Args:
        file: the path of its source.

    Returns:
        Public name → the module that has it, and its name there.
    """
    with open(file, encoding="utf-8") as source:  # noqa: PTH123 - pathlib is slow to load
        text = source.read()
    names = {shown: (module, own) for module, own, shown in ENTRY.findall(text)}
    return names | {short: names[long] for short, long in SHORTER.findall(text) if long in names}


def open_door(package: str, file: str, prefix: str | None = None) -> tuple[list[str], Callable[[str], Any]]:
    """What a door is that loads its modules late.

    Args:
        package: the `__name__` of the door.
        file: its `__file__`.
        prefix: what stands before `passes` and `pipeline` in this process; by default what stands before `package`.

    Returns:
        Its `__all__` and its `__getattr__`.
    """
    names, own_prefix = public_names(file), re.split(r"\b(?:passes|pipeline)\b", package)[0]

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, own = names[name]
        return getattr(importlib.import_module((own_prefix if prefix is None else prefix) + home), own)

    return sorted(names), find


def list_names(package: str) -> None:
    """Give a door that loads its modules at once its `__all__`, by which `import *` and `help` leave these modules out.

    Args:
        package: the `__name__` of the door.
    """
    door = sys.modules[package]
    vars(door)["__all__"] = sorted(public_names(str(door.__file__)))


ENTRY: Final = re.compile(r"^ *from (\S+) import (\w+) as (\w+)$", re.MULTILINE)

SHORTER: Final = re.compile(r"^ +(\w+) = (\w+)$", re.MULTILINE)
