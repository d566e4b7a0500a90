"""`onnxline generate`: text by the parts of a run, on any backend."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import numpy as np
import typer

from passes.suggest import plural
from passes.weights.sessions import first_words
from pipeline.commands.shared import FORMAT_VERSION, add_command
from pipeline.errors import UsageError
from pipeline.terminal import print_json, print_line


def register(app: typer.Typer) -> None:
    add_command(app, "generate", generate)


def generate(
    run: Path,
    ids: str | None = None,
    prompt: str | None = None,
    inputs: Path | None = None,
    start: str | None = None,
    max_new_tokens: int = 32,
    temperature: float = 0.0,
    seed: int = 0,
    backend: str = "onnxruntime",
    as_json: bool = False,
) -> None:
    """Generate text by the parts of a run with `model.task`."""
    if (ids is not None and prompt is not None) or all(given is None for given in (ids, prompt, inputs)):
        raise UsageError("generate: expected one of --ids 1,2,3, --prompt TEXT and --inputs FILE.npz")
    tokens = None if ids is None else _read_ids(ids, "--ids")
    from pipeline.parts.generate import TextGenerator

    generator = TextGenerator(run, backend)
    found = generator.generate(
        tokens,
        prompt=prompt,
        inputs=None if inputs is None else _read_arrays(inputs),
        start=None if start is None else _read_ids(start, "--start"),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    )
    if as_json:
        print_json({"format_version": FORMAT_VERSION, **dataclasses.asdict(found)})
        return
    print_line(found.text if prompt is not None else ",".join(map(str, found.tokens)))
    print_line(
        f"{plural(len(found.tokens), 'token')} in {found.seconds:.2f} s on {found.backend}: the first after "
        f"{found.first_seconds:.2f} s, then {found.tokens_per_second:.1f} tokens per second"
    )


def _read_ids(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"{option}: found {text!r}, expected numbers of tokens with commas between: 1,2,3") from None


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a .npz file by name.

    Raises:
        UsageError: there is no such file, or it is no .npz file of numbers.
    """
    try:
        with np.load(path, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    except (OSError, ValueError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise UsageError(
            f"--inputs: {path} cannot be read ({first_words(error)}); expected an .npz file with an array for each "
            "input of the encoder, such as input_features"
        ) from error
