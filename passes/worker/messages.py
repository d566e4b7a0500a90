"""What a worker and its owner say to each other: requests and answers, each with its number.

A message is two frames of a pipe: a header of fixed size, and a pickle. Anything else in the pipe was written by code
that runs in the worker, to a file descriptor that the code does not own. The header shows at once that it is `Garbage`.
"""

from __future__ import annotations

import errno
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any, Final

STOP: Final = 0
"""The number of the message that ends the current call and drops its result. Requests are numbered from 1."""

REFUSED: Final = "the system refused to go on"
REFUSALS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE)
"""Errors of the system that no call is to blame for: full disks and exhausted handles. A message on such an error
begins with `REFUSED`."""

MARK: Final = b"onnxline"
HEADER: Final = struct.Struct("<8sQQ")
"""The mark, the number of the request, and the bytes of the pickle."""


class CallOutcome(StrEnum):
    """What an answer says of its call."""

    DONE = "done"
    ITEM = "item"
    """The call is a generator; the value is its next item."""
    RAISED = "raised"
    NO_MEMORY = "no memory"
    DIED = "died"
    """The process that was forked for the call has ended without an answer; the value is its exit code."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A call: a function of a module, and picklable arguments."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """The result of a call. `value` is what it returned, its item, or a message of one line."""

    outcome: CallOutcome
    value: Any


class Garbage(Exception):
    """Bytes that are no message."""


class Channel:
    """One end of a pipe that carries messages."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def send(self, number: int, content: bytes) -> None:
        """Send a pickled message; `number` is the number of the request; its answers have the same number."""
        self._pipe.send_bytes(HEADER.pack(MARK, number, len(content)))
        self._pipe.send_bytes(content)

    def receive(self) -> tuple[int, bytes]:
        """The number and the pickle of the next message.

        Raises:
            Garbage: the pipe holds something that is no message.
            EOFError, OSError: the other side is gone.
        """
        mark, number, size = HEADER.unpack(self._frame(HEADER.size))
        if mark != MARK:
            raise Garbage
        return number, self._frame(size)

    def _frame(self, size: int) -> bytes:
        try:
            frame = self._pipe.recv_bytes(size)
        except OSError as error:
            if self._pipe.closed or not self._pipe.readable:  # as after a longer frame
                raise Garbage from error
            raise
        if len(frame) != size:
            raise Garbage
        return frame

    def poll(self, seconds: float | None = 0.0) -> bool:
        """Whether there is something to receive, or the other side is gone, within `seconds`; None: wait for it."""
        return self._pipe.poll(seconds)

    def fileno(self) -> int:
        return self._pipe.fileno()

    def close(self) -> None:
        self._pipe.close()


def read_answer(content: bytes) -> CallAnswer:
    """The answer that was pickled as `content`.

    Raises:
        Garbage: `content` is no answer.
    """
    try:
        answer = pickle.loads(content)
    except Exception as error:
        raise Garbage from error
    if not isinstance(answer, CallAnswer):
        raise Garbage
    return answer
