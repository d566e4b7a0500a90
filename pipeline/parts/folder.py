"""The folder `models` of a run: the final model of each part over one file of weights, and what applications read."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from passes.suggest import bytes_text, plural
from passes.weights.detached import read_model
from passes.weights.files import save_together
from pipeline.parts.genai import genai_config
from pipeline.parts.generate import DECODER, MODELS, SETTINGS
from pipeline.workspace import Workspace, digest_of_file, key_of, own_code_digest, stamp

WEIGHTS: Final = "weights.data"

STAGE: Final = "models"
"""The stage under which the list of files is saved."""

TOKENIZER_FILES: Final = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template.*",
)  # fmt: skip
"""What a tokenizer of Hugging Face is read from, as far as a folder has it."""

Files = tuple[tuple[str, int, int], ...]
"""Name below the folder of the run, size and time of each file."""


def write_models(
    finals: Mapping[str, Path], config: Any, source: Path | None, workspace: Workspace
) -> tuple[Files, bool]:
    """Write the models of all parts, `genai_config.json` and the tokenizer.

    Args:
        finals: part → its final model.
        config: of the source, from transformers.
        source: the folder of the source, which may have a tokenizer.

    Returns:
        The files, and whether they were there from an earlier run, and unchanged.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    folder = workspace.folder / MODELS
    data = [file.name for path in finals.values() for file in sorted(path.resolve().parent.glob(f"{path.name}.*.data"))]
    text = config.to_json_string()
    finals_key = {name: digest_of_file(path) for name, path in finals.items()}
    key = key_of(finals_key, data, text, str(source), own_code_digest())
    known = workspace.load(STAGE, key, Files)
    if known and workspace.is_unchanged(known):
        return known, True
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    models = {folder / f"{name}.onnx": read_model(path) for name, path in finals.items()}
    save_together(models, folder / WEIGHTS)
    if folder / DECODER in models:
        graph = models[folder / DECODER].proto.graph
        (folder / SETTINGS).write_text(genai_config(config, graph), encoding="utf-8")
    for file in (file for pattern in TOKENIZER_FILES for file in (source.glob(pattern) if source else ())):
        shutil.copyfile(file, folder / file.name)
    names = sorted(file.relative_to(workspace.folder).as_posix() for file in folder.iterdir())
    files = tuple((name, *stamp(workspace.folder / name)) for name in names)
    workspace.save(STAGE, key, files)
    return files, False


def describe_files(files: Files) -> str:
    """`2 models, 3.4 MB of weights`."""
    models = [name for name, _, _ in files if name.endswith(".onnx")]
    size = next((size for name, size, _ in files if name == f"{MODELS}/{WEIGHTS}"), 0)
    return f"{plural(len(models), 'model')}, {bytes_text(size)} of weights"
