"""Load and validate a model from a path, from bytes or in memory; an error is one sentence."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Final

import onnx
from onnx import ModelProto, OperatorSetIdProto

from passes.errors import ModelError
from passes.load.graphs import GraphCheck
from passes.load.nodes import OperatorScope, check_calls, functions_by_key
from passes.load.values import OPEN_DIM, check_entries, check_text

OLDEST_IR: Final = 3
"""The first version in which a model says which operators it means."""
MOST_BYTES: Final = 2**31 - 1
"""The size limit of one protobuf message."""


def load_model(
    source: str | Path | bytes | ModelProto,
    folder: Path | None = None,
    *,
    may_be_empty: bool = False,
    may_lack_outputs: bool = False,
) -> ModelProto:
    """Load a model that the rest of the code can trust. External data must exist, but is not read.

    One thing is changed in a model that is read: dims of -1, which Paddle's exporter writes, become open. A model in
    memory is not changed.

    Args:
        source: nodes may come in any order.
        folder: of the external data; by default that of the path (of the file that a link leads to).
        may_be_empty: weights may be left out: a tensor without data, or a data file that is missing.
        may_lack_outputs: outputs may have no producer, as where a tool has fused over a pinned value.

    Raises:
        ModelError: the file is missing, truncated or no ONNX; or the model is invalid. One sentence: what was found, at
            which node, tensor or value, and what was expected.
    """
    if isinstance(source, ModelProto):
        check_model(source, folder, may_be_empty=may_be_empty, may_lack_outputs=may_lack_outputs)
        return source
    if isinstance(source, bytes):
        model = _parse(source, "the model")
        check_model(model, folder, may_be_empty=may_be_empty, may_lack_outputs=may_lack_outputs)
    else:
        path = Path(source)
        model = _read(path)
        folder = folder or (path.resolve().parent if path.is_symlink() else path.parent)
        try:
            check_model(model, folder, may_be_empty=may_be_empty, may_lack_outputs=may_lack_outputs)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error
    free_dims(model)
    return model


def to_path(model: object) -> Path:
    """`model` as a path, where a model or its path is asked for.

    Raises:
        ModelError: it is something else.
    """
    if not isinstance(model, str | PathLike):
        raise ModelError(f"found {type(model).__name__}, expected an onnx.ModelProto or the path of an ONNX file")
    return Path(model)


def check_model(
    model: ModelProto, folder: Path | None = None, *, may_be_empty: bool = False, may_lack_outputs: bool = False
) -> None:
    """Validate a model in memory; see `load_model`.

    Raises:
        ModelError: it is not valid.
    """
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
        raise ModelError("it holds no graph; is it an ONNX file, and complete?")
    for text, what in (
        (model.producer_name, "producer's name"),
        (model.producer_version, "producer's version"),
        (model.domain, "domain"),
        (model.doc_string, "description"),
    ):
        check_text(text, f"the model's {what}")
    check_entries(model.metadata_props, "the model's metadata")
    if not OLDEST_IR <= model.ir_version <= onnx.IR_VERSION:
        raise ModelError(
            f"it has the IR version {model.ir_version}, and onnx {onnx.__version__} reads {OLDEST_IR} to "
            f"{onnx.IR_VERSION}; is the file damaged, or onnx too old for it?"
        )
    versions = _versions(model.opset_import, "the model")
    functions = functions_by_key(model)
    for function in model.functions:
        check_text(function.name, "the name of a function")
        check_text(function.domain, f"the domain of the function {function.name!r}")
        own = _versions(function.opset_import, f"the function {function.name!r}")
        parameters = frozenset((*function.attribute, *(attribute.name for attribute in function.attribute_proto)))
        operators = OperatorScope({**versions, **own}, functions, parameters)
        GraphCheck(operators, folder, may_be_empty).check_function(function)
    root = None if folder is None else folder.resolve()
    GraphCheck(OperatorScope(versions, functions), root, may_be_empty, may_lack_outputs).check(model.graph)
    if functions:
        check_calls(model.graph, functions)


def _read(path: Path) -> ModelProto:
    try:
        if not path.is_file():
            raise ModelError(f"no ONNX file at {path}; expected an .onnx file, or the folder of a run that has ended")
        if path.stat().st_size > MOST_BYTES:
            raise ModelError(
                f"{path} has {path.stat().st_size / 2**30:.3g} GiB, and one protobuf message holds 2 GiB at most; "
                "save it with external data"
            )
        return onnx.load(path, load_external_data=False)
    except ModelError:
        raise
    except Exception as error:  # protobuf, and onnx's parsers of text, raise errors of many types
        raise ModelError(
            f"{path} is not a readable ONNX file ({path.stat().st_size} bytes; {error}); is it complete?"
        ) from error


def _parse(content: bytes, what: str) -> ModelProto:
    try:
        return onnx.load_from_string(content)
    except Exception as error:
        raise ModelError(f"{what} is not readable ONNX ({error}); is it complete?") from error


def _versions(imports: Iterable[OperatorSetIdProto], where: str) -> dict[str, int]:
    """Domain → version; ONNX's own domain is "".

    Raises:
        ModelError: a domain has two versions, or one that does not exist.
    """
    found: dict[str, int] = {}
    for entry in imports:
        check_text(entry.domain, f"a domain of {where}")
        domain = "" if entry.domain == "ai.onnx" else entry.domain
        known = onnx.defs.onnx_opset_version() if domain == "" else 2**31
        if not 1 <= entry.version <= known:
            raise ModelError(
                f"{where} imports version {entry.version} of {domain or 'ai.onnx'}; "
                + (f"onnx {onnx.__version__} has 1 to {known}" if domain == "" else "expected 1 or more")
            )
        if found.setdefault(domain, entry.version) != entry.version:
            raise ModelError(
                f"{where} imports the versions {found[domain]} and {entry.version} of {domain or 'ai.onnx'}; "
                "expected one"
            )
    return found


def free_dims(model: ModelProto) -> None:
    """Make dims of -1 open, in place."""
    graph = model.graph
    for info in (*graph.input, *graph.output, *graph.value_info):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_value == OPEN_DIM:
                dim.ClearField("dim_value")
