"""An imported model trains as the torch module that it came from does, and goes back into its ONNX model."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from passes.optimize import optimize
from passes.structures import structure_of
from passes.weights.detached import detach
from pipeline.errors import Unsupported, UsageError
from pipeline.importers import from_onnx
from pipeline.importers.from_torch import from_torch
from pipeline.training import as_module, record_step, with_weights
from tests.pipeline.training.steps import LOSS, seeded, step_of_torch
from tests.pipeline.training.test_qdq import BATCH as QUANTIZED_BATCH
from tests.pipeline.training.test_qdq import quantized


class Attention(nn.Module):
    """Separate Q, K and V after a norm, a residual and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (*x.shape[:2], 2, 8)
        q, k, v = (part(self.norm(x)).view(heads).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1) @ v
        return self.head((x + self.out(attended.transpose(1, 2).flatten(2))).mean(1))


def attention() -> nn.Module:
    torch.manual_seed(0)
    return Attention().eval()


BATCH = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2])


@cache
def optimized() -> onnx.ModelProto:
    """The module after the default list of passes, which here keeps Q, K and V apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(attention(), (BATCH[0],), dynamo=True, optimize=False, verbose=False)
    assert exported is not None
    return optimize(exported.model_proto, keep=["qkv"]).to_proto()


def outputs_of(model: onnx.ModelProto, x: torch.Tensor) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def find_qkv(model: onnx.ModelProto) -> int:
    structure = structure_of("qkv")
    assert structure is not None
    copy = onnx.ModelProto()
    copy.CopyFrom(model)  # detach takes the weights out of the model that it is given
    return len(structure.find(detach(copy)).instances)


@pytest.mark.parametrize("make", [lambda params: SGD(params, lr=0.05), lambda params: AdamW(params, lr=1e-3)])
def test_losses_after_the_pass_list_are_those_of_torch(make) -> None:
    """The bias of K moves no loss, so its gradient is noise, of which Adam makes steps; the losses do not feel them."""
    imported, module = as_module(optimized()), attention()
    program, optimizer = record_step(imported, LOSS, make(imported.parameters()), BATCH), make(module.parameters())
    ours = [program.step(BATCH).item() for _ in range(20)]
    theirs = [step_of_torch(module, optimizer, BATCH) for _ in range(20)]
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert theirs[-1] < theirs[0]
    back = with_weights(optimized(), program)
    np.testing.assert_allclose(outputs_of(back, BATCH[0]), module(BATCH[0]).detach(), rtol=1e-3, atol=1e-4)
    assert find_qkv(optimized()) == find_qkv(back) == 1


def test_only_weights_have_changed_in_what_goes_back() -> None:
    imported = as_module(optimized())
    program = record_step(imported, LOSS, SGD(imported.parameters(), lr=0.05), BATCH)
    program.step(BATCH)
    back, before = with_weights(optimized(), program), onnx.ModelProto()
    changed = [
        tensor.name
        for tensor, old in zip(back.graph.initializer, optimized().graph.initializer, strict=True)
        if tensor.SerializeToString() != old.SerializeToString()
    ]
    assert set(imported.trained) - set(changed) <= {"k.bias"}  # which moves no loss
    assert set(changed) <= set(imported.trained)
    for model in (back, before):
        if model is before:
            model.CopyFrom(optimized())
        del model.graph.initializer[:]
    assert back == before


def test_a_module_that_was_trained_goes_through_the_main_job_again() -> None:
    module = attention()
    program = record_step(module, LOSS, SGD(module.parameters(), lr=0.05), BATCH)
    program.step(BATCH)
    program.write_back()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(module, (BATCH[0],), dynamo=True, optimize=False, verbose=False)
    assert exported is not None
    run = optimize(exported.model_proto, keep=["qkv"])
    assert find_qkv(run.to_proto()) == 1
    np.testing.assert_allclose(outputs_of(run.to_proto(), BATCH[0]), module(BATCH[0]).detach(), atol=1e-5)


def test_a_graph_of_torch_is_a_module_too() -> None:
    """Of any batch, with the parameters' own names."""
    module = attention()
    batch = torch.export.Dim("batch")
    graph = from_torch(torch.export.export(module, (BATCH[0],), dynamic_shapes=({0: batch},)))
    imported = as_module(graph, weights=module.state_dict())
    assert dict(imported.named_parameters()).keys() == dict(module.named_parameters()).keys()
    for count in (2, 3):
        torch.testing.assert_close(imported(BATCH[0][:count]), module(BATCH[0][:count]))
    program, optimizer = (
        record_step(imported, LOSS, SGD(imported.parameters(), lr=0.05), BATCH),
        SGD(module.parameters(), lr=0.05),
    )
    ours = [program.step(BATCH).item() for _ in range(5)]
    assert ours == pytest.approx([step_of_torch(module, optimizer, BATCH) for _ in range(5)], rel=1e-4)


