"""The prepared run for a card: its checks on the recording device, its rows at tiny sizes, and on a GPU as they are."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from benchmarks.cuda import __main__ as run_of_rows
from benchmarks.cuda.__main__ import RowProcess, read_results, read_row, write_results
from benchmarks.cuda.checks import CASES, CHECKS, check_operators, find_failures_apart, operator_case, operators
from benchmarks.cuda.measure import Bench
from benchmarks.cuda.rows import ROWS, find_difference, peer, read_sanitizer
from pipeline.ir.graph import to_device
from pipeline.lowering import with_kernels
from pipeline.ops import KINDS, Kind
from pipeline.ops.layout import traced_strides
from pipeline.runtime.devices import find_device
from pipeline.runtime.eager import apply
from pipeline.runtime.recording import RecordingDevice
from tests.support.paths import ROOT


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name: str) -> None:
    CHECKS[name](find_device("cuda"))


def test_every_operator_runs_and_replays_under_the_rules_of_a_capture() -> None:
    found = check_operators(RecordingDevice(2**24))
    assert "1 captured segment, 0 eager calls" in found


@pytest.mark.parametrize("name", [name for name in ROWS if name != "check-operators"])
def test_every_row_works_without_a_card(name: str) -> None:
    figures = ROWS[name].run(Bench.open(dry=True))
    assert figures
    assert not [value for value in figures.values() if isinstance(value, str) and value.startswith("failed")]


def test_a_run_writes_results_and_does_not_repeat_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.cuda", "--dry", "--rows", "check-indices", "--out", str(tmp_path)]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stdout + first.stderr
    assert "check-indices: ran" in first.stdout
    assert "check-indices: measured already" in second.stdout
    assert sorted(file.name for file in tmp_path.iterdir()) == ["results.json", "rows.md"]
    found = json.loads((tmp_path / "results.json").read_text())["check-indices"]
    assert (found["status"], found["card"]) == ("ran", "dry run on the CPU")
    assert "| check-indices | dry run on the CPU | ran | shows found late" in (tmp_path / "rows.md").read_text()


def test_a_row_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    """A process of a compiler has the row's output open; its figures up to then are kept."""
    started = tmp_path / "started"
    script = f"""echo '{{"figures": {{"replay": 1}}}}'; echo half; sleep 600 & echo $! > {started}; sleep 600"""
    begun = time.monotonic()
    found = read_row(*RowProcess(["bash", "-c", script]).finish(5.0), 5.0)
    assert time.monotonic() - begun < 300, "it waits for what the row has started"
    assert (found["status"], found["figures"]) == ("longer than 5 s", {"replay": 1})
    stat = Path("/proc", started.read_text().strip(), "stat")
    while stat.exists() and stat.read_text().split()[2] != "Z":  # a signal may take a while; nobody waits for a zombie
        assert time.monotonic() - begun < 300, "what the row has started runs on"
        time.sleep(0.01)


def test_a_row_ends_with_the_run_that_started_it(tmp_path: Path) -> None:
    """A run that is killed says nothing to its rows, which are in sessions of their own."""
    started = tmp_path / "started"
    row = (
        "import os, threading, time\n"
        "from benchmarks.cuda.__main__ import end_with_parent\n"
        f"open({str(started)!r}, 'w').write(str(os.getpid()))\n"
        "threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()\n"
        "time.sleep(600)\n"
    )
    run = "import sys\nfrom benchmarks.cuda.__main__ import RowProcess\n"
    run += f"RowProcess([sys.executable, '-c', {row!r}]).finish(600)"
    process = subprocess.Popen([sys.executable, "-c", run], cwd=ROOT)
    begun = time.monotonic()
    while not (started.exists() and started.read_text()):
        assert time.monotonic() - begun < 300
        time.sleep(0.01)
    process.kill()
    process.wait()
    stat = Path("/proc", started.read_text(), "stat")
    while stat.exists() and stat.read_text().split()[2] != "Z":
        assert time.monotonic() - begun < 300, "the row runs on"
        time.sleep(0.01)


