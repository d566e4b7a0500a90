"""`RunResult`: each stage's result, and the files of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from passes.proof.draws import InputSampler
from passes.run.result import OptimizeResult, PassRow, StructureVerdict, summary_lines
from passes.suggest import milliseconds_text, shorten_lines
from pipeline.report import ExportReport, PassesReport, Report, RuntimeReport

if TYPE_CHECKING:
    import onnx

    from pipeline.ir import Graph


@dataclass(frozen=True, repr=False)
class RunResult(OptimizeResult):
    """The results of the stages of one run that ended well.

    `folder` holds the files of the run; `export`, `optimize` and `runtime` are what these stages report, and `report`
    is `report.json` as an object. `cached` names the stages that were taken from an earlier run, since nothing that
    they depend on has changed.
    """

    folder: Path
    export: ExportReport
    optimize: PassesReport
    runtime: RuntimeReport
    report: Report
    cached: tuple[str, ...]
    code: Mapping[str, str] = field(default_factory=dict)
    """Python files that made the model → their digests."""
    sampler: InputSampler | None = None
    """Draws inputs of the model at sizes and in ranges on which the reference ran; None where nothing was run."""

    @property
    def passes(self) -> tuple[PassRow, ...]:
        return self.optimize.passes

    @property
    def structures(self) -> tuple[StructureVerdict, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimize.structures

    def __repr__(self) -> str:
        times = ", ".join(
            f"{backend.name} {'unsupported' if backend.shortfall else milliseconds_text(backend.seconds)}"
            for backend in self.runtime.backends
        )
        backends = (f"a run on {times}",) if times else ()
        lines = ("RunResult", *summary_lines(self.passes, self.structures), *backends, f"files: {self.folder}/")
        return shorten_lines(lines)

    @property
    def model(self) -> Path:
        """The final ONNX file; that of a part is in `models` of all parts, and one that refers to the weights of a
        checkpoint in the checkpoint's folder."""
        path = self.folder / "model.onnx"
        return path.resolve() if path.is_symlink() else path

    def save(self, path: str | PathLike[str]) -> None:
        from passes.weights.detached import read_model
        from passes.weights.files import write_model

        write_model(read_model(self.model), path)

    def to_proto(self) -> onnx.ModelProto:
        from passes.weights.detached import attach, read_model

        return attach(read_model(self.model))

    @cached_property
    def graph(self) -> Graph:
        """The IR from `ir.json`, without weights.

        Raises:
            FileNotFoundError: no IR was made: the `plan` backend was left out, or cannot take the model, and then
                `runtime.backends` says why.
        """
        import json

        from pipeline.ir import from_json

        return from_json(json.loads((self.folder / "ir.json").read_text(encoding="utf-8")))
