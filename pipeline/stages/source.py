"""Stage `source`: makes or opens the model, and computes its fingerprint.

The weights may stay in a checkpoint's files; then the stage decides where they are written, and whether they are read.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from importlib.util import resolve_name
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from passes.graph.traversal import pause_collector
from passes.proof.prover import STRUCTURE
from passes.user_files import is_user_code
from passes.weights.detached import UNREAD, read_model
from passes.weights.stand_ins import digest_of
from pipeline.config import ModelConfig, RunConfig, locate, split_factory
from pipeline.errors import UsageError
from pipeline.export.load import load_source
from pipeline.export.source import OnnxSource, Source, TorchSource, with_dynamic_shapes
from pipeline.stages.check import refuse_export_keys
from pipeline.workspace import Workspace, key_of, own_code_digest, stamp, versions

if TYPE_CHECKING:  # it imports torch
    from pipeline.export.transformers_class import LoadedModel


def open_source(config: RunConfig, loaded: LoadedModel | None = None, stages: Path | None = None) -> Source:
    """Make or open the source, with the names, and with the buffers as inputs, that `export:` asks for.

    Args:
        loaded: the model that the parts of `model.task` share.
        stages: a folder that keeps the calls of a pipeline's models for a later run.

    Raises:
        SourceError: the model, its checkpoint or its inputs cannot be made or read.
        ConfigError: keys of `export:` that mean nothing for an ONNX file are set.
    """
    refuse_export_keys(config)
    named = with_dynamic_shapes(config.model, config.export)
    if stages is not None and loaded is None and config.model.diffusers is not None:
        loaded = load_pipeline(config.model, stages)
    with pause_collector() if config.weightless else nullcontext():
        source = load_source(named, weightless=config.weightless, loaded=loaded)
    if isinstance(source, OnnxSource):
        return source
    from pipeline.export import as_configured  # loads torch, which an ONNX file does not need

    return as_configured(source, config.export)


def load_pipeline(model: ModelConfig, stages: Path) -> LoadedModel:
    """The pipeline of `model.diffusers`, whose calls the folder `stages` keeps as long as nothing has changed that they
    depend on: the files of the pipeline, by size and time, the versions and our code.

    Raises:
        SourceError: a model of the pipeline is missing, or the pipeline does not run.
    """
    from pipeline.export.parts import CallFile, load_for_parts  # loads torch

    folder = model.diffusers.folder if model.diffusers is not None else None
    files = sorted(Path(folder).rglob("*")) if folder is not None else ()
    stamps = [(str(path), *stamp(path)) for path in files if path.is_file()]
    known = model.model_dump(mode="json", exclude={"part"})
    calls = CallFile(stages / "calls.pt", key_of(known, stamps, own_code_digest(), versions()))
    return load_for_parts(model, calls=calls)


def traced_shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """Input → its shape in the call that torch exports; empty for an ONNX file, which comes without a call."""
    if isinstance(source, OnnxSource):
        return {}
    from pipeline.export.tree import input_tensors  # loads torch, which an ONNX file does not need

    tensors = input_tensors(source.module, source.example).values()
    return {spec.name: tuple(tensor.shape) for spec, tensor in zip(source.own_inputs, tensors, strict=True)}


def fingerprint(source: Source, config: RunConfig, code: Sequence[Path]) -> str:
    """A digest of the model's bytes: weights, and for torch also `code`, the files that make and run it (`code_of`).

    Of unread weights only the position in their files counts, and the files' size and time.
    """
    digest = hashlib.blake2b(digest_size=16)
    if config.export.weights == "referenced" and config.checkpoint is not None:
        from pipeline.export.checkpoint import read_shards  # loads torch, which an ONNX file does not need

        digest.update(read_shards(locate(config.checkpoint)).fingerprint().encode())
    for spec in source.inputs:
        digest.update(repr(spec).encode())
    if isinstance(source, OnnxSource):
        model = read_model(source.path, unread=True) if config.verify.proof == STRUCTURE else source.model
        for tensor in model.proto.graph.initializer:
            digest.update(model.digest(tensor).encode())
        digest.update(model.proto.SerializeToString(deterministic=True))
        return digest.hexdigest()
    for file in code:
        digest.update(file.read_bytes())
    _add_tensors(digest, source)
    return digest.hexdigest()


def code_of(source: Source, model: ModelConfig) -> list[Path]:
    """The Python files that made the model: those of the module classes; a factory's file or package and the loaded
    files next to it; and what these import, without installed libraries. Empty for an ONNX source."""
    files = set()
    if isinstance(source, OnnxSource):
        return []
    for module in source.module.modules():
        try:
            files.add(Path(inspect.getfile(type(module))))
        except (TypeError, OSError):  # a class made in a REPL has no file
            continue
    if model.factory is not None:
        factory = split_factory(model.factory)[0]
        own = _files_of_factory(locate(factory).resolve()) if factory.endswith(".py") else _of_package(factory)
        files.update(_with_imports(own))
    return sorted(file for file in files if file.is_file())


def _files_of_factory(factory: Path) -> set[Path]:
    """`factory` and the loaded files of its folder and below. Folders are resolved once each: torch has 2,000 files."""
    files = {file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    folders = {os.path.dirname(file) for file in files}  # noqa: PTH120 - a Path each takes ten times as long
    folders.discard("")  # torch.ops says "_ops.py", which is no file of the working directory
    own_folders = {folder for folder in folders if Path(folder).resolve().is_relative_to(factory.parent)}
    return {factory, *(Path(file) for file in files if os.path.dirname(file) in own_folders)}  # noqa: PTH120


def _of_package(factory: str) -> set[Path]:
    """The loaded files of the factory's package."""
    top = factory.partition(".")[0]
    loaded = [module for name, module in list(sys.modules.items()) if name == top or name.startswith(f"{top}.")]
    return {Path(file) for module in loaded if (file := getattr(module, "__file__", None))}