@pytest.mark.parametrize("found", [[1.0, 2.2], [1.0, math.nan]])
def test_a_wrong_replay_has_no_time(found: list[float]) -> None:
    expected = torch.tensor([1.0, 2.0])
    assert find_difference(torch.tensor([1.0, 2.001]), expected) < 2e-3
    with pytest.raises(AssertionError, match=r"a replay differs from eager torch by .*, whose largest element is 2\.0"):
        find_difference(torch.tensor(found), expected)


def test_a_peer_that_leaves_out_its_graphs_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile does so without an error, and is then as slow as its default mode."""

    def compile(self: Bench, module: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
        counters["inductor"]["cudagraph_skips"] += 1
        return module

    monkeypatch.setattr(Bench, "compile", compile)
    found = peer(Bench.open(dry=True), lambda: None, "reduce-overhead", lambda compiled: compiled())
    assert str(found).startswith("failed: torch.compile has left out 1 graphs of CUDA, and has Timing(")


def test_the_hosts_time_of_a_replay_is_that_of_torch_and_the_rest() -> None:
    figures = ROWS["forward-tiny"].run(Bench.open(dry=True))
    rest = figures["replay"].host_us - figures["launch"].host_us
    assert figures["host µs beyond the launch"] == round(rest, 2)
    assert figures["host µs beyond launch and copies"] == round(rest - figures["copies of inputs"].host_us, 2)


@pytest.mark.parametrize("name", ["forward-tiny", "train-mlp"])
def test_a_warm_up_compiles_what_the_row_compares_with_and_measures_nothing_else(name: str) -> None:
    figures = ROWS[name].run(replace(Bench.open(dry=True), warms=True))
    assert list(figures) == ["reduce-overhead", "default"]
    assert not [value for value in figures.values() if isinstance(value, str)]


def test_what_rows_compile_is_compiled_before_and_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm-ups share the card, so what they have measured to choose a kernel is forgotten."""
    chosen, started = tmp_path / "cache" / "a" / "kernel.best_config", list[tuple[str, bool, bool]]()
    chosen.parent.mkdir(parents=True)
    chosen.touch()

    def start_row(
        name: str, limit_s: float, *, dry: bool, warms: bool = False, process: RowProcess | None = None
    ) -> dict[str, object]:
        started.append((name, warms, chosen.exists()))
        return {"status": "ran", "seconds": 0.0, "figures": {}}

    monkeypatch.setattr(run_of_rows, "start_row", start_row)
    monkeypatch.setattr(run_of_rows, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "argv", ["cuda", "--dry", "--rows", "kernels,train-mlp", "--out", str(tmp_path)])
    assert run_of_rows.main() == 0
    assert started == [("train-mlp", True, True), ("kernels", False, False), ("train-mlp", False, False)]
    assert run_of_rows.main() == 0
    assert len(started) == 3, "rows that are measured are not compiled again"


