"""Passes on the graphs that autograd records: they write with few operators what autograd writes with many.

Autograd differentiates one operator at a time. The gradient of a tensor that was split is a sum of tensors, each of
which is zero outside of one part; the gradient of a mean is divided after it was expanded; a product whose bias was
added after a view stays a product and a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from pipeline.ir.graph import Attr, Graph, InputRef, Op, TensorSpec, TorchConst
from pipeline.lowering.fusion.op_patterns import match_sum
from pipeline.lowering.fusion.rewrite import Rewrite, only_user, producer


@dataclass(frozen=True, slots=True)
class Part:
    """A gradient of the positions `start` to `stop` of an axis; the gradient is zero at all other positions."""

    op: Op
    axis: int
    start: int
    stop: int
    is_select: bool
    """Whether the gradient lacks the axis, since one position was selected."""


def join_parts(graph: Graph) -> Graph:
    """`parts`: a sum of gradients of parts that fill the whole tensor becomes their concatenation."""
    rewrite = Rewrite(graph)
    for op in graph.ops:
        if match_sum(op) is None or _is_inner_sum(graph, op):
            continue
        parts = _parts_of(graph, op)
        if parts is None or not _fill(parts, graph.values[op.outputs[0]].spec):
            continue
        ordered = sorted(parts, key=lambda part: part.start)
        inputs = [_with_axis(rewrite, op, part) if part.is_select else part.op.inputs[0] for part in ordered]
        attrs: dict[str, Attr] = {"tensors": tuple(map(InputRef, range(len(inputs)))), "dim": ordered[0].axis}
        rewrite.replace(op, "aten.cat.default", inputs, op.outputs, attrs)
    return rewrite.build()


def _is_inner_sum(graph: Graph, op: Op) -> bool:
    """Whether the only user of `op` is another sum of the same shape; then `op` is handled with that sum."""
    user = only_user(graph, op.outputs[0])
    return user is not None and match_sum(user) is not None and _keeps_shape(graph, user)


def _keeps_shape(graph: Graph, op: Op) -> bool:
    out = graph.values[op.outputs[0]].spec
    return all(graph.values[vid].spec == out for vid in op.inputs)


def _parts_of(graph: Graph, total: Op) -> list[Part] | None:
    """The terms of a sum of sums; None if a term is no gradient of a part, or has other users too."""
    parts: list[Part] = []
    todo = [total]
    while todo:
        op = todo.pop()
        terms = match_sum(op)
        if terms is None:
            part = _read_part(graph, op)
            if part is None:
                return None
            parts.append(part)
            continue
        producers = [producer(graph, vid) for vid in terms]
        if not _keeps_shape(graph, op) or any(only_user(graph, vid) is None for vid in terms):
            return None
        todo += [term for term in producers if term is not None]
        if None in producers:
            return None
    return parts


def _read_part(graph: Graph, op: Op) -> Part | None:
    if op.kind not in ("aten.select_backward.default", "aten.slice_backward.default"):
        return None
    whole, axis = graph.values[op.outputs[0]].spec, op.attrs["dim"]
    if not whole.is_static or not isinstance(axis, int) or op.attrs.get("step", 1) != 1:
        return None
    axis %= whole.rank
    size = whole.sizes[axis]
    if op.kind == "aten.select_backward.default":
        index = op.attrs["index"]
        return Part(op, axis, index % size, index % size + 1, is_select=True) if isinstance(index, int) else None
    start, end = op.attrs["start"], op.attrs["end"]
    if not isinstance(start, int) or not isinstance(end, int):
        return None
    taken = range(*slice(start, end).indices(size))
    return Part(op, axis, taken.start, taken.stop, is_select=False) if taken else None


def _fill(parts: list[Part], whole: TensorSpec) -> bool:
    """Whether the parts are along one axis, next to each other, and leave nothing out."""
    if len(parts) < 2 or len({part.axis for part in parts}) > 1:
        return False
    ends = sorted((part.start, part.stop) for part in parts)
    meet = all(left[1] == right[0] for left, right in pairwise(ends))
    return meet and ends[0][0] == 0 and ends[-1][1] == whole.sizes[parts[0].axis]


def _with_axis(rewrite: Rewrite, op: Op, part: Part) -> int:
    """The gradient of a selected position, with the axis that the selection removed; a view."""
    graph, source = rewrite.graph, part.op.inputs[0]
    spec = graph.values[source].spec
    shape = (*spec.shape[: part.axis], 1, *spec.shape[part.axis :])
    wide = rewrite.declare(f"{graph.values[source].name} in place", TensorSpec(shape, spec.dtype, spec.device))
    rewrite.replace(op, "aten.unsqueeze.default", [source], [wide], {"self": InputRef(0), "dim": part.axis})
    return wide


def scale_before_spreading(graph: Graph) -> Graph:
    """`spread`: a tensor that is expanded and then divided by a number is divided first."""
    rewrite = Rewrite(graph)
    for op in graph.ops:
        if op.kind not in ("aten.div.Scalar", "aten.mul.Scalar"):
            continue
        spread = producer(graph, op.inputs[0])
        if spread is None or spread.kind != "aten.expand.default" or only_user(graph, op.inputs[0]) is not op:
            continue
        small, large = graph.values[spread.inputs[0]], graph.values[op.outputs[0]]
        if small.spec.dtype != large.spec.dtype or small.spec.numel == large.spec.numel:
            continue
        scaled = rewrite.declare(f"{large.name} before it is spread", small.spec)
        rewrite.replace(op, op.kind, spread.inputs, [scaled], op.attrs)
        if all(graph.ops[oid].kind in READ_SPREAD for oid in large.users):
            rewrite.replace(op, spread.kind, [scaled], op.outputs, spread.attrs)
            continue
        wide = rewrite.declare(f"{large.name} spread", large.spec)
        rewrite.replace(op, spread.kind, [scaled], [wide], spread.attrs)
        rewrite.replace(op, "aten.clone.default", [wide], op.outputs, {"self": InputRef(0), "memory_format": ROWS})
    return rewrite.build()


READ_SPREAD = frozenset({"aten.threshold_backward.default", "aten.add.Tensor", "aten.mul.Tensor"})
"""Operators that read an expanded operand as fast as a row-major operand; other operators copy it first."""

ROWS = TorchConst("memory_format", "contiguous_format")


def add_biases_in_products(graph: Graph) -> Graph:
    """`bias`: a product of matrices and the sum of its rows with a bias become one call."""
    rewrite = Rewrite(graph)
    for op in graph.ops:
        terms = match_sum(op)
        if terms is None:
            continue
        for rows, bias in (terms, terms[::-1]):
            product = _product_before_views(graph, rows)
            if product is None or graph.values[bias].spec.shape != graph.values[product.outputs[0]].spec.shape[1:]:
                continue
            out = graph.values[op.outputs[0]]
            if out.spec != graph.values[rows].spec or graph.values[bias].spec.dtype != out.spec.dtype:
                continue
            made = graph.values[product.outputs[0]]
            total = rewrite.declare(f"{made.name} with bias", made.spec)
            inputs = (bias, *product.inputs)
            rewrite.replace(op, "aten.addmm.default", inputs, [total], ADDMM)
            rewrite.replace(op, "aten.view.default", [total], op.outputs, {"self": InputRef(0), "size": out.spec.shape})
            break
    return rewrite.build()


ADDMM: dict[str, Attr] = {"self": InputRef(0), "mat1": InputRef(1), "mat2": InputRef(2)}


def _product_before_views(graph: Graph, vid: int) -> Op | None:
    """The `mm` whose rows `vid` holds, in groups that views make; nothing else may read these views."""
    columns = graph.values[vid].spec.shape[-1:]
    for op in _sources(graph, vid):
        out = graph.values[op.outputs[0]]
        if out.spec.shape[-1:] != columns or only_user(graph, out.vid) is None:
            return None
        if op.kind == "aten.mm.default":
            return op
        if op.kind not in ("aten.view.default", "aten._unsafe_view.default"):
            return None
    return None


def _sources(graph: Graph, vid: int) -> Iterator[Op]:
    """The producer of `vid`, then the producer of its first operand, and so on."""
    op = producer(graph, vid)
    while op is not None:
        yield op
        op = producer(graph, op.inputs[0]) if op.inputs else None


def sum_rows_by_product(graph: Graph) -> Graph:
    """`sums`: the sum of a few rows, such as the gradient of a bias, becomes a product with ones, which starts
    faster."""
    rewrite = Rewrite(graph)
    ones: dict[tuple[int, str], int] = {}
    for op in graph.ops:
        if not _sums_few_rows(graph, op):
            continue
        matrix, out = graph.values[op.inputs[0]].spec, graph.values[op.outputs[0]]
        rows, columns = matrix.sizes
        key = rows, matrix.dtype
        if key not in ones:
            ones[key] = rewrite.declare(f"{rows} ones", TensorSpec((rows,), matrix.dtype, matrix.device))
            attrs: dict[str, Attr] = {"size": (rows,), "dtype": TorchConst("dtype", matrix.dtype), "device": CPU}
            rewrite.replace(op, "aten.ones.default", (), [ones[key]], attrs)
        transposed, total = (
            rewrite.declare(f"{out.name} {what}", TensorSpec(shape, matrix.dtype, matrix.device))
            for what, shape in (("transposed", (columns, rows)), ("in one axis", (columns,)))
        )
        rewrite.replace(op, "aten.t.default", op.inputs, [transposed], {"self": InputRef(0)})
        rewrite.replace(
            op, "aten.mv.default", [transposed, ones[key]], [total], {"self": InputRef(0), "vec": InputRef(1)}
        )
        rewrite.replace(op, "aten.view.default", [total], op.outputs, {"self": InputRef(0), "size": out.spec.shape})
    return rewrite.build()


FEW_ROWS = 64
"""A product adds row after row; for many rows torch's sum is more exact."""

