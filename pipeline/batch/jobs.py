"""The jobs of a batch: which configurations patterns name, and the run of each, or of each of its parts, as a job."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from passes.advisories.known import quarantined_by_entry
from passes.errors import PassError
from passes.proof.numbers import only_compared
from passes.recipe.recipe import names_of
from passes.recipe.user_passes import code_digest
from pipeline.argument_checks import NAMES, expects
from pipeline.config import RunConfig, is_reference
from pipeline.config.paths import locate, split_factory
from pipeline.errors import OnnxlineError, UsageError
from pipeline.jobs import Job
from pipeline.jobs.job import here
from pipeline.parts import PartsResult
from pipeline.parts.folder import PARTS
from pipeline.result import RunResult
from pipeline.run import Pipeline
from pipeline.verify.user_inputs import input_files
from pipeline.workspace import key_of, stamp


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A configuration or a model that a pattern names. `config` is None if it cannot be read; `mistake` says why."""

    path: Path
    name: str
    config: RunConfig | None
    mistake: OnnxlineError | PassError | None = None


@expects(patterns=NAMES, overrides=NAMES)
def read_configs(patterns: Sequence[str], overrides: Sequence[str] = ()) -> tuple[PlannedRun, ...]:
    """The configurations that `patterns` name, in their order; the matches of a glob are sorted; no duplicates.

    A model, `model.onnx` or `file.py:make`, has a configuration with all else by default.

    Raises:
        UsageError: a pattern names no file, or two configurations have one name, and so one folder.
    """
    planned = tuple(_read(path, overrides) for path in _files(patterns))
    first: dict[str, PlannedRun] = {}
    for run in planned:
        other = first.setdefault(run.name, run) if run.config is not None else run
        if other is not run:
            raise UsageError(
                f"{other.path} and {run.path} are both named {run.name!r}, so they would write into one folder; "
                "give each a `name` of its own, or run one of them with another --out"
            )
    return planned


def _read(path: Path, overrides: Sequence[str]) -> PlannedRun:
    try:
        config = RunConfig.from_source(path, overrides)
    except (OnnxlineError, PassError) as error:
        return PlannedRun(path, path.stem, None, error)
    return PlannedRun(path, config.name, config)


def _files(patterns: Sequence[str]) -> tuple[Path, ...]:
    files: dict[Path, Path] = {}
    for pattern in patterns:
        matches = list(_matches(pattern))
        if not matches:
            raise UsageError(f"{pattern!r} names no file; expected configurations or models, such as 'configs/*.yaml'")
        for path in matches:
            files.setdefault(path.resolve(), path)
    return tuple(files.values())


def _matches(pattern: str) -> Iterator[Path]:
    if is_reference(pattern) or Path(pattern).is_file():  # its name may hold brackets
        yield Path(pattern)
        return
    matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - the pattern may be absolute
    yield from (path for path in map(Path, matches) if path.is_file())


def jobs_of(planned: PlannedRun, out: Path, *, by_part: bool = False) -> list[Job]:
    """The run of a configuration that could be read, into `out`/<name>; with `by_part` after a job for each part.

    The arguments hold all that the run depends on, so it is a new job when the settings, the files of the model, the
    code of the user's passes, or the passes that tables call unsafe change.

    Raises:
        PolicyError: a user's pass cannot be loaded, or a table is missing.
        ModelError: a table cannot be read.
    """
    config = planned.config
    assert config is not None
    folder = str((out / planned.name).resolve())
    configs = {name: config.of_part(name) for name in config.model.part_names}
    parts = [
        Job(
            part_key(planned.name, name),
            run_one,
            {**_dependencies([own]), "settings": _with_one_part(config, name), "folder": folder, "part": name},
        )
        for name, own in (configs.items() if by_part and len(configs) > 1 else ())
    ]
    arguments = {**_dependencies([config, *configs.values()]), "settings": config.to_mapping(), "folder": folder}
    return [*parts, Job(planned.name, run_one, arguments, after=[part.key for part in parts])]


def part_key(run: str, part: str) -> str:
    """The key of the job of a part: its folder below that of the batch."""
    return f"{run}/{PARTS}/{part}"


def _dependencies(configs: Sequence[RunConfig]) -> dict[str, Any]:
    """The arguments of a job that change with what is outside of its configuration, or of those of its parts."""
    files = dict.fromkeys(file for config in configs for file in _model_files(config) if _is_there(file))
    settings = [config.passes for config in configs]
    return {
        "files": {file: stamp(locate(file)) for file in files},
        "passes": key_of([code_digest(names_of(passes.recipe)) for passes in settings]),
        "unsafe": {name: found for passes in settings for name, found in quarantined_by_entry(passes.skip).items()},
    }


