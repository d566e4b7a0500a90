"""Every kernel on inputs that are views: what it computes on inputs that lie row after row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from pipeline.ops import Kind, unpack
from pipeline.runtime.feeding import SlotPointer, operands, tensors_by_storage
from pipeline.runtime.kernels import prepare_kernel
from pipeline.runtime.kernels.aten.call import AtenCall
from pipeline.runtime.kernels.aten.fast_paths import FAST_PATHS
from pipeline.runtime.kernels.aten.fast_paths import matmul as multiply
from pipeline.runtime.kernels.base import Launch, in_turn
from pipeline.runtime.tensors import as_tensor, storage_id, to_numpy, torch_dtype
from tests.pipeline.runtime.kernels import test_elementwise as elementwise
from tests.pipeline.runtime.kernels import test_linear_conv as linear_conv
from tests.pipeline.runtime.kernels import test_norm_reduce as norm_reduce
from tests.pipeline.runtime.kernels import test_recurrent as recurrent
from tests.pipeline.runtime.kernels import test_shape_index as shape_index
from tests.pipeline.runtime.kernels.kernel_reference import Case, assert_close, expected, graph_of

MODULES = (elementwise, linear_conv, norm_reduce, recurrent, shape_index)
CASES = [case for module in MODULES for case in module.CASES]
EXPANDABLE = [case for module in MODULES[:3] for case in module.CASES if case.inputs[0].ndim]


def bind(case: Case, inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> Launch:
    """The kernels of the ops that the case is in the IR, one after the other."""
    graph = graph_of(case, [to_numpy(out) for out in outs])
    slots = dict(zip(graph.inputs, inputs, strict=True)) | dict(zip(graph.outputs, outs, strict=True))
    for value in graph.values:
        if value.vid in graph.payloads:
            slots[value.vid] = as_tensor(graph.payloads[value.vid].numpy())
        elif value.vid not in slots:
            slots[value.vid] = torch.empty(value.spec.sizes, dtype=torch_dtype(value.spec.dtype))
    launches = []
    for op in graph.ops:
        assert op.kernel is not None
        attrs = unpack(op.kernel.attr_schema, op.kernel.attr_blob)
        kernel = prepare_kernel(Kind(op.kernel.kind_id), attrs)
        launches.append(kernel([slots[vid] for vid in op.inputs], [slots[vid] for vid in op.outputs]))
    return in_turn(*launches)


def launched(case: Case, inputs: Sequence[torch.Tensor], like: Sequence[np.ndarray]) -> list[np.ndarray]:
    outs = [torch.full_like(as_tensor(np.array(array)), 77) for array in like]
    bind(case, inputs, outs)()
    return [to_numpy(out) for out in outs]


def spaced(array: np.ndarray) -> torch.Tensor:
    """Every second element on every axis of something larger, the axes the other way round in memory."""
    room = torch.full([2 * size + 1 for size in reversed(array.shape)], 1, dtype=as_tensor(array).dtype)
    view = room.permute(tuple(reversed(range(array.ndim))))[tuple(slice(1, None, 2) for _ in array.shape)]
    return view.copy_(as_tensor(array))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_spaced_and_transposed(case: Case) -> None:
    results = expected(case)
    found = launched(case, [spaced(array) for array in case.inputs], results)
    for ours, wanted in zip(found, results, strict=True):
        assert_close(ours, wanted)


@pytest.mark.parametrize("case", EXPANDABLE, ids=str)
def test_expanded(case: Case) -> None:
    """The first row of input 0, repeated by a stride of 0."""
    first, *rest = (as_tensor(array) for array in case.inputs)
    row = first[:1].expand(first.shape)
    results = launched(case, [row.contiguous(), *rest], expected(case))
    for ours, wanted in zip(launched(case, [row, *rest], results), results, strict=True):
        assert_close(ours, wanted)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pointed_at_other_memory(case: Case) -> None:
    """Bound to one memory and launched on another: a launch holds no address, and all its operands can be listed."""
    results = expected(case)
    given = [as_tensor(np.array(array)) for array in case.inputs]
    slots = [torch.zeros_like(tensor) for tensor in given]
    outs = [torch.full_like(as_tensor(np.array(array)), 77) for array in results]
    launch = bind(case, slots, outs)
    found = [torch.full_like(out, 55) for out in outs]
    for slot, memory in zip([*slots, *outs], [*given, *found], strict=True):
        storage = storage_id(slot)
        shown = tensors_by_storage([slot, *operands(launch)], [storage])[storage]
        SlotPointer(slot.detach(), shown).point_at(memory)
    launch()
    for ours, wanted in zip(map(to_numpy, found), results, strict=True):
        assert_close(ours, wanted)


PRODUCTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heads in the middle": lambda x: x.view(2, 4, 3, 4).transpose(1, 2),
    "one head, repeated": lambda x: x.view(2, 1, 3, 16)[..., :4].expand(2, 5, 3, 4),
    "columns first": lambda x: x.view(2, 3, 4, 4).transpose(-1, -2),
}


@pytest.mark.parametrize("view", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize("shared", [False, True])
def test_products_of_views(view: Callable[[torch.Tensor], torch.Tensor], shared: bool) -> None:
    a = view(torch.arange(96.0))
    b = torch.arange(20.0).view(5, 4).t() if shared else torch.rand(*a.shape[:-2], 5, 4).transpose(-1, -2)
    out = torch.empty(*a.shape[:-1], 5)
    multiply(AtenCall("aten.matmul.default", torch.ops.aten.matmul.default, {}, [a, b], {}), [out])()
    torch.testing.assert_close(out, a @ b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gelu_whose_result_lies_in_another_order(dtype: torch.dtype) -> None:
    """torch's own gelu with `out=` leaves such a result as it was."""
    x, out = torch.linspace(-2, 2, 24).view(2, 3, 4).to(dtype), torch.full((3, 2, 4), 77, dtype=dtype).transpose(0, 1)
    launch = FAST_PATHS["aten.gelu.default"](
        AtenCall("aten.gelu.default", torch.ops.aten.gelu.default, {}, [x], {}), [out]
    )
    assert launch is not None
    launch()
    torch.testing.assert_close(out, torch.nn.functional.gelu(x))
