"""The example reader in C prints what the plan holds, and refuses files that were cut or changed, without a fault."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.lowering import lower, with_kernels
from pipeline.lowering.memory_order import in_traced_order
from pipeline.ops import Kind, unpack
from pipeline.planning import (
    ExecutionPlan,
    MemoryRegion,
    PlanFile,
    StoredBytes,
    encode_plans,
    make_plan,
    map_memory,
)
from tests.support.paths import ROOT
from tests.support.torch_programs import SmallDecoder, graph_of

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
FLAGS = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsanitize=address,undefined")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


Print = Callable[[bytes | Path], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def print_plan(tmp_path_factory: pytest.TempPathFactory) -> Print:
    folder = tmp_path_factory.mktemp("plan_reader")
    source, program = ROOT / "examples/plan_reader/print_plan.c", folder / "print_plan"
    subprocess.run([str(COMPILER), *FLAGS, "-o", str(program), str(source)], check=True, capture_output=True)

    def run(data: bytes | Path) -> subprocess.CompletedProcess[str]:
        path = data if isinstance(data, Path) else folder / "plan.bin"
        if isinstance(data, bytes):
            path.write_bytes(data)
        return subprocess.run([str(program), str(path)], capture_output=True, text=True, errors="replace", check=False)

    return run


@pytest.fixture(scope="module")
def plan() -> ExecutionPlan:
    graph = with_kernels(in_traced_order(graph_of(SmallDecoder(), SmallDecoder.example())))
    return map_memory(make_plan(graph, lower(graph)), [MemoryRegion("sram", 192), MemoryRegion("dram")])


@pytest.fixture(scope="module")
def data(plan: ExecutionPlan) -> bytes:
    weights = {"b_cache": StoredBytes(file="model.bin", offset=64, nbytes=96, crc32=0xABCD)}
    weights["one"] = StoredBytes(data=b"1234", crc32=zlib.crc32(b"1234"))
    return encode_plans(PlanFile({"main": plan}, weights))


def value_line(plan: ExecutionPlan, vid: int) -> str:
    slot, layout = plan.slots[vid], plan.layouts.get(vid)
    shown = f"value {vid} {slot.name} {slot.role} {slot.spec.dtype}{listed(slot.spec.sizes)}"
    shown += f" traced{listed(slot.strides)}" if slot.strides is not None else ""
    shown += f" strides{listed(layout.strides)} from {layout.offset}" if layout is not None else ""
    shown += f" alias of {plan.alias[vid]}" if vid in plan.alias else ""
    return shown + (f" at byte {plan.offsets[vid]}" if vid in plan.offsets else "")


def listed(numbers: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, numbers))}]"


def test_it_prints_every_value_and_call(print_plan: Print, plan: ExecutionPlan, data: bytes) -> None:
    printed = print_plan(data)
    assert (printed.returncode, printed.stderr) == (0, "")
    lines = printed.stdout.splitlines()
    head = f'entry main: graph "{plan.graph_name}" {plan.graph_digest}'
    assert lines[0] == f"{head} arena {plan.arena_bytes} live {plan.live_bytes}"
    assert lines[1 : 1 + len(plan.slots)] == [value_line(plan, vid) for vid in range(len(plan.slots))]
    calls = [line for line in lines if line.startswith("call ")]
    plans = [plan, *(body for bodies in plan.bodies.values() for body in bodies)]
    assert len(calls) == sum(len(inner.calls) for inner in plans)
    for oid, call in zip(plan.order, plan.calls, strict=True):
        vids = f"({','.join(map(str, call.in_vids))}) -> ({','.join(map(str, call.out_vids))})"
        (line,) = [line for line in calls if f"kind {call.kind_id} {call.attr_schema}" in line and vids in line]
        assert line.startswith(f"call of op {oid} {Kind(call.kind_id).name} kind ")
        assert f"op={unpack(call.attr_schema, call.attr_blob).get('op', '')}" in line + "op="
    assert sum("pad=[1,0] mode=constant has_value=true value=0.5" in line for line in calls) == 1
    assert sum("pred=$0 true_fn=body0 false_fn=body1 operands=[$1]" in line for line in calls) == 1
    assert plan.memory is not None  # it is passed over: what follows is read right
    assert lines[-2:] == [
        "weight b_cache in 'model.bin' from 64, 96 bytes, crc32 0000abcd, 0 bytes here",
        "weight one in '' from 0, 0 bytes, crc32 9be3e0a3, 4 bytes here",
    ]


def test_it_is_one_page() -> None:
    assert (ROOT / "examples/plan_reader/print_plan.c").read_text(encoding="utf-8").count("\n") <= 100


def test_it_refuses_what_was_cut_or_changed(print_plan: Print, data: bytes) -> None:
    draw = random.Random(0)
    for _ in range(10):
        changed = bytearray(data)
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        for hostile in (bytes(changed), data[: draw.randrange(len(data))]):
            refused = print_plan(hostile)
            assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr


@pytest.mark.parametrize("size", [0, 5, 8, 63])
def test_it_refuses_a_file_without_a_header(print_plan: Print, data: bytes, size: int) -> None:
    refused = print_plan(data[:size])
    assert (refused.returncode, refused.stderr) == (1, "this is no plan.bin\n")


def test_it_refuses_a_folder_and_what_is_not_there(print_plan: Print, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "plan.bin"):
        refused = print_plan(path)
        assert (refused.returncode, refused.stderr) == (1, "expected the path of a plan.bin\n")


def test_it_survives_files_that_were_signed_anew(print_plan: Print, data: bytes) -> None:
    """The sanitizers end the program with another code and many lines."""
    draw = random.Random(0)
    for _ in range(40):
        changed = bytearray(data)
        changed[draw.randrange(24, len(data))] = draw.choice([0, 1, 255, draw.randrange(256)])
        changed[12:16] = struct.pack("<I", zlib.crc32(changed[16:]))
        result = print_plan(bytes(changed))
        assert result.returncode in (0, 1)
        assert (
            result.stderr in ("", "a field has no meaning\n", "the table of texts is cut\n") or "texts" in result.stderr
        )
