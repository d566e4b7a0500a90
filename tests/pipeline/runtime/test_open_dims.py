"""Named dims: a plan for each size that is fed, of which the last are kept; sizes rounded up to buckets by choice."""

from __future__ import annotations

import threading

import pytest
import torch

from pipeline.errors import UsageError
from pipeline.ir.graph import Graph
from pipeline.runtime.open_dims import SizedProgram, compile_open_graph
from tests.support.torch_programs import graph_of


class Rows(torch.nn.Module):
    """Row by row, and each row twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x).relu()
        return y, torch.cat([y, y.flip(1)]).flatten()


class Plain(Rows):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.layer(x).relu()


ROWS = Rows()  # made once: its seed is that of the process, and threads compare with it


class Counter(torch.nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x + self.count


def open_graph(module: torch.nn.Module) -> Graph:
    return graph_of(module, [torch.rand(4, 3)], dynamic_shapes={"x": {0: torch.export.Dim("batch")}})


@pytest.fixture(scope="module")
def graph() -> Graph:
    return open_graph(Rows())


def dim_of(graph: Graph) -> str:
    """torch may name a dim itself."""
    return str(graph.values[graph.inputs[0]].spec.shape[0])


def check_runs(cache: SizedProgram, graph: Graph, size: int) -> None:
    x = torch.rand(size, 3)
    found = cache.run({"x": x})
    with torch.no_grad():
        expected = ROWS(x)
    for vid, one in zip(graph.outputs, expected, strict=True):
        torch.testing.assert_close(found[graph.values[vid].name], one)


def test_the_last_sizes_are_kept(graph: Graph) -> None:
    cache, dim = compile_open_graph(graph, Rows().state_dict(), limit=2), dim_of(graph)
    for size in (2, 3, 2, 5):
        check_runs(cache, graph, size)
    assert cache.sizes == [{dim: 2}, {dim: 5}]


def test_weights_are_bound_without_a_copy(graph: Graph) -> None:
    weights = Rows().state_dict()
    cache = compile_open_graph(graph, weights)
    for size in (2, 3):
        cache.run({"x": torch.rand(size, 3)})
    bound = [tensor for program in cache._plans._kept.values() for tensor in program.weights.values()]
    assert len(bound) == 4
    assert {tensor.data_ptr() for tensor in bound} == {tensor.data_ptr() for tensor in weights.values()}


def test_sizes_are_rounded_up_to_buckets() -> None:
    graph = open_graph(Plain())
    dim = dim_of(graph)
    cache = compile_open_graph(graph, Rows().state_dict(), buckets={dim: (8, 4)})
    for size in (3, 2, 4, 6, 8):
        x = torch.rand(size, 3)
        (found,) = cache.run({"x": x}).values()
        with torch.no_grad():
            torch.testing.assert_close(found, Plain()(x))
    assert cache.sizes == [{dim: 4}, {dim: 8}]
    with pytest.raises(UsageError, match=f"{dim} = 9 is above every bucket: 4, 8"):
        cache.run({"x": torch.rand(9, 3)})


def test_a_feed_of_the_size_of_a_bucket_is_neither_filled_up_nor_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = open_graph(Plain())
    program = compile_open_graph(graph, Rows().state_dict(), buckets={dim_of(graph): (4,)})
    monkeypatch.setattr(program, "_fill", None)
    monkeypatch.setattr(program, "_cut_padding", None)
    (found,) = program.run({"x": torch.rand(4, 3)}).values()
    assert len(found) == 4


def test_mistakes_are_named(graph: Graph) -> None:
    with pytest.raises(UsageError, match="has no dim 'bach'"):
        compile_open_graph(graph, buckets={"bach": (1,)})
    with pytest.raises(UsageError, match=r"found \(0,\), expected sizes of 1 or more"):
        compile_open_graph(graph, buckets={dim_of(graph): (0,)})
    with pytest.raises(UsageError, match="are not at the end: leave out its buckets"):
        compile_open_graph(graph, buckets={dim_of(graph): (4,)})
    for sizes in ("48", [1.5], [True], 4, []):
        with pytest.raises(UsageError, match=r"found .*, expected sizes of 1 or more, such as \[8, 64\]"):
            compile_open_graph(graph, buckets={dim_of(graph): sizes})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match=r"buckets is a list; expected \{name of a dim: sizes\}"):
        compile_open_graph(graph, buckets=[4])  # type: ignore[arg-type]
    for limit in (0, 1.5, None):
        with pytest.raises(UsageError, match=f"limit={limit}; expected 1 or more sizes"):
            compile_open_graph(graph, limit=limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["run", "replay", "run_updating"])
def test_a_feed_without_an_input_is_named_before_sizes_are_looked_for(graph: Graph, method: str) -> None:
    with pytest.raises(UsageError, match="the feed lacks 'x'; inputs: x"):
        getattr(compile_open_graph(graph), method)({})


def test_a_name_that_is_no_input_is_named_with_buckets_too() -> None:
    graph = open_graph(Plain())
    program = compile_open_graph(graph, Rows().state_dict(), buckets={dim_of(graph): [4]})
    with pytest.raises(UsageError, match="the feed has 'z', which is no input; inputs: x"):
        program.run({"x": torch.rand(2, 3), "z": torch.rand(1)})


def test_a_size_is_run_while_another_one_is_planned(graph: Graph) -> None:
    """The thread that plans waits in `approve` until the other one has run."""
    inside, done = threading.Event(), threading.Event()

    def wait_at_seven(bound: Graph) -> None:
        if bound.values[bound.inputs[0]].spec.sizes[0] == 7:
            inside.set()
            assert done.wait(20)

    program = SizedProgram(graph, Rows().state_dict(), approve=wait_at_seven)
    check_runs(program, graph, 2)
    planning = threading.Thread(target=lambda: program.run({"x": torch.rand(7, 3)}))
    planning.start()
    assert inside.wait(20)
    running = threading.Thread(target=lambda: [check_runs(program, graph, size) for size in (2, 3)])
    running.start()
    running.join(20)
    assert not running.is_alive()
    done.set()
    planning.join()
    assert [size for (size,) in (one.values() for one in program.sizes)] == [2, 3, 7]


def test_two_threads_that_meet_a_new_size_make_one_plan(graph: Graph) -> None:
    planned: list[Graph] = []
    program = SizedProgram(graph, Rows().state_dict(), approve=planned.append)
    threads = [threading.Thread(target=check_runs, args=(program, graph, 5)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(planned) == 1
    assert not program._planning, "no lock is left of a plan that was made"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("method", ["run", "replay", "run_updating"])
def test_what_has_no_shape_of_its_own_is_named(graph: Graph, method: str) -> None:
    call = getattr(compile_open_graph(graph), method)
    with pytest.raises(UsageError, match="'x' is a list; expected a torch tensor or a numpy array"):
        call({"x": [[1.0, 2.0, 3.0]]})
    for layout in (torch.strided, torch.jagged):
        with pytest.raises(UsageError, match="'x' is a nested tensor; expected a dense one"):
            call({"x": torch.nested.nested_tensor([torch.ones(3), torch.ones(3)], layout=layout)})


def test_states_are_the_same_at_all_sizes() -> None:
    cache = compile_open_graph(open_graph(Counter()), Counter().state_dict(), limit=2)
    for run, size in enumerate([2, 3, 4, 2]):
        (found,) = cache.run({"x": torch.zeros(size, 3)}).values()
        assert torch.equal(found, torch.full((size, 3), run + 1.0))


def test_states_are_read_and_set_between_sizes() -> None:
    program = compile_open_graph(open_graph(Counter()), Counter().state_dict(), limit=2)
    assert program.states() == {}
    with pytest.raises(UsageError, match="nothing was run"):
        program.give_states({"b_count": torch.zeros(1)})
    for size in (2, 3):
        outputs, updated = program.run_updating({"x": torch.zeros(size, 3)})
        assert [tuple(one.shape) for one in outputs.values()] == [(size, 3)]
        assert updated == {}  # a state stays with the program
    assert program.states() == {"b_count": torch.tensor([2.0])}
    program.give_states({"b_count": torch.tensor([10.0])})
    (found,) = program.run({"x": torch.zeros(4, 3)}).values()
    assert torch.equal(found, torch.full((4, 3), 11.0))


def test_a_graph_may_be_refused_for_some_sizes(graph: Graph) -> None:
    def refuse_three(bound: Graph) -> None:
        if bound.values[bound.inputs[0]].spec.sizes[0] == 3:
            raise UsageError("three rows")

    program = SizedProgram(graph, Rows().state_dict(), approve=refuse_three)
    check_runs(program, graph, 2)
    with pytest.raises(UsageError, match="three rows"):
        program.run({"x": torch.rand(3, 3)})
    assert program.sizes == [{dim_of(graph): 2}]