def test_results_that_the_tree_has_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is lent begins with an empty folder for what it gives back."""
    found = {"status": "ran", "card": run_of_rows.DRY_CARD, "sources": run_of_rows.digest_of_sources(), "goal": ""}
    write_results(tmp_path, {"kernels": found})
    monkeypatch.setattr(run_of_rows, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["cuda", "--dry", "--rows", "kernels", "--out", str(tmp_path / "out")])
    assert run_of_rows.main() == 0


@pytest.mark.parametrize(
    ("code", "said", "shows"),
    [(0, "ERROR SUMMARY: 0 errors", "errors"), (1, "Device not supported", "skipped")],
)
def test_a_sanitizer_that_cannot_look_is_skipped_with_its_reason(code: int, said: str, shows: str) -> None:
    assert list(read_sanitizer(code, said)) == [shows]


def test_what_a_sanitizer_finds_fails_its_row() -> None:
    with pytest.raises(AssertionError, match="3 errors"):
        read_sanitizer(9, "Invalid __global__ write\nERROR SUMMARY: 3 errors")


def test_a_row_that_ends_early_says_how() -> None:
    found = read_row(*RowProcess([sys.executable, "-c", "raise SystemExit('no memory')"]).finish(60), 60)
    assert (found["status"], found["figures"], found["error"]) == ("exit 1", {}, "no memory\n")


def test_a_row_that_fails_keeps_the_figures_that_it_had() -> None:
    said = '{"figures": {"replay": 1}}\n{"status": "failed", "error": "of a peer", "seconds": 2.0}'
    found = read_row(0, said, "", 2.0, 60)
    assert (found["status"], found["figures"], found["error"]) == ("failed", {"replay": 1}, "of a peer")


GOOD = {"status": "ran", "card": "H200", "goal": ""}


@pytest.mark.parametrize(
    "damaged",
    [
        b"\xff\xfe{}",
        b"[1, 2]",
        b'{"kernels": 3, "train-mlp": {"status": "ran"}, "train-cnn": {"status": 1, "card": "H200", "goal": ""}}',
        b'{"kernels": {"status": "ran", "card": "H200", "goal": "", "figures": 3}}',
    ],
)
def test_what_is_no_result_is_measured_anew(damaged: bytes, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_bytes(damaged)
    assert read_results(tmp_path) == {}


def test_figures_of_another_commit_end_no_run(tmp_path: Path) -> None:
    odd = {"replay": {"seconds": 1}, "eager": {"device_ms": "1", "host_us": None}, "shows": None}
    (tmp_path / "results.json").write_text(json.dumps({"kernels": {**GOOD, "figures": odd}}))
    write_results(tmp_path, read_results(tmp_path))
    assert "| kernels | H200 | ran | replay {'seconds': 1}; eager " in (tmp_path / "rows.md").read_text()


RUN = """import sys
from benchmarks.cuda import __main__ as run
code = sys.argv.pop()
run.RowProcess.of_row = lambda name, *, dry, warms=False: run.RowProcess([sys.executable, "-c", code])
sys.exit(run.main())
"""
"""A run whose rows have a code of the test."""


def start_run(code: str, rows: str, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", RUN, "--dry", "--rows", rows, "--out", str(out), code]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)


def test_a_run_that_is_asked_to_end_writes_what_it_has(tmp_path: Path) -> None:
    """A machine that is lent takes its time back by SIGTERM first."""
    code = f"""
import time; input()
print('{{"figures": {{"replay": 1}}}}', flush=True)
open({str(tmp_path / "started")!r}, "w").close(); time.sleep(600)
"""
    run, begun = start_run(code, "kernels,autotune-bert-1", tmp_path), time.monotonic()
    while not (tmp_path / "started").exists():
        assert time.monotonic() - begun < 300
        time.sleep(0.01)
    run.terminate()
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 1
    assert b"autotune-bert-1: no time left" in said
    (found,) = read_results(tmp_path).values()
    assert (found["status"], found["figures"]) == ("ended with the run", {"replay": 1})


def test_a_run_goes_on_where_nobody_reads_what_it_says(tmp_path: Path) -> None:
    run = start_run("""input(); print('{"status": "ran", "seconds": 1}')""", "kernels,autotune-bert-1", tmp_path)
    assert run.stdout is not None
    run.stdout.close()
    assert run.wait(300) == 0
    assert list(read_results(tmp_path)) == ["kernels", "autotune-bert-1"]


def test_a_place_that_takes_no_results_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["cuda", "--dry", "--out", str(tmp_path / "file")])
    with pytest.raises(SystemExit, match="2"):
        run_of_rows.main()
    assert f"--out {tmp_path / 'file'} is no folder to write to: " in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_card_a_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cuda", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        run_of_rows.main()
    assert re.search("no card: .+; take a machine with an NVIDIA GPU and its driver, or --dry", capsys.readouterr().err)
    monkeypatch.setattr(run_of_rows.END, "is_asked", True)
    with pytest.raises(LookupError, match="asked to end before torch had named the card"):
        run_of_rows.card_name(dry=False)


def test_a_half_of_a_file_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"kernels": {"status": "ran", "card": "H2')
    assert read_results(tmp_path) == {}
    found = {"kernels": {"status": "exit 1", "card": "H200", "goal": "≥ 0.8", "error": "no | memory\n"}}
    write_results(tmp_path, found)
    assert read_results(tmp_path) == found
    assert "| kernels | H200 | exit 1 | no / memory | ≥ 0.8 |" in (tmp_path / "rows.md").read_text()


def test_where_one_operator_fails_the_check_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"Exp": CASES["Exp"], "Item": (lambda x: x * x.sum().item(), CASES["Exp"][1], "")}
    monkeypatch.setattr("benchmarks.cuda.checks.CASES", case)
    monkeypatch.setattr(
        "benchmarks.cuda.checks.operators", lambda: (*operator_case(("Exp",))[:2], lambda *_: [torch.ones(9)])
    )
    with pytest.raises(AssertionError, match="Item: ") as failure:
        check_operators(RecordingDevice(2**20))
    assert "Exp: " not in str(failure.value)


def test_an_operator_that_ends_its_process_hides_none_after_it() -> None:
    """`c` ends the context of CUDA, so that its process tries no other; `d` ends the process itself."""
    tries = """
