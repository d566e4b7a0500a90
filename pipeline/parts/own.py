"""Parts of one's own: the folder `models` of a run that has them, and the chain of them.

The chain is a function of the user's: it is called on the final models, and on their sources.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from passes.proof.numbers import compare
from passes.weights.detached import DetachedModel, read_model
from passes.weights.files import replace_folder_when_done, save_together
from pipeline.config import RunConfig, RuntimeConfig
from pipeline.errors import SourceError
from pipeline.export.source import OnnxSource, Source
from pipeline.export.user_code import call_user_code, load_function
from pipeline.parts.folder import MODEL_ALONE, WEIGHTS, WEIGHTS_ALONE, Files, load_files, save_files
from pipeline.parts.sessions import MODELS, step_opener
from pipeline.parts.slots import Step
from pipeline.report import ValuesReport
from pipeline.verify.backends import Feeds
from pipeline.workspace import Workspace, key_of, own_code_digest


def write_own_parts(finals: Mapping[str, Path], workspace: Workspace) -> tuple[Files, dict[str, str], bool]:
    """Write the final models. Those that share a weight lie together over one file; others have a folder each.

    Args:
        finals: part → its final model.

    Returns:
        The files; part → its file below `models`; and whether they were there from an earlier run, and unchanged.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    folder = (workspace.folder / MODELS).resolve()
    key, places = key_of(sorted(finals), own_code_digest()), {name: path.resolve() for name, path in finals.items()}
    known = load_files(workspace, key)
    if known and all(place.is_relative_to(folder) for place in places.values()):  # the parts have links to them
        return known, {name: place.relative_to(folder).as_posix() for name, place in places.items()}, True
    models = {name: read_model(path) for name, path in finals.items()}  # some may lie in `folder`
    sharing = find_sharing(models)
    written = {name: f"{name}.onnx" if name in sharing else f"{name}/{MODEL_ALONE}" for name in models}
    with replace_folder_when_done(folder) as fresh:
        if sharing:
            save_together({fresh / written[name]: models[name] for name in sharing}, fresh / WEIGHTS)
        for name in models.keys() - sharing.keys():
            (fresh / name).mkdir()
            save_together({fresh / written[name]: models[name]}, fresh / name / WEIGHTS_ALONE)
    return save_files(workspace, key), written, False


def find_sharing(models: Mapping[str, DetachedModel]) -> dict[str, frozenset[str]]:
    """Part → the digests of its weights that another part has too; without parts that share none.

    Small tensors, which stay in the files of models, do not count.
    """
    weights = {name: frozenset(weight.digest for weight in model.weights.values()) for name, model in models.items()}
    counts = Counter(digest for digests in weights.values() for digest in digests)
    shared = frozenset(digest for digest, count in counts.items() if count > 1)
    return {name: digests & shared for name, digests in weights.items() if digests & shared}


def prove_own_chain(
    open_sources: Mapping[str, Callable[[], Source]],
    finals: Mapping[str, Path],
    config: RunConfig,
    backends: Sequence[str],
    observe: Callable[[str, int, int], object] = lambda *_: None,
) -> tuple[ValuesReport, ...]:
    """Compare what `model.chain` returns for the final models with what it returns for the sources, on each backend.

    The function is called with the parts, name → a call of arrays by name, and with a generator of numpy that always
    has the same seed. It returns an array, or arrays by name.

    Args:
        open_sources: part → makes its source; all sources that the chain calls are in memory together.
        finals: part → its final model.
        backends: those that take all parts.
        observe: called with each backend before it runs, its place and how many there are.

    Raises:
        SourceError: the function raises, or returns something else than arrays.
    """
    chain = _UserChain(config)
    expected = chain.run(
        {name: _later(partial(_reference_of, open_source)) for name, open_source in open_sources.items()}
    )
    runtimes, found = {name: config.of_part(name).runtime for name in finals}, []
    uncalled = ", ".join(name for name in finals if not chain.calls[name])
    note = f"model.chain calls no {uncalled}; each part is proven by itself" if uncalled else ""
    for place, backend in enumerate(backends):
        observe(backend, place, len(backends))
        got = chain.run(
            {name: _later(partial(_open_step, path, backend, runtimes[name])) for name, path in finals.items()}
        )
        found.append(_compare(expected, got, backend, config, note))
    return tuple(found)


class _UserChain:
    """The function of the user's, and how often it has called each part."""

    def __init__(self, config: RunConfig) -> None:
        assert config.model.chain is not None
        self._text, self._seed = config.model.chain, config.verify.seed
        self._function = load_function(self._text, "model.chain", f"the chain {self._text}")
        self.calls = Counter[str]()

    def run(self, steps: Mapping[str, Step]) -> dict[str, np.ndarray]:
        def call(name: str, feeds: Feeds) -> Mapping[str, np.ndarray]:
            self.calls[name] += 1
            return steps[name]({key: np.asarray(array) for key, array in feeds.items()})

        parts = {name: partial(call, name) for name in steps}
        result: Any = call_user_code(
            lambda: self._function(parts, np.random.default_rng(self._seed)),
            f"the chain {self._text} raises",
            self._text,
        )
        arrays = dict(result) if isinstance(result, Mapping) else {"result": result}
        wrong = next((value for value in arrays.values() if not isinstance(value, np.ndarray | np.generic)), None)
        if wrong is not None or not arrays:
            found = type(wrong).__name__ if arrays else "nothing"
            raise SourceError(f"the chain {self._text} returns {found}, expected an array of numpy, or arrays by name")
        return {str(name): np.asarray(value) for name, value in arrays.items()}


def _later(open_step: Callable[[], Step]) -> Step:
    """A step that is opened when it is first called."""
    opened = list[Step]()

    def run(feeds: Feeds) -> Mapping[str, np.ndarray]:
        if not opened:
            opened.append(open_step())
        return opened[0](feeds)

    return run


def _open_step(path: Path, backend: str, runtime: RuntimeConfig) -> Step:
    return step_opener(path.parent, backend, runtime, optimized=False)(path)


def _reference_of(open_source: Callable[[], Source]) -> Step:
    """The source as a call: torch, or the ONNX file as it is."""
    source = open_source()
    if isinstance(source, OnnxSource):
        return _open_step(source.path, "onnxruntime", RuntimeConfig())
    from pipeline.export.reference import run_torch  # loads torch, which an ONNX file does not need

    return partial(run_torch, source)


def _compare(
    expected: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray], backend: str, config: RunConfig, note: str
) -> ValuesReport:
    if expected.keys() != got.keys():
        why = f"found the results {', '.join(got)}, expected {', '.join(expected)}"
        return ValuesReport(backend, len(expected), float("inf"), is_right=False, why=why)
    errors = {name: compare(array, got[name], config.verify.compared_within) for name, array in expected.items()}
    wrong = next((f"{name}: {error.why}" for name, error in errors.items() if not error.ok), "")
    return ValuesReport(backend, len(errors), max(error.max_abs for error in errors.values()), not wrong, wrong or note)
