"""The modules of pytorch-ir that hold no code of their own here: a table of them, and the few names they add to ours.

`import torch_ir` puts each module of the table where `from torch_ir.ir import OpNode` finds it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn

from pipeline import torch_ir as ours
from pipeline.torch_ir import IR, deserialize_ir, load_weights, serialize_ir
from pipeline.torch_ir.extract import is_meta_module, is_meta_tensor, validate_inputs_meta, validate_meta_device
from pipeline.torch_ir.registry import REGISTERED, look_up

VERSION: Final = "0.2.3"
"""The release of pytorch-ir whose surface this is."""

GETITEM: Final = "<built-in function getitem>"
"""The type of the nodes that take one result of an operator with several; an IR of ours has none."""


def get_model_name(model: nn.Module) -> str:
    """The name of its class."""
    return type(model).__name__


def get_op_type(target: Any) -> str:
    """`aten.linear.default` of torch.ops.aten.linear.default."""
    return str(target)


def execute_getitem(inputs: list[torch.Tensor], attrs: dict[str, Any]) -> list[torch.Tensor]:
    """The executor of `getitem`, which is no operator of torch."""
    return [inputs[attrs["index"]]]


def get_conversion_fn(op_type: str) -> Callable[..., Any] | None:
    return look_up(REGISTERED.conversions, op_type)


def get_execution_fn(op_type: str) -> Callable[..., Any] | None:
    found = look_up(REGISTERED.executors, op_type)
    return execute_getitem if found is None and op_type == GETITEM else found


class IRSerializer:
    """`serialize_ir` and `deserialize_ir`, as methods."""

    def serialize(self, ir: IR) -> str:
        return serialize_ir(ir)

    def deserialize(self, json_str: str) -> IR:
        return deserialize_ir(json_str)


class WeightLoader:
    """`load_weights`, as a method."""

    def load(self, path: str | Path) -> dict[str, torch.Tensor]:
        return load_weights(path)


def add_modules() -> None:
    """Make the modules of `MODULES`, parents first; a submodule is an attribute of its parent too."""
    for path, (title, names) in MODULES.items():
        module = sys.modules[path] = ModuleType(path, title)
        module.__dict__.update({name: OWN.get(name, getattr(ours, name, None)) for name in names.split()})
        vars(module)["__all__"] = names.split()
        parent, _, leaf = path.rpartition(".")
        setattr(sys.modules[parent], leaf, module)
    vars(sys.modules["torch_ir.ops"])["__path__"] = []


OWN: Mapping[str, object] = {
    item.__name__: item
    for item in (
        *(get_model_name, get_op_type, execute_getitem, get_conversion_fn, get_execution_fn),
        *(IRSerializer, WeightLoader, is_meta_module, is_meta_tensor, validate_inputs_meta, validate_meta_device),
    )
} | {"__version__": VERSION, "GETITEM": GETITEM}
"""What `pipeline.torch_ir` does not offer under these names."""

LOOKUPS = "get_conversion_fn get_execution_fn list_registered_ops register_executor register_op"

MODULES: Mapping[str, tuple[str, str]] = {
    "torch_ir._version": ("The release of pytorch-ir.", "__version__"),
    "torch_ir.ir": ("The dataclasses of an IR.", "IR OpNode TensorMeta"),
    "torch_ir.visualize": ("An IR as Mermaid text.", "IR generate_op_distribution_pie ir_to_mermaid"),
    "torch_ir.exporter": (
        "torch.export of a module, and checks that the module and its inputs are on meta.",
        "ExportError export_model get_model_name is_meta_module is_meta_tensor validate_inputs_meta "
        "validate_meta_device",
    ),
    "torch_ir.serializer": (
        "IR ↔ JSON.",
        "IRSerializer SerializationError TensorMeta deserialize_ir load_ir save_ir serialize_ir validate_ir",
    ),
    "torch_ir.weight_loader": (
        "Load weights from files.",
        "IR WeightLoadError WeightLoader load_weights load_weights_pt load_weights_safetensors "
        "validate_weights_against_ir",
    ),
    "torch_ir.ops": ("Functions that users register for single types of op.", LOOKUPS),
    "torch_ir.ops.registry": ("Functions that users register for single types of op.", LOOKUPS),
    "torch_ir.ops.aten_ops": ("The type of a node, as text.", "get_op_type"),
    "torch_ir.ops.aten_impl": ("The executor of `getitem`.", "GETITEM execute_getitem register_executor"),
}
"""Module → its docstring, and the names it offers: ours (`pipeline.torch_ir`), or those of `OWN`."""
