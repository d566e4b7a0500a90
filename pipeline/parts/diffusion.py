"""The folder of a pipeline of diffusers, a folder for each model; and the proof that its image is diffusers' own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from passes.weights.detached import read_model
from passes.weights.files import replace_folder_when_done, save_together
from pipeline.config import RunConfig
from pipeline.parts.folder import MODEL_ALONE, WEIGHTS_ALONE, Files, load_files, save_files, stamps_of
from pipeline.parts.sessions import MODELS, backends_of, step_opener
from pipeline.report import ImageReport
from pipeline.workspace import Workspace, digest_of_file, key_of, own_code_digest

if TYPE_CHECKING:
    from pipeline.export.parts.diffusion import DiffusionModels

LIMIT: Final = 1 / 510
"""The most that a pixel of an image from 0 to 1 may differ: half of a step of eight bits."""


def write_pipeline(finals: Mapping[str, Path], models: DiffusionModels, workspace: Workspace) -> tuple[Files, bool]:
    """Write the final model of each part into a folder of its own, as diffusers and optimum-onnx lay them out.

    Args:
        finals: part → its final model.
        models: the pipeline; its scheduler, its tokenizers and the configurations of its models are written too.

    Returns:
        The files, and whether they were there from an earlier run, and unchanged.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    folder = workspace.folder / MODELS
    source = Path(models.section.folder) if models.section.folder is not None else None
    digests = {name: digest_of_file(path) for name, path in finals.items()}
    stamps = stamps_of(sorted(file for file in source.rglob("*") if file.is_file())) if source is not None else ()
    key = key_of(digests, str(models.section), stamps, own_code_digest())
    known = load_files(workspace, key)
    if known:
        return known, True
    with replace_folder_when_done(folder) as fresh:
        for name, path in finals.items():
            (fresh / name).mkdir()
            save_together({fresh / name / MODEL_ALONE: read_model(path)}, fresh / name / WEIGHTS_ALONE)
            model, _ = models.component(name)
            write = getattr(model, "save_config", None) or model.config.save_pretrained
            write(fresh / name)
        models.pipe.save_config(fresh)
        models.pipe.scheduler.save_pretrained(fresh / "scheduler")
        for place in sorted(source.glob("*")) if source is not None else ():
            if place.is_dir() and place.name.startswith(("tokenizer", "feature_extractor")):
                shutil.copytree(place, fresh / place.name)
            elif place.name == "model_index.json":
                shutil.copyfile(place, fresh / place.name)
    return save_files(workspace, key), False


def prove_images(
    open_models: Callable[[], DiffusionModels],
    folder: Path,
    config: RunConfig,
    observe: Callable[[str, int, int], object] = lambda *_: None,
) -> tuple[ImageReport, ...]:
    """Compare the image that the pipeline makes by the files with that by torch, on each backend.

    Args:
        folder: with a folder for each part.
        observe: called with each backend before it runs, its place and how many there are.
    """
    from pipeline.export.parts.diffusion import STEPS  # loads torch

    models, names, found = open_models(), backends_of(config), []
    for place, name in enumerate(names):
        observe(name, place, len(names))
        open_step: Any = step_opener(folder, name, config.runtime, optimized=False)
        called = [part for part in models.names if not part.endswith("vae_encoder")]
        with models.replace_models({part: open_step(folder / part / MODEL_ALONE) for part in called}):
            image = models.make_image()
        worst = float((image - models.image).abs().max())
        is_right = worst <= LIMIT
        why = "" if is_right else f"a pixel differs by {worst:.1e}, and {LIMIT:.1e} is half of a step of eight bits"
        found.append(ImageReport(name, STEPS, worst, LIMIT, is_right, why))
    return tuple(found)
