"""Where a node of the traced graph comes from: its torch module, and the line of Python that made it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.fx import Node

__all__ = ["line_of", "module_of"]

FRAME = 'File "'
TORCH = str(Path(torch.__file__).parent)
PACKAGES = "site-packages/"


def module_of(node: Node) -> str:
    """The path of the innermost module, `encoder.layer.3.output`; empty at the top, or where torch did not say."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = next(reversed(stack.values()))
    return path.partition("@")[0]  # torch marks a second call of the same module as `layer@1`


def line_of(node: Node) -> str:
    """The innermost line that is not torch's own, as `transformers/models/bert/modeling_bert.py:175`."""
    trace = node.meta.get("stack_trace") or ""
    end = len(trace)
    while (start := trace.rfind(FRAME, 0, end)) >= 0:
        path, _, rest = trace[start + len(FRAME) : end].partition('", line ')
        if not path.startswith((TORCH, "<")):  # "<eval_with_key>.3" is code that torch wrote itself
            number = rest.partition(",")[0]
            return f"{path.rpartition(PACKAGES)[2]}:{number}"
        end = start
    return ""
