"""IR ↔ string and file, and the check of an IR."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.errors import InternalError
from pipeline.ir import check
from pipeline.torch_ir.document.files import explain_errors, parse_json
from pipeline.torch_ir.errors import SerializationError
from pipeline.torch_ir.ir import IR, an_ir
from pipeline.torch_ir.validation import mistaken, path_of

__all__ = ["deserialize_ir", "load_ir", "save_ir", "serialize_ir", "validate_ir"]


def serialize_ir(ir: IR) -> str:
    """The IR as one string of JSON, constants included."""
    return json.dumps(an_ir(ir, SerializationError).to_dict(), allow_nan=False)


def deserialize_ir(json_str: str | bytes) -> IR:
    """The IR of a string of `serialize_ir`.

    Raises:
        SerializationError: it is no text, no JSON, or no IR.
    """
    if not isinstance(json_str, str | bytes):
        raise mistaken(
            "the text of the IR", json_str, "a str or bytes", SerializationError, {dict: "IR.from_dict reads it"}
        )
    return IR.from_dict(parse_json("the text of the IR", json_str.encode() if isinstance(json_str, str) else json_str))


def save_ir(ir: IR, path: str | Path) -> None:
    """`ir.save(path)`; makes the folder if there is none.

    Raises:
        SerializationError: the file cannot be written.
    """
    ir, path = an_ir(ir, SerializationError), path_of("the IR", path, SerializationError)
    with explain_errors(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
    ir.save(path)


def load_ir(path: str | Path) -> IR:
    """`IR.load(path)`.

    Raises:
        NoIRFile: there is no such file (a FileNotFoundError too).
        SerializationError: it is no IR.
    """
    return IR.load(path)


def validate_ir(ir: IR) -> bool:
    """Check the IR against every rule of the Graph. Returns True.

    Raises:
        SerializationError: a rule is broken, or a tensor is used that nothing makes; the message lists all.
    """
    try:
        check(an_ir(ir, SerializationError).graph)
    except InternalError as error:
        raise SerializationError(f"the IR {ir.model_name!r} is not sound: {error}") from error
    return True
