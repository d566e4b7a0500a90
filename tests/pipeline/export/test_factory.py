"""Sources that a function of the user's makes, and the ways in which such a function goes wrong."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError, SourceError, Unsupported
from pipeline.export import TorchSource, load_source, run_torch
from pipeline.export.user_code import check_function

Factory = Callable[..., ModelConfig]

LINEAR = "def make(width=4):\n    return nn.Sequential(nn.Linear(width, 2))\n"


def load(config: ModelConfig) -> TorchSource:
    source = load_source(config)
    assert isinstance(source, TorchSource)
    return source


def test_a_module_with_declared_inputs(factory: Factory) -> None:
    source = load(factory(LINEAR, args={"width": 6}, inputs={"input": {"shape": ["batch", 6]}}))
    assert not source.module.training
    assert [str(spec) for spec in source.inputs] == ["input: float32[batch, 6]"]
    assert source.outputs == ("output",)
    assert source.example.kwargs["input"].shape == (2, 6)


def test_what_a_graph_cannot_hold_of_a_factorys_module_is_noted(factory: Factory) -> None:
    code = """
class Steps(nn.Module):
    last = None

    def forward(self, x, scale):
        before, self.last = self.last, x
        return x * scale if before is None else x + before

def make():
    return Steps(), (torch.ones(2), 3)
"""
    numbers, tensors = load(factory(code)).notes
    assert numbers.startswith("the graph holds numbers of Python that forward is given: scale=3;")
    assert tensors.startswith("forward keeps tensors in last for the next call:")


def test_the_seed_decides_the_weights_and_leaves_torch_alone(factory: Factory) -> None:
    def weight(seed: int) -> torch.Tensor:
        return next(load(factory(LINEAR, seed=seed, inputs={"input": {"shape": [2, 4]}})).module.parameters())

    torch.manual_seed(99)
    expected = torch.rand(3)
    torch.manual_seed(99)
    first, again, other = weight(1), weight(1), weight(2)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_example_of_the_factory_gives_names_shapes_and_ranges(factory: Factory) -> None:
    code = """
class Net(nn.Module):
    def forward(self, ids, *, extra, scale=1.0, mask=None):
        return {"a": ids * scale, "b": [extra["y"], extra["x"] + mask]}

def make():
    ids = torch.tensor([[1, 2, 9]])
    extra = {"y": torch.zeros(2), "x": torch.linspace(0, 3, 4)}
    return Net(), (ids,), {"mask": torch.ones(4, dtype=torch.int64), "scale": 2.0, "extra": extra}
