"""The files that declare custom operators: named once for a process and its children, loaded where they are needed.

`declare_ops` puts the files into an environment variable, which every process that is started meanwhile inherits. Shape
inference, proofs and plans load the files when they meet a model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from passes.errors import PolicyError, check_type
from passes.suggest import describe_argument, nearest
from passes.user_files import from_home, load_file

if TYPE_CHECKING:
    import onnxruntime

    from passes.custom_ops.operator import CustomOp

VARIABLE: Final = "ONNXLINE_CUSTOM_OPS"
"""The environment variable with the files, one a line: `folder/ops.py`, or `folder/ops.py:NAME` for one operator."""

KIND: Final = "CustomOp"
"""The class of what a file declares. It is known by its name: a script's process may load the class twice."""


@contextmanager
def declare_ops(references: Sequence[str | Path]) -> Iterator[tuple[CustomOp, ...]]:
    """Let everything that is run meanwhile know the custom operators of some files.

    Args:
        references: files of Python, `ops.py` for all operators of the file and `ops.py:SWISH` for one of them; relative
            to the working directory.

    Yields:
        the operators that are known now, those of an outer `declare_ops` first.

    Raises:
        PolicyError: a file is missing, raises, or declares no operator; or two operators have one name.
        UsageError: `references` is no list of paths.

    Example:
        >>> with onnxline.declare_ops(["ops.py"]):
        ...     run = onnxline.optimize("model.onnx")
    """
    check_type(references, (list, tuple), "declare_ops", "a list of files, such as ['ops.py']")
    for reference in references:
        check_type(reference, (str, Path), "declare_ops", "a list of files, such as ['ops.py']")
    before = os.environ.get(VARIABLE)
    lines = [*(before or "").splitlines(), *map(_absolute, references)]
    os.environ[VARIABLE] = "\n".join(dict.fromkeys(lines))
    try:
        yield tuple(declared_ops().values())
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def declared_ops() -> Mapping[tuple[str, str], CustomOp]:
    """(domain, type) → the operator, for all operators declared in this process; ONNX's inference knows them then.

    Raises:
        PolicyError: as `declare_ops`.
    """
    return _load(declaration_key()) if os.environ.get(VARIABLE) else {}


def reference_ops() -> Mapping[tuple[str, str], CustomOp]:
    """The `declared_ops` that only their references in numpy compute: those without a library of onnxruntime's."""
    return {key: op for key, op in declared_ops().items() if op.shared_library is None}


def declaration_key() -> tuple[tuple[str, int], ...]:
    """The files with the times of their last change: what `declared_ops` depends on."""
    lines = filter(None, os.environ.get(VARIABLE, "").splitlines())
    return tuple((line, _changed_at(_parts(line)[0])) for line in lines)


def files_of(references: Sequence[str]) -> list[Path]:
    """The files of some references."""
    return [Path(_parts(reference)[0]) for reference in references]


def check_references(references: Sequence[str]) -> None:
    """Refuse a file that is missing, without loading any.

    Raises:
        PolicyError: the message names the nearest file.
    """
    for path in files_of(references):
        if path.suffix != ".py":
            raise PolicyError(f"custom_ops: found {str(path)!r}, expected a file of Python, such as ops.py")
        if not path.is_file():
            near = nearest(path.name, [file.name for file in path.parent.glob("*.py")]) if path.parent.is_dir() else ""
            raise PolicyError(f"custom_ops: no file {str(path)!r}{near}")


def add_libraries(options: onnxruntime.SessionOptions) -> None:
    """Give a session of onnxruntime the kernels of the declared operators that have a library.

    Raises:
        PolicyError: onnxruntime cannot load a library.
    """
    for library in dict.fromkeys(op.shared_library for op in declared_ops().values() if op.shared_library):
        try:
            options.register_custom_ops_library(library)
        except Exception as error:  # onnxruntime raises errors of many types
            said = " ".join(str(error).split())
            raise PolicyError(f"onnxruntime cannot load the library {library} of custom operators: {said}") from error


def _absolute(reference: str | Path) -> str:
    file, name = _parts(str(reference))
    return f"{from_home(file).resolve()}{':' * bool(name)}{name}"


def _parts(reference: str) -> tuple[str, str]:
    """The file, and the name of one operator in it; no name for all operators of the file."""
    file, colon, name = reference.rpartition(":")
    return (file, name) if colon and name.isidentifier() else (reference, "")


def _changed_at(file: str) -> int:
    try:
        return Path(file).stat().st_mtime_ns
    except OSError:
        return 0


@cache
def _load(key: tuple[tuple[str, int], ...]) -> Mapping[tuple[str, str], CustomOp]:
    import onnx.reference  # before a schema is added: its import fails where operators of two domains share a name

    check_references([reference for reference, _ in key])
    found: dict[tuple[str, str], CustomOp] = {}
    for reference, _ in key:
        for op in _ops_of(reference):
            own = (op.domain, op.name)
            if own in found:
                raise PolicyError(f"{reference} declares {op.key}, which another file or line declares too")
            found[own] = op
            if onnx.defs.has(op.name, op.domain):
                _forget(op)
            onnx.defs.register_schema(op.schema())
    return found


def _forget(op: CustomOp) -> None:
    """Take an operator that was declared before out of ONNX's registry, which takes no second one of its name."""
    import onnx

    known = onnx.defs.get_schema(op.name, op.domain)
    onnx.defs.deregister_schema(known.name, known.since_version, known.domain)


def _ops_of(reference: str) -> list[CustomOp]:
    """The operators of one file, with absolute paths of their libraries."""
    (file, name), title = _parts(reference), f"the custom operators {reference}"
    path = Path(file)
    found = vars(load_file(path, title))
    known = {key: value for key, value in found.items() if type(value).__qualname__ == KIND}
    if name and known and name not in known:
        there = f"{name!r} is {describe_argument(found[name])}" if name in found else f"no {name!r} there"
        hint = nearest(name, known) or f"; it has: {', '.join(known)}"
        raise PolicyError(f"{title}: {there}{hint}")
    ops = [known[name]] if name in known else list({id(value): value for value in known.values()}.values())
    if not ops:
        raise PolicyError(f"{title}: found no CustomOp; expected SWISH = onnxline.CustomOp('com.acme', 'Swish', …)")
    return [
        op
        if op.shared_library is None
        else replace(op, shared_library=str((path.parent / op.shared_library).resolve()))
        for op in ops
    ]
