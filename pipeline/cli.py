"""The `onnxline` command: options in, exit code out. All that it prints comes from events and results.

A command's module is imported when the command runs: `--help` and a misspelt option need none of them.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final, Literal, NoReturn, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from pipeline.errors import (
    EXTRAS,
    InternalError,
    MissingExtra,
    OnnxlineError,
    UsageError,
    message_with_notes,
    refusal_of,
)
from pipeline.terminal import open_streams, print_line, print_text, styled_streams

COMMANDS: Final = {
    "run": ("run", "Run a model or a configuration: export, passes with proof, verified model, IR and plan."),
    "optimize": (
        "optimize",
        "Run the passes on an ONNX file, prove each change, and write the result; works without torch.",
    ),
    "generate": ("generate", "Generate text by the parts of a run with `model.task`."),
    "quantsim": ("quantsim", "Prepare the model, quantize it by rules, and say what each step costs."),
    "encodings": (
        "quantsim",
        "Read the encodings of a quantized model into a file for another tool, or quantize a model by such a file.",
    ),
    "check": ("run", "Check a configuration, and an ONNX file that it names, and say what a run would do."),
    "init": (
        "run",
        "Write a commented configuration to begin with; it runs as it is, on a small model with random weights.",
    ),
    "diff": ("diff", "Compare B with A, by structure and by numbers; the exit code is 1 if they differ."),
    "why": ("diff", "Say which torch module a node or a weight comes from, which line of it, and which pass made it."),
    "bisect": (
        "bisect",
        "Find the first pass of a recipe that is at fault, and write the smallest model on which it is.",
    ),
    "passes": ("passes", "Every pass that this installation can run."),
    "view": ("view", "Draw the graph of a model, or of two with their difference, as one page that needs no server."),
    "compare": ("compare", "Run two ONNX models on the same inputs; compare outputs, layers and common values."),
    "inspect": (
        "facts",
        "Say what an ONNX file is: inputs, outputs, operators, parameters, MACs, memory, structures, targets.",
    ),
    "extract": ("change", "Write the part of an ONNX file between values, or nodes, that are named."),
    "outputs": ("change", "Make outputs of inner values, or drop outputs with all that only they need."),
    "rename": ("change", "Give values of an ONNX file other names: inputs, outputs, weights, and what nodes make."),
    "fix-shapes": ("change", "Give inputs fixed shapes, and all values the shapes that follow."),
    "change-batch": ("change", "Let a model take another number of rows at once, or any number."),
    "convert-opset": ("change", "Convert an ONNX file to another opset, up or down."),
    "to-fp16": ("change", "Compute in float16, except where range or error ask for float32."),
    "to-bf16": ("change", "Compute in bfloat16, except where the error asks for float32."),
    "to-int8": ("int8", "Compute in 8 bits where the rules of a target say so, with ranges by samples."),
    "split": ("facts", "Write an ONNX file as parts that feed each other, with a manifest of what feeds what."),
    "merge": ("facts", "Write two ONNX files as one, where outputs of the first feed inputs of the second."),
    "guard": (
        "guard",
        "Run COMMAND and hold a policy in each call of onnxsim, onnxoptimizer and onnxslim, children included.",
    ),
    "train": ("run", "Train the model of a configuration and write it as ONNX, or go on with a stopped training."),
    "baseline": ("batch", "Keep the results of a run in a text file for git, and see when they change."),
    "batch": ("batch", "Run many configurations at once; the same command again runs what is not done."),
    "audit": (
        "audit",
        "Try every pass on many small models, and say what it breaks: is this release of an optimizer safe?",
    ),
    "plan": ("plan", "What a plan decided: calls, places, memory over time; and a run of it, launch by launch."),
    "debug": ("debug", "Find out why a model computes something else than it should: where two backends part."),
    "ir": ("ir", "A model as a graph of aten operations in JSON, without its weights."),
    "schema": ("run", "Write the JSON Schema of a configuration, for editors."),
}
"""Command → its module in `pipeline.commands` and its line in `--help`, in the order of `--help`."""

ONE_THREAD: Final = frozenset(
    {"optimize", "diff", "why", "view", "compare", "inspect", "extract", "outputs", "rename", "fix-shapes"}
    | {"change-batch", "convert-opset", "to-fp16", "to-bf16", "to-int8", "split", "merge", "quantsim"}
)
"""Commands whose own process multiplies no matrices: numpy gets one thread there, so that workers can be forks."""

ALLOCATIONS: Final = 1_000_000
"""Objects that such a command makes before Python's collector looks for cycles: at most some 100 MB. With a tenth of
it the imports alone are walked twice, 0.05 of 0.7 s."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it."""


