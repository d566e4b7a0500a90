"""Models whose weights stay in a checkpoint's files: where they are written, and whether weights are read."""

from __future__ import annotations

import os
from pathlib import Path

import onnx

from passes.proof.prover import STRUCTURE
from passes.weights.detached import UNREAD
from pipeline.config import RunConfig, locate
from pipeline.errors import UsageError
from pipeline.workspace import Workspace

MODEL = "model.onnx"


def shards_folder(config: RunConfig) -> Path | None:
    """The folder of the weight files that the model refers to; None where weights are copied."""
    if config.export.weights != "referenced":
        return None
    path = locate(config.model.onnx or config.checkpoint or "").resolve()
    return path if path.is_dir() else path.parent


def final_path(config: RunConfig, workspace: Workspace) -> Path:
    """The path of the final model: next to referenced weights, since ONNX loads external data from its own folder only.

    Raises:
        UsageError: another file, which onnxline has not written, has that path.
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
    except Exception:  # a file that cannot be read is not ours
        return False


def written_path(workspace: Workspace) -> Path:
    """The path of the final model, links resolved: its data is next to the file, not next to a link to it."""
    path = workspace.folder / MODEL
    return path.readlink() if path.is_symlink() else path


def link_to(path: Path, workspace: Workspace) -> None:
    """Make `model.onnx` of the run a link to a model in another folder."""
    link = workspace.folder / MODEL
    if path == link:
        return
    temporary = workspace.folder / f".{MODEL}.{os.getpid()}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path)
    temporary.replace(link)


def leaves_unread(config: RunConfig) -> bool | None:
    """Whether weights stay unread, for `read_model`; None where the file itself decides."""
    return True if config.verify.proof == STRUCTURE else None


def why_not_compared(config: RunConfig) -> str:
    """The reason why no numbers are compared; empty where they are."""
    if config.verify.proof != STRUCTURE:
        return ""
    where = (
        "; the module was made without weights, which are in the checkpoint's files only" if config.weightless else ""
    )
    return f"verify.proof is structure: nothing was run{where}"