CPU = TorchConst("device", "cpu")


def _sums_few_rows(graph: Graph, op: Op) -> bool:
    if op.kind != "aten.sum.dim_IntList" or op.attrs["dim"] not in ((0,), (-2,)) or op.attrs.get("dtype") is not None:
        return False
    spec = graph.values[op.inputs[0]].spec
    is_matrix = spec.rank == 2 and spec.is_static and spec.device == "cpu"
    return is_matrix and spec.dtype in ("float32", "float64") and 0 < spec.sizes[0] <= FEW_ROWS and spec.sizes[1] > 0


def join_relu_with_products(graph: Graph) -> Graph:
    """`relu`: a product of matrices, and the ReLU after it or the gradient of a ReLU, become one call."""
    rewrite = Rewrite(graph)
    for op in graph.ops:
        gated = op.kind == "aten.threshold_backward.default"
        if op.kind != "aten.relu.default" and not (gated and op.attrs["threshold"] == 0):
            continue
        product = producer(graph, op.inputs[0])
        if product is None or only_user(graph, op.inputs[0]) is not op or dict(product.attrs) not in (MM, ADDMM):
            continue
        operands = [graph.values[vid] for vid in product.inputs]
        has_bias = product.kind == "aten.addmm.default"
        if product.kind not in ("aten.mm.default", "aten.addmm.default"):
            continue
        if has_bias and operands[0].spec.shape != graph.values[product.outputs[0]].spec.shape[1:]:
            continue  # one number for all columns, or a matrix
        if any(value.spec.dtype != "float32" for value in operands):
            continue
        bias, matrices = product.inputs[: int(has_bias)], product.inputs[int(has_bias) :]
        attrs: dict[str, Attr] = {"bias": has_bias, "gate": gated}
        rewrite.replace(op, "ReluProduct", (*matrices, *bias, *op.inputs[1:]), op.outputs, attrs)
    return rewrite.build()


