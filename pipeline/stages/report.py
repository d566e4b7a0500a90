"""The last stage: writes the results of a run as `report.json`, `report.html` and `run.yaml`.

The files of a quantization simulation next to them belong to one final model, and go or stay with it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pipeline.config import RunConfig
from pipeline.report import ExportReport, PassesReport, Pictures, Report, RuntimeReport, report_json
from pipeline.report.html import page_of, render
from pipeline.report.model import Quantization
from pipeline.stages.source import why_not_compared, written_path
from pipeline.workspace import Workspace, digest_of_file, key_of


@dataclass(slots=True)
class Findings:
    """The results of the stages so far, each under the stage's name."""

    export: ExportReport | None = None
    passes: PassesReport | None = None
    runtime: RuntimeReport | None = None
    cached: list[str] = field(default_factory=list)
    """Stages that were taken from an earlier run."""
    seconds: dict[str, float] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=lambda: {"": []})
    """Notes by stage; the last key is the running stage."""


def write_report(
    config: RunConfig,
    findings: Findings,
    versions: Mapping[str, str],
    workspace: Workspace,
    failure: str = "",
    exit_code: int = 0,
    *,
    with_page: bool = True,
) -> Report:
    """Write `report.json` with the results so far, and `report.html` if `with_page`."""
    passes, why = findings.passes, why_not_compared(config)
    noted = (text for texts in findings.notes.values() for text in texts)
    exported = findings.export.notes if findings.export else ()
    report = Report(
        name=config.name,
        exit_code=exit_code,
        failure=failure,
        export=findings.export,
        passes=passes.passes if passes else (),
        structures=passes.structures if passes else (),
        sensitivity=passes.sensitivity if passes else None,
        runtime=findings.runtime,
        versions=versions,
        cached=tuple(findings.cached),
        seconds=findings.seconds,
        files=_files(workspace),
        marks=passes.marks if passes else (),
        not_compared=why,
        coverage=passes.coverage if passes and not why else None,
        notes=tuple(text for text in dict.fromkeys(noted) if text not in exported),
        layers=passes.layers if passes else (),
        names=passes.names if passes else None,
    )
    write_quietly(lambda: workspace.write_text("report.json", report_json(report)), when=bool(failure))
    if with_page:
        pictures = passes.pictures if passes else Pictures()
        write_quietly(lambda: write_page(report, pictures, workspace), when=bool(failure))
    return report


def write_page(report: Report, pictures: Pictures, workspace: Workspace) -> None:
    """Write `report.html`, with the section on quantization if one was saved for these models."""
    quantization = workspace.load(QUANTIZATION, key_of_models(report), Quantization)
    workspace.write_text("report.html", render(page_of(report, pictures, workspace.folder, quantization)))


def save_quantization(found: Quantization, report: Report, workspace: Workspace) -> None:
    """Save what the page shows of a quantization simulation of the final model of a run."""
    workspace.save(QUANTIZATION, key_of_models(report), found)


def remove_quantization(workspace: Workspace) -> None:
    """Remove what a simulation of an earlier run has written, so that it is never next to another model."""
    workspace.forget(QUANTIZATION)
    for file in _quantization_files(workspace):
        file.unlink(missing_ok=True)


def set_aside_quantization(workspace: Workspace) -> str:
    """Set what a simulation has written aside while the final model may be replaced, and return that model's digest.

    A run that is stopped loses it, since the next one empties `scratch`. The digest is empty where no simulation was.
    """
    files = [file for file in _quantization_files(workspace) if file.exists()]
    if not files:
        return ""
    digest = _digest_of_final(workspace)
    aside = workspace.scratch / QUANTIZATION
    aside.mkdir(parents=True)
    for file in files:
        target = aside / file.relative_to(workspace.folder)
        target.parent.mkdir(exist_ok=True)
        file.replace(target)
    return digest


