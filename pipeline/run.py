"""The whole run: from a configuration to verified models, their IR and their plans. Read `ModelRun.execute` first."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from passes.custom_ops import declare_ops
from passes.errors import check_type
from pipeline.config import RunConfig
from pipeline.errors import UsageError
from pipeline.events import Observer
from pipeline.export.source import Source
from pipeline.model_run import ModelRun
from pipeline.parts.run import PartsRun
from pipeline.result import RunResult
from pipeline.stages.check import check_settings, default_folder
from pipeline.workspace import Workspace


class Pipeline:
    """One run of one configuration.

    Args:
        config: as read by `RunConfig.from_yaml`.
        out: the folder of the artifacts; `runs/<name>` below the working directory by default.
        observer: called with each event; the run itself prints nothing.
        source: the model, if it exists already; otherwise it is made from `config.model`.
        is_checked: whether `check_settings` has been called already.
        writes_page: whether a run of one model that ends well writes `report.html`; the caller does otherwise.
    """

    def __init__(
        self,
        config: RunConfig,
        out: str | Path | None = None,
        observer: Observer = lambda _: None,
        source: Source | None = None,
        *,
        is_checked: bool = False,
        writes_page: bool = True,
    ) -> None:
        if not isinstance(config, RunConfig):
            raise UsageError(
                f"Pipeline: found {type(config).__name__}, expected a RunConfig, as RunConfig.from_yaml reads"
            )
        if out is not None:
            check_type(out, (str, PathLike), "Pipeline: out", "the path of a folder")
        if not callable(observer):
            raise UsageError(f"Pipeline: observer: found {type(observer).__name__}, expected a function of one event")
        self.config = config
        self.folder = default_folder(config, out)
        self._observer = observer
        self._source = source
        self._is_checked, self._writes_page = is_checked, writes_page

    def run(self) -> RunResult:
        """Run the stages whose inputs have changed since the last run in this folder; load the results of the others.

        Returns:
            What each stage found; of a configuration in parts a `PartsResult`, which has the parts too.

        Raises:
            UsageError, PassError: something that was given is wrong (exit code 2); the report of an earlier run that
                ended well stays, unless its model has been replaced.
            CheckFailed: the export, a pass under `strict`, or the final model is not right (exit code 1).
        """
        workspace = self._checked_workspace()
        with declare_ops(self.config.custom_ops):
            if self.config.model.part_names:
                return PartsRun(self.config, workspace, self._observer).run()
            run = ModelRun(self.config, workspace, self._observer, self._source, writes_page=self._writes_page)
            return run.run()

    def run_part(self, name: str) -> RunResult:
        """Run one part of a configuration in parts to where `run` takes it from; several may run at the same time.

        Args:
            name: a key of the configuration's `parts`.

        Raises:
            UsageError: there is no such part, or see `run`; a run of all parts is at work in the folder.
            CheckFailed: see `run`.
        """
        if name not in self.config.model.part_names:
            known = ", ".join(self.config.model.part_names) or "none, for this is the run of one model"
            raise UsageError(f"Pipeline.run_part: found the part {name!r}, expected one of the parts: {known}")
        workspace = self._checked_workspace()
        with declare_ops(self.config.custom_ops):
            return PartsRun(self.config, workspace, self._observer).run_alone(name)

    def _checked_workspace(self) -> Workspace:
        workspace = Workspace(self.folder)
        if not self._is_checked:
            check_settings(self.config, workspace)
        return workspace