def _with_imports(files: Iterable[Path]) -> set[Path]:
    """`files` and the loaded files that they import, directly or not, without installed libraries."""
    paths = {name: Path(file) for name, module in list(sys.modules.items()) if (file := _file_of(module))}
    names = {path: name for name, path in paths.items()}
    reached, waiting = set(files), list(files)
    while waiting:
        file = waiting.pop()
        if not file.is_file():  # it is inside an archive
            continue
        for name in _imported_names(file, getattr(sys.modules.get(names.get(file, "")), "__package__", None) or ""):
            path = paths.get(name)
            if path is not None and path not in reached and is_user_code(str(path)):
                reached.add(path)
                waiting.append(path)
    return reached


def _file_of(module: object) -> str:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and file.endswith(".py") else ""


def _imported_names(file: Path, package: str) -> Iterator[str]:
    """Names of the modules that `file` may import; `from a import b` gives both `a` and `a.b`."""
    for node in ast.walk(ast.parse(file.read_bytes())) if file.suffix == ".py" else ():
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                yield from (".".join(parts[: end + 1]) for end in range(len(parts)))
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            name = resolve_name("." * node.level + (node.module or ""), package or None)
            yield from (name, *(f"{name}.{alias.name}" for alias in node.names))


def _add_tensors(digest: hashlib.blake2b, source: TorchSource) -> None:
    import torch

    from pipeline.runtime.tensors import to_numpy

    named = (*source.module.named_parameters(), *source.module.named_buffers())
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode())
        if tensor.is_meta:
            continue
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(digest_of(flat.view(torch.uint8).numpy()).encode() if flat.numel() else b"")
    for name, tensor in sorted(source.buffers.items()):
        digest.update(f"{name} {to_numpy(tensor).tobytes()!r}".encode())
    digest.update(repr(source.module).encode())


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
    return path.resolve() if path.is_symlink() else path


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
    """Why no values are compared; empty where they are."""
    if config.verify.proof != STRUCTURE:
        return ""
    where = (
        "; the module was made without weights, which are in the checkpoint's files only" if config.weightless else ""
    )
    return f"verify.proof is structure: nothing was run{where}"
