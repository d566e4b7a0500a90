"""Find separate Q, K and V projections: three products, each with its own matrix, before one attention.

The search goes through the graphs inside of nodes too: branches of If, bodies of Loop and Scan. Where a model has no
separate projections, a sentence says which attention lacks them, what would separate them, and what came nearest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper

from passes.graph.op_facts import PASSING_OPS, RESHAPES, attribute_of
from passes.graph.traversal import bodies_of
from passes.model.canonical import ValueDigests, value_digests
from passes.structures.attention import Operands, attention_operands
from passes.structures.matrices import Matrix, matrix_of, matrix_values
from passes.structures.projection import Projection, ProjectionSearch, as_projection
from passes.structures.types import Instance, KeptWeight, PinSite, SearchResult, Sums, sums_of
from passes.structures.view import GraphView, module_of, packing_of, quantized_weight
from passes.suggest import ELLIPSIS, join_first, plural
from passes.weights.relations import orders_of
from passes.weights.stand_ins import digest_of

Triple = tuple[Projection, Projection, Projection]


def find_separate_qkv(view: GraphView) -> SearchResult:
    """Three projections, each with its own weight, feeding one attention (MHA, GQA, MQA, cross-attention)."""
    inlined = view.model.without_functions()
    whole = view if inlined is view.model else GraphView(inlined)
    instances: list[Instance] = []
    merged = [*find_packed(whole)]
    others = 0
    for graph in (whole, *inner_views(whole)):
        candidates = _search(graph)
        instances += _instances(graph, candidates.triples, view.producers.keys())
        merged += candidates.merged
        others += candidates.others
    named = tuple(replace(instance, name=instance.name or f"attention {at}") for at, instance in enumerate(instances))
    text, remedy = describe_others(whole, [instance.name for instance in named], merged, others)
    return SearchResult(named, text, remedy)


@dataclass(frozen=True, slots=True)
class QkvCandidates:
    """The attention blocks of one graph: with three projections, with merged projections, and the number of
    `others`."""

    triples: list[Triple]
    merged: list[MergedProjection]
    others: int


def _search(view: GraphView) -> QkvCandidates:
    triples: list[Triple] = []
    merged: list[MergedProjection] = []
    others = 0
    pairs: set[frozenset[str]] = set()
    search = ProjectionSearch(view)
    for readings in attention_operands(search):
        read = _read(search, readings)
        if isinstance(read, MergedProjection):
            merged.append(read)
        elif read is None:
            others += 1
        else:
            _, key, value = read
            # Two softmaxes may weight one V (DiffLlama); a later layer may use an earlier one's K and V (Gemma 3n).
            pair = frozenset({key.value, value.value})
            if pair not in pairs:
                pairs.add(pair)
                triples.append(read)
    # A delta rule reads its state by K too, before it writes; and it reads one product at several nodes.
    own = {projection.value for triple in triples for projection in triple}
    blocks = {entry.value: entry for entry in merged if entry.value not in own}
    return QkvCandidates(triples, list(blocks.values()), others)


def _read(search: ProjectionSearch, readings: Sequence[Operands]) -> Triple | MergedProjection | None:
    """The triple that one attention reads; or the product that merges several of the three; or None.

    Where scores are a sum, the K with the source of V is chosen, and if possible a Q with the same source. Other
    projections read positions (DeBERTa, XLNet), or the output of an adapter.
    """
    triples: list[tuple[int, Triple]] = []
    merged: MergedProjection | None = None
    for reading in readings:
        queries, keys = search.before_shared_matrix(reading.query, reading.key)
        for query, key, value in product(queries, keys, search.projections_of(reading.value)):
            values = [query.value, key.value, value.value]
            if len(set(values)) < 3:
                projection = key if values.count(key.value) > 1 else query
                is_whole = len(set(values)) == 1
                merged = merged or MergedProjection(projection.value, projection.weight, is_whole)
            elif not _in_turn(search, (query, key, value)):
                sources = [search.view.origin_of(projection.data, PASSING_OPS) for projection in (query, key, value)]
                agreement = 2 * (sources[1] == sources[2]) + (sources[0] in sources[1:])
                triples.append((agreement, (query, key, value)))
    return max(triples, key=lambda entry: entry[0])[1] if triples else merged


def _in_turn(search: ProjectionSearch, triple: Triple) -> bool:
    """Whether one of the three projections is computed from another: then they are in sequence, not parallel."""
    return any(search.depends(a.node, b.node) for a in triple for b in triple if a is not b)


def _instances(view: GraphView, triples: Sequence[Triple], pinnable: Set[str]) -> list[Instance]:
    """`pinnable` are the values of the model's own graph that a pin can hold."""
    computed = any(not projection.matrix.is_plain for triple in triples for projection in triple)
    exported = value_digests(view.model) if computed else None
    # Each matrix is hashed in all layouts that an optimizer may leave it in; hashing releases the interpreter lock.
    with ThreadPoolExecutor() as pool:
        weights = list(
            pool.map(
                lambda role, projection: _kept_weight(view, role, projection, exported),
                *zip(*_with_roles(triples), strict=True),
            )
        )
    return [
        _instance(view, triple, _without_shared_digests(weights[3 * at : 3 * at + 3]), pinnable)
        for at, triple in enumerate(triples)
    ]


