"""What has to hold on a device, each as a function that raises: rows of the run, and tests with the mark `gpu`."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

import torch
from torch import nn

from benchmarks.cuda.cubins import CASES as PROGRAMS
from benchmarks.cuda.cubins import Case, make_operand
from benchmarks.cuda.measure import feed_of, graph_of
from benchmarks.cuda.models import Classifier, Decode, Words, cnn, mlp
from pipeline.errors import DataError
from pipeline.ir.graph import Graph, TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.ops.row_programs import read_program
from pipeline.runtime import compile_graph
from pipeline.runtime.devices import Device, find_device
from pipeline.runtime.kernels.cuda import launch_row_program
from pipeline.runtime.kernels.row_programs import compute_into
from pipeline.training import record_step
from tests.pipeline.runtime.kernels.aten.typed_calls import CASES


class Operators(nn.Module):
    """Every operator of the table that has a case, each on operands that another operator made."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def forward(self, *operands: torch.Tensor) -> list[torch.Tensor]:
        rest, found = list(operands), list[torch.Tensor]()
        for name in self.names:
            function, own, _ = CASES[name]
            given, rest = rest[: len(own)], rest[len(own) :]
            results = function(*(tensor.flip(0) for tensor in given))
            found += results if isinstance(results, tuple) else [results]
        return found


@cache
def operators() -> OperatorCase:
    """Every operator that has a case, in one graph."""
    return operator_case(tuple(CASES))


OperatorCase = tuple[Graph, Sequence[torch.Tensor], Callable[..., Sequence[torch.Tensor]]]
"""A graph, its inputs on the CPU, and what eager torch calls for them."""


def operator_case(names: tuple[str, ...]) -> OperatorCase:
    module = Operators(names)
    inputs = [tensor for name in names for tensor in CASES[name][1]]
    return graph_of(module, inputs), inputs, module


def check_operators(device: Device) -> str:
    """Runs and replays of every operator against eager torch on the same device; where one fails, all that do."""
    with convolutions_in_float32(device):
        try:
            summary = compare_operators(operators(), device)
        except Exception as error:  # of whichever operator: each has its own graph now
            print(f"all in one graph: {error}", flush=True)
            failures = find_failures_apart(CASES) if device.place.type == "cuda" else find_failures(CASES, device)
            raise AssertionError("\n".join([*failures, f"all in one graph: {error}"])) from error
    return f"{len(CASES)} operators, {summary}"


def convolutions_in_float32(device: Device) -> AbstractContextManager[object]:
    """As products are by default: cuDNN would round what it multiplies to TF32, each of its kernels in another way."""
    is_on_card = device.place.type == "cuda"
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False) if is_on_card else nullcontext()


def find_failures(names: Iterable[str], device: Device) -> Iterator[str]:
    for name in names:
        try:
            compare_operators(operator_case((name,)), device)
        except Exception as error:  # whatever it is, it is what the check says of the operator
            yield f"{name}: {type(error).__name__}: {error}"[:400]


TRIES: Final = (
    sys.executable,
    "-c",
    "import sys\nfrom benchmarks.cuda.checks import try_operators\ntry_operators(sys.argv[1:])",
)


def try_operators(names: Iterable[str]) -> None:
    """Print a line for each operator that is tried on a card, with what fails, up to the first that ends the context of
    CUDA."""
    device = find_device("cuda")
    with convolutions_in_float32(device):
        for name in names:
            failure, is_lost = next(find_failures([name], device), ""), False
            try:
                device.synchronize()
            except RuntimeError as error:
                failure, is_lost = failure or f"{name}: {error}", True
            print(json.dumps(failure), flush=True)
            if is_lost:
                return


def find_failures_apart(names: Iterable[str], tries: Sequence[str] = TRIES) -> Iterator[str]:
    """As `find_failures` on a card, in other processes: an operator that ends the context of CUDA, or its process, ends
    it for all after it, so a further process goes on with those.

    Args:
        names: the operators.
        tries: a command that prints a line for each of its arguments, as `try_operators` does.
    """
    left = list(names)
    while left:
        done = subprocess.run([*tries, *left], capture_output=True, text=True, check=False)
        said = [str(json.loads(line)) for line in done.stdout.splitlines() if line.startswith('"')]
        if done.returncode and len(said) < len(left):  # the operator without a line has ended the process
            said.append(f"{left[len(said)]}: exit {done.returncode}: {done.stderr[-400:]}")
        for failure in filter(None, said):
            print(failure, flush=True)  # a check that is ended has said this much
            yield failure
        left = left[len(said) :]


