"""What many tests of passes and of whole runs need."""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Final

# Before anything imports Triton: its kernels are run by its interpreter, on the CPU.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
from hypothesis import settings

from passes.context import USER_CODE, PassContext, open_context
from passes.worker.client import Worker
from passes.worker.platforms import available_cores
from tests.support.one_of_each import NIGHTLY, ONE_OF_EACH
from tests.support.paths import TESTS

settings.register_profile("all", deadline=None)  # no test asserts a time: other work may hold the machine
settings.register_profile("onnxline", deadline=None, max_examples=50)
settings.register_profile("fast", deadline=None, max_examples=25)


@pytest.fixture(scope="session")
def context() -> Iterator[PassContext]:
    """Workers and a folder, for all tests: they take seconds to start. A worker that dies is replaced."""
    with open_context() as opened:
        yield opened


@pytest.fixture(autouse=True, scope="session")
def running_workers(context: PassContext) -> Iterator[None]:
    """Runs and commands in this process get a context of their own, but with workers that run already: to start them
    would be most of the time of most tests. Commands in a process of their own start theirs, and so do threads that run
    at the same time and runs with a limit of memory; what a test has put onto `sys.path` is seen by a new worker alone.
    """
    paths, lending = list(sys.path), threading.RLock()

    @contextmanager
    def lend(
        timeout_s: float = 600.0, memory_gib: float | None = None, folder: Path | None = None, **asked: str
    ) -> Iterator[PassContext]:
        if memory_gib is not None or not lending.acquire(blocking=False):
            with open_context(timeout_s, memory_gib, folder, **asked) as opened:
                yield opened
            return
        workers = (context.worker, context.user_code, context.proofs)
        limits = [worker.timeout_s for worker in workers]
        context.worker.timeout_s = context.user_code.timeout_s = timeout_s
        context.proofs.timeout_s = max(timeout_s, context.proofs.timeout_s)
        try:
            own = (
                Worker(timeout_s, preload=USER_CODE, alone=True)
                if sys.path != paths
                else nullcontext(context.user_code)
            )
            with tempfile.TemporaryDirectory(prefix="onnxline-", dir=folder) as place, own as user_code:
                yield PassContext(context.worker, Path(place).resolve(), context.proofs, user_code, **asked)
        finally:
            for worker, limit in zip(workers, limits, strict=True):
                worker.timeout_s = limit
            lending.release()

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in ("passes", "pipeline") and vars(module).get("open_context") is open_context:
                patch.setattr(module, "open_context", lend)  # modules that load later take it from `passes.context`
        yield


