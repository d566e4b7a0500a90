"""`onnxline ir extract|info|visualize|verify|run`: a model as a graph of aten operations, without its weights."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from passes.visible import json_text
from pipeline.commands.shared import add_command
from pipeline.config import ModelConfig, RunConfig, split_factory
from pipeline.errors import CheckFailed, UsageError
from pipeline.export.load import load_source
from pipeline.export.source import OnnxSource, TorchSource, with_dynamic_shapes
from pipeline.terminal import print_line, print_text

if TYPE_CHECKING:  # torch takes seconds to import, and `onnxline --help` does not need it
    import torch
    from torch import nn


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="A model as a graph of aten operations in JSON, without its weights.")
    add_command(group, "ir extract", extract)
    add_command(group, "ir info", info)
    add_command(group, "ir visualize", visualize)
    add_command(group, "ir verify", verify)
    add_command(group, "ir run", run)
    app.add_typer(group, name="ir")


def extract(
    source: str,
    out: Path | None = None,
    name: str | None = None,
    dynamic: list[str] | None = None,
    functionalize: bool = True,
    meta: bool = False,
    train: bool = False,
    overrides: list[str] | None = None,
) -> None:
    """Trace a model in eval mode, and write its graph: shapes, dtypes, names of weights, but no weights."""
    read_source(source, overrides or ())  # what follows loads torch, which takes seconds
    from pipeline.torch_ir.command_files import check_place
    from pipeline.torch_ir.extract import extract_source

    path = out or (Path(f"{name}_ir.json") if name else None)
    if path is not None:  # a trace may take long
        check_place(path, (".json", ".json.zst"))
    model = open_model(source, overrides or (), dynamic or (), meta, train)
    name = name or type(model.module).__name__
    path = path or Path(f"{name}_ir.json")
    with _warnings_as_lines():
        ir = extract_source(model, name, functionalize=functionalize)
    ir.save(path)
    print_text(f"{ir!r}\nwritten to {path}")
    for note in (*note_mode(model), *model.notes):
        print_line(f"onnxline: {note}", err=True)


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print what warnings say of the model, a line each: the user of a command has no line of code to point to."""
    from pipeline.export.call_watch import is_about_model

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            yield
        finally:
            for warning in filter(is_about_model, caught):
                print_line(f"onnxline: {warning.message}", err=True)


def info(file: Path, as_json: bool = False, out: Path | None = None) -> None:
    """Summarize an IR: its operators, weights, inputs and outputs."""
    _check_file(file)
    from pipeline.torch_ir import load_ir
    from pipeline.torch_ir.command_files import summary, summary_text, write_text

    found = summary(load_ir(file))
    text = json_text(found) if as_json else summary_text(found)
    if out is None:
        print_text(text, wraps=not as_json)
    else:
        write_text(out, text)
        print_line(f"written to {out}")


def visualize(
    file: Path, max_nodes: int = 150, weights: bool = True, modules: bool = True, out: Path | None = None
) -> None:
    """Draw an IR by module: a Mermaid flowchart, or an SVG."""
    _check_file(file)
    from pipeline.torch_ir import ir_to_mermaid, load_ir
    from pipeline.torch_ir.command_files import write_picture

    if out is None:
        print_text(ir_to_mermaid(load_ir(file), max_nodes, weights, by_module=modules), wraps=False)
    else:
        write_picture(load_ir(file), out, max_nodes, weights, by_module=modules)
        print_line(f"written to {out}")


def verify(
    file: Path,
    source: str,
    weights: Path | None = None,
    constants: Path | None = None,
    localize: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    train: bool = False,
    overrides: list[str] | None = None,
) -> None:
    """Compare what an IR computes with what its model computes in eval mode; the exit code is 1 on a difference."""
    _check_file(file)
    model = open_model(source, overrides or (), (), False, train)
    from pipeline.torch_ir import load_ir, load_weights, verify_ir_with_state_dict
    from pipeline.torch_ir.command_files import read_arrays

    for note in note_mode(model):
        print_line(f"onnxline: {note}", err=True)
    if weights is not None:
        state = load_weights(weights)
        _load_weights(model.module, state, weights)
    else:
        state = model.module.state_dict()
    given = None if constants is None else read_arrays(constants)
    ok, report = verify_ir_with_state_dict(
        load_ir(file), state, model.module, model.example.args, rtol, atol, given, model.example.kwargs, localize
    )
    if not ok:
        raise CheckFailed(str(report))
    print_text(str(report))


