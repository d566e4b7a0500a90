"""The files of a plan, with the places of the weights in the final model's files; and those of its graph.

A run without the backend `plan` does not import this file, nor the IR, the planner and the importers: 0.2 s.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from pipeline.config.sections import RuntimeConfig
from pipeline.importers.from_onnx.source import FilePayload
from pipeline.ir.graph import Graph, Payload, Role, Value
from pipeline.ir.json import to_json
from pipeline.ir.text import to_text
from pipeline.planning import ExecutionPlan, PlanFile, StoredBytes, check_plan, encode_plans, map_memory, parse_regions
from pipeline.planning import to_json as plan_to_json
from pipeline.workspace import Workspace

Place = tuple[int, int]
"""First byte, and how many."""

GRAPH, INITIALIZER, NAME, RAW_DATA = 7, 5, 8, 9
"""Field numbers of ModelProto, GraphProto and TensorProto."""

BYTES_FIELD = 2
"""The wire type of texts, bytes and messages."""


def with_memory_map(plan: ExecutionPlan, config: RuntimeConfig) -> ExecutionPlan:
    """`plan` with a memory map, where the configuration names regions.

    Raises:
        UsageError: a pin of a value that the plan does not have, or regions that are too small.
    """
    if config.regions is None:
        return plan
    mapped = map_memory(plan, parse_regions(config.regions), config.pins)
    check_plan(mapped)
    return mapped


def write_plan_files(plan: ExecutionPlan, graph: Graph, model: Path, workspace: Workspace) -> list[Path]:
    """Write `plan` of `graph`, which was imported from the file `model`."""
    content = PlanFile({"main": plan}, stored_bytes(graph, model, workspace.folder))
    return [
        workspace.write_text("plan.json", json.dumps(plan_to_json(plan), indent=1) + "\n"),
        workspace.write_bytes("plan.bin", encode_plans(content)),
    ]


def stored_bytes(graph: Graph, model: Path, folder: Path) -> dict[str, StoredBytes]:
    """Where the bytes of each stored value are, by name; those that are in no file are in the plan itself.

    A weight-free graph gives no places for the weights that it lacks.
    """
    places = raw_data_places(model)
    return {
        value.name: _locate_bytes(value, graph.payloads[value.vid], places, model, folder)
        for value in graph.with_role(Role.PARAM, Role.STATE, Role.CONST)
        if value.vid in graph.payloads and value.users
    }


def _locate_bytes(
    value: Value, payload: Payload, places: Mapping[str, Place], model: Path, folder: Path
) -> StoredBytes:
    array = np.ascontiguousarray(payload.numpy())
    crc32 = zlib.crc32(_raw(array).data)
    if isinstance(payload, FilePayload):
        place = payload.place
        return StoredBytes(file=_from(folder, Path(place.path)), offset=place.offset, nbytes=place.nbytes, crc32=crc32)
    offset, nbytes = places.get(value.name, (0, 0))
    # A weight below the threshold that the file keeps in another field is not found, nor one that a pass has renamed.
    if nbytes == array.nbytes and np.array_equal(np.fromfile(model, np.uint8, nbytes, offset=offset), _raw(array)):
        return StoredBytes(file=_from(folder, model), offset=offset, nbytes=nbytes, crc32=crc32)
    return StoredBytes(data=_raw(array).tobytes(), crc32=crc32)


def _raw(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _from(folder: Path, file: Path) -> str:
    return os.path.relpath(file.resolve(), folder.resolve()).replace(os.sep, "/")


def raw_data_places(model: Path) -> dict[str, Place]:
    """{initializer: where its `raw_data` lies in the file of an ONNX model}; others are not listed."""
    if not model.stat().st_size:
        return {}
    places: dict[str, Place] = {}
    with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for graph in _fields(data, 0, len(data), GRAPH):
            for tensor in _fields(data, *graph, INITIALIZER):
                names = [data[begin:end].decode() for begin, end in _fields(data, *tensor, NAME)]
                places |= {
                    name: (begin, end - begin) for name in names for begin, end in _fields(data, *tensor, RAW_DATA)
                }
    return places


def _fields(data: mmap.mmap, at: int, end: int, wanted: int) -> Iterator[Place]:
    """First byte and end of each field of this number in the message from `at` to `end`."""
    while at < end:
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == BYTES_FIELD:
            size, at = _varint(data, at)
            if number == wanted:
                yield at, at + size
            at += size
        elif wire == 0:
            _, at = _varint(data, at)
        else:
            at += {1: 8, 5: 4}[wire]


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at


def write_graph(graph: Graph, workspace: Workspace) -> list[Path]:
    """Write `graph` as ir.json and ir.txt."""
    return [
        workspace.write_text("ir.json", json.dumps(to_json(graph), indent=1) + "\n"),
        workspace.write_text("ir.txt", to_text(graph)),
    ]