def compare_operators(case: OperatorCase, device: Device) -> str:
    graph, inputs, eager = case
    expected = [tensor.cpu() for tensor in eager(*(tensor.to(device.place) for tensor in inputs))]
    program = compile_graph(graph, device=device)
    feed = feed_of(graph, inputs)
    outputs = [graph.values[vid].name for vid in graph.outputs]
    program.replay(feed)
    for run in (program.run, program.replay):
        found = run(feed)
        for name, other in zip(outputs, expected, strict=True):
            own = found[name].cpu()
            if other.is_floating_point():  # torch compares no float8
                own, other = own.double(), other.double()
            torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    return str(program.capture(feed).report.summary)


def check_capture(device: Device) -> str:
    """Decode with a cache: replays are runs, a snapshot takes them back, dropped captures can be made again."""
    module = Decode(64, 4, 128, 16).eval()
    inputs = [torch.randn(1, 1, 64), torch.tensor([0]), torch.zeros(1, 1, 1, 16)]
    graph = graph_of(module, inputs)
    weights = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    program, eager = compile_graph(graph, weights, device=device), compile_graph(graph, weights, device=device)
    names = [graph.values[vid].name for vid in graph.inputs]
    feed = dict(zip(names, inputs, strict=True))
    report = program.capture(feed).report
    before = program.snapshot()
    for place in range(4):
        given = {**feed, names[0]: torch.randn(1, 1, 64), names[1]: torch.tensor([place])}
        for found, other in zip(program.replay(given).values(), eager.run(given).values(), strict=True):
            far = (found - other).abs().max()
            assert torch.equal(found, other), f"replay {place} differs from its eager run by {far}"
    first, again = (program.replay(feed, restore=before) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first), "a restored replay is another one"
    program.drop_captures()
    program.replay(feed, restore=before)
    program.synchronize()
    return report.summary


def check_row_programs(device: Device) -> str:
    """Row programs in Triton against their forms in torch, in each dtype; and rows that fill no block.

    Without a card small ones are only computed by torch: the tests run Triton's interpreter.
    """
    on_card = device.place.type == "cuda"
    short = Case("short rows", PROGRAMS[4].program, (3, 5, 130), ((650, 130, 1), (0, 130, 1)))
    for case in (*PROGRAMS, short):
        sizes = case.sizes if on_card else tuple(min(size, 6) for size in case.sizes)
        for dtype, rtol in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)):
            ins = [make_operand(sizes, strides, dtype, device.place, torch.randn) for strides in case.strides]
            found, expected = (torch.full(sizes, math.nan, dtype=dtype, device=device.place) for _ in range(2))
            program = read_program(case.program)
            if on_card:
                launch_row_program(program, ins, found)()
            else:
                compute_into(program, ins, found)
            compute_into(program, ins, expected)
            say = partial("{}, {}: {}".format, case.name, dtype)
            torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-5, msg=say)
    return f"{len(PROGRAMS) + 1} programs in 3 dtypes, by {'Triton' if on_card else 'torch alone'}"


def check_indices(device: Device) -> str:
    """An index out of range fails a later run, and the device lives on."""
    builder = GraphBuilder("rows")
    table, ids = builder.input("table", TensorSpec((4, 8), "float32")), builder.input("ids", TensorSpec((3,), "int64"))
    rows = builder.emit("aten.embedding.default", [table, ids], [("rows", TensorSpec((3, 8), "float32"))])
    program = compile_graph(builder.build(rows), device=device)
    feed = {"table": torch.ones(4, 8), "ids": torch.tensor([0, 9, 3])}
    for run in (program.run, program.replay):
        run(feed)
        try:
            program.synchronize()
        except DataError:
            pass
        else:
            raise AssertionError("the index 9 of 4 rows went unnoticed")
    assert program.run({**feed, "ids": torch.tensor([0, 1, 3])})["rows"].cpu().tolist() == [[1.0] * 8] * 3
    return "found late, in runs and in replays"


