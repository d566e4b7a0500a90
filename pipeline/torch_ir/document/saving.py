"""An IR into its files: the JSON in pieces, and beside it the constants that are large."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.torch_ir.document import files
from pipeline.torch_ir.document.clearing import clearing
from pipeline.torch_ir.document.constants import Beside, write_constant

__all__ = ["save"]


def save(
    path: Path, sections: Iterable[tuple[str, Any]], constants: Mapping[str, torch.Tensor], threshold: int
) -> None:
    """Write `sections`, of which the last are the nodes, and constants; those over `threshold` bytes beside.

    Raises:
        SerializationError: a file cannot be written, and what was there stays.
    """
    beside = Beside(threshold)
    written = {key: write_constant(key, tensor, beside) for key, tensor in constants.items()}
    large = path.with_name(files.sidecar_name(files.sidecar_prefix(path), beside.tensors))
    written |= {key: {"file": large.name, **written[key]} for key in beside.tensors}
    with clearing(path, large), files.written(path) as temporary:
        files.write(temporary, _text(sections, written), path)
        if beside.tensors:
            with files.written(large) as data:  # which is in place before the JSON that names it
                files.write_tensors(data, beside.tensors)


def _text(sections: Iterable[tuple[str, Any]], constants: Mapping[str, Any]) -> Iterator[str]:
    """The JSON in pieces, a line for each node, so that a large graph is never one string."""
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode
    opening = "{"
    for key, part in (*sections, ("constants", constants)):
        yield f"{opening}{encode(key)}:"
        opening = ",\n"
        if key == "nodes":
            yield "["
            for index, node in enumerate(part):
                yield f",\n{encode(node)}" if index else f"\n{encode(node)}"
            yield "]"
        else:
            yield encode(part)
    yield "}\n"
