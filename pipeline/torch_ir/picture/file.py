"""Mermaid text as a file: text as it is, inside Markdown, or drawn by `mmdc`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from pipeline.errors import UserMistake
from pipeline.torch_ir.output import written

__all__ = ["IMAGES", "write_picture"]

TEXTS = (".mmd", ".md", ".mermaid", ".txt")
IMAGES = (".png", ".svg")
SECONDS = 120


def write_picture(mermaid: str, path: Path) -> None:
    """Write `mermaid` to `path`, as its ending says.

    Raises:
        UserMistake: an image is asked for and there is no `mmdc`, or it fails; another ending; a place that cannot be
            written.
    """
    with written(path, (*TEXTS, *IMAGES)) as temporary:
        if path.suffix in IMAGES:
            _draw(mermaid, temporary, path.suffix)
        else:
            text = f"```mermaid\n{mermaid}\n```\n" if path.suffix == ".md" else f"{mermaid}\n"
            temporary.write_text(text, encoding="utf-8")


def _draw(mermaid: str, path: Path, suffix: str) -> None:
    command = shutil.which("mmdc")
    if command is None:
        raise UserMistake(
            f"a {suffix} needs the command mmdc, which is not installed; pip install mmdc, or write a .mmd or .md file"
        )
    source, drawn = path.with_name(f"{path.name}.mmd"), path.with_name(f"{path.name}{suffix}")
    try:
        source.write_text(mermaid, encoding="utf-8")
        subprocess.run(
            [command, "--input", source, "--output", drawn], check=True, capture_output=True, text=True, timeout=SECONDS
        )
        drawn.replace(path)
    except (subprocess.SubprocessError, FileNotFoundError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise UserMistake(f"mmdc could not draw the graph: {said[-1] if said else error}") from error
    finally:
        source.unlink(missing_ok=True)
        drawn.unlink(missing_ok=True)
