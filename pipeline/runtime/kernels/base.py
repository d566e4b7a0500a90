"""What a kernel is. A kernel writes every output in full, and reads no input after it wrote an output that may share
that input's storage (see INPLACE in the family's file under pipeline/lowering)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Attrs", "Ins", "Kernel", "Outs"]

Ins = Sequence[torch.Tensor]
Outs = Sequence[torch.Tensor]
Attrs = dict[str, Any]
"""What `lowering.unpack` gives. The schema fixes names and types, so a kernel does not look twice."""

Kernel = Callable[[Ins, Outs, Attrs], None]
