"""A model whose weights stay in the files of others: where it is written, and what is read of them."""

from __future__ import annotations

import os
from pathlib import Path

import onnx

from passes.proof.prover import STRUCTURE
from passes.weights.detached import UNREAD
from pipeline.config import RunConfig, locate
from pipeline.errors import UsageError
from pipeline.workspace import Workspace

__all__ = ["MODEL", "final_path", "leaves_unread", "link_to", "shards_folder", "why_not_compared", "written_path"]

MODEL = "model.onnx"


def shards_folder(config: RunConfig) -> Path | None:
    """The folder of the files that the model refers to; None where weights are copied."""
    if config.export.weights != "referenced":
        return None
    path = locate(config.model.onnx or config.checkpoint or "").resolve()
    return path if path.is_dir() else path.parent


def final_path(config: RunConfig, workspace: Workspace) -> Path:
    """Where the final model is written: ONNX takes external data from the model's own folder only.

    Raises:
        UsageError: a file that is not ours stands there.
    """
    folder = shards_folder(config)
    if folder is None:
        return workspace.folder / MODEL
    path = folder / f"{config.name}.onnx"
    if path.exists() and not _is_ours(path):
        raise UsageError(
            f"{path} is there already, and onnxline has not written it; remove it, or give the run another name"
        )
    return path


def _is_ours(path: Path) -> bool:
    try:
        return any(entry.key == UNREAD for entry in onnx.load(path, load_external_data=False).metadata_props)
    except Exception:  # whatever it is, it is not ours
        return False


def written_path(workspace: Workspace) -> Path:
    """Where the final model of the run lies: its data is beside it, not beside a link to it."""
    path = workspace.folder / MODEL
    return path.readlink() if path.is_symlink() else path


def link_to(path: Path, workspace: Workspace) -> None:
    """Let `model.onnx` of the run stand for a model in another folder."""
    link = workspace.folder / MODEL
    if path == link:
        return
    temporary = workspace.folder / f".{MODEL}.{os.getpid()}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path)
    temporary.replace(link)


def leaves_unread(config: RunConfig) -> bool | None:
    """For `read_model`: whether weights stay unread; None where the file itself says."""
    return True if config.verify.proof == STRUCTURE else None


def why_not_compared(config: RunConfig) -> str:
    """Why no number was compared; empty where numbers were."""
    if config.verify.proof != STRUCTURE:
        return ""
    made = (
        "; the module was made without weights, which are in the checkpoint's files only" if config.weightless else ""
    )
    return f"verify.proof is structure: nothing was run{made}"
