"""Judge the results of passes on a case, in a worker process of its own. It shares no code with any pass.

Few test models have metadata, so `add_marks` adds some to each case before its passes run. Error messages are
normalized, so that they are equal on every machine and for every model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx

from passes.audit.cases import Case
from passes.graph.index import copy_of, required_inputs
from passes.graph.op_facts import RANDOM_OPS
from passes.graph.traversal import every_graph, every_node
from passes.proof.numbers import compare, same_bits
from passes.suggest import plural
from passes.weights.evaluator import open_evaluator

SHARE: Final = 1.1
BYTES: Final = 1024
"""A result has grown when it is larger by a tenth and by a KiB, so that a few added type annotations do not count."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a pass. If `changed`, it computes something else, so its values have to be compared."""

    model: bytes
    changed: bool


Verdict = dict[str, str]
"""Kind of finding → the reason in words."""

RANDOM_OUTPUT_OPS: Final = RANDOM_OPS - {"Dropout"}
"""Operators that draw other values in each run, or when they move in the graph."""

FATAL_KINDS: Final = frozenset({"invalid", "signature"})
"""Kinds after which comparing values says nothing: the result does not run, or takes other inputs."""

READY: Final = "ready"
"""Sent once the case itself has run: a later crash is caused by a result."""


def judge(case: Case, results: Sequence[Result], start: int, compares: bool) -> Generator[str | tuple[int, Verdict]]:
    """Judge `results`, beginning with number `start`; with `compares`, changed models are run.

    Yields "ready" first, or why the values cannot be judged; then the index of each result, with its verdict.
    """
    valid = not _invalid(case.model)
    standard = _find_standard(case) if compares else ""
    yield standard if isinstance(standard, str) and standard else READY
    for index, result in enumerate(results):
        if index >= start:
            after = onnx.load_from_string(result.model)
            verdict = dict(_static_findings(case, after, valid))
            if result.changed and verdict.keys().isdisjoint(FATAL_KINDS) and not isinstance(standard, str):
                verdict |= standard.judge_numbers(case, after)
            yield index, verdict


def _static_findings(case: Case, after: onnx.ModelProto, valid: bool) -> Iterator[tuple[str, str]]:
    """Findings that need no run of the model."""
    if valid and (why := _invalid(after)):
        yield "invalid", why
    elif why := _other_signature(case.model, after):
        yield "signature", why
    if lost := what_is_lost(case.model, after):
        yield "lost-metadata", lost
    if len(list(every_node(after.graph))) > len(list(every_node(case.model.graph))):
        yield "grew-nodes", ""
    if larger(remove_marks(case.model).ByteSize(), remove_marks(after).ByteSize()):
        yield "grew-bytes", ""


def larger(before: int, after: int) -> bool:
    """Whether a model that went from `before` to `after` bytes counts as grown."""
    return after > before * SHARE and after > before + BYTES


def _invalid(model: onnx.ModelProto) -> str:
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:
        return normalize(str(error)) or type(error).__name__
    return ""


@dataclass(frozen=True, slots=True)
class _Standard:
    """The expected outputs, and the runtime that computes them from the unoptimized model."""

    expected: Sequence[Any]
    runtime: str

    def judge_numbers(self, case: Case, after: onnx.ModelProto) -> Verdict:
        """Run `after` and compare its outputs. If this runtime cannot run it, try the others."""
        failure = ""
        for name in (self.runtime, *(name for name in RUNTIMES if name != self.runtime)):
            try:
                got = RUNTIMES[name](after, case.feeds)
            except Exception as error:
                failure = failure or f"does not run: {message_of(error)}"
                continue
            why = differs(self.expected, got, case.rtol, case.atol)
            return {"wrong": why} if why else {}
        return {"wrong": failure}


def _find_standard(case: Case) -> _Standard | str:
    """Find a runtime that computes what the case expects; return the reason in words if there is none."""
    if case.expected is None and any(node.op_type in RANDOM_OUTPUT_OPS for node in every_node(case.model.graph)):
        return "it draws random values"
    why = "it does not run"
    for name, run in RUNTIMES.items():
        try:
            got = run(case.model, case.feeds)
        except Exception:
            continue
        if case.expected is not None and (why := differs(case.expected, got, case.rtol, case.atol)):
            continue
        return _Standard(got if case.expected is None else case.expected, name)
    return why


