"""One thing that an audit found: a pass did something to a model that it should not do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["KINDS", "UNSAFE", "Finding"]


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """The pass `name` on the model `case`. `why` says more, in words that are the same on every machine.

    Args:
        name: as the catalogue has it, `onnxsim/fuse_qkv`; `default` for onnxoptimizer's default set as a whole.
        kind: one of `KINDS`.
        case: with its source, `node/test_abs`.
    """

    name: str
    kind: str
    case: str
    why: str = ""


KINDS: Final = {
    "crashed": "the process died",
    "timed-out": "it did not come back",
    "raised": "the library raised",
    "invalid": "ONNX's checker refuses the result, and not the model before",
    "signature": "inputs or outputs have other names, types or sizes",
    "wrong": "the result computes something else, or does not run",
    "grew-nodes": "the result has more operators",
    "grew-bytes": "the result is larger by more than a tenth, and by more than 1 KiB",
    "lost-metadata": "metadata or doc strings are gone from the model, or from operators that are still there",
    "not-idempotent": "a second run changes the model again",
}
"""Kind → what it means, the worst first."""

UNSAFE: Final = frozenset({"crashed", "timed-out", "invalid", "signature", "wrong"})
"""The kinds for which `skip: [unsafe]` leaves a pass out. One that raises says so itself, and costs its own step."""
