"""Parts of one's own: which of them share weights, and the folder `models` of a run that has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from passes.weights.detached import DetachedModel, read_model
from passes.weights.files import replace_folder_when_done, save_together
from pipeline.parts.folder import MODEL_ALONE, WEIGHTS, WEIGHTS_ALONE, Files, load_files, save_files
from pipeline.parts.sessions import MODELS
from pipeline.workspace import Workspace, key_of, own_code_digest


def write_own_parts(finals: Mapping[str, Path], workspace: Workspace) -> tuple[Files, dict[str, str], bool]:
    """Write the final models. Those that share a weight lie together over one file; others have a folder each.

    Args:
        finals: part → its final model.

    Returns:
        The files; part → its file below `models`; and whether they were there from an earlier run, and unchanged.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    folder = (workspace.folder / MODELS).resolve()
    key, places = key_of(sorted(finals), own_code_digest()), {name: path.resolve() for name, path in finals.items()}
    known = load_files(workspace, key)
    if known and all(place.is_relative_to(folder) for place in places.values()):  # the parts have links to them
        return known, {name: place.relative_to(folder).as_posix() for name, place in places.items()}, True
    models = {name: read_model(path) for name, path in finals.items()}  # some may lie in `folder`
    sharing = find_sharing(models)
    written = {name: f"{name}.onnx" if name in sharing else f"{name}/{MODEL_ALONE}" for name in models}
    with replace_folder_when_done(folder) as fresh:
        if sharing:
            save_together({fresh / written[name]: models[name] for name in sharing}, fresh / WEIGHTS)
        for name in models.keys() - sharing.keys():
            (fresh / name).mkdir()
            save_together({fresh / written[name]: models[name]}, fresh / name / WEIGHTS_ALONE)
    return save_files(workspace, key), written, False


def find_sharing(models: Mapping[str, DetachedModel]) -> dict[str, frozenset[str]]:
    """Part → the digests of its weights that another part has too; without parts that share none.

    Small tensors, which stay in the files of models, do not count.
    """
    weights = {name: frozenset(weight.digest for weight in model.weights.values()) for name, model in models.items()}
    counts = Counter(digest for digests in weights.values() for digest in digests)
    shared = frozenset(digest for digest, count in counts.items() if count > 1)
    return {name: digests & shared for name, digests in weights.items() if digests & shared}
