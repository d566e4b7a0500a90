"""Models in files: those inside of the onnx package, our pictures, and a folder of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import onnx
import onnx.backend.test

from passes.audit.case import Case, value_of
from passes.catalog.picture import GALLERY, read_picture
from passes.errors import ModelError
from passes.load import load_model
from passes.optimize import draw_feeds
from passes.weights.detached import DetachedModel

__all__ = ["PACKAGE", "PLANTED", "folder_names", "load_file", "load_package", "load_picture", "picture_names"]

PACKAGE: Final = Path(onnx.backend.test.__file__).parent / "data"
PLANTED: Final = Path(__file__).with_name("planted")
TOO_LARGE: Final = frozenset({"light/light_bvlc_alexnet", "light/light_vgg19", "light/light_zfnet512"})
"""Models of a few KiB that folding makes 240 MiB and more of: what comes of that depends on the machine's memory."""

SUFFIX: Final = ".onnx"

PICTURES: Final = {"planted": PLANTED, "gallery": GALLERY}
"""Source → folder. `planted` holds what the node tests lack and has brought a library down before."""


def folder_names(folder: Path) -> tuple[str, ...]:
    """Every `.onnx` file below `folder`, relative to it and without that suffix; one in capitals stays.

    Raises:
        ModelError: there is none.
    """
    files = [path for path in folder.rglob("*") if path.suffix.lower() == SUFFIX and not path.is_dir()]
    found = sorted(path.relative_to(folder).as_posix().removesuffix(SUFFIX) for path in files)
    found = [name for name in found if folder != PACKAGE or name not in TOO_LARGE]
    if not found:
        raise ModelError(f"no .onnx file in {folder}; expected a folder of models")
    return tuple(found)


def picture_names(source: str) -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in PICTURES[source].glob("*.onnxtxt")))


def load_picture(source: str, name: str) -> Case:
    return _drawn(f"{source}/{name}", read_picture(PICTURES[source] / f"{name}.onnxtxt").model)


def load_package(name: str) -> Case:
    """One of onnx's models, with the inputs and outputs that lie beside it, where they do."""
    case = load_file("package", PACKAGE, name)
    data = (PACKAGE / name).parent / "test_data_set_0"
    if not data.is_dir():
        return case
    given = {info.name: info.type for info in case.model.graph.input}
    feeds = {name: _stored(data / f"input_{place}.pb", type_) for place, (name, type_) in enumerate(given.items())}
    expected = [_stored(data / f"output_{place}.pb", info.type) for place, info in enumerate(case.model.graph.output)]
    return Case(case.name, case.model, {name: value for name, value in feeds.items() if value is not None}, expected)


def load_file(source: str, folder: Path, name: str) -> Case:
    """
    Raises:
        ModelError: the file cannot be read, or what it says cannot be.
    """
    bare = folder / f"{name}{SUFFIX}"
    path = bare if bare.exists() or Path(name).suffix.lower() != SUFFIX else folder / name
    model = load_model(path)
    onnx.load_external_data_for_model(model, str(path.resolve().parent))
    return _drawn(f"{source}/{name}", model)


def _drawn(name: str, model: onnx.ModelProto) -> Case:
    """With drawn inputs; without any where an input is no tensor, and then nothing is said of its numbers."""
    try:
        feeds: Mapping[str, Any] = draw_feeds(DetachedModel(model, {}), 0)
    except ModelError:
        feeds = {}
    return Case(name, model, feeds)


def _stored(file: Path, type_: onnx.TypeProto) -> Any:
    if not file.is_file():
        return None
    kinds = {"sequence_type": onnx.SequenceProto, "optional_type": onnx.OptionalProto}
    kind = kinds.get(type_.WhichOneof("value") or "", onnx.TensorProto)
    proto = kind.FromString(file.read_bytes())
    if isinstance(proto, onnx.SequenceProto):
        return value_of(onnx.numpy_helper.to_list(proto))
    return onnx.numpy_helper.to_optional(proto) if isinstance(proto, onnx.OptionalProto) else value_of(proto)
