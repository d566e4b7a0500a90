"""Passes of the user's own as steps: a class, or a function ModelProto → ModelProto, in a file or a package.

Their code runs in a worker in which each call is alone (`Worker.alone`), also when it is loaded to see what it is. So
what a pass does to its process ends with it, and a crash, an endless loop or an error costs that step.
`user_code.py` has what is called there.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import onnx

from passes.context import USER_CODE, PassContext
from passes.errors import PolicyError, StepFailed
from passes.external.through_files import through_files
from passes.graph.traversal import sort_nodes
from passes.recipe.user_code import (
    PassFacts,
    Reads,
    Refusal,
    StepReference,
    check_options,
    describe,
    files_of,
    inner_passes,
    installed_passes,
    run_on_file,
    run_on_structure,
    run_step,
)
from passes.step import PassResult, Step
from passes.user_files import is_reference
from passes.visible import visible_line
from passes.weights.detached import DetachedModel
from passes.weights.sharing import portable
from passes.worker.client import Worker

LOADING_S: Final = 120.0
"""Time limit in seconds for loading a pass to read its facts."""


@dataclass(frozen=True, slots=True)
class UserPass(Step):
    """A pass that the user wrote.

    Args:
        reference: what to load: `path/to/file.py:Name`, `package.module:Name`, or the name of an entry point.
        reads: `values` gets the whole model; `structure` gets it in milliseconds whatever it weighs, with stand-ins in
            place of the weights, and may move, copy and drop them, but not compute with them.
        options: keyword arguments of the class or the function.
    """

    reference: str
    name: str
    reads: Reads = "values"
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = "user"
    annotates: ClassVar[bool] = True

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        what = {"reference": self.reference, "options": dict(self.options)}
        with _kept_files(context.folder):
            if self.reads == "values":
                return PassResult(through_files(model, context, run_on_file, what, context.user_code))
            result = context.user_code.call(run_on_structure, model=model.proto.SerializeToString(), **what)
        proto = onnx.load_from_string(result)
        sort_nodes(proto.graph)
        return PassResult(model.with_proto(proto))


class FullStep(Step):
    """A full step of the user's, whose `apply` takes a context: that of the process in which it runs.

    Args:
        step: what the process loads and calls.
        facts: what the step's class declares: its name, source and fields.
    """

    def __init__(self, step: StepReference, facts: PassFacts) -> None:
        vars(self).update(facts.fields, name=facts.name, source=facts.source, is_composite=facts.composite)
        self.left_out = step.left_out
        self._step, self._facts = step, facts

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        folder = tempfile.mkdtemp(dir=context.folder, prefix="step-")
        source = portable(model, context.spill)
        draws = [dict(feeds) for feeds in context.draws()]
        with _kept_files(context.folder):
            output = context.user_code.call(run_step, step=self._step, model=source, folder=folder, draws=draws)
        if output.model is None:
            return PassResult(model, changed=False, why=output.why)
        return PassResult(output.model.to_detached(model.weights), why=output.why)

    def inner(self, context: PassContext) -> tuple[str, ...]:
        return context.user_code.call(inner_passes, step=self._step) if self.is_composite else ()

    def check(self, context: PassContext) -> None:
        _raise(context.user_code.call(check_options, step=self._step))

    def without(self, names: Sequence[str]) -> Self:
        if not self.is_composite:
            return self
        left_out = tuple(dict.fromkeys((*self.left_out, *names)))
        return type(self)(replace(self._step, left_out=left_out), self._facts)


def user_worker(worker: Worker | None = None) -> AbstractContextManager[Worker]:
    """`worker`, which stays open; or a new one for code of the user's, which starts when it is called first."""
    return Worker(LOADING_S, preload=USER_CODE, alone=True) if worker is None else nullcontext(worker)


def user_step(reference: str, options: Mapping[str, Any], worker: Worker) -> Step:
    """The step that `reference` names, made with `options`.

    Args:
        reference: `path/to/file.py:Name`, `package.module:Name`, or the name of an entry point.
        options: keyword arguments of the class or the function.
        worker: in which the user's code is loaded.

    Raises:
        PolicyError: there is nothing there (naming the nearest), loading it raises, it is no pass, or it does not
            take these options.
    """
    if visible_line(reference) != reference:
        raise PolicyError(f"found the pass {reference!r}, expected path/to/file.py:function or package.module:function")
    reference = _absolute(reference)
    facts = _ask(worker, describe, reference, options=dict(options))
    if facts.takes_context:
        return FullStep(StepReference(reference, dict(options)), facts)
    return UserPass(reference, facts.name, facts.reads, dict(options), facts.source)


def code_digest(names: Iterable[str]) -> str:
    """A digest of the code of the user's passes among `names`: their files with the modules these imported from the
    same folder, and the releases of their packages. Names of other passes do not count.

    Raises:
        PolicyError: a pass cannot be loaded.
    """
    digest = hashlib.blake2b(digest_size=16)
    entries = installed_passes()
    with user_worker() as worker:
        for name in names:
            entry = None if is_reference(name) else entries.get(name)
            if entry is not None and entry.dist is not None:
                digest.update(f"{entry.dist.name} {entry.dist.version}".encode())
            if entry is None and not is_reference(name):
                continue
            for file in _ask(worker, files_of, _absolute(name)):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _ask(worker: Worker, question: Callable[..., Any], reference: str, **arguments: Any) -> Any:
    """The answer to a question about a pass of the user's.

    Raises:
        PolicyError: there is none; or loading the pass ends the process, or does not end.
    """
    try:
        return _raise(worker.ask(question, within_s=LOADING_S, reference=reference, **arguments))
    except StepFailed as failure:
        raise PolicyError(f"the pass {reference}: it is loaded to see what it is, and {failure}") from failure


def _absolute(reference: str) -> str:
    """`reference` with the whole path of its file: the worker may have started in another folder."""
    location, _, name = reference.rpartition(":")
    return f"{Path(location).absolute()}:{name}" if location.endswith(".py") else reference


def _raise(answer: Any) -> Any:
    if isinstance(answer, Refusal):
        raise PolicyError(answer.message)
    return answer


@contextmanager
def _kept_files(folder: Path) -> Iterator[None]:
    """Put back the files of `folder` that a pass has deleted: later steps need the weights in these files."""
    with ExitStack() as stack:
        held = {path: stack.enter_context(path.open("rb")) for path in folder.rglob("*") if path.is_file()}
        folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                for path in folders:
                    path.mkdir(parents=True, exist_ok=True)
                for path in held.keys() - set(folder.rglob("*")):
                    with path.open("wb") as file:
                        shutil.copyfileobj(held[path], file)