"""
    source = load(factory(code, inputs={"ids": {"shape": ["batch", 3]}}, dims={"batch": [5, 1]}))
    assert [str(spec) for spec in source.inputs] == [
        "ids: int64[batch, 3]",
        "extra.y: float32[2]",
        "extra.x: float32[4]",
        "mask: int64[4]",
    ]
    assert [(spec.low, spec.high) for spec in source.inputs] == [(1, 10), (-1, 1), (0, 3), (1, 2)]
    assert source.outputs == ("a", "b.0", "b.1")
    assert source.example.args[0].shape == (5, 3)
    assert source.example.kwargs["mask"].tolist() == [1, 1, 1, 1]


def test_an_output_named_like_an_input_gets_another_name(factory: Factory) -> None:
    code = "class Net(nn.Module):\n    def forward(self, x):\n        return {'x': x + 1, 'n': None}\n\nmake = Net\n"
    source = load(factory(code, inputs={"x": {"shape": [2]}}))
    assert source.outputs == ("x_out",)
    assert set(run_torch(source, {"x": torch.ones(2)})) == {"x_out"}


def test_code_beside_the_file_is_importable_while_it_loads(factory: Factory, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_net.py").write_text("WIDTH = 3\n")
    code = (
        "from neighbour_of_net import WIDTH\n\ndef make():\n    return nn.Linear(WIDTH, WIDTH), (torch.ones(2, 3),)\n"
    )
    before = list(sys.path)
    assert load(factory(code)).inputs[0].shape == (2, 3)
    assert sys.path == before


def test_a_factory_in_a_module(configured: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_module_with_a_net.py").write_text(f"import torch\nfrom torch import nn\n{LINEAR}")
    monkeypatch.syspath_prepend(tmp_path)
    config = configured(factory="a_module_with_a_net:make", inputs={"input": {"shape": [2, 4]}})
    assert load(config).outputs == ("output",)


def test_imported_names_are_not_offered(factory: Factory) -> None:
    config = factory(
        "from pathlib import Path\nfrom torch.nn import Linear\nglobals().update({})\ndef build():\n    ...\n"
    )
    with pytest.raises(SourceError, match=r"no function 'make' there; it has: build$"):
        load_source(config)


def test_a_factory_that_raises_is_named_with_its_last_line(factory: Factory, tmp_path: Path) -> None:
    config = factory("def inner():\n    raise KeyError('width')\n\ndef make():\n    inner()\n")
    with pytest.raises(SourceError) as caught:
        load_source(config)
    file = tmp_path / "net.py"
    assert (
        str(caught.value) == f"the factory {file}:make raises KeyError: 'width'\n  at {file}:5: raise KeyError('width')"
    )
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def mak():\n    pass\n", "no function 'make' there; did you mean 'mak'?"),
        ("def _make():\n    pass\nclass Net:\n    pass\n", "no function 'make' there; it has: Net"),
        ("import torch\n", "no function 'make' there; it has: no functions"),
        ("def make(:\n", "loading its file raises SyntaxError: invalid syntax"),
    ],
)
def test_a_name_that_a_file_cannot_have_is_refused_without_running_it(tmp_path: Path, code: str, message: str) -> None:
    file = tmp_path / "net.py"
    file.write_text(f"raise SystemExit\n{code}")
    with pytest.raises(SourceError, match=re.escape(f"the factory: {message}")):
        check_function(f"{file}:make", "model.factory", "the factory")


@pytest.mark.parametrize(
    "code",
    [
        "def make(): pass",
        "class make: pass",
        "if True:\n    make = lambda: None",
        "from nets import make",
        "from nets import build as make",
        "from nets import *",
        "def __getattr__(name): pass",
        "globals().update(table)",
        "def later():\n    global make",
        "import sys\nsys.modules[__name__].make = later",
    ],
)
def test_a_name_that_a_file_may_have_is_left_to_the_file(tmp_path: Path, code: str) -> None:
    (tmp_path / "net.py").write_text(code)
    check_function(f"{tmp_path}/net.py:make", "model.factory", "the factory")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "raise ImportError('no such thing')\n",
            r"loading its file raises ImportError: no such thing\n  at .*net.py:4",
        ),
        ("def mak():\n    pass\n", r"no function 'make' there; did you mean 'mak'\?"),
        ("def make():\n    return 3\n", r"returns int, expected an nn.Module, \(module, args tuple\)"),
        ("def make():\n    return nn.ReLU(), [1]\n", r"returns a tuple \(ReLU, list\), expected"),
        ("def make():\n    return nn.ReLU(), torch.ones(2)\n", r"a tensor after the module, .* return module, \(x,\)"),
        ("def make():\n    nn.ReLU()\n", r"returns None \(is a `return` missing\?\), expected"),
        (
            "def make():\n    return nn.ReLU\n",
            r"returns the class ReLU, which is not called: return ReLU\(\), expected",
        ),
        ("def make():\n    return nn.ReLU().forward\n", r"returns the function forward: put it into the forward of"),
        ("def make():\n    return nn.Linear(1, 1).state_dict()\n", r"a state dict, which holds weights and no code"),
        ("async def make():\n    yield 1\n", r"returns async_generator, expected"),
        ("async def make():\n    return nn.ReLU()\n", r"returns a coroutine \(is it `async`, or does it `yield`\?\)"),
        ("make = nn.ReLU()\n", r"make is a module and no function; expected a function that returns it"),
        ("make = 3\n", r"'make' is int, expected a function"),
        (
            "def make(:\n    return 1\n",
            r"loading its file raises SyntaxError: invalid syntax.*\n  at .*net.py:4: def make\(:",
        ),
        (
            "def make():\n    return nn.Linear(2, 'a')\n",
            r"raises TypeError.*\n  at .*net.py:5: return nn.Linear\(2, 'a'\)",
        ),
        ("def make():\n    return nn.ReLU()\n", r"model.inputs is empty; forward of ReLU takes: input"),
        ("def make():\n    exit(3)\n", r"raises SystemExit: 3"),
    ],
)
def test_messages(factory: Factory, code: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        load_source(factory(code))


@pytest.mark.parametrize("module", ["no_such_mod", "no_such_mod.net", "a_package.missing", "a_package.net.missing"])
def test_a_module_that_no_import_can_find_is_refused_before_a_run(module: str, package: Path) -> None:
    with pytest.raises(SourceError, match=rf"^the factory: there is no module '{module}'; expected one that Python"):
        check_function(f"{module}:make", "model.factory", "the factory")
    assert "a_package" not in sys.modules


@pytest.mark.parametrize("module", ["a_package", "a_package.net", "os.path", "torch.nn", "a_package.lazy.missing"])
def test_a_module_that_an_import_may_find_is_left_to_the_import(module: str, package: Path) -> None:
    check_function(f"{module}:make", "model.factory", "the factory")
    assert "a_package" not in sys.modules


def test_a_package_in_a_zip_is_left_to_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ZipFile(tmp_path / "nets.zip", "w") as file:
        file.writestr("a_zipped_package/__init__.py", "")
    monkeypatch.syspath_prepend(tmp_path / "nets.zip")
    check_function("a_zipped_package.net:make", "model.factory", "the factory")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`a_package` with the packages `net` and `lazy`; modules of `lazy` need no files. Each fails if it is imported."""
    for name, code in (("", ""), ("net", ""), ("lazy", "import sys\n")):
        folder = tmp_path / "a_package" / name
        folder.mkdir()
        (folder / "__init__.py").write_text(f"{code}raise SystemExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_missing_module_is_named_without_a_line_of_ours(configured: Factory) -> None:
    with pytest.raises(SourceError, match=r"importing no_such_mod raises ModuleNotFoundError: No module .*'$"):
        load_source(configured(factory="no_such_mod:make"))
    with pytest.raises(ConfigError, match=r"model.factory: found '.:make', expected path/to/file.py:function"):
        load_source(configured(factory=".:make"))


def test_a_missing_file_is_named(configured: Factory, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=re.escape(f"no file '{tmp_path}/gone.py'")):
        load_source(configured(factory="gone.py:make"))


def test_wrong_shapes_name_the_module_and_the_declared_inputs(factory: Factory) -> None:
    with pytest.raises(SourceError) as caught:
        load_source(factory(LINEAR, inputs={"input": {"shape": [2, 5]}}))
    message = str(caught.value)
    assert message.startswith("the model raises on its example inputs in module '0' (")
    assert "mat1 and mat2 shapes cannot be multiplied (2x5 and 4x2)" in message
    assert message.endswith("the inputs are: input: float32[2, 5]\n  check shapes, dtypes and ranges in model.inputs")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"inptu": {"shape": [2, 4]}}, "has no parameter 'inptu'; did you mean 'input'?"),
        ({"input": {}}, "model.inputs.input: the key 'shape' is missing, and no example tells it"),
        ({"input": {"shape": ["a b", 4]}}, "model.inputs.input.shape: found 'a b', expected a name such as 'batch'"),
    ],
)
def test_declared_inputs_are_checked(factory: Factory, inputs: dict[str, object], message: str) -> None:
    with pytest.raises(SourceError, match=re.escape(message)):
        load_source(factory(LINEAR, inputs=inputs))