MARKS: Final = {
    "ray": ("pipeline/jobs/test_ray.py",),
    "browser": ("pipeline/report/test_browser.py", "passes/viewer/test_viewer.py", "docs/test_site.py"),
    "families": (
        "benchmarks/model_families/", "whole_runs/test_model_families.py", "pipeline/torch_ir/test_model_families.py",
        "benchmarks/test_encodings_coverage.py", "pipeline/test_onnx_backend.py",
        "pipeline/export/test_mixtures.py", "pipeline/export/test_exported_transformers.py", "pipeline/export/parts/",
        "pipeline/runtime/test_onnx_cases.py",
        "pipeline/importers/from_torch/layer_dedup/test_transformers.py", "passes/structures/test_exports.py",
        "passes/structures/test_attention_modules.py",
        "passes/structures/test_tricky_kept.py", "passes/external/test_bert.py", "passes/provenance/test_models.py",
    ),
    "tutorials": (
        "docs/test_tutorials.py", "docs/test_readme.py", "docs/test_torch_ir_page.py", "docs/test_authoring_page.py",
        "docs/test_doors.py::test_the_example",
        "examples/", "package/",
    ),
    "slow": (
        "whole_runs/", "fuzz/", "passes/audit/", "passes/bisect/", "pipeline/authoring/", "pipeline/training/",
        "passes/encodings/test_carry.py", "passes/graph/test_inference.py::test_a_",
        "passes/run/test_keep_and_skip.py::test_keep", "passes/rewrites/test_decompose_attention.py",
        "passes/external/test_trained_models.py",
        "passes/external/test_onnxruntime_graph.py::test_an_opt_level", "passes/proof/test_hostile_tables.py",
        "passes/external/test_onnxscript.py::test_rules_are_not", "passes/external/test_pieces.py::test_the_work",
        "passes/external/test_onnxsim_detached.py::test_a_folder",
        "passes/external/test_onnxruntime_graph.py::test_it_needs_no_torch", "passes/guard/",
        "passes/proof/test_draws.py::test_a_guard_compares", "passes/proof/test_hostile.py::test_a_model_that_brings",
        "passes/proof/test_numeric.py::test_a_proof_worker_that_has_died", "passes/provenance/test_shared_weights.py",
        "passes/recipe/test_user_passes.py::test_an_error_or_a_crash", "passes/run/test_reproduce.py",
        "passes/recipe/test_harmful_passes.py",
        "passes/recipe/test_user_passes.py::test_the_digest", "passes/recipe/test_user_passes.py::test_a_package",
        "passes/run/test_keep_and_skip.py::test_tied", "passes/run/test_runner.py::test_a_time_limit",
        "passes/run/test_runner.py::test_a_run_leaves", "pipeline/config/test_yaml.py::test_what_no",
        "passes/test_without_torch.py",
        "passes/worker/test_client.py", "pipeline/test_batch.py", "pipeline/commands/", "pipeline/jobs/",
        "pipeline/report/", "pipeline/compat/", "pipeline/export/test_shards.py::test_large",
        "pipeline/export/test_to_onnx.py", "pipeline/export/test_translations.py",
        "pipeline/export/test_untranslatable.py", "pipeline/export/test_weight_free.py",
        "pipeline/runtime/capture/test_captures.py::test_a_thousand",
        "pipeline/runtime/capture/test_replay.py::test_a_replay_allocates",
        "pipeline/runtime/kernels/native/test_build.py", "pipeline/export/test_writes.py",
        "pipeline/runtime/capture/test_threads.py::test_eight", "pipeline/runtime/kernels/aten/",
        "pipeline/importers/from_torch/test_functionalize.py",
        "pipeline/importers/from_torch/layer_dedup/test_plain.py", "pipeline/quantsim/test_whole_simulation.py",
        "pipeline/quantsim/test_optimize.py::test_gptq_gives",
        "pipeline/importers/from_onnx/test_quantized.py::test_like_onnxruntime",
        "pipeline/runtime/capture/test_decode.py",
        "pipeline/runtime/kernels/test_torch_against_kernels.py::test_torch_records",
        "pipeline/quantsim/test_calibration.py::test_mse_of_symmetric",
        "pipeline/torch_ir/test_savers.py", "pipeline/torch_ir/test_round_trip.py::test_an_unbind",
        "pipeline/torch_ir/test_caches.py", "pipeline/torch_ir/test_custom_ops.py",
        "pipeline/test_custom_op_library.py",
        "pipeline/torch_ir/test_flex_attention.py",
        "pipeline/torch_ir/test_writes.py", "pipeline/torch_ir/test_verify.py",
        "benchmarks/test_cuda.py::test_every_", "benchmarks/test_cuda.py::test_a_run_writes",
        "pipeline/runtime/test_devices.py::test_plans_run_and_steps",
        "pipeline/runtime/capture/test_recording_device.py::test_a_recorded_step",
        "pipeline/runtime/capture/test_recording_device.py::test_dropped_captures", "house/test_size.py",
    ),
}  # fmt: skip
"""Mark → the folders, files and tests below tests/ that bear it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast",
        action="store_true",
        help="leave out all of MARKS, run one of the parameters of a test, and draw fewer examples",
    )
    parser.addoption("--all", action="store_true", help="run what one_of_each.py leaves out, too")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("fast" if config.getoption("fast") else "all" if config.getoption("all") else "onnxline")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One more than there are cores: a fourth of the time of the tests is spent in waiting for processes."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else len(available_cores()) + 1


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what `--fast` leaves out: that is a third of the time of the collection."""
    return True if config.getoption("fast") and marks_of(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [(item, marks_of(item.path, item.name)) for item in items]
    for item, marks in marked:
        for mark in marks:
            item.add_marker(mark)
    if config.getoption("fast"):
        items[:] = take_one_of_each_test([item for item, marks in marked if not marks], config)
    elif not config.getoption("all") and not any("::" in word for word in config.args):
        items[:] = shorten(items, config)
    skip_without_gpu([item for item in items if item.get_closest_marker("gpu")])


def take_one_of_each_test(items: Sequence[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    """Leave out all but the first parameters of each test."""
    first = {f"{item.path}::{item.name.partition('[')[0]}": item for item in reversed(items)}
    kept = set(map(id, first.values()))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    return [item for item in items if id(item) in kept]


def shorten(items: Sequence[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    """Leave out `NIGHTLY`, and the parameters of a test that `ONE_OF_EACH` does not name."""
    known: Counter[str] = Counter()
    left_out: list[pytest.Item] = []
    kept: list[pytest.Item] = []
    for item in items:
        name, _, parameters = item.name.removesuffix("]").partition("[")
        test = f"{item.path.relative_to(TESTS).as_posix()}::{name}"
        runs = test not in NIGHTLY and parameters in ONE_OF_EACH.get(test, [parameters])
        known[test] += runs and test in ONE_OF_EACH
        (kept if runs else left_out).append(item)
    lost = [test for test in known if test in ONE_OF_EACH and known[test] != len(ONE_OF_EACH[test])]
    if lost:
        raise pytest.UsageError(f"ONE_OF_EACH names parameters that these tests do not have: {', '.join(lost)}")
    config.hook.pytest_deselected(items=left_out)
    return kept


def pytest_runtest_setup() -> None:
    """Let torch's exporter read its 500 translations once for each opset, and not at each export: that is more than
    half of a small one."""
    registration: Any = sys.modules.get("torch.onnx._internal.exporter._registration")
    if registration is None or registration.ONNXRegistry.from_torchlib.__module__ == __name__:
        return
    read = cache(registration.ONNXRegistry.from_torchlib)

    def from_torchlib(opset_version: int = registration._constants.TORCHLIB_OPSET) -> Any:
        registry = copy.copy(read(opset_version))
        registry.functions = {name: list(known) for name, known in registry.functions.items()}
        return registry

    registration.ONNXRegistry.from_torchlib = staticmethod(from_torchlib)


def skip_without_gpu(items: Sequence[pytest.Item]) -> None:
    """Skip `items` if torch sees no CUDA device. Torch is imported only if there are such tests."""
    if not items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device on this machine"))


def marks_of(path: Path, test: str = "") -> Sequence[str]:
    """The marks of a folder, a file, or one test of it."""
    place = path.relative_to(TESTS).as_posix() + (f"::{test}" if test else "/" if path.is_dir() else "")
    return [mark for mark, places in MARKS.items() if place.startswith(places)]
