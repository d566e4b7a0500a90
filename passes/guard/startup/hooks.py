"""The hooks of a guarded process: into the programs that it starts, and the libraries that it imports.

All ways of Python's standard library to start a program end in six native functions. They are replaced here, so that
each program gets the guard, whatever environment a script builds for it. A command that takes the guard from a Python
is named where it is started (`escapes.py`). Only the standard library is used, and little of it: this runs at the start
of every Python child of a guard."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False  # not typing's, which is slow to load
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType
    from typing import Any

    Function = Callable[..., Any]

LIBRARIES = ("onnxsim", "onnxoptimizer", "onnxslim")
"""The libraries whose functions are intercepted."""

VARIABLE = "ONNXLINE_GUARD"
"""The environment variable with the guards of a child, as JSON; see `passes.guard.settings`."""

PATH = "PYTHONPATH"

FOLDER = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120 - pathlib is slow to load
"""The folder that is put first in PYTHONPATH: Python imports `sitecustomize.py` from it."""

OUR_PROGRAM = os.fsencode(os.path.join(os.path.dirname(os.path.dirname(FOLDER)), "worker", "own_names.py"))  # noqa: PTH118, PTH120
"""The program of our own worker processes, in which nothing is guarded."""


def add_guard(environment: Mapping[Any, Any], variables: Mapping[str, str]) -> dict[Any, Any]:
    """A copy of an environment, of texts or of bytes, in which a Python child finds the guard that `variables` name."""
    ours = {os.fsencode(name) for name in (*variables, PATH)}
    path = next((value for name, value in environment.items() if os.fsencode(name) == os.fsencode(PATH)), "")
    entries = [entry for entry in os.fsdecode(path).split(os.pathsep) if entry != FOLDER] if path else []
    others = {name: value for name, value in environment.items() if os.fsencode(name) not in ours}
    return {**others, **variables, PATH: os.pathsep.join([FOLDER, *entries])}


class Launches:
    """Replaces the functions of this process that start programs, so that the programs are guarded."""

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        """The variables that children get; if empty, children are started unchanged."""
        self._replaced: list[tuple[Function, Function]] = []
        self._named: set[str] = set()
        """The warnings about commands that this process has started."""

    def open(self, variables: Mapping[str, str]) -> None:
        """Give `variables` to all later children."""
        self.variables = dict(variables)
        if not self._replaced:
            self._replaced = list(self._replacements())
            for native, ours in self._replaced:
                replace_everywhere(native, ours)

    def close(self) -> None:
        """Restore every function."""
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
        for name, functions in ways.items():
            try:
                module = importlib.import_module(name)
            except ImportError:  # another operating system
                continue
            for function, way in functions.items():
                native = getattr(module, function, None)
                if native is not None:
                    yield native, _function_like(native, way)

    def _is_ours(self, arguments: object) -> bool:
        """Whether to start this program unchanged: it is our own, or there is no guard."""
        if not self.variables:
            return True
        words = arguments if isinstance(arguments, list | tuple) else ()
        return any(isinstance(word, str | bytes) and os.fsencode(word) == OUR_PROGRAM for word in words[1:2])

    def _fork_exec(self, native: Function, *args: Any) -> Any:
        if len(args) < 6 or self._is_ours(args[0]):
            return native(*args)
        self._name_escape(args[1][-1], args[0])
        given = os.environb if args[5] is None else dict(entry.split(b"=", 1) for entry in args[5])
        guarded = add_guard(given, self.variables)
        entries = [os.fsencode(name) + b"=" + os.fsencode(value) for name, value in guarded.items()]
        return native(*args[:5], entries, *args[6:])

    def _spawn(self, native: Function, path: Any, argv: Any, env: Any, /, **options: Any) -> Any:
        if self._is_ours(argv):
            return native(path, argv, env, **options)
        self._name_escape(path, argv)
        return native(path, argv, add_guard(os.environ if env is None else env, self.variables), **options)

    def _execv(self, native: Function, path: Any, argv: Any, /) -> Any:
        if self._is_ours(argv):
            return native(path, argv)
        return os.execve(path, argv, os.environ)  # replaced too: it adds the guard

    def _execve(self, native: Function, path: Any, argv: Any, env: Any) -> Any:
        if self._is_ours(argv):
            return native(path, argv, env)
        self._name_escape(path, argv)
        return native(path, argv, add_guard(env, self.variables))

    def _system(self, native: Function, command: Any) -> Any:
        """`system` passes the environment of this process, which a script may have changed."""
        if self.variables:
            self._name_escape("sh", ["sh", "-c", command])
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

    def _name_escape(self, program: Any, arguments: Any) -> None:
        """Write down, once, a command in which a Python runs without the guard."""
        escapes = _load_escapes()
        text = escapes.describe_escape(program, arguments, VARIABLE, FOLDER)
        if text and text not in self._named:
            self._named.add(text)
            escapes.warn(text, self.variables[VARIABLE])


def _load_escapes() -> ModuleType:
    """escapes.py, by its path: an import would load the package around it, and onnx."""
    name = f"{__name__.rpartition('.')[0]}.escapes"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, f"{FOLDER}/escapes.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def _function_like(native: Function, way: Function) -> Function:
    def launch(*args: Any, **kwargs: Any) -> Any:
        return way(native, *args, **kwargs)

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):  # pickle finds it by these
        setattr(launch, name, getattr(native, name))
    return launch


def replace_everywhere(old: object, new: object) -> None:
    """Replace `old` by `new` in each module that holds it."""
    for module in list(sys.modules.values()):
        names = vars(module) if isinstance(module, type(sys)) else {}
        for name in [name for name, value in list(names.items()) if value is old]:
            setattr(module, name, new)


LAUNCHES = Launches()
"""The only instance: a process has each of the functions once."""


class AfterImport:
    """A finder that calls `then(name)` once a module is loaded or loaded again; the other finders find it.

    It applies to the packages `names` and their modules.
    """

    only_waits = True
    """Marks these finders: two of them would call each other without end."""

    def __init__(self, names: Sequence[str], then: Callable[[str], object]) -> None:
        self._names = frozenset(names)
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._names:
            return None
        for finder in list(sys.meta_path):
            if getattr(finder, "only_waits", False) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._follow(name, spec)
                return spec
        return None

    def _follow(self, name: str, spec: importlib.machinery.ModuleSpec) -> None:
        loader = spec.loader
        load = getattr(loader, "exec_module", None)
        if loader is None or load is None:
            return

        def exec_module(module: ModuleType) -> None:
            load(module)
            self._then(name)

        loader.exec_module = exec_module  # type: ignore[method-assign]  # this loader loads only this module
