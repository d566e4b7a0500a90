"""A functional form: what a kind computes, as an expression of torch that makes new tensors and can be differentiated.

The kernels beside it write into given memory (`out=`), which autograd refuses. A form is also the second opinion on a
kernel: the two share no code, and a test compares them on the cases of the kernels.

A form takes what torch records on fake tensors, so it looks at no number: shapes and attributes decide alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from pipeline.ir import TensorSpec

Ins: TypeAlias = Sequence[torch.Tensor]
Attrs: TypeAlias = Mapping[str, Any]
"""Those of the op, as its importer normalised them."""

Specs: TypeAlias = Sequence[TensorSpec]
"""Of the outputs; all static."""

Results: TypeAlias = torch.Tensor | Sequence[torch.Tensor]

Form: TypeAlias = Callable[[Ins, Attrs, Specs], Results]
