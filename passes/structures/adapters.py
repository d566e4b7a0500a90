"""Find adapters: products with two matrices of low rank, whose result is added to that of the matrix they adapt."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from onnx import NodeProto

from passes.graph.op_facts import ARRANGING, MATRIX_PRODUCTS, op_of
from passes.structures.candidates import Candidate
from passes.structures.view import GraphView


def find_loras(view: GraphView) -> Iterator[Candidate]:
    """(x·A)·B, perhaps scaled, that is added to x·W, where A has half as many columns as x and B, or fewer."""
    for down, up, *_ in find_adapters(view):
        yield Candidate(up, (down, up), (down.output[0], up.output[0]), allow_gaps=True)


def find_adapted(view: GraphView) -> dict[str, str]:
    """The weights of adapters, each with the weight that it adapts.

    Args:
        view: the view of the model.

    Returns:
        Stored tensor A or B → stored tensor W.
    """
    found: dict[str, str] = {}
    for *products, base, _ in find_adapters(view):
        adapted = view.find_weight(base.input[1])
        weights = [view.find_weight(product.input[1]) for product in products]
        if adapted is not None:
            found |= {weight.name: adapted.name for weight in weights if weight is not None}
    return found


def find_adapter_values(view: GraphView, base: Collection[str], zeros: Collection[str] = ()) -> frozenset[str]:
    """The values and initializers that a model has and its base has not.

    Args:
        view: the view of the model.
        base: the names that the base has. It may be the same network with zeros for B, since torch's exporter numbers
            values, so that an adapter changes the names of others; its adapters are other ones then.
        zeros: those of `base` that are zero.

    Returns:
        The matrices A and B, what scales them, and the values from x·A, x·A·B and x·W to their sum.
    """
    found = set[str]()
    for up, own, others in _list_adapter_values(view):
        is_new = up in zeros or up not in base
        found |= others - {*base} | (own if is_new else own - {*base})
    return frozenset(found)


def find_reused_names(view: GraphView, base: Collection[str]) -> list[str]:
    """The names that `base` gives to other values: those of adapters whose matrix B it has not, in order."""
    reused = {name for up, own, _ in _list_adapter_values(view) if up not in base for name in own.intersection(base)}
    return sorted(reused)


def _list_adapter_values(view: GraphView) -> Iterator[tuple[str, set[str], set[str]]]:
    """The matrix B of each adapter; the names of A, B, what scales them, x·A and x·A·B; and those from x·W to the
    sum."""
    through = SCALING | MATRIX_PRODUCTS | {"Add"}
    for down, up, product, total in find_adapters(view):
        ends = (down.output[0], product.output[0])
        own, others = set[str](), {total.output[0]}
        for name in total.input:
            nodes = list(view.upstream(name, through, lambda node, ends=ends: node.output[0] in ends))
            side = own if any(node.output == up.output for node in nodes) else others
            side.update(_names_at(view, nodes))
        own.update(_names_at(view, view.upstream(down.input[1], ARRANGING)))
        matrix = view.find_weight(up.input[1])
        yield matrix.name if matrix else "", own, others


def _names_at(view: GraphView, nodes: Iterable[NodeProto]) -> Iterator[str]:
    """What nodes make, and the initializers that they read."""
    for node in nodes:
        yield from node.output
        yield from (name for name in node.input if name in view.initializers)


def find_adapters(view: GraphView) -> Iterator[tuple[NodeProto, NodeProto, NodeProto, NodeProto]]:
    """The products with A, B and W of each adapter, and the Add of their results."""
    for up in view.nodes:
        if not _has_matrix(view, up):
            continue
        down = next((node for node in view.upstream(up.input[0], SCALING) if _has_matrix(view, node)), None)
        if down is None or not _is_low(view, down, up):
            continue
        for total, value in view.downstream(up.output[0], SCALING):
            base = _find_base(view, view.other_operand(total, value), down) if op_of(total) == "Add" else None
            if base is not None:
                yield down, up, base, total
                break


SCALING = ARRANGING | {"Mul", "Div"}


def _has_matrix(view: GraphView, node: NodeProto) -> bool:
    """Whether it multiplies a computed value with a stored matrix."""
    if op_of(node) not in MATRIX_PRODUCTS or node.input[0] in view.folded:
        return False
    weight = view.find_weight(node.input[1])
    return weight is not None and len(weight.dims) == 2


def _is_low(view: GraphView, down: NodeProto, up: NodeProto) -> bool:
    shapes = [view.dims(name) for name in (down.input[0], down.output[0], up.output[0])]
    sizes = [shape[-1] if shape else None for shape in shapes]
    inputs, rank, outputs = (size if isinstance(size, int) else 0 for size in sizes)
    return 0 < 2 * rank <= min(inputs, outputs)


def _find_base(view: GraphView, name: str, down: NodeProto) -> NodeProto | None:
    """The product that makes `name`, perhaps with a bias, if it is one of the same value."""
    base = view.find_producer(name, "Add", *MATRIX_PRODUCTS)
    if base is not None and op_of(base) == "Add":
        computed = [read for read in base.input if read not in view.folded]
        base = view.find_producer(computed[0], *MATRIX_PRODUCTS) if len(computed) == 1 else None
    if base is None or not _has_matrix(view, base) or view.source(base.input[0]) != view.source(down.input[0]):
        return None
    return base
