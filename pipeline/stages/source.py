"""Make or open the model, and take the fingerprint of everything that it is made of."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path

from passes.weights import read_model
from pipeline.config import RunConfig
from pipeline.export.load import load_source
from pipeline.export.source import OnnxSource, Source, TorchSource, with_names

__all__ = ["fingerprint", "open_source"]


def open_source(config: RunConfig) -> Source:
    """The source under the names that `export:` gives.

    Raises:
        SourceMistake: the model, its checkpoint or its inputs cannot be made or read.
    """
    source = load_source(config.model)
    return with_names(source, config.export) if isinstance(source, TorchSource) else source


def fingerprint(source: Source) -> str:
    """A digest of the model's bytes: weights, and for torch also the code of every module class in it."""
    digest = hashlib.blake2b(digest_size=16)
    for spec in source.inputs:
        digest.update(repr(spec).encode())
    if isinstance(source, OnnxSource):
        model = read_model(source.path)
        for tensor in model.proto.graph.initializer:
            digest.update(model.digest(tensor).encode())
        digest.update(model.proto.SerializeToString(deterministic=True))
        return digest.hexdigest()
    _add_code(digest, source)
    _add_tensors(digest, source)
    return digest.hexdigest()


def _add_code(digest: hashlib.blake2b, source: TorchSource) -> None:
    files = set()
    for module in source.module.modules():
        try:
            files.add(inspect.getfile(type(module)))
        except (TypeError, OSError):  # a class made in a REPL has no file
            digest.update(repr(type(module)).encode())
    for file in sorted(files):
        path = Path(file)
        if path.is_file():
            digest.update(path.read_bytes())


def _add_tensors(digest: hashlib.blake2b, source: TorchSource) -> None:
    import torch

    named = (*source.module.named_parameters(), *source.module.named_buffers())
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    digest.update(repr(source.module).encode())
