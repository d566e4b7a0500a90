"""Give the guard to each process that this one starts, by whatever function, and whatever environment it is given.

All ways of Python's standard library to start a program end in six native functions, which are replaced here. Only the
standard library is used, and little of it: this runs at the start of every Python child of a guard.
"""

from __future__ import annotations

import importlib
import os
import sys

TYPE_CHECKING = False  # not typing's, which is slow to load
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    Function = Callable[..., Any]

__all__ = ["FOLDER", "LAUNCHES", "PROCESSES", "VARIABLE", "Launches", "add_guard", "replace_everywhere"]

VARIABLE = "ONNXLINE_GUARD"
"""The environment variable that tells a child what to guard, as JSON; see `passes.guard.settings`."""

PROCESSES = "ONNXLINE_GUARD_PROCESSES"
"""The variable with the folders in which guarded processes say that they are."""

PATH = "PYTHONPATH"

FOLDER = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120 - pathlib is slow to load
"""What is put in front of PYTHONPATH: Python imports `sitecustomize.py` from there."""

OUR_PROGRAM = os.fsencode(os.path.join(os.path.dirname(os.path.dirname(FOLDER)), "worker", "own_names.py"))  # noqa: PTH118, PTH120
"""What our own processes run, in which nothing is guarded."""


def add_guard(environment: Mapping[Any, Any], variables: Mapping[str, str]) -> dict[Any, Any]:
    """A copy of an environment, of texts or of bytes, in which a Python child finds the guard that `variables` name."""
    ours = {os.fsencode(name) for name in (*variables, PATH)}
    path = next((value for name, value in environment.items() if os.fsencode(name) == os.fsencode(PATH)), "")
    entries = [entry for entry in os.fsdecode(path).split(os.pathsep) if entry != FOLDER] if path else []
    others = {name: value for name, value in environment.items() if os.fsencode(name) not in ours}
    return {**others, **variables, PATH: os.pathsep.join([FOLDER, *entries])}


class Launches:
    """The functions of this process that start a program, with the guard in what they start."""

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        """What children are given; nothing is given where it is empty."""
        self._replaced: list[tuple[Function, Function]] = []

    def open(self, variables: Mapping[str, str]) -> None:
        """Children are given `variables` from now on."""
        self.variables = dict(variables)
        if not self._replaced:
            self._replaced = list(self._replacements())
            for native, ours in self._replaced:
                replace_everywhere(native, ours)

    def close(self) -> None:
        """Every function is as it was."""
        self.variables = {}
        for native, ours in self._replaced:
            replace_everywhere(ours, native)
        self._replaced = []

    def _replacements(self) -> Iterator[tuple[Function, Function]]:
        ways = {
            "_posixsubprocess": {"fork_exec": self._fork_exec},
            "posix": {
                "posix_spawn": self._spawn,
                "posix_spawnp": self._spawn,
                "execv": self._execv,
                "execve": self._execve,
                "system": self._system,
            },
        }
        for place, functions in ways.items():
            try:
                module = importlib.import_module(place)
            except ImportError:  # another operating system
                continue
            for name, way in functions.items():
                native = getattr(module, name, None)
                if native is not None:
                    yield native, _function_like(native, way)

    def _is_ours(self, arguments: object) -> bool:
        """Whether nothing is to be given to this program."""
        if not self.variables:
            return True
        words = arguments if isinstance(arguments, list | tuple) else ()
        return any(isinstance(word, str | bytes) and os.fsencode(word) == OUR_PROGRAM for word in words[1:2])

    def _fork_exec(self, native: Function, *args: Any) -> Any:
        if len(args) < 6 or self._is_ours(args[0]):
            return native(*args)
        given = os.environb if args[5] is None else dict(entry.split(b"=", 1) for entry in args[5])
        guarded = add_guard(given, self.variables)
        entries = [os.fsencode(name) + b"=" + os.fsencode(value) for name, value in guarded.items()]
        return native(*args[:5], entries, *args[6:])

    def _spawn(self, native: Function, path: Any, argv: Any, env: Any, /, **options: Any) -> Any:
        if self._is_ours(argv):
            return native(path, argv, env, **options)
        return native(path, argv, add_guard(os.environ if env is None else env, self.variables), **options)

    def _execv(self, native: Function, path: Any, argv: Any, /) -> Any:
        if self._is_ours(argv):
            return native(path, argv)
        return os.execve(path, argv, os.environ)  # which is one of ours, too

    def _execve(self, native: Function, path: Any, argv: Any, env: Any) -> Any:
        return native(path, argv, env if self._is_ours(argv) else add_guard(env, self.variables))

    def _system(self, native: Function, command: Any) -> Any:
        """`system` gives the environment of the process itself, in which a script may have changed something."""
        own = {name: os.environ.get(name) for name in (*self.variables, PATH)}
        guarded = add_guard(os.environ, self.variables) if self.variables else {}
        changed = {name: value for name, value in own.items() if name in guarded and guarded[name] != value}
        for name in changed:
            os.putenv(name, guarded[name])  # not os.environ: the script shall not see it
        try:
            return native(command)
        finally:
            for name, value in changed.items():
                os.unsetenv(name) if value is None else os.putenv(name, value)


def _function_like(native: Function, way: Function) -> Function:
    def launch(*args: Any, **kwargs: Any) -> Any:
        return way(native, *args, **kwargs)

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):  # pickle finds it by these
        setattr(launch, name, getattr(native, name))
    return launch


def replace_everywhere(old: object, new: object) -> None:
    """Each module that holds `old` holds `new` instead."""
    for module in list(sys.modules.values()):
        names = vars(module) if isinstance(module, type(sys)) else {}
        for name in [name for name, value in list(names.items()) if value is old]:
            setattr(module, name, new)


LAUNCHES = Launches()
"""One, since the functions are there once in a process."""