def _with_one_part(config: RunConfig, name: str) -> dict[str, Any]:
    """The settings without what the other parts have of their own, which a job of this part does not depend on."""
    settings = config.to_mapping()
    settings["parts"] = {part: own for part, own in settings["parts"].items() if part == name}
    if config.model.parts is not None:
        settings["model"] = {"parts": {name: settings["model"]["parts"][name]}}
    return settings


def run_one(
    settings: Mapping[str, Any],
    folder: str,
    files: Mapping[str, Sequence[int]],
    passes: str,
    unsafe: Mapping[str, Sequence[str]],
    part: str = "",
) -> dict[str, Any]:
    """Run a configuration, or one part of it, and return its figures; it raises the same errors as `onnxline run`.

    Args:
        settings: a resolved configuration.
        folder: where its artifacts go.
        files: path → size and time of each file of the model, on the machine where the batch was started.
        passes: a digest of the user's own passes; only there so that it is a new job when they change.
        unsafe: the passes that tables of audits leave out; there for the same reason.
        part: only this part, which the run of the whole then takes from the folder.

    Raises:
        UsageError: this machine does not have the same files at the same paths.
    """
    config = RunConfig.from_mapping(settings)
    _refuse_other_files(files)
    run = Pipeline(config, Path(folder))
    return {**_summary(run.run_part(part)), "report": None} if part else _summary(run.run())


def _summary(result: RunResult) -> dict[str, Any]:
    known = {"report": stamp(result.folder / REPORT), "code": dict(result.code)}
    if not isinstance(result, PartsResult):
        return {**_figures(result), **known}
    parts = {name: _figures(part) for name, part in result.parts.items()}
    errors = [part["worst_error"] for part in parts.values() if part["worst_error"] is not None]
    unsupported = dict.fromkeys(name for part in parts.values() for name in part["unsupported"])
    return {
        **{key: sum(part[key] for part in parts.values()) for key in SUMS},
        "worst_error": max(errors, default=None),
        "unsupported": list(unsupported),
        "parts": parts,
        **known,
    }


def _figures(result: RunResult) -> dict[str, Any]:
    """The figures of one model."""
    backends = result.runtime.backends
    errors = [errors.max_abs for backend in backends for errors in only_compared(backend.errors).values()]
    return {
        "nodes_before": result.export.nodes,
        "nodes_after": result.optimize.nodes,
        "kept": sum(verdict.kept for verdict in result.structures),
        "structures": len(result.structures),
        "reverted": sum(row.status.counts_as_reverted for row in result.passes),
        "worst_error": max(errors, default=None),
        "unsupported": [backend.name for backend in result.runtime.backends if backend.shortfall],
    }


SUMS: Final = ("nodes_before", "nodes_after", "kept", "structures", "reverted")
"""Figures of a run in parts that are sums over its parts."""


def _model_files(config: RunConfig) -> list[str]:
    """The files of the model and of the user's inputs, as the configuration names them."""
    model = config.model
    if model.parts is not None:
        files = [file for name in model.part_names for file in _model_files(config.of_part(name))]
        chain, _ = split_factory(model.chain, "model.chain") if model.chain else ("", "")
        return [*files, chain] if chain.endswith(".py") else files
    factory, _ = split_factory(model.factory) if model.factory else ("", "")
    named = [factory if factory.endswith(".py") else "", model.onnx, model.checkpoint]
    if model.transformers is not None:
        named += [model.transformers.config, model.transformers.checkpoint, *_in_folder(model.transformers.folder)]
    if model.diffusers is not None:
        named += _in_folder(model.diffusers.folder)
    with contextlib.suppress(UsageError):  # the run will report it
        named += [str(file or name.rpartition(":")[0]) for name, file in input_files(config.verify.inputs)]
    return [file for file in named if isinstance(file, str) and file]


def _in_folder(folder: str | None) -> list[str]:
    """The files below a folder: each model of a pipeline has a folder of its own."""
    return sorted(map(str, locate(folder).rglob("*.*"))) if folder and _is_there(folder) else []


def _is_there(file: str) -> bool:
    """Whether the file exists; the run itself reports a missing one."""
    try:
        return locate(file).exists()
    except UsageError:
        return False


def _refuse_other_files(files: Mapping[str, Sequence[int]]) -> None:
    """Refuse missing files and other sizes. Times may differ, if a package was installed on each machine separately."""
    others = [file for file, (size, _) in files.items() if not _is_there(file) or stamp(locate(file))[0] != size]
    if others:
        raise UsageError(
            f"{', '.join(others)} on {here()}: not there, or not as large as where the batch was started; "
            "every node needs the same files at the same paths, on a disk that they share"
        )


REPORT: Final = "report.json"
