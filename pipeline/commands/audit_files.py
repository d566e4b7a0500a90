"""The files of an audit, each under its name only when it is whole."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

from passes.advisories import Table, table_text
from passes.advisories.known import file_name
from passes.audit.reproducers import told_by
from passes.weights.files import replace_when_done
from pipeline.workspace import disk_errors

__all__ = ["remove_stale", "write_reproducer", "write_table"]


def write_table(table: Table, folder: Path) -> None:
    _write(folder / file_name(table.distribution, table.version), table_text(table).encode())


def write_reproducer(value: Mapping[str, str], folder: Path) -> None:
    """The model, and beside it how to see what is wrong."""
    _write(folder / f"{value['name']}.onnx", base64.b64decode(value["model"]))
    _write(folder / f"{value['name']}.txt", value["text"].encode())


def remove_stale(folder: Path, tables: Sequence[Table]) -> None:
    """Remove what earlier runs wrote of findings that are gone; of passes that were tried, so that it is known."""
    found = {(entry.name, entry.kind) for table in tables for entry in table.entries}
    for file in sorted(folder.glob("*.txt")):
        with disk_errors(file):
            told = told_by(file.stem, file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else None
            if told and told not in found and any(table.speaks_of(told[0]) for table in tables):
                file.with_suffix(".onnx").unlink(missing_ok=True)
                file.unlink()


def _write(path: Path, content: bytes) -> None:
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_when_done(path) as temporary:
            temporary.write_bytes(content)
