"""A picture of an IR as a file: Mermaid text as it is or inside Markdown, our SVG, or a PNG drawn by `mmdc`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.torch_ir.command_files import written
from pipeline.torch_ir.ir import IR
from pipeline.torch_ir.picture.mermaid import ir_to_mermaid
from pipeline.torch_ir.picture.svg import ir_to_svg

__all__ = ["write_picture"]

TEXTS = (".mmd", ".md", ".mermaid", ".txt")
SECONDS = 120


def write_picture(ir: IR, path: Path, max_nodes: int, include_weights: bool, *, by_module: bool = False) -> None:
    """Draw `ir` into `path`, as its ending says; see `ir_to_mermaid`. An SVG is always by module.

    Raises:
        UsageError: a PNG is asked for and there is no `mmdc`, or it fails; another ending; a place that cannot be
            written.
    """
    with written(path, (*TEXTS, ".png", ".svg")) as temporary:
        if path.suffix == ".svg":
            temporary.write_text(ir_to_svg(ir, max_nodes, include_weights), encoding="utf-8")
            return
        mermaid = ir_to_mermaid(ir, max_nodes, include_weights, by_module=by_module)
        if path.suffix == ".png":
            _draw(mermaid, temporary, path.suffix)
        else:
            text = f"```mermaid\n{mermaid}\n```\n" if path.suffix == ".md" else f"{mermaid}\n"
            temporary.write_text(text, encoding="utf-8")


def _draw(mermaid: str, path: Path, suffix: str) -> None:
    command = shutil.which("mmdc")
    if command is None:
        raise UsageError(
            f"a {suffix} needs the command mmdc, which is not installed; pip install mmdc, or write a .svg or .md file"
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
        raise UsageError(f"mmdc could not draw the graph: {said[-1] if said else error}") from error
    finally:
        source.unlink(missing_ok=True)
        drawn.unlink(missing_ok=True)
