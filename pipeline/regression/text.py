"""A baseline as a file: YAML, a line for most of what there is, so that a review reads well."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from passes.weights.files import replace_when_done
from pipeline.errors import UsageError
from pipeline.regression.baseline import FORMAT_VERSION
from pipeline.workspace import disk_errors, make_folder

__all__ = ["check_place", "file_beside", "read_baseline", "write_baseline"]

HEAD: Final = (
    "# What `onnxline baseline accept` found. `onnxline baseline check` fails when any of it changes;\n"
    "# accept again what you have reviewed.\n"
)

SUFFIX: Final = ".baseline"

WIDTH: Final = 4096
"""So that no entry is folded over lines."""


def file_beside(config: Path) -> Path:
    """`vit.baseline` for `vit.yaml`."""
    return config.with_suffix(SUFFIX)


def write_baseline(baseline: dict[str, Any], path: Path) -> None:
    """Under another name first, so that no half of it is ever there.

    Raises:
        UsageError: it cannot be written, or `path` is a file that is something else.
    """
    check_place(path)
    body = yaml.safe_dump(baseline, sort_keys=False, allow_unicode=True, default_flow_style=None, width=WIDTH)
    with disk_errors(path):
        make_folder(path.parent)
        with replace_when_done(path) as temporary:
            temporary.write_text(HEAD + body, encoding="utf-8")


def check_place(path: Path) -> None:
    """Refuse a place where no baseline can be written, before the run.

    Raises:
        UsageError: a folder, something that is no baseline, or what cannot be read lies there.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give a file with --file")
    try:
        is_other = path.is_file() and not path.read_bytes().startswith(HEAD.splitlines()[0].encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; give another --file") from None
    if is_other:
        raise UsageError(f"{path} is there already and is no baseline, so it is not written over; give another --file")


def read_baseline(path: Path) -> dict[str, Any]:
    """Raises UsageError: there is none, or it is not one of ours."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no baseline at {path}; make it with `onnxline baseline accept`") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read as a baseline: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict) or "format_version" not in data:
        raise UsageError(f"{path} is not a baseline; make one with `onnxline baseline accept`")
    if data["format_version"] != FORMAT_VERSION:
        raise UsageError(
            f"{path} has format version {data['format_version']}, this release reads {FORMAT_VERSION}; accept it anew"
        )
    return data
