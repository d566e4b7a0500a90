"""Commands that change one ONNX file by one step, with its proof: `extract`, `outputs`, `rename`, `fix-shapes`,
`change-batch`, `convert-opset`, `to-fp16` and `to-bf16`. They need no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_type_hints

import typer

from passes.suggest import describe_absence, plural
from pipeline.commands.shared import add_command, check_output, split_names
from pipeline.errors import CheckFailed, UsageError

Proof = Literal["numbers", "structure"]


def register(app: typer.Typer) -> None:
    """Add the command that `app` is named after: to read the annotations of all takes longer than to parse a line."""
    for read in (extract, outputs, rename, fix_shapes, change_batch, convert_opset, to_fp16, to_bf16):
        name = read.__name__.replace("_", "-")
        if name == app.info.name:
            add_command(app, name, _command(name, read), section="change")


def _command(step: str, read: Callable[..., Mapping[str, Any]]) -> Callable[..., None]:
    """The command of a step: its files, the options that `read` makes those of the step from, and those of each change.

    Args:
        read: options of the command line → options of the step.
    """
    own, shared = inspect.signature(read).parameters, inspect.signature(change_model).parameters
    files, rest = [shared[name] for name in FILES], [shared[name] for name in shared if name not in (*FILES, *SAID)]

    def command(**given: Any) -> None:
        options = read(**{name: given.pop(name) for name in own})
        change_model(step=step, options=options, **given)

    command.__doc__ = read.__doc__
    command.__annotations__ = {**get_type_hints(change_model), **get_type_hints(read), "return": type(None)}
    parameters = sorted([*files, *own.values(), *rest], key=lambda known: known.default is not inspect.Parameter.empty)
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined] # typer reads it
        [known.replace(kind=inspect.Parameter.KEYWORD_ONLY) for known in parameters]
    )
    return command


FILES = ("model", "out")
SAID = ("step", "options")


def extract(begin: list[str] | None = None, end: list[str] | None = None) -> dict[str, Any]:
    """Write the part of an ONNX file between values, or nodes, that are named."""
    if not begin and not end:
        raise UsageError("extract: found no name; expected --from NAME, --to NAME or both")
    return {"inputs": [*dict.fromkeys(begin or ())], "outputs": [*dict.fromkeys(end or ())]}


def outputs(add: list[str] | None = None, drop: list[str] | None = None) -> dict[str, Any]:
    """Make outputs of inner values, or drop outputs with all that only they need."""
    if not add and not drop:
        raise UsageError("outputs: found nothing to do; expected --add VALUE or --drop OUTPUT")
    return {"add": [*dict.fromkeys(add or ())], "drop": [*dict.fromkeys(drop or ())]}


def rename(value: list[str]) -> dict[str, Any]:
    """Give values of an ONNX file other names: inputs, outputs, weights, and what nodes make."""
    return {"values": read_pairs("--value", value, "OLD=NEW")}


def fix_shapes(shape: list[str]) -> dict[str, Any]:
    """Give inputs fixed shapes, and all values the shapes that follow."""
    return {"shapes": read_shapes(shape)}


def change_batch(size: str = "batch") -> dict[str, Any]:
    """Let a model take another number of rows at once, or any number."""
    return {"size": int(size) if size.isdecimal() else size}


def convert_opset(opset: int) -> dict[str, Any]:
    """Convert an ONNX file to another opset, up or down."""
    return {"to": opset}


def to_fp16(keep: list[str] | None = None, measured: bool = True) -> dict[str, Any]:
    """Compute in float16, except where range or error ask for float32."""
    return {"keep": split_names("--keep", keep), "measured": measured}


def to_bf16(keep: list[str] | None = None, measured: bool = True) -> dict[str, Any]:
    """Compute in bfloat16, except where the error asks for float32."""
    return {"keep": split_names("--keep", keep), "measured": measured}


def change_model(
    model: Path,
    out: Path,
    step: str,
    options: Mapping[str, Any],
    encodings: Path | None = None,
    proof: Proof = "numbers",
    timeout_s: float = 600.0,
    quiet: bool = False,
) -> None:
    """Run one step on an ONNX file, say what it did and how far it is from the source, and write the result.

    Raises:
        UsageError: a file cannot be read or written. CheckFailed: the step failed; nothing is written.
    """
    import passes
    from passes.errors import StepFailed
    from passes.tools.doors import run_step
    from passes.weights.files import save, write_errors
    from pipeline.commands.optimize import read_encodings, write_encodings
    from pipeline.terminal import open_screen

    if not model.is_file():
        raise UsageError(f"{model}: {describe_absence(model)}; expected an ONNX file")
    check_output(out, model)
    given, version = read_encodings(encodings)
    screen = open_screen(quiet=quiet)
    try:
        run: passes.PassRun = run_step(
            model, step, options, {"proof": proof, "timeout_s": timeout_s, "encodings": given}
        )
    except StepFailed as failure:
        raise CheckFailed(f"{failure}; {out} was not written") from failure
    if run.invalid:
        raise CheckFailed(f"the result is not valid ONNX, so it was not written: {run.invalid}")
    with write_errors(out):
        save(run.model, out, referring=bool(run.model.unread()))
    row = run.rows[-1]
    worst = max((errors.max_abs for errors in row.errors.values()), default=None)
    kind = next((errors.judged_as for errors in row.errors.values() if errors.judged_as), "")
    how = "proven by structure alone" if worst is None else f"max error {worst:.1e} (tolerance of {kind or 'its type'})"
    done = f"{row.nodes_before} → {plural(row.nodes_after, 'node')}, {how}" if row.changed else "nothing to change"
    screen.print_line(f"{step}: {done}")
    for words in row.words.split("; ") if row.words else ():
        screen.print_line(f"  {words}")
    screen.print_line(f"model: {out}")
    if run.encodings is not None and version is not None:
        write_encodings(run, out, version, screen.print_line)


def read_pairs(option: str, texts: Sequence[str], form: str) -> dict[str, str]:
    """`old=new` as old → new; the last `=` of a text counts, since names may have one.

    Args:
        option: for messages, such as `--value`.
        texts: what the user gave, one text for each time that the option was repeated.
        form: what is expected, for messages, such as `OLD=NEW`.

    Raises:
        UsageError: a text is not of this form, or two texts have the same name on the left.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        left, _, right = text.rpartition("=")
        if not left or not right:
            raise UsageError(f"{option} is {text!r}; expected {form}")
        if left in pairs:
            raise UsageError(f"{option}: found {left}={pairs[left]} and {text} for one name; leave one of them out")
        pairs[left] = right
    return pairs


def read_shapes(texts: Sequence[str]) -> dict[str, list[int]]:
    """`images=1,3,320,320` as input → sizes."""
    form, shapes = "INPUT=1,3,320,320", {}
    for name, sizes in read_pairs("--shape", texts, form).items():
        if not all(size.strip().isdecimal() for size in sizes.split(",")):
            raise UsageError(f"--shape is '{name}={sizes}'; expected {form}")
        shapes[name] = [int(size) for size in sizes.split(",")]
    return shapes
