"""What opens a model, and how it ends: a result, a mistake of the user's in one message, or a bug.

Allowed ends are a result (`ok`), an error with exit code 2 (`refused`) and a failed check with exit code 1 (`failed`).
Everything else is an uncaught error, and raises `UncaughtError`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import onnx

import passes
from benchmarks.fuzz.seeds import seed_models, write_data_file
from passes.context import PassContext, open_context
from passes.diff import compare_matched, diff_as_data, diff_text, match_models
from passes.weights.detached import read_model
from pipeline.cli import _exit_code
from pipeline.importers import from_onnx
from pipeline.ops import emitter_of

TIMEOUT_S = 20.0
"""For one call of native code in `passes.optimize`."""
RECIPE = ("eliminate_identity", "fuse_matmul_add_bias_into_gemm", "fold_constants", "onnxsim")


class UncaughtError(Exception):
    """A door let an error out that is neither a result nor a mistake of the user's."""


class Doors:
    """The doors, with workers and a folder of seed models that all files share."""

    def __init__(self, folder: Path, context: PassContext, runs: Path) -> None:
        self._folder = folder
        self._context = context
        self._runs = runs

    @classmethod
    @contextlib.contextmanager
    def open(cls) -> Iterator[Doors]:
        with tempfile.TemporaryDirectory() as place, open_context(TIMEOUT_S, 4.0) as context:
            folder = Path(place, "models")
            folder.mkdir()
            write_data_file(folder)
            for name, model in seed_models().items():
                onnx.save(model, folder / f"{name}.onnx")
            with _lend(context, Path(place)):
                yield cls(folder, context, Path(place))

    def knock(self, door: str, content: bytes, seed_model: str) -> str:
        """How `door` takes the file: `ok`, or the kind of the error and its message.

        Raises:
            UncaughtError: with the traceback.
        """
        path = self._folder / "broken.onnx"
        path.write_bytes(content)
        try:
            return DOORS[door](self, path, self._folder / f"{seed_model}.onnx")
        except UncaughtError:
            raise
        except Exception as error:
            kind = {1: "failed", 2: "refused"}.get(getattr(error, "exit_code", 3))
            if kind is None or not str(error):
                raise UncaughtError(traceback.format_exc()) from error
            return f"{kind}: {error}"

    def load(self, path: Path, _: Path) -> str:
        read_model(path)
        return "ok"

    def from_onnx(self, path: Path, _: Path) -> str:
        from_onnx(path, dims=self._dims(path), emitter_of=emitter_of)
        return "ok"

    def optimize(self, path: Path, _: Path) -> str:
        passes.optimize(path, RECIPE, context=self._context)
        return "ok"

    def diff(self, path: Path, seed: Path) -> str:
        return self._command("diff", seed, path)

    def diff_structure(self, path: Path, seed: Path) -> str:
        """What `onnxline diff --structure-only` does, without its command line, which takes longer to build."""
        found = compare_matched(match_models(read_model(seed), read_model(path)))
        diff_text(found)
        json.dumps(diff_as_data(found))
        return "ok" if found.is_empty else "failed: it differs"

    def run(self, path: Path, _: Path) -> str:
        config = self._runs / "broken.yaml"
        dims = {name: [2, 3] for name in self._dims(path)}
        settings = {
            "name": "broken",
            "model": {"onnx": str(path), "dims": dims},
            "passes": {"recipe": list(RECIPE)},
            "verify": {"draws": 1},
        }
        config.write_text(json.dumps(settings))
        return self._command("run", config, "--out", self._runs / "out")

    def why(self, path: Path, _: Path) -> str:
        return self._command("why", path, "*")

    def bisect(self, path: Path, _: Path) -> str:
        return self._command("bisect", path, "--recipe", "eliminate_identity", "--crash", "--budget-s", "0")

    def right(self, path: Path, _: Path) -> str:
        """Whether our own runtime computes what onnxruntime does, where both of them run the model."""
        from benchmarks.fuzz.right import compare_with_onnxruntime

        return compare_with_onnxruntime(path, self._dims(path), self._context)

    def _command(self, *words: str | Path) -> str:
        out, errors = io.StringIO(), io.StringIO()
        before, sys.argv = sys.argv, ["onnxline", *map(str, words)]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
                code = _exit_code()
        finally:
            sys.argv = before
        said = errors.getvalue()
        if code not in (0, 1, 2) or "Traceback" in said or (code == 2 and "onnxline: " not in said):
            raise UncaughtError(f"exit code {code}: {said}")
        return "ok" if code == 0 else f"{'failed' if code == 1 else 'refused'}: {said}"

    @staticmethod
    def _dims(path: Path) -> Mapping[str, int]:
        """A size for every name of a dim of an input, as far as the file can be parsed."""
        try:
            model = onnx.load(path, load_external_data=False)
        except Exception:
            return {}
        names = (dim.dim_param for info in model.graph.input for dim in info.type.tensor_type.shape.dim)
        return {name: 2 for name in names if name and isinstance(name, str)}


@contextlib.contextmanager
def _lend(context: PassContext, place: Path) -> Iterator[None]:
    """Give the workers of `context` to whatever command would start its own: to start them takes longer than a file."""
    modules = [importlib.import_module(name) for name in OPEN_BENCHES]
    before = [module.open_context for module in modules]

    @contextlib.contextmanager
    def lend(
        timeout_s: float = 0.0, memory_gib: float | None = None, folder: Path | None = None
    ) -> Iterator[PassContext]:
        with tempfile.TemporaryDirectory(dir=folder or place) as own:
            yield PassContext(context.worker, Path(own).resolve(), context.proofs)

    for module in modules:
        vars(module)["open_context"] = lend
    try:
        yield
    finally:
        for module, its_own in zip(modules, before, strict=True):
            vars(module)["open_context"] = its_own


OPEN_BENCHES = ("pipeline.commands.bisect", "pipeline.commands.diff", "pipeline.model_run")
DOORS: Mapping[str, Callable[[Doors, Path, Path], str]] = {
    "load": Doors.load,
    "from_onnx": Doors.from_onnx,
    "optimize": Doors.optimize,
    "diff": Doors.diff,
    "diff_structure": Doors.diff_structure,
    "run": Doors.run,
    "why": Doors.why,
    "bisect": Doors.bisect,
    "right": Doors.right,
}