import json, os, sys
for name in sys.argv[1:]:
    if name == "d":
        print("died", file=sys.stderr, flush=True)
        os._exit(3)
    print(json.dumps(f"{name}: wrong" if name in "bcf" else ""), flush=True)
    if name == "c":
        break
"""
    found = list(find_failures_apart("abcdef", [sys.executable, "-c", tries]))
    assert found == ["b: wrong", "c: wrong", "d: exit 3: died\n", "f: wrong"]


def test_the_process_of_the_next_row_begins_before_the_turn_of_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, processes = list[str](), dict[str, RowProcess]()

    def of_row(name: str, *, dry: bool) -> RowProcess:
        seen.append(f"{name} begins")
        processes[name] = RowProcess([sys.executable, "-c", "input()"])
        return processes[name]

    def start_row(name: str, limit_s: float, *, dry: bool, process: RowProcess | None = None) -> dict[str, object]:
        seen.append(f"{name} has its turn")
        assert process is processes.get(name)
        if name == "autotune-vit-1":
            raise KeyboardInterrupt
        return {"status": "failed", "seconds": 0.0, "error": "no luck"}

    monkeypatch.setattr(run_of_rows, "start_row", start_row)
    monkeypatch.setattr(RowProcess, "of_row", of_row)
    rows = "kernels,autotune-bert-1,autotune-vit-1,autotune-tiny"
    monkeypatch.setattr(sys, "argv", ["cuda", "--dry", "--rows", rows, "--out", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        run_of_rows.main()
    assert seen == [
        *("autotune-bert-1 begins", "kernels has its turn", "autotune-vit-1 begins", "autotune-bert-1 has its turn"),
        *("autotune-tiny begins", "autotune-vit-1 has its turn"),
    ]
    assert all(process.end() == ("", "") and process._process.poll() is not None for process in processes.values())


def test_a_row_that_fails_says_why_and_loses_no_other_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row has no process, and the result of another cannot be written."""

    def of_row(name: str, *, dry: bool, warms: bool = False) -> RowProcess:
        if name == "check-indices":
            raise OSError("no memory")
        if name == "autotune-bert-1":
            (tmp_path / "results.new").mkdir()
        said = '{"status": "ran", "figures": {"replay": 1}, "seconds": 1}'
        return RowProcess([sys.executable, "-c", f"input(); print({said!r})"])

    monkeypatch.setattr(RowProcess, "of_row", of_row)
    monkeypatch.setattr(
        sys, "argv", ["cuda", "--dry", "--rows", "check-indices,kernels,autotune-bert-1", "--out", str(tmp_path)]
    )
    assert run_of_rows.main() == 1
    said = capsys.readouterr().out
    assert "check-indices: failed, 0.0 s: no process: no memory" in said
    assert "kernels: ran, 1.0 s" in said
    assert '"replay": 1' in said.partition("autotune-bert-1: its result is not written: ")[2]
    assert f"1 rows failed; their traces are in {tmp_path / 'results.json'}" in said


