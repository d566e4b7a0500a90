"""What the commands read, write and show of an IR: named tensors (.npz, .safetensors), text, pictures and figures.

A path that cannot be written is refused before the work; an existing file is replaced after it.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from passes.suggest import join_words
from passes.weights.files import replace_when_done
from pipeline.errors import UsageError
from pipeline.ir import Dim
from pipeline.runtime.tensors import dtype_name, to_numpy, to_torch
from pipeline.torch_ir.ir import IR
from pipeline.torch_ir.nodes import stored_values
from pipeline.torch_ir.picture import ir_to_mermaid
from pipeline.torch_ir.svg import ir_to_svg


def check_place(path: Path, endings: tuple[str, ...] = ()) -> None:
    """
    Raises:
        UsageError: `path` ends in none of `endings`, is a folder, or its folder does not exist.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; expected a file, as in {path}/name{endings[0] if endings else '.txt'}")
    if endings and not path.name.endswith(endings):
        raise UsageError(f"{path}: expected {join_words(endings)}")
    if not path.parent.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {path.parent}; make it first")


@contextmanager
def write_atomically(path: Path, endings: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield a temporary path; on success, the file there replaces `path`.

    Raises:
        UsageError: it cannot be written there.
    """
    check_place(path, endings)
    try:
        with replace_when_done(path) as temporary:
            yield temporary
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Write `text` and a line end, atomically."""
    with write_atomically(path) as temporary:
        temporary.write_text(f"{text}\n", encoding="utf-8")


ENDINGS = (".npz", ".safetensors")


def read_arrays(path: Path) -> dict[str, torch.Tensor]:
    """Name → tensor. Nothing is unpickled.

    Raises:
        UsageError: there is no such file, it is none of the two, or it is damaged.
    """
    if path.suffix not in ENDINGS:
        raise UsageError(f"{path}: expected {' or '.join(ENDINGS)}")
    try:
        if not path.is_file():
            raise UsageError(f"{path} cannot be read: there is no such file")
        path.open("rb").close()  # else a file that nobody may read is no whole .npz
        return _from_safetensors(path) if path.suffix == ".safetensors" else _from_npz(path)
    except UsageError:
        raise
    except Exception as error:  # of the two libraries, or the file system's
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def write_arrays(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `tensors`, atomically.

    Raises:
        UsageError: another ending, a dtype that .npz has not, or a place that cannot be written.
    """
    foreign = [name for name, tensor in tensors.items() if hasattr(ml_dtypes, dtype_name(tensor.dtype))]
    if path.suffix == ".npz" and foreign:
        raise UsageError(
            f"{path}: numpy has no {str(tensors[foreign[0]].dtype)[6:]} ({foreign[0]!r}); use .safetensors"
        )
    with write_atomically(path, ENDINGS) as temporary:
        if path.suffix == ".npz":
            with temporary.open("wb") as file:
                np.savez(file, **{name: to_numpy(tensor) for name, tensor in tensors.items()})  # type: ignore[arg-type]
        else:
            from safetensors.torch import save_file

            save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, temporary)


def _from_safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _from_npz(path: Path) -> dict[str, torch.Tensor]:
    if not zipfile.is_zipfile(path):  # numpy would ask whether to unpickle it
        raise UsageError(f"{path} is no whole .npz file; write it with numpy.savez(path, name=array)")
    with np.load(path, allow_pickle=False) as archive:
        return {name: _tensor(path, name, archive) for name in archive.files}


def _tensor(path: Path, name: str, archive: Mapping[str, np.ndarray]) -> torch.Tensor:
    try:
        return to_torch(archive[name])
    except (UsageError, TypeError, ValueError) as error:  # strings and objects
        raise UsageError(f"{path}: the array {name!r} holds no numeric values: {error}") from error


TEXTS = (".mmd", ".md", ".mermaid", ".txt")
SECONDS = 120


def write_picture(ir: IR, path: Path, max_nodes: int, include_weights: bool, *, by_module: bool = False) -> None:
    """Draw `ir` into `path`, as its ending says; see `ir_to_mermaid`. An SVG is always by module.

    Raises:
        UsageError: a PNG is asked for and there is no `mmdc`, or it fails; another ending; a place that cannot be
            written.
    """
    with write_atomically(path, (*TEXTS, ".png", ".svg")) as temporary:
        if path.suffix == ".svg":
            temporary.write_text(ir_to_svg(ir, max_nodes, include_weights), encoding="utf-8")
            return
        mermaid = ir_to_mermaid(ir, max_nodes, include_weights, by_module=by_module)
        if path.suffix == ".png":
            _draw(mermaid, temporary, path.suffix)
        else:
            text = f"```mermaid\n{mermaid}\n```\n" if path.suffix == ".md" else f"{mermaid}\n"
            temporary.write_text(text, encoding="utf-8")


def _draw(mermaid: str, path: Path, suffix: str) -> None:
    command = shutil.which("mmdc")
    if command is None:
        raise UsageError(
            f"a {suffix} needs the command mmdc, which is not installed; pip install mmdc, or write a .svg or .md file"
        )
    source, drawn = path.with_name(f"{path.name}.mmd"), path.with_name(f"{path.name}{suffix}")
    try:
        source.write_text(mermaid, encoding="utf-8")
        subprocess.run(
            [command, "--input", source, "--output", drawn], check=True, capture_output=True, text=True, timeout=SECONDS
        )
        drawn.replace(path)
    except (subprocess.SubprocessError, FileNotFoundError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise UsageError(f"mmdc could not draw the graph: {said[-1] if said else error}") from error
    finally:
        source.unlink(missing_ok=True)
        drawn.unlink(missing_ok=True)


def summary(ir: IR) -> dict[str, Any]:
    """Plain data, for JSON. `total_parameters` counts elements of weights, buffers and constants, of tied ones once."""
    graph = ir.graph
    weights = list(stored_values(graph))
    tensors = {frozenset(graph.sources.get(value.vid, (value.name,))): value for value in weights}
    return {
        "model_name": ir.model_name,
        "num_nodes": len(graph.ops),
        "num_inputs": len(graph.inputs),
        "num_outputs": len(graph.outputs),
        "num_weights": len(weights),
        "total_parameters": sum(math.prod(value.spec.sizes) for value in tensors.values()),
        "input_shapes": {graph.values[vid].name: list(graph.values[vid].spec.shape) for vid in graph.inputs},
        "output_shapes": {graph.values[vid].name: list(graph.values[vid].spec.shape) for vid in graph.outputs},
        "op_distribution": dict(Counter(op.kind for op in graph.ops).most_common()),
    }


def summary_text(found: Mapping[str, Any]) -> str:
    """`summary` for people."""
    return "\n".join(_lines(found))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"Model: {found['model_name']}"
    yield f"Nodes: {found['num_nodes']}"
    yield f"Inputs: {found['num_inputs']}"
    yield f"Outputs: {found['num_outputs']}"
    yield f"Weights: {found['num_weights']}"
    yield f"Total parameters: {found['total_parameters']:,}"
    for title, key in (("Input shapes", "input_shapes"), ("Output shapes", "output_shapes")):
        yield ""
        yield f"{title}:"
        yield from (f"  {name}: {_shape(shape)}" for name, shape in found[key].items())
    yield ""
    yield "Op distribution:"
    yield from (f"  {kind}: {count}" for kind, count in found["op_distribution"].items())


def _shape(shape: Sequence[Dim]) -> str:
    return f"[{', '.join(map(str, shape))}]"
