"""Each way for a script to reach an optimizer in its own process is held, and stands in the log."""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import pickle
import runpy
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import onnx
import onnxoptimizer
import onnxoptimizer.onnx_opt_cpp2py_export as native
import pytest
from onnxoptimizer import optimize

import passes
from passes.guard.patching import is_intercepted
from tests.support.onnx_models import attention

pytestmark = pytest.mark.usefixtures("workers")

Way = Callable[[onnx.ModelProto, Path], onnx.ModelProto]

QKV: Final = ["fuse_qkv"]
PARTIAL: Final = functools.partial(optimize, passes=QKV)
PICKLED: Final = pickle.dumps(optimize)
COPIED: Final = types.FunctionType(optimize.__code__, optimize.__globals__)


def in_a_thread(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    result: list[onnx.ModelProto] = []
    thread = threading.Thread(target=lambda: result.append(optimize(model, QKV)))
    thread.start()
    thread.join()
    return result[0]


def in_a_pool(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(optimize, model, QKV).result()


def by_its_command(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    onnx.save(model, folder / "in.onnx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["onnxoptimizer", str(folder / "in.onnx"), str(folder / "out.onnx"), "-p", *QKV])
        runpy.run_module("onnxoptimizer", run_name="__main__")
    return onnx.load(folder / "out.onnx")


def by_a_script(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    (folder / "script.py").write_text("from onnxoptimizer import optimize\nmade = optimize(model, ['fuse_qkv'])")
    return runpy.run_path(str(folder / "script.py"), {"model": model})["made"]


def loaded_again(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    before = dict(vars(onnxoptimizer))
    try:
        return importlib.reload(onnxoptimizer).optimize(model, QKV)
    finally:
        vars(onnxoptimizer).update(before)


def imported_again(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "onnxoptimizer")
        return importlib.import_module("onnxoptimizer").optimize(model, QKV)


def native_from_file_to_file(model: onnx.ModelProto, folder: Path, name: str) -> onnx.ModelProto:
    source, target = str(folder / "in.onnx"), str(folder / "out.onnx")
    onnx.save(model, source)
    getattr(native, name)(source, target, QKV, "out.data")
    return onnx.load(target)


WAYS: Final[dict[str, Way]] = {
    "by name": lambda model, _: optimize(model, QKV),
    "by module": lambda model, _: onnxoptimizer.optimize(model, passes=QKV),
    "a partial": lambda model, _: PARTIAL(model),
    "pickled": lambda model, _: pickle.loads(PICKLED)(model, QKV),
    "its code copied": lambda model, _: COPIED(model, QKV, False),
    "evaluated": lambda model, _: eval(
        "__import__('onnxoptimizer').optimize(model, names)", {"model": model, "names": QKV}
    ),
    "thread": in_a_thread,
    "pool": in_a_pool,
    "command": by_its_command,
    "script": by_a_script,
    "reload": loaded_again,
    "imported again": imported_again,
    "native": lambda model, _: onnx.load_from_string(native.optimize(model.SerializeToString(), QKV)),
    "native fixed point": lambda model, _: onnx.load_from_string(
        native.optimize_fixedpoint(model.SerializeToString(), QKV)
    ),
    "native files": lambda model, folder: native_from_file_to_file(model, folder, "optimize_from_path"),
    "native fixed point, files": lambda model, folder: native_from_file_to_file(
        model, folder, "optimize_fixedpoint_from_path"
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_held(way: str, tmp_path: Path) -> None:
    with passes.guard(["qkv"], compare=False, quiet=True) as log:
        result = WAYS[way](attention(), tmp_path)
    assert Counter(node.op_type for node in result.graph.node) == Counter(
        node.op_type for node in attention().graph.node
    )
    assert [call.kept for call in log.calls] == [{"qkv": 1}]


def test_mistakes_in_native_calls_are_the_librarys_to_tell() -> None:
    with passes.guard(["qkv"], compare=False, quiet=True) as log:
        with pytest.raises(TypeError, match="incompatible function arguments"):
            native.optimize("no bytes", QKV)
        with pytest.raises(RuntimeError, match="pass nope is unknown"):
            native.optimize(attention().SerializeToString(), ["nope"])
    assert [call.returned for call in log.calls] == ["raised"] * 2


def test_nothing_of_it_stays() -> None:
    functions = {name: getattr(native, name) for name in dir(native) if name.startswith("optimize")}
    assert len(functions) == 4
    with passes.guard(quiet=True):
        pass
    module_wide_guard = {name: getattr(native, name) for name in functions}
    assert module_wide_guard == functions
    assert all(is_intercepted(function) for function in functions.values())  # of this file's own guard