def test_what_reads_the_host_on_cuda_has_an_obstacle_and_nothing_else() -> None:
    """A fake tensor of a CUDA device has no elements, so an operator that reads one fails."""
    graph = to_device(operators()[0], "cuda:0")
    held, reads_host, untraceable = dict[int, torch.Tensor](), set[str](), set[str]()
    with FakeTensorMode():
        for value in graph.values:
            if value.producer is None:
                dtype = getattr(torch, value.spec.dtype)
                strides = traced_strides(value) or torch.empty(value.spec.sizes, device="meta").stride()
                held[value.vid] = torch.empty_strided(value.spec.sizes, strides, dtype=dtype, device="cuda")
        for op in graph.ops:
            try:
                results = apply(op, [held[vid] for vid in op.inputs], {})
            except DataDependentOutputException:
                reads_host.add(op.kind)
                continue
            except RuntimeError as error:  # torch decomposes it by Python's indexing, which looks for the driver
                assert "not linked with support for cuda devices" in str(error)
                untraceable.add(op.kind)
                results = [torch.empty(graph.values[vid].spec.sizes, device="cuda") for vid in op.outputs]
            assert {result.device.type for result in results} == {"cuda"}, op.kind
            held.update(zip(op.outputs, results, strict=True))
    calls = [(op.kind, Kind(op.kernel.kind_id)) for op in with_kernels(graph).ops if op.kernel is not None]
    assert reads_host == {operator for operator, kind in calls if "cuda" in KINDS[kind.name].obstacles}
    assert untraceable <= {"aten.grid_sampler.default", "aten.im2col.default", "onnxline.recurrent.default"}
    assert len(calls) > 150


# Launches of the Triton kernels become machine code for GPUs that this machine does not have.

CODE = """
import torch
from benchmarks.cuda.cubins import TargetDriver, list_launches, measure_launch
driver = TargetDriver({capability})
for name, _, launch in list_launches((torch.float16,)):
    used = measure_launch(launch, driver)
    launch()
    print(used.registers, used.stack, name, sep="\\t")
assert len(driver.binaries) == 10, "a launch compiles once"
"""

EACH = """
import torch
from benchmarks.cuda.cubins import TargetDriver, measure_launch
from pipeline.ops.row_programs import INSTRUCTIONS, read_program
from pipeline.runtime.kernels.cuda import launch_row_program
driver = TargetDriver(90)
for name, count in INSTRUCTIONS.items():
    ins, out = [torch.empty(5, 6)] * (1 if name == "rotate" else count), torch.empty(5, 6)
    program = read_program(f"{name}({', '.join(f'i{at}' for at in range(len(ins)))})")
    used = measure_launch(launch_row_program(program, ins, out), driver)
    assert 0 < used.registers <= 64 and (used.stack == 0 or name in ("sin", "cos")), (name, used)
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_no_kernel_has_more_values_than_registers(capability: int, tmp_path: Path) -> None:
    """In a process without the interpreter, which the other tests use."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", CODE.format(capability=capability)]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True).stdout
    rows = [line.split("\t") for line in said.splitlines()]
    assert len(rows) == 10
    assert all(0 < int(registers) <= 128 and stack == "0" for registers, stack, _ in rows), rows


def test_each_instruction_becomes_machine_code(tmp_path: Path) -> None:
    """The interpreter, by which the other tests run them, takes more than the compiler does.

    CUDA's sine and cosine have a stack, for angles of more than 100,000.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", EACH], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
