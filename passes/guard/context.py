"""The context manager of a guard: `with passes.guard(keep=["qkv"]) as log:`."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from passes.errors import PolicyError, check_type
from passes.guard import registry
from passes.guard.call_log import GuardedCall, read_calls, read_warnings, say, warn
from passes.guard.settings import Settings
from passes.guard.startup.escapes import HELPER, is_python
from passes.guard.startup.hooks import OUR_PROGRAM
from passes.policy.policy import check_lists
from passes.suggest import plural
from passes.worker.platforms import check_limits, children_of


@dataclass(slots=True)
class GuardLog:
    """The calls and warnings of a guard, from all processes; it grows until the guard ends."""

    path: str = ""
    _calls: tuple[GuardedCall, ...] = ()
    _warnings: tuple[str, ...] = ()

    @property
    def calls(self) -> tuple[GuardedCall, ...]:
        return read_calls(self.path) if self.path else self._calls

    @property
    def warnings(self) -> tuple[str, ...]:
        return read_warnings(self.path) if self.path else self._warnings

    def close(self) -> None:
        """Read the file for the last time, before it is removed."""
        self._calls, self._warnings, self.path = self.calls, self.warnings, ""


def guard(
    keep: Sequence[str] = (),
    skip: Sequence[str] = (),
    *,
    watch: bool = True,
    compare: bool = True,
    log: str | Path | None = None,
    timeout_s: float = 600.0,
    memory_gib: float | None = None,
    quiet: bool = False,
) -> Guard:
    """Enforce a policy on every call of an optimizer inside a `with` block.

    Args:
        keep: structures to keep, such as `qkv` or `op:Softmax`; an entry may match nothing in a model.
        skip: passes, groups and globs to leave out, such as `fuse_qkv` or `fusions`.
        watch: whether the skip of a pass that destroys a structure also reverts other passes that destroy it.
        compare: also make each call without the guard, in a worker, and report what it would have lost.
        log: a file for the calls, one JSON object a line; an existing file is overwritten.
        timeout_s: seconds for one call of native code.
        memory_gib: GiB that one worker process may allocate; see `passes.context.worker_memory`.
        quiet: no lines on standard error.

    Returns:
        A context manager; `with … as log` gives a GuardLog, whose `calls` are the calls so far.

    Raises:
        PolicyError: when the block begins: an unknown pass or structure, or a log that cannot be written.
        UsageError: a value that an argument cannot have.

    Example:
        >>> import onnx, onnxline, onnxoptimizer
        >>> with onnxline.guard(keep=["qkv"], compare=False, quiet=True) as log:
        ...     optimized = onnxoptimizer.optimize(onnx.load("model.onnx"), ["fuse_qkv"])
        >>> [dict(call.kept) for call in log.calls]
        [{'qkv': 1}]
    """
    check_lists(keep=keep, skip=skip)
    for name, value in (("watch", watch), ("compare", compare), ("quiet", quiet)):
        check_type(value, bool, name, "True or False")
    check_limits(timeout_s, memory_gib)
    if log is not None:
        check_type(log, (str, os.PathLike), "log", "the path of a file")
    return Guard(Settings(tuple(keep), tuple(skip), watch, compare, timeout_s, memory_gib, quiet), log)


class Guard:
    """A context manager; the value of `with … as` is a `GuardLog`."""

    def __init__(self, settings: Settings, log: str | Path | None = None) -> None:
        self._settings, self._log_file = settings, log
        self._entered: list[_ActiveGuard] = []

    def __enter__(self) -> GuardLog:
        self._settings.check()
        folder = tempfile.mkdtemp(prefix="onnxline-guard-")
        journal = str(Path(self._log_file or Path(folder, "calls.jsonl")).absolute())
        try:
            Path(journal).write_text("", encoding="utf-8")
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            reason = error.strerror or error
            raise PolicyError(
                f"the guard's log cannot be written: {journal}: {reason}; name a file in a folder that is there"
            ) from error
        settings, log = replace(self._settings, journal=journal), GuardLog(journal)
        registry.enter(settings)
        for command in dict.fromkeys(running_pythons(OUR_PROGRAM)):
            warn(f"child python ran before the guard began, so no call in it is guarded: {command}", [settings])
        self._entered.append(_ActiveGuard(settings, log, folder, os.getpid()))
        return log

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        entered = self._entered.pop()
        if entered.process != os.getpid():  # a fork that leaves the block too; the log belongs to its parent
            registry.leave(entered.settings)
            return
        registry.leave(entered.settings)
        if not entered.settings.quiet:
            say(summary(entered.log.calls, entered.settings))
        if not self._log_file:
            entered.log.close()
        shutil.rmtree(entered.folder, ignore_errors=True)


def running_pythons(ours: bytes) -> list[str]:
    """The commands of the Pythons that run below this process, without workers of onnxline, whose program is `ours`."""
    found: list[str] = []
    waiting = [os.getpid()]
    while waiting:
        for child in children_of(waiting.pop()):
            process = Path("/proc", str(child))
            try:
                words = os.fsdecode((process / "cmdline").read_bytes()).rstrip("\0").split("\0")
                program = str((process / "exe").readlink()).removesuffix(" (deleted)")
            except OSError:  # it has ended, or is another user's
                continue
            if os.fsdecode(ours) in words[1:2]:
                continue
            waiting.append(child)
            if is_python(program) and not any(HELPER in word for word in words):
                found.append(shlex.join(words))
    return found


@dataclass(frozen=True, slots=True)
class _ActiveGuard:
    """A guard whose block is running."""

    settings: Settings
    log: GuardLog
    folder: str
    process: int


def summary(calls: Sequence[GuardedCall], settings: Settings) -> Iterator[str]:
    """Lines on what was intercepted, what was kept, and which entries of `keep` match nothing."""
    if not calls:
        yield "no call of an optimizer was intercepted"
        return
    kept: Counter[str] = Counter()
    for call in calls:
        kept.update(call.kept or {})
    lost = sum(len(call.would_have_lost) for call in calls)
    faulty = sum(bool(call.unguarded_fault) for call in calls)
    words = [f"{plural(len(calls), 'call')} of an optimizer"]
    words += [f"kept {kind} ×{count}" for kind, count in kept.items() if count]
    words += [f"{lost} would have been lost without the guard"] if lost else []
    words += [f"{faulty} would have gone wrong without the guard"] if faulty else []
    yield ", ".join(words)
    for entry in settings.keep:
        if not entry.endswith("?") and not kept[entry]:
            yield f"warning: keep: {entry} matches nothing in any of the models"