def _import_numpy_with_one_thread() -> None:
    """OpenBLAS starts its threads when numpy is imported; programs that this process starts have theirs."""
    if "OPENBLAS_NUM_THREADS" in os.environ:
        return
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import numpy  # noqa: F401

    del os.environ["OPENBLAS_NUM_THREADS"]


class _LazyGroup(TyperGroup):
    """Lists `COMMANDS` without importing their modules; imports only the command that is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands.update({name: TyperCommand(name, help=words) for name, (_, words) in COMMANDS.items()})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and name in COMMANDS:
            _check_folder()
            if name in ONE_THREAD:
                _import_numpy_with_one_thread()
                gc.set_threshold(ALLOCATIONS, 20)
            command = load_command(name)
            _add_options(command, [option for option in self.params if option.name in COMMON])
            _prepare(command, ctx)
        return name, command, rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with styled_streams():
            super().format_help(ctx, formatter)

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        _hide_types(params)
        _read_plain_values(params)
        return params


def load_command(name: str) -> Any:
    """The command as its module registers it."""
    commands = typer.Typer(name=name, callback=lambda: None)  # with a callback it is a group, even of one command
    importlib.import_module(f".commands.{COMMANDS[name][0]}", __package__).register(commands)
    commands.registered_commands = [found for found in commands.registered_commands if found.name == name]
    return get_command(commands).commands[name]  # type: ignore[attr-defined]


def _check_folder() -> None:
    """Refuse a working directory that has been removed: no process can be started there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("the working directory has been removed; change to a folder that is there") from None


COMMON: Final = ("with_traceback", "custom_ops")
"""The options of `options` that each command has too."""


def _add_options(command: Any, options: Sequence[Any]) -> None:
    command.params.extend(options)
    for inner in getattr(command, "commands", {}).values():
        _add_options(inner, options)


def _prepare(command: Any, context: Any) -> None:
    params = command.get_params(context)  # with `--help`
    _hide_types(params)
    _read_plain_values(params)
    command.format_help = partial(_show_help, command.format_help)
    for inner in getattr(command, "commands", {}).values():
        _prepare(inner, context)


def _read_plain_values(params: Sequence[Any]) -> None:
    """Let texts, paths and defaults be read without pydantic, which typer loads for any parameter: 0.04 of 0.3 s."""
    for param in params:
        if hasattr(param, "_runtime_param") and hasattr(param, "type_descriptor"):  # typer 0.29
            param._runtime_param = _ParameterReader(param.type_descriptor)


@dataclass(frozen=True, slots=True)
class _ParameterReader:
    """Reads the words of one parameter; what is no text, path or default is left to typer.

    Args:
        descriptor: what typer knows of the parameter's type.
    """

    descriptor: Any

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value of a parameter, by typer's name for it."""
        kind, is_list = self.descriptor.annotation, param.multiple or param.nargs == -1
        if value is None:
            return () if is_list else None
        if get_origin(kind) is list and isinstance(value, list | tuple):
            (kind,) = get_args(kind)
            if all(_is_plain(item, kind) for item in value):
                return [kind(item) for item in value]
        elif get_origin(kind) is Literal and value in get_args(kind):
            return value
        elif _is_plain(value, kind) or (kind is int and str(value).isdecimal() and not self._has_limits()):
            return kind(value)
        from typer._coercion import build_runtime_param

        return build_runtime_param(self.descriptor).coerce(value, param=param, ctx=ctx)

    def _has_limits(self) -> bool:
        info = self.descriptor.parameter_info
        return info.min is not None or info.max is not None


def _is_plain(value: Any, kind: Any) -> bool:
    return kind in (str, Path, int, float, bool) and (isinstance(value, kind) or (kind is Path and type(value) is str))


