"""The bytes of a file → the object that it holds, or what is wrong with them in words."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from typing import Any

import orjson

from pipeline.torch_ir.errors import SerializationError

__all__ = ["AGAIN", "parsed"]

AGAIN = "copy it again from where it was saved, or save the IR again"


def parsed(what: str, text: bytes) -> Mapping[str, Any]:
    """The JSON object `text`; `what` names it in messages.

    orjson is quicker; Python's own takes the NaN and Infinity in files of pytorch-ir, and other encodings.

    Raises:
        SerializationError: it ends early, is no JSON, or no object.
    """
    try:
        data = orjson.loads(text)
    except orjson.JSONDecodeError:
        data = _by_python(what, text)
    if not isinstance(data, dict):
        raise SerializationError(f"{what} holds a {type(data).__name__}; expected the object that IR.save writes")
    return data


def _by_python(what: str, text: bytes) -> Any:
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        said = (
            _other_than_json(text) or f"is not in UTF-8: byte {error.start} is {text[error.start : error.start + 1]!r}"
        )
    except json.JSONDecodeError as error:
        said = _other_than_json(text) or _broken(text, error)
    raise SerializationError(f"Invalid JSON: {what} {said}; expected the JSON that IR.save writes: {AGAIN}")


def _other_than_json(text: bytes) -> str:
    start = text.removeprefix(codecs.BOM_UTF8).lstrip()
    if not start:
        return "is empty"
    return "" if start.startswith((b"{", b"[")) else f"is no JSON: it begins with {start[:12]!r}"


def _broken(text: bytes, error: json.JSONDecodeError) -> str:
    if not text.rstrip().endswith((b"}", b"]")) or error.pos >= len(error.doc.rstrip()):
        return f"ends early, after {len(text)} bytes in line {error.doc.count(chr(10)) + 1}"
    return f"is damaged in line {error.lineno}, column {error.colno} ({error.msg})"
