"""The worker: a crash, an endless loop or an error costs one call, and the next one works."""

from __future__ import annotations

import pytest

from passes.errors import StepCrashed, StepFailed, StepTimedOut
from passes.isolate import Worker

HERE = "tests.passes.faults"


@pytest.mark.parametrize(
    ("function", "arguments", "kind", "words"),
    [
        ("die", {}, StepCrashed, "died \\(signal SIGABRT\\)"),
        ("leave", {}, StepCrashed, "died \\(exit code 7\\)"),
        ("loop", {}, StepTimedOut, "ran past 0.5 s"),
        ("complain", {"words": "no such tensor"}, StepFailed, "^ValueError: no such tensor$"),
        ("nowhere", {}, StepFailed, "AttributeError"),
    ],
)
def test_a_fault_is_told_and_the_next_call_works(function, arguments, kind, words) -> None:
    with Worker(timeout_s=5) as worker:
        assert worker.call(f"{HERE}:double", number=2) == 4
        worker.timeout_s = 0.5
        with pytest.raises(kind, match=words) as caught:
            worker.call(f"{HERE}:{function}", **arguments)
        assert type(caught.value) is kind
        worker.timeout_s = 5
        assert worker.call(f"{HERE}:double", number=21) == 42


def test_the_worker_is_kept_between_calls() -> None:
    with Worker() as worker:
        assert worker.call("os:getpid") == worker.call("os:getpid")


def test_output_of_a_native_library_does_not_mix_with_answers() -> None:
    with Worker() as worker:
        assert worker.call(f"{HERE}:shout") == "done"
