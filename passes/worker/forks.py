"""A call in a process of its own: a fork of a worker that does nothing else, has one thread, and stays as it is.

Whatever the call does to its process (another folder, patched libraries, closed files, threads, limits, an exit) ends
with it. The fork has no pipe: its answer is a file, which only the process that was forked writes, and which is read
when that process has ended; then all that it has started is ended as well. A call takes 10 ms of a core, where a new
process that imports onnx takes 300.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Never

from passes.worker.messages import CallAnswer, CallOutcome
from passes.worker.platforms import end_descendants, flush_native

CAN_FORK: Final = sys.platform == "linux"
"""Elsewhere a worker whose calls are to be alone is replaced after each call."""


def answer_in_fork(make_answer: Callable[[], bytes], handles: Iterable[int]) -> bytes:
    """Call `make_answer` in a fork, and return what it returns; an answer that says how it died if it does not return.

    Args:
        handles: the file descriptors that the fork must not have.
    """
    Path(tempfile.gettempdir()).mkdir(parents=True, exist_ok=True)  # a pass may have deleted it
    with tempfile.TemporaryDirectory(prefix="call-", ignore_cleanup_errors=True) as folder:
        place = Path(folder, "answer")
        child = os.fork()
        if child == 0:
            _answer(make_answer, handles, place)
        _, status = os.waitpid(child, 0)
        end_descendants()
        try:
            return place.read_bytes()
        except OSError:
            return pickle.dumps(CallAnswer(CallOutcome.DIED, os.waitstatus_to_exitcode(status)))


def _answer(make_answer: Callable[[], bytes], handles: Iterable[int], place: Path) -> Never:
    """In the fork: write the answer to `place`, and end."""
    process, code = os.getpid(), 1
    try:
        for handle in handles:
            os.close(handle)
        # A pass that clears away its temporary files must not meet ours.
        own = place.with_name("temporary")
        own.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(own)
        answer = make_answer()
        if os.getpid() == process:  # it may have forked, and come back in the fork as well
            _write(answer, place)
            code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            flush_native()
        os._exit(code & 0xFF)


def _write(answer: bytes, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = place.with_name("unfinished")
    unfinished.write_bytes(answer)
    unfinished.replace(place)