RULE = """<ir_version: 10, opset_import: ["" : 21]> g (int64[2] ids, float[2, 3, 4] x) => (float[2, 3, 6] y) {
    e = Gather <axis = 0> (table, ids)
    axis = Constant <value = int64[1] {1}> ()
    u = Unsqueeze (e, axis)
    a = Add (x, u)
    n = LayerNormalization <axis = -1> (a, scale, shift)
    p = MatMul (n, w)
    q = Add (p, b)
    r = Add (q, mask)
    y = Mul (r, one)
}"""


def rule_model() -> onnx.ModelProto:
    model = onnx.parser.parse_model(RULE)
    draw = np.random.default_rng(0)
    shapes = {"table": (9, 4), "scale": 4, "shift": 4, "w": (4, 6), "b": 6, "mask": (1, 3, 6), "one": 1}
    for name, shape in shapes.items():
        array = draw.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def test_weights_differ_from_masks_and_numbers() -> None:
    module = as_module(rule_model())
    assert sorted(module.trained) == ["b", "scale", "shift", "table", "w"]
    assert as_module(rule_model(), train=["mask", "w*"]).trained == ("w", "mask")
    graph = from_onnx(rule_model(), trainable=["w"])
    assert as_module(graph).trained == ("w",)


def test_a_weight_whose_name_has_brackets_is_trained_by_its_name() -> None:
    model = rule_model()
    next(tensor for tensor in model.graph.initializer if tensor.name == "w").name = "w[0]"
    model.graph.node[5].input[1] = "w[0]"
    assert as_module(model, train=["w[0]"]).trained == ("w[0]",)
    assert as_module(from_onnx(model, trainable=["w[0]"])).trained == ("w[0]",)


def test_inputs_come_in_order_or_by_name() -> None:
    module = as_module(rule_model())
    ids, x = torch.tensor([3, -1]), torch.randn(2, 3, 4)
    wanted = outputs_by_name(rule_model(), ids=ids, x=x)
    for found in (module(ids, x), module(x=x, ids=ids, target=torch.zeros(1))):
        np.testing.assert_allclose(found.detach(), wanted, atol=1e-5)
    with pytest.raises(UsageError, match="reads ids, x; found 1 tensors by order"):
        module(ids)
    with pytest.raises(UsageError, match=r"input 'x' is float32\[1, 3, 4\]; the graph declares float32\[2, 3, 4\]"):
        module(ids, x[:1])


def outputs_by_name(model: onnx.ModelProto, **feed: torch.Tensor) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {name: tensor.numpy() for name, tensor in feed.items()})[0])


