"""Files as their reader may meet them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def forbid_reading(file: Path) -> Iterator[None]:
    """Make a file that this process may not read while the context lasts; root, who may, is another user until then."""
    file.write_bytes(b"anything")
    file.chmod(0)
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)
