"""A model that fits nowhere, in pieces that run one after the other: each reads what the pieces before it have made.

The graph is cut, in its own order, where few values cross. A piece runs on onnxruntime with its weights mapped from
their files. onnxruntime's CPU provider has few kernels for floats of 16 bits, so a piece computes in float32: each
weight is widened when it is read, and no longer than that.
"""

from __future__ import annotations

import itertools
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from passes.graph.index import GraphIndex, computed_values, copy_of, extract, replace_entries, values_read
from passes.graph.op_facts import has_body
from passes.graph.traversal import live_nodes
from passes.rewrites.to_float32 import HALVES, widen_attributes
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.errors import CheckFailed, UsageError
from pipeline.quantsim.shard_files import WeightFormat, open_source, read_dequantized


@dataclass(frozen=True, slots=True)
class ModelPiece:
    """The nodes `first` to `last` of a graph.

    reads: computed values and inputs of the model that are made before it.
    makes: values of it, or of pieces before it, that are read after it.
    """

    first: int
    last: int
    reads: tuple[str, ...]
    makes: tuple[str, ...]


def cut_pieces(model: DetachedModel, most: int) -> tuple[ModelPiece, ...]:
    """The graph in pieces whose weights have about `most` bytes each; a larger weight is in a piece of its own.

    Raises:
        UsageError: a node has a body, which may read values of any piece.
    """
    index = model.index
    bodied = next(filter(has_body, index.nodes), None)
    if bodied is not None:
        raise UsageError(
            f"quantsim.shard_mib: found {bodied.op_type} {bodied.name!r}, expected a model without branches and loops: "
            "with quantsim.optimize it runs in pieces"
        )
    sizes = list(itertools.accumulate(_count_new_bytes(model), initial=0))
    cuts = [0]
    while sizes[-1] - sizes[cuts[-1]] > most:
        begun = cuts[-1]
        last = max(bisect_right(sizes, sizes[begun] + most) - 1, begun + 1)
        first = min(max(bisect_left(sizes, sizes[begun] + most // 2), begun + 1), last)
        cuts.append(min(range(first, last + 1), key=lambda place: (index.crossing[place], -place)))
    return tuple(_describe_piece(index, first, last) for first, last in itertools.pairwise((*cuts, len(index.nodes))))


def _count_new_bytes(model: DetachedModel) -> Iterator[int]:
    """For each node the bytes of the weights that no node before it reads."""
    seen: set[str] = set()
    for node in model.index.nodes:
        new = [model.index.initializers[name] for name in {*node.input} - seen if name in model.index.initializers]
        yield sum(weight.data.nbytes for weight in map(model.weight, new) if weight is not None)
        seen.update(node.input)


def _describe_piece(index: GraphIndex, first: int, last: int) -> ModelPiece:
    made = computed_values(index.nodes[:first]).keys() | index.required_inputs.keys()
    own = computed_values(index.nodes[first:last]).keys()
    later = set(values_read(index.nodes[last:]))
    reads = [name for name in values_read(index.nodes[first:last]) if name in made]
    return ModelPiece(first, last, tuple(reads), tuple(sorted(later & (made | own))))


def run_piece(
    path: str,
    piece: dict[str, Any],
    keeps: Sequence[str],
    source: str,
    result: str,
    rounded: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> dict[str, Any]:
    """The job of one piece: run it on each sample in the folder `source`, and write to the folder `result`.

    Args:
        path: of the model.
        piece: the fields of a ModelPiece.
        keeps: values that are written for others than the next piece.
        source: a file .npz for each sample, which has what the piece reads.
        result: gets a file for each sample, with what the piece makes and `keeps`.
        rounded: weight → its `format` and its `places` in files of shards, whose values replace the stored ones.

    Returns:
        The folder that was written.

    Raises:
        CheckFailed: a value is infinite or NaN.
    """
    model, part = open_source(path), ModelPiece(**piece)
    wanted = sorted({*part.makes, *keeps})
    read = set(values_read(model.index.nodes[part.first : part.last]))
    arrays = {
        name: read_dequantized(WeightFormat(**entry["format"]), entry["places"])
        for name, entry in rounded.items()
        if name in read
    }
    runner: PieceRunner | None = None
    temporary = Path(f"{result}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for file in sorted(Path(source).glob("*.npz")):
        with np.load(file) as archive:
            known = {name: archive[name] for name in archive.files if name in {*part.reads, *wanted}}
        runner = runner or PieceRunner(model, part, [name for name in wanted if name not in known], known, arrays)
        found = {**known, **runner.run(known)}
        broken = next((name for name in keeps if not np.isfinite(found[name]).all()), None)
        if broken is not None:
            raise CheckFailed(f"quantsim.optimize: {broken!r} is infinite or NaN in the float model, on {file.name}")
        np.savez(temporary / file.name, **{name: found[name] for name in wanted})  # type: ignore[arg-type]
    shutil.rmtree(result, ignore_errors=True)
    temporary.rename(result)
    return {"folder": result}


class PieceRunner:
    """Runs a piece in float32.

    Args:
        wanted: the values to compute.
        example: what it reads, of one sample: its types are those of all.
        arrays: stored tensor → float32 values in place of its own.
    """

    def __init__(
        self,
        model: DetachedModel,
        piece: ModelPiece,
        wanted: Sequence[str],
        example: dict[str, np.ndarray],
        arrays: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> None:
        self._session: Session | None = None
        if not wanted:
            return
        nodes = [copy_of(node) for node in model.index.nodes[piece.first : piece.last]]
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(as_float(example[name]).dtype), None)
            for name in piece.reads
        ]
        proto = extract(model.proto, nodes, inputs=inputs, outputs=[ValueInfoProto(name=name) for name in wanted])
        live = live_nodes(proto.graph)[::-1]
        replace_entries(proto.graph.node, widen(live, model.index.initializers))
        self._session = Session.of(DetachedModel(proto, model.weights).with_arrays(arrays))

    def run(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self._session.run({name: as_float(array) for name, array in values.items()}) if self._session else {}


def as_float(array: np.ndarray) -> np.ndarray:
    """Floats of 16 bits in 32; others as they are."""
    is_half = array.dtype == np.float16 or array.dtype.name == "bfloat16"
    return array.astype(np.float32) if is_half else array


def widen(nodes: Sequence[NodeProto], stored: dict[str, TensorProto]) -> Iterator[NodeProto]:
    """The nodes in float32, where they compute in floats of 16 bits; stored tensors stay as they are.

    A table is gathered from before it is widened, so that no copy of the whole is made.
    """
    wide: set[str] = set()
    for node in nodes:
        made = copy_of(node)
        tables = 1 if node.op_type == "Gather" else 0
        for place, name in enumerate(node.input):
            if place < tables or name not in stored or stored[name].data_type not in HALVES:
                continue
            if name not in wide:
                wide.add(name)
                yield helper.make_node("Cast", [name], [f"{name}{WIDE}"], to=TensorProto.FLOAT)
            made.input[place] = f"{name}{WIDE}"
        widen_attributes(made)
        is_half_table = tables and node.input[0] in stored and stored[node.input[0]].data_type in HALVES
        if is_half_table:
            made.output[0] = f"{node.output[0]}{NARROW}"
        yield made
        if is_half_table:
            yield helper.make_node("Cast", [made.output[0]], [node.output[0]], to=TensorProto.FLOAT)


WIDE: Final = "/float32"
NARROW: Final = "/stored"