def test_a_declaration_must_fit_the_example(factory: Factory) -> None:
    code = "def make():\n    return nn.Linear(4, 2), (torch.ones(2, 4),)\n"
    with pytest.raises(SourceError, match=re.escape("declared int64[b, 4], but the example is float32[2, 4]")):
        load_source(factory(code, inputs={"input": {"shape": ["b", 4], "dtype": "int64"}}))
    with pytest.raises(SourceError, match=re.escape("the example has no tensor 'x'; it has: input")):
        load_source(factory(code, inputs={"x": {"shape": ["b", 4]}}))


def test_an_output_that_is_no_tensor_is_unsupported(factory: Factory) -> None:
    code = "class Net(nn.Module):\n    def forward(self, x):\n        return {'a': x, 'k': 7}\n\nmake = Net\n"
    with pytest.raises(Unsupported, match="the model returns int 7 at 'k', and an ONNX graph returns tensors only"):
        load_source(factory(code, inputs={"x": {"shape": [2]}}))


def test_what_torch_export_made_is_a_module(factory: Factory) -> None:
    """It refuses .eval(), alone and inside of another module."""
    code = """
def make():
    program = torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),))
    return nn.Sequential(nn.Dropout(), program.module(), nn.Dropout()), (torch.ones(2, 4),)
"""
    source = load(factory(code))
    x = torch.ones(2, 4)
    assert torch.equal(torch.from_numpy(run_torch(source, {"input": x})["output"]), source.module(x))


