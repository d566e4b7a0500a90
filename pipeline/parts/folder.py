"""The folder `models` of a run: the final model of each part over one file of weights, and what applications read."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

import onnx

from passes.suggest import bytes_text, plural
from passes.weights.detached import read_model
from passes.weights.files import replace_folder_when_done, save_together
from pipeline.parts.first_call import FIRST_CALL, make_first_call
from pipeline.parts.genai import SPEECH, genai_config, genai_image_config, genai_speech_config
from pipeline.parts.generate import CONFIG, GENERATION, SETTINGS
from pipeline.parts.sessions import MODELS
from pipeline.parts.slots import PAST_PREFIX, state_slots
from pipeline.workspace import Workspace, key_of, own_code_digest, stamp

WEIGHTS: Final = "weights.data"

MODEL_ALONE: Final = "model.onnx"
WEIGHTS_ALONE: Final = "model.onnx_data"
"""Of a part that shares no weights, in a folder of its own, as diffusers and optimum-onnx name them."""

PARTS: Final = "parts"
"""The folder that has the folder of each part's run."""

EXPORTED: Final = "exported"
"""The folder of all parts as torch exported them, over one file of weights."""

KV_MAPPING: Final = "kv_mapping.json"
"""Which output of one part is which input of the other."""

STAGE: Final = "models"
"""The stage under which the list of files is saved."""

TOKENIZER_FILES: Final = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template.*",
    "*processor_config.json",
)  # fmt: skip
"""What a tokenizer or processor of Hugging Face is read from, as far as a folder has it."""

Files = tuple[tuple[str, int, int], ...]
"""Name below the folder of the run, or path, size and time of each file."""


def write_models(
    finals: Mapping[str, Path], config: Any, source: Path | None, workspace: Workspace, *, refers: bool = False
) -> tuple[Files, bool]:
    """Write the models of all parts, what applications read next to them, and the tokenizer.

    Args:
        finals: part → its final model.
        config: of the source, from transformers.
        source: the folder of the source, which may have a tokenizer.
        refers: the models refer to weights of the source, next to which they lie: links to them are made.

    Returns:
        The files, and whether they were there from an earlier run, and unchanged.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    folder = workspace.folder / MODELS
    patterns = (*TOKENIZER_FILES, *((GENERATION,) if "encoder" in finals else ()))
    found = {file for pattern in patterns for file in (source.glob(pattern) if source else ()) if file.is_file()}
    copied = sorted(found)
    key = key_of(sorted(finals), config.to_json_string(), stamps_of(copied), own_code_digest())
    known = load_files(workspace, key)
    if known and all(path == (folder / f"{name}.onnx").resolve() for name, path in finals.items()):
        return known, True
    with replace_folder_when_done(folder) as fresh:
        _write_files(fresh, finals, config, refers=refers)
        for file in copied:
            shutil.copyfile(file, fresh / file.name)
    return save_files(workspace, key), False


def _write_files(folder: Path, finals: Mapping[str, Path], config: Any, *, refers: bool) -> None:
    """Write the models, and what applications read of `config`."""
    models = {folder / f"{name}.onnx": read_model(path) for name, path in finals.items()}
    if refers:
        for name, path in finals.items():
            (folder / f"{name}.onnx").symlink_to(path)
    else:
        if "encoder" in finals:
            first = make_first_call(models[folder / "encoder.onnx"], models[folder / "decoder.onnx"])
            models |= {folder / f"{FIRST_CALL}.onnx": first} if first is not None else {}
        save_together(models, folder / WEIGHTS)
    graphs = {path.stem: model.proto.graph for path, model in models.items()}
    (folder / CONFIG).write_text(config.to_json_string(), encoding="utf-8")  # which optimum-onnx reads of any task
    if graphs.keys() & {"encoder", "vision", "model"}:
        settings = genai_image_config(config, graphs) if "vision" in graphs else None
        if config.model_type == SPEECH:
            settings = genai_speech_config(config, graphs["decoder"])
        if settings is not None:
            (folder / SETTINGS).write_text(settings, encoding="utf-8")
    elif "decoder" in graphs:
        (folder / SETTINGS).write_text(genai_config(config, graphs["decoder"]), encoding="utf-8")
    else:
        _write_mapping(graphs["decode"], folder / KV_MAPPING)


def stamps_of(files: Iterable[Path]) -> Files:
    """Path, size and time of files that are copied: another tokenizer of the source belongs into the folder, too."""
    return tuple((str(file), *stamp(file)) for file in files)


def load_files(workspace: Workspace, key: str) -> Files | None:
    """The files that an earlier run has written to `models` for this key; None if there are none, or other ones now."""
    known = workspace.load(STAGE, key, Files)
    return known if known and workspace.is_unchanged(known) else None


def save_files(workspace: Workspace, key: str) -> Files:
    """Save which files `models` has, for a later run with the same key."""
    found = sorted(file for file in (workspace.folder / MODELS).rglob("*") if file.is_file())
    files = tuple((file.relative_to(workspace.folder).as_posix(), *stamp(file)) for file in found)
    workspace.save(STAGE, key, files)
    return files


def where_to_load(finals: Mapping[str, Path]) -> str:
    """How to load models that refer to the shards of a checkpoint, as a sentence."""
    paths = " and ".join(str(path) for path in finals.values())
    return (
        f"onnx and onnxruntime load {paths}, next to the shards; {MODELS}/ has links to them, which these two refuse, "
        "since ONNX takes external data from the folder of a model's path alone"
    )


def store_once(parts: Mapping[str, Workspace], whole: Workspace, written: Mapping[str, str]) -> bool:
    """Let the runs of all parts share their weights: their models become links to those in `models` and `exported`.

    Records of stages are listed anew, so that a later run takes them up. Where a system has no links, nothing changes.

    Args:
        written: part → the file of its final model below `models`. A part from an ONNX file has no exported one.

    Returns:
        Whether anything was to do.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    files = {name: workspace.folder / "exported.onnx" for name, workspace in parts.items()}
    files = {name: file for name, file in files.items() if file.exists()}
    fresh = [file for file in files.values() if not file.is_symlink()]
    if fresh:
        models = {whole.folder / EXPORTED / f"{name}.onnx": read_model(file) for name, file in files.items()}
        (whole.folder / EXPORTED).mkdir(exist_ok=True)
        save_together(models, whole.folder / EXPORTED / WEIGHTS)
    is_changed = bool(fresh)
    for name, workspace in parts.items():
        gone = {file for pattern in DATA for file in workspace.folder.glob(pattern)}
        is_changed |= bool(gone)
        final = PurePosixPath(MODELS, written[name])
        links = {"export": ("exported.onnx", PurePosixPath(EXPORTED, f"{name}.onnx"))} if name in files else {}
        for stage, (link, target) in {**links, "passes": ("model.onnx", final)}.items():
            try:
                _link(workspace.folder / link, f"../../{target}")
            except OSError:
                return False
            data = WEIGHTS if target.parent.name in (EXPORTED, MODELS) else WEIGHTS_ALONE
            workspace.list_anew(stage, gone, [f"../../{target.parent}/{data}"])
        for file in gone:
            file.unlink()
    return is_changed