MM: dict[str, Attr] = {"self": InputRef(0), "mat2": InputRef(1)}


def write_class_gradients(graph: Graph) -> Graph:
    """`classes`: the gradient of a cross entropy is written over the log-softmax of its logits.

    torch has a matrix for the gradient of the loss, and a further one for that of the logits.

    In a row of the share s it is s · exp(log p), less s at the class of the row.
    """
    rewrite = Rewrite(graph)
    for op in graph.ops:
        loss = producer(graph, op.inputs[0]) if op.kind == "aten._log_softmax_backward_data.default" else None
        if loss is None or not _is_gradient_of_classes(graph, loss, op):
            continue
        share, logs, target, total = loss.inputs
        rows, matrix = graph.values[target].spec, graph.values[logs].spec
        name, number = graph.values[op.outputs[0]].name, graph.values[share].spec
        ignored, row = loss.attrs["ignore_index"], replace(matrix, shape=rows.shape)

        def emit(
            kind: str, inputs: list[int], spec: TensorSpec, attrs: dict[str, Attr], op: Op = op, name: str = name
        ) -> int:
            made = rewrite.declare(f"{name} {kind.split('.')[1]}", spec)
            rewrite.replace(op, kind, inputs, [made], attrs)
            return made

        if loss.attrs["reduction"] == MEAN:
            share = emit("aten.div.Tensor", [share, total], number, {})
        is_ignored = emit("aten.eq.Scalar", [target], replace(rows, dtype="bool"), {"other": ignored})
        shares = emit("aten.where.ScalarSelf", [is_ignored, share], row, ZERO_OR_SHARE)
        classes = emit("aten.masked_fill.Scalar", [target, is_ignored], rows, {"value": 0})
        column = (*rows.shape, 1)
        shares = emit("aten.view.default", [shares], replace(row, shape=column), {"size": column})
        classes = emit("aten.view.default", [classes], replace(rows, shape=column), {"size": column})
        less = emit("aten.neg.default", [shares], replace(row, shape=column), {})
        odds = emit("aten.mul.Tensor", [emit("aten.exp.default", [logs], matrix, {}), shares], matrix, {})
        rewrite.replace(op, "aten.scatter_add.default", [odds, classes, less], op.outputs, AT_CLASSES)
    return rewrite.build()