def _show_help(format_help: Callable[..., None], *context: Any) -> None:
    with styled_streams():
        format_help(*context)


def _hide_types(params: list[Any]) -> None:
    """Leave out the `<bool>` that `--help` of typer 0.29 writes after each flag, which takes no value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""


app = typer.Typer(
    name="onnxline",
    cls=_LazyGroup,
    help="PyTorch → ONNX, pass by pass, with proof; then a static IR and a planned run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from importlib import metadata

        print_line(f"onnxline {metadata.version('onnxline')}")
        raise typer.Exit


def _enable_traceback(context: typer.Context, is_asked: bool) -> None:
    if is_asked and context.obj is not None:
        context.obj["traceback"] = True


def _declare_ops(context: typer.Context, files: list[str] | None) -> None:
    if files:
        from passes.custom_ops import declare_ops

        context.with_resource(declare_ops(files))


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    with_traceback: Annotated[
        bool,
        typer.Option(
            "--traceback",
            callback=_enable_traceback,
            expose_value=False,
            help="Show where in the code an error was raised.",
        ),
    ] = False,
    custom_ops: Annotated[
        list[str] | None,
        typer.Option(
            "--custom-ops",
            callback=_declare_ops,
            expose_value=False,
            metavar="OPS.py",
            help="A file that declares custom operators (docs/how-to/custom-ops.md); may be repeated.",
        ),
    ] = None,
) -> None:
    """Options of every command."""


def main() -> None:
    """Run the command line; turn errors into one message and an exit code."""
    with _stopped_by_sigterm(), _without_end(), open_streams() as output:
        code = _exit_code()
        if output.loss:
            _complain(f"standard output cannot be written: {output.loss}; what was not printed is lost")
            code = UsageError.exit_code
    exec("")  # else CPython ends `python -m` by SIGINT after a Ctrl-C that left an exec of text, such as a dataclass's
    sys.exit(code)


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM stop the command as Ctrl-C does, so that no temporary folder with weights is left."""
    process = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if os.getpid() != process:  # a fork, such as a worker of a DataLoader
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif callable(handler):
            handler(signal.SIGINT, frame)
        else:  # a shell starts background jobs with Ctrl-C ignored
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _without_end() -> Iterator[None]:
    """Make an error of os._exit, by which a model's code would end the command with its own exit code, 0 too."""
    end, process = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:
            end(status)
        raise SystemExit(f"os._exit({status}) was called, which would end the command")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = end


def _exit_code() -> int:
    settings = {"traceback": False}
    try:
        code = get_command(app).main(prog_name="onnxline", standalone_mode=False, obj=settings) or 0  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except typer.Exit as exit_:
        code = exit_.exit_code
    except Exception as error:
        if settings["traceback"]:
            _show_traceback(error)
        code = INTERRUPTED if _was_interrupted(error) else _report_error(error, is_shown=settings["traceback"])
    if code == INTERRUPTED:  # Ctrl-C: by release, typer raises Abort or Exit, or returns the code
        _complain("stopped; what was finished is kept, run the same command again to go on")
    return code


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused an error: a native module whose import it stops says that it cannot be imported."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _report_error(error: Exception, *, is_shown: bool) -> int:
    if type(error) is ModuleNotFoundError and error.name in EXTRAS:
        error = MissingExtra(str(error.name))
    show = getattr(error, "show", None)  # the parser's own complaints about the command line
    if show is not None:
        error.message = getattr(error, "message", "").replace("Value error, ", "")  # type: ignore[attr-defined] # pydantic's
        show()
        return 2
    code = getattr(error, "exit_code", None)
    if isinstance(error, OnnxlineError) or code is not None:
        _complain(message_with_notes(error))
        return code or InternalError.exit_code
    if (refusal := refusal_of(error)) is not None:
        _complain(str(refusal))
        return refusal.exit_code
    if not is_shown:
        _show_traceback(error)
    _complain(f"this is a bug of onnxline ({type(error).__name__}: {error}); please report it with the lines above")
    return InternalError.exit_code


def _show_traceback(error: Exception) -> None:
    print_text("".join(traceback.format_exception(error)), err=True, wraps=False)


def _complain(text: str) -> None:
    print_text(f"onnxline: {text}", err=True)


if __name__ == "__main__":
    main()
