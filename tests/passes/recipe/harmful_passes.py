"""Passes of a user that harm the process in which they run, and return the model as it is."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import locale
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto


def change_folder(model: ModelProto) -> ModelProto:
    os.chdir("/")
    return model


def remove_own_folder(model: ModelProto) -> ModelProto:
    os.chdir(tempfile.mkdtemp())
    Path.cwd().rmdir()
    return model


def fork_and_return_twice(model: ModelProto) -> ModelProto:
    os.fork()
    return model


def fork_many(model: ModelProto) -> ModelProto:
    for _ in range(4):
        os.fork()
    return model


def return_in_the_fork_alone(model: ModelProto) -> ModelProto:
    if os.fork():
        os._exit(0)
    return model


def leave_a_daemon(model: ModelProto) -> ModelProto:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    return model


def leave_a_program(model: ModelProto) -> ModelProto:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    return model


def patch_onnx(model: ModelProto) -> ModelProto:
    for name in ("load", "save", "save_model", "load_from_string"):
        setattr(onnx, name, lambda *_, **__: None)
    onnx.helper.make_node = onnx.checker.check_model = onnx.numpy_helper.to_array = lambda *_, **__: None
    return model


def patch_numpy(model: ModelProto) -> ModelProto:
    np.ascontiguousarray = np.array = np.frombuffer = lambda *_, **__: None  # type: ignore[assignment]
    return model


def patch_pickle(model: ModelProto) -> ModelProto:
    pickle.dumps = pickle.loads = lambda *_, **__: b"patched"  # type: ignore[assignment]
    return model


def patch_builtins(model: ModelProto) -> ModelProto:
    builtins.open = builtins.isinstance = lambda *_, **__: False  # type: ignore[assignment]
    return model


def write_to_every_descriptor(model: ModelProto) -> ModelProto:
    for descriptor in range(3, 256):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\x00\x00\x00\x05hello")
    return model


def write_to_stdout(model: ModelProto) -> ModelProto:
    os.write(1, b"\xff" * 2**20)
    print("a sentence", flush=True)
    return model


def close_every_descriptor(model: ModelProto) -> ModelProto:
    os.closerange(0, 256)
    return model


def change_environment(model: ModelProto) -> ModelProto:
    os.environ.clear()
    os.environ.update(PATH="/nowhere", PYTHONPATH="/nowhere", TMPDIR="/nowhere", HOME="/nowhere")
    return model


def ignore_signals(model: ModelProto) -> ModelProto:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGIO, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    signal.signal(signal.SIGALRM, lambda *_: None)
    return model


def lower_limits(model: ModelProto) -> ModelProto:
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
    return model


def lower_file_size(model: ModelProto) -> ModelProto:
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
    return model


def empty_sys_path(model: ModelProto) -> ModelProto:
    sys.path.clear()
    sys.meta_path.clear()
    return model


def forget_modules(model: ModelProto) -> ModelProto:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("passes", "onnx", "numpy")]:
        sys.modules[name] = None  # type: ignore[assignment]
    return model


def leave_threads(model: ModelProto) -> ModelProto:
    for _ in range(4):
        threading.Thread(target=time.sleep, args=(600,)).start()
    return model


def delete_temporary_files(model: ModelProto) -> ModelProto:
    for path in Path(tempfile.gettempdir()).iterdir():
        shutil.rmtree(path, ignore_errors=True)
    return model


def delete_files_of_the_run(model: ModelProto) -> ModelProto:
    """What a script does that clears a folder of temporary files by name; the test says which."""
    shutil.rmtree(os.environ["FOLDER_TO_DELETE"], ignore_errors=True)
    return model


def exit_at_once(model: ModelProto) -> ModelProto:
    os._exit(0)


def exit_by_python(model: ModelProto) -> ModelProto:
    sys.exit(3)


def kill_itself(model: ModelProto) -> ModelProto:
    os.kill(os.getpid(), signal.SIGSEGV)
    return model


def kill_its_group(model: ModelProto) -> ModelProto:
    os.killpg(0, signal.SIGTERM)
    return model


def interrupt(model: ModelProto) -> ModelProto:
    raise KeyboardInterrupt


def switch_off_the_collector(model: ModelProto) -> ModelProto:
    gc.disable()
    gc.set_threshold(0)
    return model


def change_locale(model: ModelProto) -> ModelProto:
    locale.setlocale(locale.LC_ALL, "C")
    os.environ["LC_ALL"] = "tr_TR.UTF-8"
    return model


def raise_on_warnings(model: ModelProto) -> ModelProto:
    np.seterr(all="raise")
    warnings.simplefilter("error")
    sys.setrecursionlimit(120)
    return model


def register_at_exit(model: ModelProto) -> ModelProto:
    atexit.register(os.kill, os.getppid(), signal.SIGKILL)
    os.register_at_fork(before=lambda: os._exit(9))
    return model


def choose_spawn(model: ModelProto) -> ModelProto:
    multiprocessing.set_start_method("spawn", force=True)
    return model


def register_schemas(model: ModelProto) -> ModelProto:
    onnx.defs.register_schema(onnx.defs.OpSchema("Relu", "mine", 1))
    return model


def trace_everything(model: ModelProto) -> ModelProto:
    sys.settrace(lambda *_: 1 / 0)  # type: ignore[arg-type]
    sys.excepthook = sys.unraisablehook = None  # type: ignore[assignment]
    return model


def answer_for_the_step_after_it(model: ModelProto) -> ModelProto:
    """Write a file wherever an answer may be expected."""
    for folder in Path(tempfile.gettempdir()).parents:
        with contextlib.suppress(OSError):
            (folder / "answer").write_bytes(b"garbage")
    return model


PASSES = [name for name, value in list(vars().items()) if getattr(value, "__module__", "") == __name__]
