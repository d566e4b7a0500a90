"""A model by torch.compile with frozen weights, and by OpenVINO where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

Side = Callable[[], Any]


def find_obstacle(peer: str) -> str:
    """Why a peer cannot be run here; empty where it can."""
    if peer == "OpenVINO":
        return "" if importlib.util.find_spec("openvino") else "not installed"
    return "" if shutil.which("c++") or shutil.which("g++") else "no C++ compiler"


def make_compiled(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Side:
    """With weights as constants, which lets Inductor pack them."""
    function = torch.compile(module, options={"freezing": True})

    def run() -> Any:
        with torch.no_grad():
            return function(*inputs)

    return run


def make_openvino(path: Path, feeds: Mapping[str, np.ndarray], threads: int) -> Side:
    """For latency and in float32; inputs are bound once, outputs are in memory of the request."""
    openvino = importlib.import_module("openvino")
    core = openvino.Core()
    model = core.read_model(path)
    model.reshape({name: list(array.shape) for name, array in feeds.items()})
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    for name, array in feeds.items():
        request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
    return request.infer
