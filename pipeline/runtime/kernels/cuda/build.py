"""Make a kernel of Triton from the text of a function."""

from __future__ import annotations

import hashlib
import linecache
from functools import cache
from importlib.util import find_spec
from typing import Any


@cache
def has_triton() -> bool:
    """Whether Triton is installed (the extra `cuda`)."""
    return find_spec("triton") is not None


@cache
def build_kernel(text: str) -> Any:
    """The kernel whose function `text` defines, on `tl`; the same object for the same text.

    Triton reads the source of a function by `inspect`, so the text is given to `linecache` under a name of its own.
    """
    import triton
    import triton.language as tl

    name = f"<kernel {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    defined: dict[str, Any] = {"tl": tl, "__name__": __name__, "__file__": name}
    exec(compile(text, name, "exec"), defined)
    (function,) = (made for made in defined.values() if getattr(made, "__code__", None) is not None)
    return triton.jit(function)