def _with_roles(triples: Sequence[Triple]) -> list[tuple[str, Projection]]:
    return [entry for triple in triples for entry in zip("QKV", triple, strict=True)]


def _without_shared_digests(weights: Sequence[KeptWeight]) -> tuple[KeptWeight, ...]:
    """`weights` without the digests that two of them share, such as the digest of a tensor from which both are
    computed."""
    count = Counter(digest for digests in {weight.digests for weight in weights} for digest in digests)
    return tuple(
        replace(weight, digests=frozenset(digest for digest in weight.digests if count[digest] == 1))
        for weight in weights
    )


def _instance(view: GraphView, triple: Triple, weights: tuple[KeptWeight, ...], pinnable: Set[str]) -> Instance:
    module = module_of([projection.node for projection in triple])
    outputs = [projection.value for projection in triple]
    sums = [_skip_bias(view, name) for name in outputs]
    heads = [_skip_reshapes(view, name) for name in sums]
    # A pin needs a type, and a value of the main graph; elsewhere only the checker protects the instance.
    known = all(name in view.types and name in pinnable for name in (*outputs, *sums, *heads))
    sites = zip(outputs, sums, heads, strict=True) if known else ()
    pins = tuple(PinSite(*(view.types[name] for name in names)) for names in sites)
    return Instance("qkv", module, module, weights, pins)


def _skip_bias(view: GraphView, name: str) -> str:
    """The sum with a constant that is the only consumer of `name`, else `name`: product and sum may become one node."""
    node = _only_consumer(view, name)
    return node.output[0] if node is not None and _is_bias(view, node) else name


def _skip_reshapes(view: GraphView, name: str) -> str:
    """The value after the bias and all reshapes of `name`, as far as each is the only consumer of the value before.

    A product with a bias takes matrices. For other ranks a pass puts it between two Reshapes, and may merge the second
    with those that follow.
    """
    while (node := _only_consumer(view, name)) is not None:
        is_reshape = node.op_type in RESHAPES and node.input[0] == name
        if not (is_reshape or _is_bias(view, node)) or view.dims(node.output[0]) is None:
            break
        name = node.output[0]
    return name


def _only_consumer(view: GraphView, name: str) -> NodeProto | None:
    consumers = view.consumers.get(name, [])
    return consumers[0] if len(consumers) == 1 and name not in view.outputs else None


def _is_bias(view: GraphView, node: NodeProto) -> bool:
    return node.op_type == "Add" and any(map(view.is_constant, node.input))