def remove_other_parts(names: Collection[str], whole: Workspace) -> None:
    """Remove the runs of parts that an earlier configuration had in this folder, and what torch exported of them."""
    for stages in (whole.folder / PARTS).glob("*/.stages"):
        if stages.parent.name not in names:
            shutil.rmtree(stages.parent)
            (whole.folder / EXPORTED / f"{stages.parent.name}.onnx").unlink(missing_ok=True)


DATA: Final = ("exported.onnx*data", "model.onnx.*.data")
"""The files of weights in the folder of a part, before they are shared."""


def _link(path: Path, target: str) -> None:
    """Put a link in the place of a file, in one step."""
    temporary = path.with_name(f".{path.name}.link.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)


def _write_mapping(graph: onnx.GraphProto, path: Path) -> None:
    """Write which state of `prefill` is which of `decode`.

    `layers` has a row for each layer with key and value, with their scales. Those rows have no place for the states of
    a convolution, a state space or an indexer: they are in a list of their own, `states`, where there are any.
    """
    from pipeline.export.parts.pair import kv_mapping, save_kv_mapping  # loads torch

    slots = {slot.before: slot.after for slot in state_slots(graph)}
    names = [name.removesuffix(".key") for name in slots if name.endswith(".key")]
    layers = [name.removeprefix(PAST_PREFIX) for name in names if f"{name}.value" in slots]
    before = [f"{PAST_PREFIX}{layer}.{name}" for layer in layers for name in ("key", "value")]
    outputs = ["logits", *(slots[name] for name in before)]
    mapping = kv_mapping(outputs, before, outputs, layers=[int(layer) for layer in layers])
    rows: Any = mapping["layers"]
    others = slots.keys() - set(before)
    for row, layer in zip(rows, layers, strict=True):
        for scale in ("key_scale", "value_scale"):
            name = f"{PAST_PREFIX}{layer}.{scale}"
            if name in slots:
                names = {f"prefill_{scale}_output": slots[name], f"decode_{scale}_input": name}
                row |= {**names, f"decode_{scale}_output": slots[name]}
                others -= {name}
    if others:
        mapping["states"] = [_state_row(name, slots[name]) for name in slots if name in others]
    save_kv_mapping(mapping, path)


def _state_row(before: str, after: str) -> dict[str, Any]:
    layer, _, name = before.removeprefix(PAST_PREFIX).partition(".")
    return {"layer": int(layer), "state": name, "prefill_output": after, "decode_input": before, "decode_output": after}


def describe_files(files: Files) -> str:
    """`2 models, 3.4 MB of weights`."""
    models = [name for name, _, _ in files if name.endswith(".onnx")]
    size = sum(size for name, size, _ in files if name.endswith("data"))
    return f"{plural(len(models), 'model')}, {bytes_text(size)} of weights"
