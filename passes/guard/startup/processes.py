"""Which processes have begun with the guard: each leaves an empty file of its own in a folder that the guard names.

Linux only: what identifies a process is read from /proc. Only the standard library is used, and little of it.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # not typing's, which is slow to load
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Image", "is_registered", "read_image", "register"]


class Image:
    """A process between two `exec`: its number, when it began, and where its arguments lie in memory. A fork has the
    place of its parent, a program that was just begun has another one, since the kernel chooses it by chance."""

    def __init__(self, process: int, began: int, arguments: int, parent: int) -> None:
        self.process = process
        self.arguments = arguments
        self.parent = parent
        self.name = f"{process}-{began}-{arguments}"
        """No other process has it, nor has this one after the next `exec`."""


def read_image(process: int) -> Image | None:
    """What runs as `process`; None where nothing runs, or where it is not told."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:  # noqa: PTH123 - pathlib is slow to load
            words = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if words[0] in (b"Z", b"X"):
        return None
    return Image(process, int(words[19]), int(words[45]), int(words[1]))


def register(folders: Sequence[str]) -> None:
    """Say in each of `folders` that this process has the guard. The folder is gone once the guard has ended."""
    image = read_image(os.getpid())
    for folder in folders:
        if image is not None:
            try:
                os.close(os.open(f"{folder}/{image.name}", os.O_CREAT | os.O_WRONLY, 0o600))
            except OSError:
                continue


def is_registered(image: Image, folder: str) -> bool:
    return os.access(f"{folder}/{image.name}", os.F_OK)
