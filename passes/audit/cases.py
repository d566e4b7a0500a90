"""Every model that an audit tries, by name. Other processes get only names, and load the models themselves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnx.backend.test
from onnx import numpy_helper

from passes.catalog.listing import GALLERY, read_example
from passes.errors import ModelError, PolicyError
from passes.load import load_model
from passes.optimize import draw_feeds
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class Case:
    """A model to try passes on. `name` begins with the source: `node/test_abs`.

    Args:
        feeds: arrays, lists of arrays, or None, by input.
        expected: by position of the outputs; None where the unoptimized model provides the reference.
        rtol, atol: of the test; None for the tolerances by dtype of `passes.proof.numbers`.
    """

    name: str
    model: onnx.ModelProto
    feeds: Mapping[str, Any] = field(default_factory=dict)
    expected: Sequence[Any] | None = None
    rtol: float | None = None
    atol: float | None = None


def value_of(given: Any) -> Any:
    """Convert a test's value to numpy: tensors become arrays, also in lists and optionals."""
    if isinstance(given, onnx.TensorProto):
        return numpy_helper.to_array(given)
    if isinstance(given, list | tuple):
        return [value_of(item) for item in given]
    return given if given is None else np.asarray(given)


FOLDER: Final = "models"
"""The source name for models from the user's folder."""


def case_names(models: Path | None = None, globs: Sequence[str] = ()) -> tuple[str, ...]:
    """The names of all cases that match one of `globs`, or of all, source by source.

    Raises:
        ModelError: `models` holds no model.
        PolicyError: nothing matches.
    """
    listed = {source: names for source, (names, _) in SOURCES.items()}
    if models is not None:
        listed[FOLDER] = partial(folder_names, models)
    asked = [source for source in listed if not globs or any(_may_match(glob, source) for glob in globs)]
    names = [f"{source}/{name}" for source in asked for name in listed[source]()]
    matching = tuple(name for name in names if not globs or any(fnmatchcase(name, glob) for glob in globs))
    if not matching:
        raise PolicyError(
            f"--cases: nothing matches {', '.join(globs)}; expected a glob such as node/test_if*, "
            f"with one of the sources {', '.join(listed)}"
        )
    return matching


def _may_match(glob: str, source: str) -> bool:
    """Whether `glob` can match a case of `source`: sources that cannot match are not listed, which takes seconds."""
    head, slash, _ = glob.partition("/")
    return head == source or not slash or any(letter in head for letter in "*?[")


def load_case(name: str, models: Path | None = None) -> Case:
    """Load the case called `name`.

    Raises:
        ModelError: its file cannot be read.
    """
    source, _, bare = name.partition("/")
    if source == FOLDER and models is not None:
        return load_file(FOLDER, models, bare)
    return SOURCES[source][1](bare)


def node_names() -> tuple[str, ...]:
    """The names of ONNX's own test models."""
    return tuple(sorted(_tests()))


def load_node(name: str) -> Case:
    """One of ONNX's own test models, with its inputs, expected outputs and tolerances."""
    test = _tests()[name]
    given, expected = test.data_sets[0]
    feeds = {info.name: value_of(value) for info, value in zip(test.model.graph.input, given, strict=False)}
    return Case(f"node/{name}", test.model, feeds, [value_of(value) for value in expected], test.rtol, test.atol)


@cache
def _tests() -> dict[str, Any]:
    """Name → test of ONNX's node tests. Collecting them takes seconds, and some compute infinities on purpose."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return {test.name: test for test in collect_testcases(None)}  # type: ignore[arg-type]


PACKAGE: Final = Path(onnx.backend.test.__file__).parent / "data"
PLANTED: Final = Path(__file__).with_name("planted")
TOO_LARGE: Final = frozenset({"light/light_bvlc_alexnet", "light/light_vgg19", "light/light_zfnet512"})
"""Models of a few KiB that folding grows to 240 MiB and more: the result depends on the machine's memory."""

SUFFIX: Final = ".onnx"

PICTURES: Final = {"planted": PLANTED, "gallery": GALLERY}
"""Source → folder. `planted` holds models that the node tests lack and that have crashed a library before."""


def folder_names(folder: Path) -> tuple[str, ...]:
    """Every `.onnx` file below `folder`, relative to it and without that suffix; a suffix in capitals stays.

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
    """The names of the models in text of one source."""
    return tuple(sorted(file.stem for file in PICTURES[source].glob("*.onnxtxt")))


def load_picture(source: str, name: str) -> Case:
    """A model in text, with drawn inputs."""
    return _with_drawn_feeds(f"{source}/{name}", read_example(PICTURES[source] / f"{name}.onnxtxt").model)


def load_package(name: str) -> Case:
    """Load one of the models in the onnx package, with the test inputs and outputs stored next to it, if any."""
    case = load_file("package", PACKAGE, name)
    data = (PACKAGE / name).parent / "test_data_set_0"
    if not data.is_dir():
        return case
    given = {info.name: info.type for info in case.model.graph.input}
    feeds = {name: _read_value(data / f"input_{index}.pb", type_) for index, (name, type_) in enumerate(given.items())}
    expected = [
        _read_value(data / f"output_{index}.pb", info.type) for index, info in enumerate(case.model.graph.output)
    ]
    return Case(case.name, case.model, {name: value for name, value in feeds.items() if value is not None}, expected)


def load_file(source: str, folder: Path, name: str) -> Case:
    """Load a model with its external data.

    Raises:
        ModelError: the file cannot be read, or is no valid model.
    """
    bare = folder / f"{name}{SUFFIX}"
    path = bare if bare.exists() or Path(name).suffix.lower() != SUFFIX else folder / name
    model = load_model(path)
    onnx.load_external_data_for_model(model, str(path.resolve().parent))
    return _with_drawn_feeds(f"{source}/{name}", model)


def _with_drawn_feeds(name: str, model: onnx.ModelProto) -> Case:
    """A case with drawn inputs; without inputs if one is no tensor, and then its outputs are not judged."""
    try:
        feeds: Mapping[str, Any] = draw_feeds(DetachedModel(model, {}), 0)
    except ModelError:
        feeds = {}
    return Case(name, model, feeds)


def _read_value(file: Path, type_: onnx.TypeProto) -> Any:
    if not file.is_file():
        return None
    kinds = {"sequence_type": onnx.SequenceProto, "optional_type": onnx.OptionalProto}
    kind = kinds.get(type_.WhichOneof("value") or "", onnx.TensorProto)
    proto = kind.FromString(file.read_bytes())
    if isinstance(proto, onnx.SequenceProto):
        return value_of(onnx.numpy_helper.to_list(proto))
    return onnx.numpy_helper.to_optional(proto) if isinstance(proto, onnx.OptionalProto) else value_of(proto)


SOURCES: Final[Mapping[str, tuple[Callable[[], tuple[str, ...]], Callable[[str], Case]]]] = {
    "node": (node_names, load_node),
    "package": (partial(folder_names, PACKAGE), load_package),
    "planted": (partial(picture_names, "planted"), partial(load_picture, "planted")),
    "gallery": (partial(picture_names, "gallery"), partial(load_picture, "gallery")),
}
"""Source → its names, and how one of them is loaded."""
