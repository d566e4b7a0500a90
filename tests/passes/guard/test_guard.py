"""The `with` form, on calls of onnxoptimizer."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections import Counter
from pathlib import Path

import onnx
import onnxoptimizer
import pytest
from onnxoptimizer import optimize  # by name, before any guard

import passes
from passes.guard import Guard, GuardedCall, GuardLog, Returned
from tests.support.onnx_models import attention, matrix, merged_attention, model_of, op_counts

pytestmark = pytest.mark.usefixtures("workers")

QKV = ["fuse_qkv"]


def guard(*keep: str, **wishes) -> Guard:
    return passes.guard(keep, **{"quiet": True, **wishes})


def only(log: GuardLog) -> GuardedCall:
    (call,) = log.calls
    return call


def test_every_reference_to_the_function_is_guarded_and_then_free_again() -> None:
    environment, finders = dict(os.environ), list(sys.meta_path)
    with guard("qkv") as log:
        by_name, by_module = optimize(attention(), QKV), onnxoptimizer.optimize(attention(), QKV)
    assert op_counts(by_name) == op_counts(by_module) == op_counts(attention())
    assert op_counts(optimize(attention(), QKV))["Split"] == 1
    assert (dict(os.environ), sys.meta_path) == (environment, finders)
    assert len(log.calls) == 2


def test_a_call_is_logged_with_its_place_and_what_it_would_have_lost() -> None:
    model = attention()
    with guard("qkv") as log:
        optimize(model, QKV)
        (call,) = log.calls  # while the guard is on, too
    assert log.calls == (call,)
    assert (call.file, call.caller) == (__file__, "test_a_call_is_logged_with_its_place_and_what_it_would_have_lost")
    assert Path(__file__).read_text().splitlines()[call.line - 1].strip() == "optimize(model, QKV)"
    assert (call.function, call.returned, call.proof) == ("onnxoptimizer.optimize", Returned.GUARDED, "numbers")
    assert (call.process, call.thread, call.model) == (os.getpid(), "MainThread", "")
    assert (call.nodes_before, call.nodes_after, call.unguarded_nodes) == (19, 19, 21)
    assert (call.kept, call.missing, call.compared) == ({"qkv": 1}, (), True)
    [lost] = call.would_have_lost
    assert "wq" in lost and "wk" in lost and "wv" in lost


def test_what_did_not_have_to_be_kept_may_be_merged_and_no_comparison_is_made() -> None:
    with guard(compare=False) as log:
        assert op_counts(optimize(attention(), QKV))["Split"] == 1
    assert (log.calls[0].kept, log.calls[0].compared, log.calls[0].would_have_lost) == ({}, False, ())


def test_a_skip_is_honoured_and_watches() -> None:
    with guard(skip=QKV) as log, guard(skip=["eliminate_*"]):
        optimized = optimize(attention(), [*QKV, "eliminate_deadend"])
    (call,) = log.calls
    assert op_counts(optimized) == op_counts(attention())
    assert call.kept == {"qkv": 1}
    assert call.skipped == {
        "fuse_qkv": "skip: fuse_qkv",
        "eliminate_deadend": "skip: eliminate_* names eliminate_deadend",
    }


def test_keep_that_matches_nothing_anywhere_is_reported_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with guard("qkv", quiet=False) as log:
        optimize(merged_attention(), ["eliminate_identity"])
    assert log.calls[0].missing == ("qkv",)
    assert "warning: keep: qkv matches nothing in any of the models" in capsys.readouterr().err
    with guard("qkv?", quiet=False):
        optimize(merged_attention(), ["eliminate_identity"])
    assert "warning" not in capsys.readouterr().err


LATER = """
g (float[2, 32] x) => (float[2, 32] y) {
    t = Transpose <perm = [1, 0]> (x) i = Identity (t) u = Transpose <perm = [1, 0]> (i) y = Relu (u)
}
"""


def test_a_fixed_point_goes_on_until_nothing_changes() -> None:
    """The first of the two passes has something to do only after the second."""
    names = ["fuse_consecutive_transposes", "eliminate_identity"]
    with guard() as log:
        once, until = optimize(model_of(LATER), names), optimize(model_of(LATER), names, fixed_point=True)
    assert op_counts(once) == op_counts(optimize(model_of(LATER), names)) == Counter(Transpose=2, Relu=1)
    assert op_counts(until) == op_counts(optimize(model_of(LATER), names, True)) == Counter(Transpose=1, Relu=1)
    assert [call.nodes_after for call in log.calls] == [3, 2]


def test_a_fixed_point_leaves_out_what_did_not_go_well() -> None:
    """split_init drops what the model computes."""
    names = ["split_init", "fuse_consecutive_transposes", "eliminate_identity"]
    with guard() as log:
        optimized = optimize(model_of(LATER), names, fixed_point=True)
    assert op_counts(optimized) == Counter(Transpose=1, Relu=1)
    assert list(only(log).reverted or ()) == ["split_init"]


def test_what_the_caller_asked_for_may_rename_the_inputs() -> None:
    with guard() as log:
        optimized = optimize(model_of(LATER), ["rename_input_output"])
    assert [info.name for info in optimized.graph.input] != ["x"]
    assert only(log).returned is Returned.UNGUARDED


SHARED = "g (float[2, 8, 32] x) => (float[2, 8, 32] q, float[2, 8, 32] k, float[2, 8, 32] v)"


def test_what_the_optimizer_refuses_is_refused() -> None:
    """onnxoptimizer's fuse_qkv fails an assertion where the shared input is a graph input."""
    text = SHARED + "{ q = MatMul (x, a) k = MatMul (x, b) v = MatMul (x, c) }"
    model = model_of(text, a=matrix(32, 32, 0), b=matrix(32, 32, 1), c=matrix(32, 32, 2))
    with guard() as log, pytest.raises(RuntimeError, match="Assertion"):
        optimize(model, QKV)
    assert only(log).returned is Returned.RAISED


