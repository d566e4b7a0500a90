"""The devices of a graph, and the pass that moves a graph to another one."""

from __future__ import annotations

from dataclasses import replace

from pipeline.ir.graph import Attr, Graph, Op, TorchConst

AUTOCAST = "higher_order.wrap_with_autocast"


def to_device(graph: Graph, device: str) -> Graph:
    """`graph` and its bodies with every value on `device`, which torch calls `cuda:0`; the same graph if it is there.

    Operators that name a device where they make a tensor name `device` afterwards. Payloads stay where they are, until
    a program binds them.
    """
    if devices_of(graph) == (device,):
        return graph
    values = tuple(replace(value, spec=replace(value.spec, device=device)) for value in graph.values)
    return replace(graph, values=values, ops=tuple(_move(op, device) for op in graph.ops))


def devices_of(graph: Graph) -> tuple[str, ...]:
    """The devices of all values of `graph`, in the order of their first value."""
    return tuple(dict.fromkeys(value.spec.device for value in graph.values))


def _move(op: Op, device: str) -> Op:
    attrs = {name: _name_device(item, device) for name, item in op.attrs.items()}
    if op.kind == AUTOCAST:  # it names the kind of device by a string
        attrs["device_type"] = device.partition(":")[0]
    # A kernel has the attributes packed, so an op whose attributes differ needs another one.
    kernel = op.kernel if attrs == dict(op.attrs) else None
    return replace(op, attrs=attrs, bodies=tuple(to_device(body, device) for body in op.bodies), kernel=kernel)


def _name_device(item: Attr, device: str) -> Attr:
    if isinstance(item, tuple):
        return tuple(_name_device(part, device) for part in item)
    return TorchConst("device", device) if isinstance(item, TorchConst) and item.kind == "device" else item