def _kept_weight(view: GraphView, role: str, projection: Projection, exported: ValueDigests | None) -> KeptWeight:
    """The matrix of `projection` in that `role`; `exported`: those of the exported model, if they are needed.

    A matrix computed from stored tensors may be folded by a tool that computes in another order. So it is also
    identified by its elements up to rounding.
    """
    matrix = projection.matrix
    if matrix.is_plain:
        return _with_scale(view, role, projection, frozenset(_plain_digests(view, matrix)), None)
    values = matrix_values(view, matrix)
    digests = set() if values is None else {digest_of(values), *map(digest_of, _transposes(values))}
    if exported is not None and matrix.value in exported.values:
        digests.add(exported.values[matrix.value])
    if _is_quantized(view, matrix):  # a pass may multiply with the stored tensor and scale afterwards
        digests.add(view.model.digest(matrix.stored))
        digests.update(view.model.transposed_digest(matrix.stored, axes) for axes in _orders(matrix.stored.dims))
    return _with_scale(view, role, projection, frozenset(digests), None if values is None else sums_of(values))


def _with_scale(
    view: GraphView, role: str, projection: Projection, digests: frozenset[str], rounded: Sums | None
) -> KeptWeight:
    scale = attribute_of(projection.node, "alpha", 1.0)
    suffix = packing_of(view, projection.node) + ("" if scale == 1.0 else f"*{scale}")
    is_exact = quantized_weight(view, projection.matrix.value) is not None
    return KeptWeight(
        role, projection.weight.name, frozenset(f"{digest}{suffix}" for digest in digests), rounded, is_exact
    )


def _is_quantized(view: GraphView, matrix: Matrix) -> bool:
    """Whether the matrix is a whole tensor of integers."""
    dims = view.dims(matrix.value)
    whole = matrix.stored.data_type in (TensorProto.INT8, TensorProto.UINT8)
    return whole and dims is not None and sorted(map(str, dims)) == sorted(map(str, matrix.stored.dims))


def _plain_digests(view: GraphView, matrix: Matrix) -> Iterator[str]:
    """The digests of the matrix in each type and layout that an optimizer may leave it in."""
    stored = matrix.stored
    yield view.model.digest(stored)
    if view.model.is_unread(stored):  # a cast cannot be digested without the data
        yield from map(partial(view.model.transposed_digest, stored), _orders(stored.dims))
        return
    array = view.model.array(stored)
    yield from map(digest_of, _transposes(array))
    info = view.types.get(matrix.value)
    if info is not None and info.type.tensor_type.elem_type not in (0, stored.data_type):
        cast = array.astype(helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type))
        yield from map(digest_of, (cast, *_transposes(cast)))


