"""The folder of a run, while others use the disk too."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.errors import CheckFailed, UsageError
from pipeline.workspace import Workspace


def test_a_folder_that_is_removed_during_the_run_is_no_bug(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "out")
    with pytest.raises(UsageError, match="out was removed during the run; leave it"), workspace.acquire():
        shutil.rmtree(workspace.folder)
        workspace.write_text("a", "b")


def test_an_error_of_the_run_itself_stays(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed), Workspace(tmp_path / "out").acquire():
        raise CheckFailed("wrong")