def test_names_that_torch_cannot_have_are_kept_beside() -> None:
    """`forward` is a method, `w` cannot be a weight and hold one, and a path has no empty part."""
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[2] x) => (float[2] y)
        <float[2] "forward" = {1, 2}, float[2] "w" = {3, 4}, float[2] "w.x" = {5, 6}, float[2] "a..b" = {7, 8}>
    { h = Add (x, "forward") i = Mul (h, "w") j = Add (i, "w.x") y = Mul (j, "a..b") }"""
    model = onnx.parser.parse_model(text)
    module = as_module(model)
    assert sorted(module.value_names.values()) == ["a..b", "forward", "w", "w.x"]
    loss = lambda output, target: ((output - target) ** 2).mean()  # noqa: E731
    batch = torch.ones(2), torch.zeros(2)
    program = record_step(module, loss, SGD(module.parameters(), lr=1e-4), batch)
    program.step(batch)
    back = with_weights(model, program)
    program.write_back()
    np.testing.assert_allclose(outputs_of(back, batch[0]), module(batch[0]).detach(), rtol=1e-6)


FOREIGN = """<ir_version: 10, opset_import: ["" : 21]> g (float[1, 1, 2, 2] x) => (float[1, 1, 2, 2] y)
    <float[1, 1, 1, 1] w = {2}, float[1, 2, 2, 2] d = {0, 0, 0, 0, 0, 0, 0, 0}>
{ y = DeformConv (x, w, d) }"""


REGIONS = """<ir_version: 10, opset_import: ["" : 21]> g (float[1, 2, 6, 6] x) => (float[1, 2, 2, 2] y)
    <float w = {1.5}, float[1, 4] boxes = {0, 0, 4, 4}, int64[1] places = {0}>
{ a = Mul (x, w) y = RoiAlign <output_height = 2, output_width = 2> (a, boxes, places) }"""


def test_what_cannot_be_trained_is_refused_in_one_sentence() -> None:
    with pytest.raises(
        Unsupported, match=r"op 0 \(DeformConv\) cannot be trained through: DeformConv is run by another runtime"
    ):
        as_module(onnx.parser.parse_model(FOREIGN))
    with pytest.raises(Unsupported, match=r"op 1 \(RoiAlign\) cannot be trained through: it takes as many samples"):
        as_module(onnx.parser.parse_model(REGIONS), train=["w"])
    with pytest.raises(UsageError, match="train: found no float weight that 'wq' names or matches"):
        as_module(rule_model(), train=["wq"])
    other = as_module(rule_model())
    model = rule_model()
    next(tensor for tensor in model.graph.initializer if tensor.name == "w").name = "v"
    model.graph.node[5].input[1] = "v"
    with pytest.raises(UsageError, match="the model has no initializer 'w', which was trained"):
        with_weights(model, other)


OPEN_BATCH = """
<ir_version: 8, opset_import: ["" : 17]>
rows (float[batch, 4] x) => (float[size, 3] y) <float[1] ones = {1.0}> {
    product = MatMul(x, w)
    shape = Shape(product)
    filler = Expand(ones, shape)
    y = Add(product, filler)
}
"""


def test_a_module_takes_the_sizes_that_its_model_leaves_open() -> None:
    """The filler is a constant of another size for each batch; the weight is one for all."""
    proto = onnx.parser.parse_model(OPEN_BATCH)
    weight = torch.arange(12.0).reshape(4, 3)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight.numpy(), "w"))
    module = as_module(proto, shapes={"x": (2, 4)})
    program = record_step(module, nn.MSELoss(), SGD(module.parameters(), lr=0.01), (torch.ones(2, 4), torch.ones(2, 3)))
    program.step((torch.ones(2, 4), torch.ones(2, 3)))
    program.write_back()
    trained = program.state_dict()["module"]["w"]
    assert not torch.equal(trained, weight)
    for rows in (2, 5, 1):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(module(x).detach(), x @ trained + 1)
    with pytest.raises(UsageError, match=r"input 'x' is float32\[2, 5\]; the graph declares float32\[2, 4\]"):
        module(torch.ones(2, 5))


# A trained program goes to ONNX in one call, by the main job with its proof.

STEPS = 5


def test_a_trained_module_is_exported(tmp_path: Path) -> None:
    module = attention().train()
    program = record_step(module, LOSS, AdamW(module.parameters(), lr=1e-2), BATCH)
    for _ in range(STEPS):
        program.step(BATCH)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = program.export(tmp_path / "trained.onnx", keep=["qkv"], out=tmp_path / "run")
    found = onnx.load(tmp_path / "trained.onnx")
    assert [(verdict.kind, verdict.kept) for verdict in result.structures] == [("qkv", True)]
    assert find_qkv(found) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert module.training
    untrained = module(BATCH[0]).detach()
    program.write_back()
    expected = module.eval()(BATCH[0]).detach()
    np.testing.assert_allclose(outputs_of(found, BATCH[0]), expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(untrained, expected, atol=1e-2)


def test_a_model_that_came_from_onnx_goes_back_with_q_k_and_v_apart(tmp_path: Path) -> None:
    onnx.save(optimized(), tmp_path / "before.onnx")
    module = as_module(tmp_path / "before.onnx")
    program = record_step(module, LOSS, SGD(module.parameters(), lr=0.05), BATCH)
    for _ in range(STEPS):
        program.step(BATCH)
    program.export(tmp_path / "trained.onnx", keep=["qkv"])
    found = onnx.load(tmp_path / "trained.onnx")
    assert find_qkv(found) == 1
    program.write_back()
    expected = module(BATCH[0]).detach()
    np.testing.assert_allclose(outputs_of(found, BATCH[0]), expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(outputs_of(optimized(), BATCH[0]), expected, atol=1e-2)
    with pytest.raises(UsageError, match="the module came from ONNX, whose inputs are known"):
        program.export(tmp_path / "trained.onnx", args=(BATCH[0],))


class Counted(nn.Module):
    """Has a buffer that is in no state dict, and that each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(1)
        return self.inner(x) * self.seen


def test_buffers_that_are_in_no_state_dict_go_along(tmp_path: Path) -> None:
    module, x = seeded(Counted), torch.ones(2, 16)
    program = record_step(module, LOSS, SGD(module.parameters(), lr=0.1), (x, torch.tensor([0, 1])))
    for _ in range(STEPS):
        program.step((x, torch.tensor([0, 1])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program.export(tmp_path / "trained.onnx", out=tmp_path / "run")
    program.write_back()
    assert module.seen.item() == STEPS
    found = outputs_of(onnx.load(tmp_path / "trained.onnx"), x)
    np.testing.assert_allclose(found, module.eval()(x).detach(), rtol=1e-5, atol=1e-6)


def test_a_quantized_model_stays_quantized(tmp_path: Path) -> None:
    model = quantized("int4/channel", "uint8")
    module = as_module(model)
    program = record_step(module, LOSS, SGD(module.parameters(), lr=1e-5), QUANTIZED_BATCH)
    program.step(QUANTIZED_BATCH)
    program.export(tmp_path / "trained.onnx")
    found = onnx.load(tmp_path / "trained.onnx")
    kinds = Counter(node.op_type for node in found.graph.node)
    assert (kinds["QuantizeLinear"], kinds["DequantizeLinear"]) == (5, 8)
    assert sum(tensor.data_type == onnx.TensorProto.INT4 for tensor in found.graph.initializer) == 4
    np.testing.assert_array_equal(
        outputs_of(found, QUANTIZED_BATCH[0]), outputs_of(with_weights(model, program), QUANTIZED_BATCH[0])
    )