def _orders(dims: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The other orders of the axes of a matrix, or of a stack of matrices."""
    return orders_of(len(dims)) if len(dims) <= 3 else iter(())


def _transposes(array: np.ndarray) -> list[np.ndarray]:
    if array.ndim == 3:
        return [array.transpose(order) for order in orders_of(3)]
    return [array.reshape(array.shape[0], -1).T]


def inner_views(view: GraphView) -> Iterator[GraphView]:
    """A view of each graph inside of the nodes of `view`'s own graph, at any depth, without branches that never run."""
    for node in view.inferred.node:
        dead = _dead_branch(view, node)
        for attribute in node.attribute:
            for body in bodies_of(attribute) if attribute.name != dead else ():
                inner = GraphView(view.model, body, view, _entries(node, body))
                yield inner
                yield from inner_views(inner)


def _dead_branch(view: GraphView, node: NodeProto) -> str:
    """The attribute with the branch of an If that its constant condition never takes; empty where both may run."""
    matrix = matrix_of(view, node.input[0]) if node.op_type == "If" and node.input[0] in view.folded else None
    values = None if matrix is None else matrix_values(view, matrix)
    if values is None or values.size != 1:
        return ""
    return "else_branch" if values.item() else "then_branch"


def _entries(node: NodeProto, body: GraphProto) -> list[NodeProto]:
    """Nodes that stand for how a Loop or Scan hands values to its `body`: a state is what it begins with or what the
    last turn made, and what is scanned is taken from along its axis."""
    count = attribute_of(node, "num_scan_inputs")
    if node.op_type not in ("Loop", "Scan"):
        return []
    given, inner, made = list(node.input), [info.name for info in body.input], [info.name for info in body.output]
    if count is None:  # a Loop, which counts its turns and says whether there is another one
        given, inner, made, count = given[2:], inner[2:], made[1:], 0
    states = len(inner) - count
    held = zip(given[:states], made, inner, strict=False)
    scanned = zip(given[states:], inner[states:], attribute_of(node, "scan_input_axes") or [0] * count, strict=False)
    return [
        *(helper.make_node("Where", ["", first, later], [name]) for first, later, name in held),
        *(helper.make_node("Gather", [whole, ""], [name], axis=axis) for whole, name, axis in scanned),
    ]


@dataclass(frozen=True, slots=True)
class MergedProjection:
    """One product, which makes `value`, in place of several: `is_whole` if it makes all of Q, K and V, and not only
    two."""

    value: str
    weight: TensorProto
    is_whole: bool

    def __str__(self) -> str:
        return f"{self.weight.name} ({'×'.join(str(dim) for dim in self.weight.dims)})"


def find_packed(view: GraphView) -> Iterator[MergedProjection]:
    """The matrices of onnxruntime's operators that project to Q, K and V by themselves."""
    for op in PACKED_OPS:
        for node in view.by_op.get(op, ()):
            weight = view.find_weight(node.input[1]) if len(node.input) > 1 else None
            if weight is not None:
                yield MergedProjection(node.output[0], weight, True)


def describe_others(
    view: GraphView, apart: Sequence[str], merged: Sequence[MergedProjection], others: int
) -> tuple[str, str]:
    """A text on the attention blocks without separate projections, with the names of those that are `apart`, and what
    to do about it; the text is empty if all are apart.

    Args:
        view: the index of the model.
        apart: names of the instances with separate projections.
        merged: the products that merge several projections.
        others: how many attention blocks have neither three projections nor merged ones.
    """
    rest = _without_triple(merged, others)
    remedy = "put the step split-qkv into the recipe to take it apart" if merged else ""
    if not apart:
        return rest or _nearest(view), remedy
    if not rest:
        return "", ""
    names = join_first(apart, 3, ELLIPSIS)
    return f"{plural(len(apart), 'attention block')} with separate Q, K and V ({names}), and {rest}", remedy


def _without_triple(merged: Sequence[MergedProjection], others: int) -> str:
    texts = []
    if merged:
        which = "Q, K and V" if all(projection.is_whole for projection in merged) else "Q, K and V, or two of them,"
        names = join_first(merged, 3, ELLIPSIS)
        texts.append(
            f"{plural(len(merged), 'attention block')} whose {which} are one matrix in the source already: {names}"
        )
    if others:
        texts.append(f"{plural(others, 'attention block')} whose Q, K and V were not traced back to three matrices")
    return "; ".join(texts)


def _nearest(view: GraphView) -> str:
    """What was looked for, and the products of one input, which Q, K and V would be."""
    softmaxes = len(view.by_op.get("Softmax", ()))
    found = f"no attention in a form that is looked for ({SOUGHT}; {softmaxes or 'no'} Softmax)"
    groups: dict[str, list[str]] = defaultdict(list)
    for node in view.own:
        projection = as_projection(view, node)
        if projection is not None:
            groups[view.origin_of(projection.data, PASSING_OPS)].append(projection.weight.name)
    most = max(groups.values(), key=len, default=[])
    nearest = f"; nearest: {len(most)} products of one input, with {join_first(most, 3, ELLIPSIS)}"
    return found + (nearest if len(most) > 1 else "")


PACKED_OPS: Final = tuple(f"com.microsoft.{name}" for name in ("Attention", "QAttention"))

SOUGHT: Final = "weights made from Q and K that multiply V, or a state made from K and V that Q multiplies"
