"""The files of an audit, each under its name only when it is whole."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

from passes.audited import Table, table_text
from passes.audited.known import file_name
from passes.model.files import replace_when_done
from pipeline.workspace import disk_errors

__all__ = ["write_reproducer", "write_table"]


def write_table(table: Table, folder: Path) -> None:
    _write(folder / file_name(table.library, table.version), table_text(table).encode())


def write_reproducer(value: Mapping[str, str], folder: Path) -> None:
    """The model, and beside it how to see what is wrong."""
    _write(folder / f"{value['name']}.onnx", base64.b64decode(value["model"]))
    _write(folder / f"{value['name']}.txt", value["text"].encode())


def _write(path: Path, content: bytes) -> None:
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_when_done(path) as temporary:
            temporary.write_bytes(content)