def run(
    file: Path,
    inputs: Path,
    out: Path,
    weights: Path | None = None,
    constants: Path | None = None,
    planned: bool = True,
) -> None:
    """Run an IR on weights and inputs from files."""
    _check_file(file)
    from pipeline.torch_ir import IRExecutor, load_ir, load_weights
    from pipeline.torch_ir.command_files import ENDINGS, check_place, read_arrays, write_arrays

    check_place(out, ENDINGS)  # a run may take long
    loaded = load_ir(file)
    given = None if constants is None else read_arrays(constants)
    state = None if weights is None else load_weights(weights)
    executor = IRExecutor(loaded, state, given, planned=planned)
    executor.refuse_without_weights("Weights not loaded: the IR holds none; name their file by --weights")
    outputs = executor.execute(read_arrays(inputs))
    names = [meta.name for meta in loaded.graph_outputs]
    write_arrays(out, dict(zip(names, outputs, strict=True)))
    print_line(f"{', '.join(dict.fromkeys(names))} written to {out}")


def _check_file(file: Path) -> None:
    """Refuse a file that is not there before torch is loaded."""
    if not file.exists():
        raise UsageError(f"IR file not found: {file} cannot be read: there is no such file or folder")


def _load_weights(module: nn.Module, state: dict[str, torch.Tensor], path: Path) -> None:
    from pipeline.torch_ir.weights import tied_names

    try:  # not strictly: of tied weights, a checkpoint has one
        missing, unknown = module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise UsageError(f"{path} does not fit the model: {error}") from error
    if unknown:
        raise UsageError(f"{path} has {unknown[0]!r}, and the model has no such weight; is it of another model?")
    others = tied_names(module) if missing else {}
    if lacking := [name for name in missing if not any(alias in state for alias in others.get(name, ()))]:
        raise UsageError(f"{path} lacks {', '.join(map(repr, lacking))}; is it whole, and of this model?")


def open_model(
    text: str, overrides: Sequence[str], dynamic: Sequence[str], meta: bool, train: bool = False
) -> TorchSource:
    """Make the module and call it once on its example; in eval mode unless `train`, which keeps its own mode.

    Raises:
        UsageError: there is no such model, or it is an ONNX file; or `dynamic` is not as in `x.0=batch`.
    """
    config = read_source(text, overrides)
    axes = _axes(dynamic)
    if axes:
        both = {name: {**config.export.dynamic_shapes.get(name, {}), **own} for name, own in axes.items()}
        shapes = {**config.export.dynamic_shapes, **both}
        config = config.model_copy(update={"export": config.export.model_copy(update={"dynamic_shapes": shapes})})
    import torch  # seconds: not for a source that is not there

    with torch.device("meta") if meta else contextlib.nullcontext():
        source = _load(text, with_dynamic_shapes(config.model, config.export), train)
    if not isinstance(source, TorchSource):
        raise UsageError(f"{text} names an ONNX file; an IR is extracted from a torch module")
    return source


def note_mode(source: TorchSource) -> Iterator[str]:
    from pipeline.export.build_source import describe_eval_mode

    yield from (f"{said}; --train keeps its mode" for said in describe_eval_mode(source))


def _load(text: str, model: ModelConfig, train: bool) -> TorchSource | OnnxSource:
    from pipeline.export.build_source import NoInputs

    try:
        return load_source(model, keep_mode=train)
    except NoInputs as error:
        if text.endswith(CONFIGURATIONS):
            raise
        raise UsageError(
            f"{text} gives a module and no example; expected (module, args tuple) or (module, args tuple, kwargs dict) "
            f"as what the factory returns; {error.takes}"
        ) from error


def read_source(text: str, overrides: Sequence[str]) -> RunConfig:
    """The configuration that SOURCE names, or that of a factory by itself.

    Raises:
        UsageError: there is no such file, or it is neither.
    """
    if text.endswith(CONFIGURATIONS):
        return RunConfig.from_yaml(text, tuple(overrides))
    if overrides:
        raise UsageError("--set is for configurations; a factory has no settings: name a .yaml")
    if ":" not in text:
        raise UsageError(f"found {text!r}, expected file.py:make, package.module:make, or a configuration (.yaml)")
    file, _ = split_factory(text)
    if file.endswith(".py") and not Path(file).is_file():
        raise UsageError(f"the factory {text}: no file {file!r}; its path is relative to the folder that you are in")
    return RunConfig.from_mapping({"name": "model", "model": {"factory": text}})


def _axes(dynamic: Sequence[str]) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = {}
    for item in dynamic:
        place, _, dim = item.partition("=")
        name, _, axis = place.rpartition(".")
        if not name or not axis.lstrip("-").isdecimal() or not dim.isidentifier():
            raise UsageError(f"--dynamic {item}: expected INPUT.AXIS=DIM, as in x.0=batch")
        found.setdefault(name, {})[int(axis)] = dim
    return found


CONFIGURATIONS = (".yaml", ".yml")
