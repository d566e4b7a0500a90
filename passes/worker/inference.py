"""ONNX's own code on a model of the user's, shape inference above all, in a process with limits of time and memory.

Inference carries the values of small constants along, so a file of a kilobyte in which 34 nodes double a constant takes
all memory there is; and native code cannot be stopped in the process that calls it.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeVar

import onnx
from onnx import ModelProto
from onnx.shape_inference import InferenceError

from passes.errors import InferenceStopped, StepCrashed, StepFailed, StepTimedOut
from passes.worker.client import Worker
from passes.worker.platforms import crowding, memory_limit

Result = TypeVar("Result")

LEAST_SECONDS: Final = 20.0
SECONDS_PER_NODE: Final = 0.002
"""The time limit; inference takes a hundredth of it where nothing is wrong."""

MOST_MEMORY: Final = 8 * 2**30


def infer_shapes(
    model: ModelProto, *, check_type: bool = False, strict_mode: bool = False, data_prop: bool = False
) -> ModelProto:
    """`onnx.shape_inference.infer_shapes`, under limits; `model` stays as it is.

    Raises:
        InferenceError: onnx refuses the model.
        InferenceStopped: it takes more time or memory than any sound model.
    """
    flags = {"check_type": check_type, "strict_mode": strict_mode, "data_prop": data_prop}
    nodes = len(model.graph.node) + sum(len(function.node) for function in model.functions)
    limit = LEAST_SECONDS + SECONDS_PER_NODE * nodes
    try:
        return onnx.load_from_string(call_limited(_infer, limit, model=model.SerializeToString(), flags=flags))
    except (StepCrashed, StepTimedOut) as failure:
        spent = f"{limit:.0f} s" if isinstance(failure, StepTimedOut) else "the memory that it may have"
        raise InferenceStopped(
            f"ONNX's shape inference of the model takes more than {spent}, and was stopped; is there a constant that "
            "node after node makes larger?"
        ) from failure
    except StepFailed as failure:
        raise InferenceError(str(failure)) from failure


def call_limited(function: Callable[..., Result], limit: float, **arguments: Any) -> Result:
    """Call a function of a module in the process, for `limit` seconds of a quiet machine at most.

    Raises:
        StepFailed: as `Worker.call`.
    """
    return _process_of(os.getpid()).call(function, limit * crowding(), arguments)


class _LimitedProcess:
    """The process that works for this one; threads take turns."""

    def __init__(self) -> None:
        memory = min(MOST_MEMORY, memory_limit() * 9 // 10)
        self._worker = Worker(memory_bytes=memory, preload=(__name__.removeprefix("_onnxline."),))
        self._turn = threading.Lock()

    def call(self, function: Callable[..., Result], limit: float, arguments: dict[str, Any]) -> Result:
        with self._turn:
            return self._worker.ask(function, within_s=limit, **arguments)

    def close(self) -> None:
        self._worker.close()


@cache
def _process_of(process: int) -> _LimitedProcess:
    """The limited process for the process with this id: a fork must not use the limited process of its parent."""
    limited = _LimitedProcess()
    atexit.register(lambda: limited.close() if os.getpid() == process else None)
    return limited


def _infer(model: bytes, flags: dict[str, bool]) -> bytes:
    return onnx.shape_inference.infer_shapes(onnx.load_from_string(model), **flags).SerializeToString()
