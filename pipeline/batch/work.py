"""One run as a job: what it is told, which files it needs where it is done, and what it comes to."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from passes.advisories.known import quarantines
from passes.recipe.recipe import names_of
from passes.recipe.user_passes import code_digest
from pipeline.batch.configs import Planned
from pipeline.config import RunConfig
from pipeline.config.paths import locate, split_factory
from pipeline.errors import UsageError
from pipeline.result import RunResult
from pipeline.run import Pipeline
from pipeline.spread import Job
from pipeline.spread.perform import here
from pipeline.verify.user_inputs import input_files
from pipeline.workspace import stamp

__all__ = ["REPORT", "job_of", "run_one"]

REPORT: Final = "report.json"


def job_of(planned: Planned, out: Path) -> Job:
    """The run of a configuration that could be read, into `out`/<name>.

    All on which it depends is in the arguments, so that it is another job when the settings, the files of the model,
    the code of the user's own passes or what their tables call unsafe change.

    Raises:
        PolicyError: a pass of the user's own cannot be loaded, or there is no table where one should be.
        ModelError: a table cannot be read.
    """
    assert planned.config is not None
    wishes = planned.config.passes
    arguments = {
        "settings": planned.config.resolved(),
        "folder": str((out / planned.name).resolve()),
        "files": {file: stamp(locate(file)) for file in _files(planned.config) if _is_there(file)},
        "passes": code_digest(names_of(wishes.recipe)),
        "unsafe": quarantines(wishes.skip),
    }
    return Job(planned.name, RUN_ONE, arguments)


def run_one(
    settings: Mapping[str, Any],
    folder: str,
    files: Mapping[str, Sequence[int]],
    passes: str,
    unsafe: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Run a configuration; what it raises is what `onnxline run` would say.

    Args:
        settings: a configuration as resolved.
        folder: of its artifacts.
        files: by path, size and time of what the model is read from, where the batch was started.
        passes: a digest of the user's own passes; only there to make another job of it when they change.
        unsafe: what tables of audits leave out; there for the same reason.

    Raises:
        UsageError: this machine has not the same files at the same paths.
    """
    config = RunConfig.from_mapping(settings)
    _refuse_other_files(files)
    return _summary(Pipeline(config, Path(folder)).run())


def _summary(result: RunResult) -> dict[str, Any]:
    errors = [errors.max_abs for backend in result.runtime.backends for errors in backend.errors.values()]
    return {
        "nodes_before": result.export.nodes,
        "nodes_after": result.optimize.nodes,
        "kept": sum(verdict.kept for verdict in result.structures),
        "structures": len(result.structures),
        "reverted": sum(row.status.counts_as_reverted for row in result.passes),
        "worst_error": max(errors, default=None),
        "unsupported": [backend.name for backend in result.runtime.backends if backend.shortfall],
        "report": stamp(result.folder / REPORT),
        "code": dict(result.code),
    }


def _files(config: RunConfig) -> list[str]:
    """What the model and the user's own inputs are read from, as the configuration names it."""
    model = config.model
    factory, _ = split_factory(model.factory) if model.factory else ("", "")
    named = [factory if factory.endswith(".py") else "", model.onnx, model.checkpoint]
    if model.transformers is not None:
        named += [model.transformers.config, model.transformers.checkpoint, *_in_folder(model.transformers.folder)]
    with contextlib.suppress(UsageError):  # the run will name it
        named += [str(file or name.rpartition(":")[0]) for name, file in input_files(config.verify.inputs)]
    return [one for one in named if isinstance(one, str) and one]


def _in_folder(folder: str | None) -> list[str]:
    return sorted(map(str, locate(folder).glob("*.*"))) if folder and _is_there(folder) else []


def _is_there(file: str) -> bool:
    """What is not there the run will name."""
    try:
        return locate(file).exists()
    except UsageError:
        return False


def _refuse_other_files(files: Mapping[str, Sequence[int]]) -> None:
    """Times may differ, where a package was installed on each machine by itself."""
    others = [file for file, (size, _) in files.items() if not _is_there(file) or stamp(locate(file))[0] != size]
    if others:
        raise UsageError(
            f"{', '.join(others)} on {here()}: not there, or not as large as where the batch was started; "
            "every node needs the same files at the same paths, on a disk that they share"
        )


RUN_ONE: Final = "pipeline.batch.work:run_one"