def restore_quantization(digest: str, workspace: Workspace) -> None:
    """Bring back what was set aside if the final model is the same bit for bit; else remove it."""
    aside = workspace.scratch / QUANTIZATION
    if digest and digest == _digest_of_final(workspace):
        for file in filter(Path.is_file, aside.rglob("*")):
            file.replace(workspace.folder / file.relative_to(aside))
    else:
        remove_quantization(workspace)
    shutil.rmtree(aside, ignore_errors=True)


def _quantization_files(workspace: Workspace) -> tuple[Path, ...]:
    folder = workspace.folder
    return tuple(
        file for name in QUANTIZATION_FILES for file in (folder / name, *sorted(folder.glob(f"{name}.*.data")))
    )


def _digest_of_final(workspace: Workspace) -> str:
    """The digest of the final model's file, and of the files with its weights, which are named by their content.

    Empty if there is no model.
    """
    path = written_path(workspace)
    if not path.is_file():
        return ""
    data = sorted(file.name for file in path.parent.glob(f"{path.name}.*.data"))
    return key_of(path.name, digest_of_file(path), data)


def key_of_models(report: Report) -> str:
    """The key of the final models, which another recipe may make too. A simulation's files go when a model changes."""
    return key_of([mark.fingerprint for model in (report, *report.parts.values()) for mark in model.marks[-1:]])


QUANTIZATION: Final = "quantsim"
"""The stage under which the section is saved."""

QUANTIZED_MODEL: Final = "model.qdq.onnx"
ENCODINGS: Final = "model.encodings"
QUANTIZATION_REPORT: Final = "quantsim.json"
ROUNDED_MODEL: Final = "model.rounded.onnx"
CHECKPOINT_CONFIG: Final = "quantize_config.json"
LAYOUTS: Final = {
    **{name: f"{name}/model.safetensors" for name in ("gptq", "gptq_v2", "awq")},
    "matmul-nbits": "matmul-nbits/model.onnx",
}
"""Layout of `quantsim.layouts` → its file; a checkpoint has `CHECKPOINT_CONFIG` next to it."""
LAYOUT_FILES: Final = (*LAYOUTS.values(), *(f"{name}/{CHECKPOINT_CONFIG}" for name in LAYOUTS))
QUANTIZATION_FILES: Final = (QUANTIZED_MODEL, ROUNDED_MODEL, ENCODINGS, QUANTIZATION_REPORT, *LAYOUT_FILES)
"""What `onnxline quantsim` writes next to the files of the run."""


def write_quietly(write: Callable[[], object], *, when: bool = True) -> None:
    """Call `write`; with `when`, ignore its errors: a report that cannot be written must not hide the run's failure."""
    try:
        write()
    except Exception:
        if not when:
            raise


def has_good_report(workspace: Workspace) -> bool:
    """Whether the folder has the report of a run that ended well."""
    try:
        return json.loads((workspace.folder / "report.json").read_text(encoding="utf-8"))["exit_code"] == 0
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def _files(workspace: Workspace) -> tuple[str, ...]:
    """The files of the run, including those that are written after the report, and no simulation of it."""
    present = {path.name for path in workspace.folder.iterdir() if path.is_file()} - set(QUANTIZATION_FILES)
    return tuple(sorted(present | {"report.json", "report.html", "log.txt"}))


def write_settings(config: RunConfig, versions: Mapping[str, str], workspace: Workspace, *, is_given: bool) -> None:
    """Write `run.yaml`: the resolved configuration, which can be run again, with versions as a comment.

    Args:
        is_given: whether the module was given from Python, so that no file could name it; a comment says so.
    """
    note = "# The module was given from Python; this file alone does not make it.\n" if is_given else ""
    lines = "".join(f"#   {name} {version}\n" for name, version in versions.items())
    workspace.write_text("run.yaml", f"{note}# As resolved by onnxline, with\n{lines}{config.to_yaml()}")