def test_complex_outputs_are_unsupported(factory: Factory) -> None:
    code = "class Net(nn.Module):\n    def forward(self, x):\n        return x, torch.fft.fft(x)\n\nmake = Net\n"
    message = "the model's output at '1': found torch.complex64, and a graph of ONNX gives no complex numbers; return"
    with pytest.raises(Unsupported, match=message):
        load_source(factory(code, inputs={"x": {"shape": [2]}}))


def test_dims_that_no_input_has_are_a_mistake(factory: Factory) -> None:
    config = factory(LINEAR, inputs={"input": {"shape": ["batch", 4]}}, dims={"bach": [2]})
    with pytest.raises(Exception, match="no input has a dim named 'bach'; the named dims are: batch"):
        load_source(config)


def test_a_module_may_write_into_its_inputs(factory: Factory) -> None:
    code = "class Net(nn.Module):\n    def forward(self, x):\n        return x.add_(1)\n\nmake = Net\n"
    source = load(factory(code, inputs={"x": {"shape": [2]}}))
    feed = torch.zeros(2)
    assert run_torch(source, {"x": feed})["output"].tolist() == [1, 1]
    assert run_torch(source, {"x": feed})["output"].tolist() == [1, 1]


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x):
        return self.inner(x)
"""


def test_the_line_of_the_users_forward_is_named(factory: Factory, tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        load_source(factory(f"{NET}\nmake = Net\n", inputs={"x": {"shape": [2, 5]}}))
    place = f"{tmp_path}/net.py:11: return self.inner(x)"
    assert f"in module 'inner' ({place}): RuntimeError: mat1 and mat2" in str(caught.value)


@pytest.mark.parametrize("wrapped", ["nn.DataParallel(Net())", "torch.compile(nn.DataParallel(Net()))"])
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_wrappers_are_taken_off_and_named(factory: Factory, wrapped: str) -> None:
    source = load(factory(f"{NET}\ndef make():\n    return {wrapped}, (torch.ones(2, 4),)\n"))
    assert type(source.module).__name__ == "Net"
    assert source.notes[-1].endswith("; the module inside is exported")
    assert source.weights == "as the factory makes them, with seed 0"


@pytest.mark.parametrize(
    "scripted",
    ["torch.jit.trace(Net(), torch.ones(2, 4))", "torch.jit.script(Net())", "nn.Sequential(torch.jit.script(Net()))"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_modules_of_torch_jit_are_refused_in_a_sentence(factory: Factory, scripted: str) -> None:
    with pytest.raises(SourceError, match=r"which torch.export cannot trace; return the original nn.Module"):
        load(factory(f"{NET}\ndef make():\n    return {scripted}, (torch.ones(2, 4),)\n"))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("nn.Identity(), (torch.ones(2, dtype=torch.complex64),)", "'input' is complex64; inputs can be drawn for"),
        ("nn.Identity(), (torch.ones(2).to(torch.float8_e4m3fn),)", "'input' is float8_e4m3fn; inputs can be drawn"),
        ("Net(), (torch.ones(2, 4).numpy(),)", "'x': found a numpy array, expected torch.from_numpy(array)"),
        (
            "Net(), ()",
            "missing 1 required positional argument: 'x'\n  the inputs are: none, since the example holds no",
        ),
        ("Sparse(), (torch.ones(2, 4),)", "the model's output at the top: found a sparse tensor (torch.sparse_coo)"),
    ],
)
def test_examples_and_outputs_that_no_graph_has(factory: Factory, returned: str, message: str) -> None:
    sparse = "class Sparse(nn.Module):\n    def forward(self, x):\n        return x.to_sparse()\n"
    with pytest.raises((SourceError, Unsupported), match=re.escape(message)):
        load(factory(f"{NET}\n{sparse}\ndef make():\n    return {returned}\n"))


def test_a_module_without_values_is_refused_where_numbers_are_needed(factory: Factory) -> None:
    source = load(factory(f"{NET}\ndef make():\n    return Net().to('meta'), (torch.ones(2, 4),)\n"))
    with pytest.raises(SourceError, match=r"has no value for 'inner.weight', which is on the meta device"):
        run_torch(source, {"x": torch.ones(2, 4)})


@pytest.mark.parametrize("prefix", ["module.", "model.net."])
def test_a_checkpoint_with_a_prefix_is_loaded_and_named(factory: Factory, tmp_path: Path, prefix: str) -> None:
    state = {f"{prefix}inner.weight": torch.full((2, 4), 7.0), f"{prefix}inner.bias": torch.ones(2)}
    torch.save({"state_dict": state}, tmp_path / "w.pt")
    source = load(factory(f"{NET}\nmake = Net\n", inputs={"x": {"shape": [2, 4]}}, checkpoint="w.pt"))
    assert source.module.state_dict()["inner.weight"].tolist() == [[7.0] * 4] * 2
    assert source.notes == (f"the checkpoint's names are the module's with {prefix!r} before",)
    assert source.weights == f"from {tmp_path}/w.pt"


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_a_checkpoint_of_other_than_floats_is_refused(factory: Factory, tmp_path: Path, dtype: torch.dtype) -> None:
    state = torch.nn.Linear(4, 2).state_dict()
    torch.save({f"inner.{name}": tensor.to(dtype) for name, tensor in state.items()}, tmp_path / "w.pt")
    with pytest.raises(SourceError, match=rf"is {str(dtype)[6:]}, expected float32 or other floats"):
        load(factory(f"{NET}\nmake = Net\n", inputs={"x": {"shape": [2, 4]}}, checkpoint="w.pt"))


def test_a_checkpoint_with_other_things_in_it_is_named(factory: Factory, tmp_path: Path) -> None:
    torch.save({3: torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(SourceError, match="found a mapping with Tensor at 3, expected"):
        load(factory(f"{NET}\nmake = Net\n", inputs={"x": {"shape": [2, 4]}}, checkpoint="w.pt"))
    torch.save({"model": {"inner.bias": torch.ones(2)}, "epoch": 3}, tmp_path / "w.pt")
    with pytest.raises(SourceError, match=r"found a mapping with dict at 'model', expected a mapping of name to"):
        load(factory(f"{NET}\nmake = Net\n", inputs={"x": {"shape": [2, 4]}}, checkpoint="w.pt"))


def test_factories_of_two_folders_have_helpers_of_the_same_name(tmp_path: Path) -> None:
    for width in (3, 5):
        folder = tmp_path / f"width{width}"
        (folder / "parts").mkdir(parents=True)
        (folder / "helpers.py").write_text(f"WIDTH = {width}\n")
        (folder / "parts" / "__init__.py").write_text("")
        (folder / "parts" / "sizes.py").write_text(f"ROWS = {width}\n")
        code = "import torch\nfrom helpers import WIDTH\nfrom parts.sizes import ROWS\n"
        (folder / "net.py").write_text(f"{code}def make():\n    return torch.nn.Linear(WIDTH, ROWS)\n")
        inputs = {"input": {"shape": [2, width]}}
        source = load(ModelConfig.model_validate({"factory": f"{folder}/net.py:make", "inputs": inputs}))
        assert next(source.module.parameters()).shape == (width, width)


def test_random_biases_draw_what_a_class_makes_zero_or_one(factory: Factory) -> None:
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.token = nn.LayerNorm(4), nn.Linear(4, 4), nn.Parameter(torch.zeros(1, 4))
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return self.linear(self.norm(x)) + self.token

make = lambda: (Net(), (torch.rand(2, 4),))
"""
    plain, again, drawn = (load(factory(code, random_biases=flag)).module.state_dict() for flag in (False, False, True))
    changed = {name for name in plain if not torch.equal(plain[name], drawn[name])}
    assert changed == {"norm.weight", "norm.bias", "linear.bias"}
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert (drawn["norm.weight"] - 1).abs().max() < 0.1
    with pytest.raises(Exception, match="found random_biases: true, but the model comes with its weights"):
        factory(code, random_biases=True, checkpoint="w.safetensors")