def _other_signature(before: onnx.ModelProto, after: onnx.ModelProto) -> str:
    """Describe a change of the inputs or outputs that a caller of the model would notice; empty if there is none."""
    for what, ours, theirs in (
        ("inputs", _input_types(before), _input_types(after)),
        ("outputs", _output_types(before), _output_types(after)),
    ):
        if list(ours) != list(theirs):
            return f"other {what}" if len(ours) == len(theirs) else f"{len(theirs) - len(ours):+} {what}"
        for name in ours:
            if _contradicts(ours[name], theirs[name], open_is_other=what == "inputs"):
                return f"{what} of another type or size"
    return ""


def _input_types(model: onnx.ModelProto) -> Mapping[str, onnx.TypeProto]:
    return {info.name: info.type for info in required_inputs(model.graph)}


def _output_types(model: onnx.ModelProto) -> Mapping[str, onnx.TypeProto]:
    return {info.name: info.type for info in model.graph.output}


def _contradicts(first: onnx.TypeProto, second: onnx.TypeProto, *, open_is_other: bool) -> bool:
    """Whether two types contradict. An open size of an output may be known afterwards; one of an input may not."""
    kind = first.WhichOneof("value")
    if kind != second.WhichOneof("value"):
        return True
    if kind != "tensor_type":
        return False
    left, right = first.tensor_type, second.tensor_type
    if left.elem_type != right.elem_type:
        return True
    if not (left.HasField("shape") and right.HasField("shape")):
        return False
    if len(left.shape.dim) != len(right.shape.dim):
        return True
    pairs = zip(left.shape.dim, right.shape.dim, strict=True)
    known = [(a.HasField("dim_value"), b.HasField("dim_value"), a.dim_value != b.dim_value) for a, b in pairs]
    return any((a and b and apart) or (open_is_other and b and not a) for a, b, apart in known)


NEWEST_IR: Final = 10
"""The newest IR version that every supported onnxruntime reads; models are given at most this version."""