def _is_gradient_of_classes(graph: Graph, loss: Op, op: Op) -> bool:
    """Whether `loss` makes the gradient that `op` reads, over rows of one large matrix, each row of the same weight."""
    if loss.kind != "aten.nll_loss_backward.default" or only_user(graph, op.inputs[0]) is not op:
        return False
    logs = op.inputs[1]
    while (view := producer(graph, logs)) is not None and view.kind in ("aten.detach.default", "aten.alias.default"):
        logs = view.inputs[0]
    spec = graph.values[logs].spec
    is_matrix = spec.rank == 2 and spec.is_static and spec.nbytes >= LARGE_MATRIX and op.attrs["dim"] in (1, -1)
    is_plain = loss.attrs["weight"] is None and loss.attrs["reduction"] in (MEAN, SUM)
    return is_matrix and is_plain and loss.inputs[1] == logs and spec == graph.values[op.outputs[0]].spec


AT_CLASSES: dict[str, Attr] = {"self": InputRef(0), "dim": 1, "index": InputRef(1), "src": InputRef(2)}

ZERO_OR_SHARE: dict[str, Attr] = {"condition": InputRef(0), "self": 0.0, "other": InputRef(1)}

MEAN, SUM = 1, 2
"""Reductions of a loss, as torch numbers them."""

LARGE_MATRIX = 2**20
"""Bytes from which a matrix that is spared is worth the launches for its rows."""


def compute_activations_again(graph: Graph) -> Graph:
    """`again`: an activation that is read in the forward pass and, much later, by gradients is computed for each.

    Its operand stays until then in any case, since the gradient of the activation reads it: so one of two large values
    of each layer is kept. The second one costs a launch, and what it reads and writes.
    """
    rewrite = Rewrite(graph)
    for op in graph.ops:
        if op.kind not in CHEAP or graph.values[op.outputs[0]].spec.nbytes < LARGE_MATRIX:
            continue
        last = max(graph.values[op.inputs[0]].users)
        made: dict[int, int] = {}  # by vid of the first one
        for path, reader in sorted(_readers(graph, op.outputs[0]), key=lambda found: found[1].oid):
            if not op.oid + FAR < reader.oid <= last or reader in rewrite:
                continue
            for step in (op, *path):
                (out,) = step.outputs
                if out not in made:
                    value = graph.values[out]
                    made[out] = rewrite.declare(f"{value.name} again", value.spec)
                    inputs = [made.get(vid, vid) for vid in step.inputs]
                    rewrite.replace(reader, step.kind, inputs, [made[out]], step.attrs)
            inputs = [made.get(vid, vid) for vid in reader.inputs]
            rewrite.replace(reader, reader.kind, inputs, reader.outputs, reader.attrs, reader.constraints)
    return rewrite.build()


def _readers(graph: Graph, vid: int, path: tuple[Op, ...] = ()) -> Iterator[tuple[tuple[Op, ...], Op]]:
    """The ops that read `vid`, each after the views through which it does."""
    for oid in graph.values[vid].users:
        op = graph.ops[oid]
        if op.kind in VIEWS:
            yield from _readers(graph, op.outputs[0], (*path, op))
        else:
            yield path, op


CHEAP = frozenset({"aten.gelu.default", "aten.silu.default"})
"""Activations whose gradient is computed from their operand."""

VIEWS = frozenset(
    {"aten.view.default", "aten._unsafe_view.default", "aten.t.default", "aten.transpose.int", "aten.detach.default"}
)

FAR = 32
"""Ops between two readers of a value from which its memory is worth more than to compute it again."""
