"""ONNX's backend interface, by which ONNX's own test runner and other tools drive the runtime.

from pipeline.onnx_backend import OnnxlineBackend
OnnxlineBackend.prepare(model).run([x])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx import helper
from onnx.backend.base import Backend, BackendRep

from pipeline.runtime.kernels.fallback import type_of
from pipeline.segments import FallbackCount, SegmentedModel

__all__ = ["OnnxlineBackend", "OnnxlineModel"]


class OnnxlineModel(BackendRep):
    """A model that is ready to run, any number of times, on inputs of any shape that it takes."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = SegmentedModel(model)

    def run(self, inputs: Any, **_: Any) -> tuple[Any, ...]:
        """The outputs in order, for inputs in order or by name.

        Args:
            inputs: arrays in order, or name → array.
        """
        named = inputs if isinstance(inputs, Mapping) else dict(zip(self._model.inputs, inputs, strict=False))
        found = self._model.run(named)
        return tuple(found[name] for name in self._model.outputs)

    def count(self) -> FallbackCount:
        """Which operators another runtime computes; known after a run."""
        return self._model.count()


class OnnxlineBackend(Backend):
    """Import, lower, plan and run on the CPU."""

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **_: Any) -> OnnxlineModel:
        if not cls.supports_device(device):
            raise ValueError(f"found device {device!r}, expected 'CPU'")
        return OnnxlineModel(model)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """The outputs of one node, at `opset_version` or the newest opset.

        Args:
            node: the node.
            inputs: an array for each of its inputs, in order; an input that is read twice counts once.
            device: `CPU`; no other device is supported.
            outputs_info: ignored: the run says dtypes and shapes itself.
            kwargs: `opset_version` may be among them; the rest is ignored.
        """
        del outputs_info
        version = kwargs.get("opset_version", onnx.defs.onnx_opset_version())
        names = list(dict.fromkeys(filter(None, node.input)))
        graph = helper.make_graph(
            [node],
            "one_node",
            [onnx.ValueInfoProto(name=name, type=type_of(value)) for name, value in zip(names, inputs, strict=True)],
            [onnx.ValueInfoProto(name=name) for name in node.output if name],
        )
        imports = [helper.make_opsetid(node.domain, version)]
        return cls.prepare(helper.make_model(graph, opset_imports=imports), device).run(inputs)