def _onnxruntime(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    import onnxruntime

    copy = copy_of(model)
    copy.ir_version = min(copy.ir_version, NEWEST_IR)
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    settings.log_severity_level = 4
    settings.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(copy.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    results: Any = session.run(None, dict(feeds))
    return results


def _reference(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    with np.errstate(all="ignore"):
        results: Any = open_evaluator(model).run(None, dict(feeds))
        return list(results)


RUNTIMES: Final[Mapping[str, Callable[[onnx.ModelProto, Mapping[str, Any]], list[Any]]]] = {
    "onnxruntime": _onnxruntime,
    "onnx": _reference,
}
"""Tried in this order; the first that computes what a case expects judges it."""


def differs(expected: Sequence[Any], got: Sequence[Any], rtol: float | None, atol: float | None) -> str:
    """Describe how `got` differs from `expected`; empty if it does not."""
    if len(expected) != len(got):
        return f"{plural(len(got), 'output')}, expected {len(expected)}"
    return next((why for pair in zip(expected, got, strict=True) if (why := _differs(*pair, rtol, atol))), "")


def _differs(expected: Any, got: Any, rtol: float | None, atol: float | None) -> str:
    if expected is None or got is None:
        return "" if expected is got else "an output is None on one side only"
    if isinstance(expected, list) or isinstance(got, list):
        if not (isinstance(expected, list) and isinstance(got, list)):
            return "a sequence on one side only"
        return differs(expected, got, rtol, atol)
    left, right = np.asarray(expected), np.asarray(got)
    if left.shape != right.shape:
        return f"shape {list(right.shape)}, expected {list(left.shape)}"
    if left.dtype.kind in "OUS" and right.dtype.kind in "OUS":
        return "" if _texts(left) == _texts(right) else "other strings"
    if left.dtype != right.dtype:
        return f"dtype {right.dtype}, expected {left.dtype}"
    if same_bits(left, right):
        return ""
    return _numbers(left, right, rtol, atol)


def _numbers(left: np.ndarray, right: np.ndarray, rtol: float | None, atol: float | None) -> str:
    if rtol is None or atol is None:
        errors = compare(left, right)
        return "" if errors.ok else (f"max error {errors.max_abs:.1g}" if errors.limit else normalize(errors.why))
    kind = np.complex128 if left.dtype.kind == "c" else np.float64
    left, right = left.astype(kind), right.astype(kind)
    with np.errstate(all="ignore"):
        if np.allclose(right, left, rtol=rtol, atol=atol, equal_nan=True):
            return ""
        finite = np.isfinite(left) & np.isfinite(right)
        if not np.array_equal(left[~finite], right[~finite], equal_nan=True):
            return "NaN or infinity on one side only"
        return f"max error {np.abs(left - right)[finite].max(initial=0.0):.1g}"


def _texts(array: np.ndarray) -> list[str]:
    return [value.decode() if isinstance(value, bytes) else str(value) for value in array.ravel().tolist()]


KEY: Final = "onnxline.audit"
NODES_FROM: Final = 10
"""The first ir_version in which nodes have metadata."""


def add_marks(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with metadata and doc strings on the model and on each node of the main graph."""
    copy = copy_of(model)
    copy.metadata_props.add(key=KEY, value="model")
    copy.doc_string = copy.doc_string or KEY
    copy.graph.doc_string = copy.graph.doc_string or KEY
    for index, node in enumerate(copy.graph.node):
        node.doc_string = node.doc_string or KEY
        if copy.ir_version >= NODES_FROM:
            node.metadata_props.add(key=KEY, value=str(index))
    return copy


def remove_marks(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without metadata and doc strings, for comparing sizes."""
    copy = copy_of(model)
    del copy.metadata_props[:]
    copy.doc_string = ""
    for graph in every_graph(copy.graph):
        graph.doc_string = ""
        for node in graph.node:
            node.doc_string = ""
            del node.metadata_props[:]
    return copy


def what_is_lost(before: onnx.ModelProto, after: onnx.ModelProto) -> str:
    """Describe the metadata that a marked model has lost. Nodes match by operator and outputs."""
    lost = []
    if not any(entry.key == KEY for entry in after.metadata_props):
        lost.append("the model's metadata")
    if not after.doc_string:
        lost.append("its doc string")
    if not after.graph.doc_string:
        lost.append("the graph's doc string")
    nodes = {(node.op_type, *node.output): node for node in before.graph.node}
    still = [(nodes[key], node) for node in after.graph.node if (key := (node.op_type, *node.output)) in nodes]
    if any(old.metadata_props and not new.metadata_props for old, new in still):
        lost.append("operators' metadata")
    if any(not new.doc_string for _, new in still):
        lost.append("operators' doc strings")
    return ", ".join(lost)


LENGTH: Final = 110

CHANGING: Final = (
    (r"'[^']*'|\"[^\"]*\"|\u2018[^\u2019]*\u2019", "'…'"),  # names of values and nodes
    (r"(?:/[\w.+-]+)+/([\w.+-]+)", r"\1"),  # folders
    (r"0x[0-9a-fA-F]+", "0x…"),
    (r"(?<=references: ).*", "…"),
    (r"\[ONNXRuntimeError\] : \d+ : \w+ : ", ""),
    (r"\S+\.(?:cc|h):\d+ \S.*[)>] (?=[A-Z])", ""),  # the place in C++, with its signature
    (r"(?<=implementation for )\w+", "…"),
    (r"\d+", "#"),
    (r"\(?node name: [^)]*\)?|node:? ?\S* ?name:? ?\S*|Name:\S*", "node"),
)
"""Pattern → replacement."""


def message_of(error: BaseException) -> str:
    """The type of an error and the first non-empty line of its message, normalized."""
    return normalize(f"{type(error).__name__}: {error}")


def normalize(text: str) -> str:
    """Reduce a message to one line of at most 110 characters, without names, paths, counts and addresses."""
    line = next((part.strip() for part in text.splitlines() if part.strip(" :")), "")
    for pattern, instead in CHANGING:
        line = re.sub(pattern, instead, line)
    line = " ".join(line.split())
    return line if len(line) <= LENGTH else line[: LENGTH - 1].rstrip() + "…"
