"""The `onnxline` command: options in, exit code out. Everything that it shows comes from events and results."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from pipeline.commands import audit, baseline, batch, bisect, diff, guard, init, ir, passes, why
from pipeline.errors import InternalError, OnnxlineError, told
from pipeline.screen import Screen

__all__ = ["app", "main"]

app = typer.Typer(
    name="onnxline",
    help="PyTorch → ONNX, pass by pass, with proof; then a static IR and a planned run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

audit.register(app)
baseline.register(app)
batch.register(app)
bisect.register(app)
diff.register(app)
guard.register(app)
init.register(app)
ir.register(app)
passes.register(app)
why.register(app)

EXTRAS = dict.fromkeys(("torch", "transformers", "safetensors", "orjson", "zstandard"), "torch")
"""Module → the extra that brings it."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it."""


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="The configuration file.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the artifacts (default runs/<name>).")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override one setting; YAML on the right."),
    ] = None,
) -> None:
    """Run a configuration from its source to a verified model, IR and plan."""
    from pipeline.config import RunConfig
    from pipeline.run import Pipeline

    settings = RunConfig.from_yaml(config, tuple(overrides or ()))
    screen = Screen()
    try:
        with screen:
            result = Pipeline(settings, out, screen.show).run()
    except Exception:
        screen.tables()  # what is known is shown, also when a later stage failed
        raise
    screen.conclude(result)


@app.command()
def schema() -> None:
    """Write the JSON Schema of a configuration, for editors."""
    from pipeline.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


def main() -> None:
    """Run the command line; turn errors into one message and an exit code."""
    sys.exit(_exit_code())


def _exit_code() -> int:
    try:
        code = app(standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except typer.Exit as exit_:
        code = exit_.exit_code
    except Exception as error:
        return _explained(error)
    if code == INTERRUPTED:  # Ctrl-C: by release, typer raises Abort or Exit, or returns the code
        _complain("stopped; what was finished is kept, run the same command again to go on")
    return code


def _explained(error: Exception) -> int:
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        extra = EXTRAS[error.name]
        _complain(f"this needs {error.name}, which is not installed; pip install 'onnxline[{extra}]'")
        return 2
    show = getattr(error, "show", None)  # the parser's own complaints about the command line
    if show is not None:
        show()
        return 2
    code = getattr(error, "exit_code", None)
    if isinstance(error, OnnxlineError) or code is not None:
        _complain(told(error))
        return code or InternalError.exit_code
    traceback.print_exception(error)
    _complain(f"this is a bug of onnxline ({type(error).__name__}: {error}); please report it with the lines above")
    return InternalError.exit_code


def _complain(text: str) -> None:
    typer.echo(f"onnxline: {text}", err=True)


if __name__ == "__main__":
    main()
