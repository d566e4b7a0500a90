"""The two elementwise kinds that are no call of one operator: a value under another name, and a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.ops.kinds import Kind
from pipeline.ops.layout import Layout
from pipeline.ops.rows import OpCall, kind, same_dtype, signature


def to_target(call: OpCall) -> str | None:
    to, dtype = call.attrs["to"], call.outs[0].dtype
    return None if to == dtype else f"attr to={to!r}, but the output is {dtype}"


def keep_layout(_attrs: Mapping[str, Any], source: Layout, _outs: object) -> tuple[Layout]:
    return (source,)


KINDS = (
    kind(Kind.Identity, signature(same_dtype), view=keep_layout),
    kind(Kind.Cast, signature(to_target), "to=s"),
)
