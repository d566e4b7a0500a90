"""`onnxline generate`: text by the decoder of a run in parts, on any backend."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import typer

from pipeline.commands.shared import FORMAT_VERSION, add_command
from pipeline.errors import UsageError
from pipeline.terminal import print_json, print_line


def register(app: typer.Typer) -> None:
    add_command(app, "generate", generate)


def generate(
    run: Path,
    ids: str | None = None,
    prompt: str | None = None,
    max_new_tokens: int = 32,
    temperature: float = 0.0,
    seed: int = 0,
    backend: str = "onnxruntime",
    as_json: bool = False,
) -> None:
    """Generate text by the decoder of a run with `task: text-generation`."""
    if (ids is None) == (prompt is None):
        raise UsageError("generate: expected one of --ids 1,2,3 and --prompt TEXT")
    tokens = None if ids is None else _read_ids(ids)
    from pipeline.parts.generate import TextGenerator

    found = TextGenerator(run, backend).generate(
        tokens, prompt=prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
    )
    if as_json:
        data = {**dataclasses.asdict(found), "tokens_per_second": found.tokens_per_second}
        print_json({"format_version": FORMAT_VERSION, **data})
        return
    print_line(found.text if prompt is not None else ",".join(map(str, found.tokens)))
    print_line(
        f"{len(found.tokens)} tokens in {found.seconds:.2f} s on {found.backend}: "
        f"{found.tokens_per_second:.1f} tokens per second"
    )


def _read_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"--ids: found {text!r}, expected numbers of tokens with commas between them: 1,2,3") from None