def test_what_it_refuses_in_part_costs_that_part() -> None:
    text = SHARED + "{ i = Identity (x) q = MatMul (i, a) k = MatMul (i, b) v = MatMul (i, c) }"
    model = model_of(text, a=matrix(32, 32, 0), b=matrix(32, 32, 1), c=matrix(32, 32, 2))
    with guard() as log:
        optimized = optimize(model, ["eliminate_identity", *QKV])
    assert op_counts(optimized) == Counter(MatMul=3)
    assert "Assertion" in (only(log).reverted or {})["fuse_qkv"]
    assert only(log).unguarded_fault.startswith("raised: RuntimeError: ")


def test_mistakes_of_the_caller_are_the_librarys_to_tell() -> None:
    with guard("qkv") as log:
        with pytest.raises(ValueError, match="only accepts ModelProto"):
            optimize("a path")
        with pytest.raises(RuntimeError, match="pass nope is unknown"):
            optimize(attention(), ["nope"])
        with pytest.raises(TypeError, match="unexpected keyword argument 'passed'"):
            optimize(attention(), passed=QKV)
    assert [call.returned for call in log.calls] == [Returned.RAISED] * 3


def test_where_numbers_cannot_be_compared_the_structure_still_is() -> None:
    model = attention()
    model.graph.node.add(op_type="Sharpen", domain="of.mine", input=["y"], output=["z"], name="own")
    model.graph.output[0].name = "z"
    model.opset_import.add(domain="of.mine", version=1)
    with guard("qkv") as log:
        optimized = optimize(model, QKV)
    (call,) = log.calls
    assert op_counts(optimized) == op_counts(model)
    assert call.proof == "structure"
    assert len(call.would_have_lost) == 1
    assert "only the structure is proven: " in call.notes[0]


def test_an_exception_in_the_block_goes_on_and_ends_the_guard() -> None:
    code = optimize.__code__
    with pytest.raises(ZeroDivisionError), guard("qkv"):
        raise ZeroDivisionError
    assert optimize.__code__ is code  # the outer guard's door
    assert op_counts(optimize(attention(), QKV))["Split"] == 1


def test_guards_inside_of_each_other_add_up_in_any_order_of_their_ends() -> None:
    outer, inner = guard(skip=["eliminate_deadend"]), guard("qkv")
    first = outer.__enter__()
    second = inner.__enter__()
    optimize(attention(), [*QKV, "eliminate_deadend"])
    outer.__exit__(None, None, None)
    kept = optimize(attention(), QKV)
    inner.__exit__(None, None, None)
    assert op_counts(kept) == op_counts(attention())
    assert [(call.kept, call.skipped) for call in first.calls] == [
        ({"qkv": 1}, {"eliminate_deadend": "skip: eliminate_deadend"})
    ]
    assert [len(log.calls) for log in (first, second)] == [1, 2]


def test_threads_are_guarded_at_once() -> None:
    results: list[onnx.ModelProto] = []
    with guard("qkv", compare=False) as log:
        threads = [threading.Thread(target=lambda: results.append(optimize(attention(), QKV))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [op_counts(model) for model in results] == [op_counts(attention())] * 3
    assert {call.thread for call in log.calls} == {thread.name for thread in threads}


def _merge(log: GuardLog) -> None:
    optimize(attention(), QKV)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_is_guarded_and_tells_its_parent() -> None:
    with guard("qkv") as log:
        child = multiprocessing.get_context("fork").Process(target=_merge, args=(log,))
        child.start()
        child.join()
        optimize(attention(), QKV)  # the parent's worker is still its own
    assert child.exitcode == 0
    assert [(call.process, len(call.would_have_lost)) for call in log.calls] == [(child.pid, 1), (os.getpid(), 1)]


def test_our_own_use_of_the_libraries_is_not_intercepted() -> None:
    with guard("qkv") as log:
        run = passes.optimize(attention(), recipe=QKV)
    assert not run.structures[0].kept
    assert log.calls == ()


def test_a_log_of_ones_own_stays(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text("an older one")
    with guard("qkv", log=path) as log:
        optimize(attention(), QKV)
    assert len(path.read_text().splitlines()) == len(log.calls) == 1