def check_streams(device: Device) -> str:
    """Two contexts on two streams, over the same weights."""
    module = mlp(64).eval()
    inputs = [torch.randn(8, 64)]
    graph = graph_of(module, inputs)
    program = compile_graph(graph, dict(module.state_dict()), device=device)
    contexts = [program.new_context() for _ in range(2)]
    (name,) = (graph.values[vid].name for vid in graph.inputs)
    with torch.no_grad():
        expected = module(inputs[0])
    if device.place.type != "cuda":
        found = [next(iter(context.run({name: inputs[0]}).values())) for context in contexts]
    else:
        streams, found = [torch.cuda.Stream() for _ in contexts], []
        for context, stream in zip(contexts, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(next(iter(context.run({name: inputs[0]}).values())))
        torch.cuda.synchronize()
    for result in found:
        torch.testing.assert_close(result.cpu(), expected, rtol=1e-3, atol=1e-4)
    return "2 contexts"


class Dropped(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(rows, 0.5, training=True)


def check_draws(device: Device) -> str:
    """Replays of two programs draw in turn from torch's default generator, on two streams as on one."""
    rows = torch.ones(1024)
    graph = graph_of(Dropped(), [rows])
    programs = [compile_graph(graph, device=device) for _ in range(2)]
    feed = {graph.values[vid].name: rows for vid in graph.inputs}
    for program in programs:
        program.capture(feed)
    is_card = device.place.type == "cuda"
    found = []
    for is_split in (True, False):
        streams = [torch.cuda.Stream() if is_card and is_split else None for _ in programs]
        torch.manual_seed(5)
        for program, stream in zip(programs * 3, streams * 3, strict=True):
            with torch.cuda.stream(stream):
                found.append(next(iter(program.replay(feed).values())))
        device.synchronize()
    assert all(map(torch.equal, found[:6], found[6:])), "two streams draw other numbers than one"
    assert len({tuple(drawn.tolist()) for drawn in found}) == 6, "a replay repeats the numbers of another one"
    return "6 draws"


ADAM: Final = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True, slots=True)
class Training:
    make: Callable[[], nn.Module]
    batch: tuple[torch.Tensor, torch.Tensor]
    optimizer: Callable[..., torch.optim.Optimizer] = ADAM


def check_training(name: str, device: Device) -> str:
    """Recorded steps against eager torch on the same device, from the same values: 100 on a GPU, else 3.

    Gradients that differ by a thousandth of themselves leave a tenth of the tolerance of the losses in use.
    """
    with convolutions_in_float32(device):
        return compare_training(TRAINED[name], device)


def compare_training(case: Training, device: Device) -> str:
    torch.manual_seed(0)
    module = case.make()
    twin = copy.deepcopy(module).to(device.place)
    loss, (x, y) = nn.functional.cross_entropy, (tensor.to(device.place) for tensor in case.batch)
    program = record_step(module, loss, case.optimizer(module.parameters()), case.batch, device=device)
    optimizer = case.optimizer(twin.parameters())
    losses = list[tuple[torch.Tensor, torch.Tensor]]()
    for _ in range(100 if device.place.type == "cuda" else 3):
        optimizer.zero_grad()
        expected = loss(twin(x), y)
        expected.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append((program.step(case.batch), expected.detach()))
    found, other = (torch.stack([pair[at].float().cpu() for pair in losses]) for at in (0, 1))
    torch.testing.assert_close(found, other, rtol=2e-3, atol=2e-4)
    far = (found - other).abs().max()
    return f"{len(losses)} steps, loss {other[0]:.4f} → {other[-1]:.4f}, largest difference {far:.1e}"


LABELS = torch.arange(4) % 10
ROWS = torch.linspace(-1, 1, 256).view(4, 64)

TRAINED: Final[Mapping[str, Training]] = {
    "mlp": Training(partial(mlp, 64), (ROWS, LABELS)),
    "mlp-sgd": Training(partial(mlp, 64), (ROWS, LABELS), partial(torch.optim.SGD, lr=1e-2, momentum=0.9)),
    "cnn": Training(cnn, (torch.linspace(-1, 1, 768).view(4, 3, 8, 8), LABELS)),
    "transformer": Training(partial(Classifier, 50, 32, 2, 4), (torch.arange(64).view(4, 16) % 50, LABELS)),
    "gpt2": Training(
        partial(Words, 50, 16, 32, 2, 4, is_causal=True), (torch.arange(64).view(4, 16) % 50, torch.arange(64) * 7 % 50)
    ),
}

CHECKS: Final[Mapping[str, Callable[[Device], str]]] = {
    "capture": check_capture,
    "indices": check_indices,
    "row-programs": check_row_programs,
    "streams": check_streams,
    "draws": check_draws,
    "operators": check_operators,
    **{f"train-{name}": partial(check_training, name) for name in TRAINED},
}
"""In the order in which they run."""
