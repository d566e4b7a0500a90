"""Forms of the two elementwise kinds that are no call of one operator."""

from __future__ import annotations

import torch

from pipeline.ops import Kind
from pipeline.runtime.functional.base import Attrs, Form, Ins, Specs, only
from pipeline.runtime.tensors import torch_dtype


def cast(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
    return ins[0].to(torch_dtype(attrs["to"]))


FORMS: dict[Kind, Form] = {Kind.Identity: only(torch.clone), Kind.Cast: cast}
