"""YAML in, `RunConfig` or one clear message out. Messages are compared whole: they are the interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from passes.errors import PolicyError
from passes.user_files import from_home
from pipeline.config import PassesConfig, RunConfig
from pipeline.errors import ConfigError

Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def write_file(name: str, text: str) -> str:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    return write_file


def mistake(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_yaml(path, overrides)
    return str(caught.value)


def test_the_example_of_the_design_loads(write: Write) -> None:
    path = write(
        "vit.yaml",
        """\
model:
  transformers: {class: ViTModel, config: {hidden_size: 768}, checkpoint: null}
  seed: 0
  inputs:
    pixel_values: {shape: [1, 3, 224, 224], dtype: float32, range: [-1, 1]}
export: {opset: 20}
passes:
  strict: false
  recipe: [default, onnxsim]
  skip: [fuse_qkv]
  keep: [qkv]
verify: {draws: 2}
runtime: {backends: [torch, plan]}
""",
    )
    config = RunConfig.from_yaml(path)
    assert config.name == "vit"
    assert config.model.transformers is not None
    assert config.model.transformers.class_name == "ViTModel"
    assert config.model.inputs["pixel_values"].shape == (1, 3, 224, 224)
    assert config.passes.recipe == ("default", "onnxsim")
    assert (config.passes.skip, config.passes.keep) == (("fuse_qkv",), ("qkv",))
    assert config.runtime.backends == ("torch", "plan")


def test_the_default_recipe_is_that_of_the_source(write: Write) -> None:
    """It is filled in, so whatever writes the configuration down says the true one."""
    torch = RunConfig.from_yaml(write("torch.yaml", "model: {factory: m:f}\npasses: {keep: [qkv]}\n"))
    assert torch.to_mapping()["passes"]["recipe"] == ["onnxscript", "default", "onnxsim", "clean"]
    file = RunConfig.from_yaml(write("file.yaml", "model: {onnx: m.onnx}\n"))
    assert file.to_mapping()["passes"]["recipe"] == ["default", "onnxsim", "clean"]
    earlier = RunConfig.from_yaml(
        write("earlier.yaml", "model: {factory: m:f}\npasses: {recipe: [default@0.1, nop]}\n")
    )
    assert earlier.passes.recipe == ("onnxscript", "default", "onnxsim", "nop")
    own = RunConfig(model=file.model, passes=PassesConfig(recipe=("default@0.1",)))
    assert own.passes.recipe == ("default", "onnxsim")
    assert RunConfig.from_yaml(write("own.yaml", "model: {factory: m:f}\n"), ["passes.recipe=[]"]).passes.recipe == ()
    built = RunConfig(model=torch.model, passes=PassesConfig(keep=("qkv",)))
    assert built.passes == torch.passes


def test_resolved_yaml_loads_back_to_an_equal_config(write: Write, tmp_path: Path) -> None:
    path = write(
        "one.yaml",
        """\
model:
  factory: sub/net.py:make
  args: {width: null, slope: 1e-3, day: 2024-01-02}
  inputs: {x: {shape: [batch, 4], seed: 3}}
  dims: {batch: [4, 5, 6]}
passes: {recipe: [default, {onnxsim: {check_n: 1}}, mine.py:Pass]}
verify: {tolerances: {float32: {atol: 1e-5, rtol: 0}}}
""",
    )
    config = RunConfig.from_yaml(path)
    assert config.model.args == {"width": None, "slope": 0.001, "day": "2024-01-02"}
    assert config.passes.recipe == ("default", {"onnxsim": {"check_n": 1}}, f"{tmp_path}/mine.py:Pass")
    again = RunConfig.from_yaml(write("elsewhere/other.yaml", config.to_yaml()))
    assert again == config
    assert again.to_yaml() == config.to_yaml()


@pytest.mark.parametrize(
    "calibration", ["{}", "{method: percentile}", "{method: percentile, percentile: 99.0}", "{method: mse}"]
)
def test_a_calibration_loads_back(calibration: str, write: Write) -> None:
    text = f"model: {{onnx: m.onnx}}\nquantsim: {{calibration: {calibration}}}\n"
    config = RunConfig.from_yaml(write("one.yaml", text))
    assert RunConfig.from_yaml(write("other.yaml", config.to_yaml())) == config


def test_paths_are_relative_to_the_file_that_they_are_written_in(write: Write, tmp_path: Path) -> None:
    write(
        "shared/base.yaml",
        "model: {factory: net.py:make}\n"
        "passes: {recipe: [mine.py:Pass, {mine.py:Other: {by: 2}}, {sequence: {steps: [mine.py:Pass]}}]}\n",
    )
    config = RunConfig.from_yaml(write("runs/one.yaml", "extends: ../shared/base.yaml\n"))
    assert config.model.factory == f"{tmp_path}/shared/net.py:make"
    mine = f"{tmp_path}/shared/mine.py"
    assert config.passes.recipe == (
        f"{mine}:Pass",
        {f"{mine}:Other": {"by": 2}},
        {"sequence": {"steps": [f"{mine}:Pass"]}},
    )
    onnx = RunConfig.from_yaml(write("runs/two.yaml", "model: {onnx: m.onnx}\n"))
    assert onnx.model.onnx == f"{tmp_path}/runs/m.onnx"
    packaged = RunConfig.from_yaml(write("three.yaml", "model: {onnx: package:silero_vad/data/a.onnx}\n"))
    assert packaged.model.onnx == "package:silero_vad/data/a.onnx"


def test_a_home_of_nobody_is_a_folder_of_that_name(write: Write, tmp_path: Path) -> None:
    """Python raises a RuntimeError for it, which was told as a bug of ours."""
    config = RunConfig.from_yaml(write("c.yaml", "model: {onnx: ~nobody_here/m.onnx}\n"))
    assert config.model.onnx == f"{tmp_path}/~nobody_here/m.onnx"
    assert from_home("~/m.onnx") == Path.home() / "m.onnx"


def test_extends_merges_mappings_and_replaces_lists(write: Write) -> None:
    write("a.yaml", "model: {factory: m:f, args: {x: 1, y: 2}}\npasses: {skip: [a, b], keep: [qkv]}\n")
    write("b.yaml", "verify: {draws: 5}\npasses: {skip: [c]}\n")
    path = write("c.yaml", "extends: [a.yaml, b.yaml]\nmodel: {args: {y: 3}}\n")
    config = RunConfig.from_yaml(path)
    assert config.model.args == {"x": 1, "y": 3}
    assert config.passes.skip == ("c",)
    assert config.passes.keep == ("qkv",)
    assert config.verify.draws == 5


def test_a_mistake_in_a_base_points_at_the_base(write: Write) -> None:
    write("base.yaml", "model:\n  factory: m:f\nverify:\n  draws: two\n")
    path = write("top.yaml", "extends: base.yaml\nname: top\n")
    assert mistake(path) == "base.yaml:4: verify.draws: found 'two', expected an integer"


def test_a_value_that_replaces_a_wrong_one_is_right(write: Write) -> None:
    write("base.yaml", "model: {factory: m:f}\nverify: {draws: two}\n")
    path = write("top.yaml", "extends: base.yaml\nverify:\n  draws: 3\n")
    assert RunConfig.from_yaml(path).verify.draws == 3


def test_circles_are_refused(write: Write) -> None:
    write("a.yaml", "extends: b.yaml\n")
    write("b.yaml", "extends: a.yaml\n")
    assert mistake("a.yaml") == "a.yaml: extends itself: a.yaml → b.yaml → a.yaml; take one of these out"


def test_a_missing_base_names_its_line(write: Write) -> None:
    path = write("a.yaml", "name: a\nextends: none.yaml\n")
    assert mistake(path) == "a.yaml:2: extends: no file 'none.yaml'; expected a YAML file"


def test_all_mistakes_are_listed_at_once(write: Write) -> None:
    path = write(
        "bad.yaml",
        """\
name: a/b
model:
  factory: m:f
  inputs:
    x: {shape: [batch, -1], dtyp: int64}
pases: {}
passes:
  strict: "no"
  recipe: [3]
verify: {tolerances: {float32: {atol: x}}}
runtime: {backends: [torchh]}
export: 3
""",
    )
    assert mistake(path).splitlines() == [
        "bad.yaml has 10 mistakes:",
        "  bad.yaml:1: name: found 'a/b', expected letters, digits, '_', '.' and '-', at most 100 (it names a folder)",
        "  bad.yaml:5: model.inputs.x.shape[1]: found -1, expected 0 or more or text",
        "  bad.yaml:5: unknown key 'dtyp' in model.inputs.x; did you mean 'dtype'?",
        "  bad.yaml:6: unknown key 'pases'; did you mean 'passes'?",
        "  bad.yaml:8: passes.strict: found 'no', expected true or false",
        "  bad.yaml:9: passes.recipe[0]: found 3, expected the name of a pass, "
        "or one name with a mapping of options: {onnxsim: {check_n: 1}}",
        "  bad.yaml:10: verify.tolerances.float32.atol: found 'x', expected a number",
        "  bad.yaml:10: verify.tolerances.float32: the key 'rtol' is missing",
        "  bad.yaml:11: runtime.backends[0]: found 'torchh', expected one of 'torch', 'onnxruntime' or 'plan'",
        "  bad.yaml:12: export: found 3, expected a mapping",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extend: base.yaml", "c.yaml:2: unknown key 'extend'; did you mean 'extends'?"),
        (
            "quantsim: {metric: {use: top-1, sampels: 3}}",
            "c.yaml:2: unknown key 'sampels' in quantsim.metric; did you mean 'samples'?",
        ),
        ("runtime: {native: 0}", "c.yaml:2: runtime.native: found 0, expected true or false"),
        (
            "passes: {recipe: [{convert-opset: 18}]}",
            "c.yaml:2: passes.recipe[0]: found 18 as options of 'convert-opset', "
            "expected a mapping, as in {onnxsim: {check_n: 1}}",
        ),
        ('runtime: {debug: "yes"}', "c.yaml:2: runtime.debug: found 'yes', expected true or false"),
        ("train: {batches: f.py:b, until: true}", "c.yaml:2: train.until: found true, expected a number"),
        (
            'train: {batches: f.py:b, optimizer: {lr: "0.1"}}',
            "c.yaml:2: train.optimizer.lr: found '0.1', expected a number",
        ),
        (
            "train: {batches: f.py:b, optimizer: {betas: [0.9]}}",
            "c.yaml:2: train.optimizer.betas: found [0.9], expected a list of 2 numbers",
        ),
        (
            "train: {batches: f.py:b, optimizer: {betas: []}}",
            "c.yaml:2: train.optimizer.betas: found [], expected a list of 2 numbers",
        ),
        (
            "train: {batches: f.py:b, optimizer: {betas: 0.9}}",
            "c.yaml:2: train.optimizer.betas: found 0.9, expected a list of 2 numbers",
        ),
        (
            "train: {batches: f.py:b, optimizer: {betas: [0.9, 2]}}",
            "c.yaml:2: train.optimizer.betas[1]: found 2, expected less than 1.0",
        ),
        (
            "train: {batches: f.py:b, optimizer: {name: sgd, nesterov: true}}",
            "c.yaml:2: train.optimizer: found nesterov without momentum, expected a momentum above 0",
        ),
        (
            "train: {batches: f.py:b, steps: 3, schedule: {name: one-cycle, steps: 2}}",
            "c.yaml:2: train: found 3 steps with a one-cycle schedule of 2, expected as many in schedule.steps, since "
            "its rate ends there",
        ),
    ],
)
def test_near_keys_and_types_are_told_apart(text: str, message: str, write: Write) -> None:
    assert mistake(write("c.yaml", f"model: {{factory: m:f}}\n{text}\n")) == message


UNTAGGED = "text, a number, true, false, null, a list or a mapping, without a tag"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [1, 2\n", "c.yaml:2: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("name: a\nname: b\n", "c.yaml:2: the key 'name' is already on line 1; keep one of them"),
        ("- a\n", "c.yaml: found a list, expected a mapping with at least the key 'model'"),
        ("", "c.yaml: found nothing, expected a mapping with at least the key 'model'"),
        ("1.5: a\n", "c.yaml:1: the key is 1.5, expected text; put it in quotes"),
        ("name: &a [*a]\n", "c.yaml:1: an alias inside its own anchor; expected a finite value"),
        (
            "name: !!python/name:os.system x\n",
            f"c.yaml:1: found the tag '!!python/name:os.system', expected {UNTAGGED}",
        ),
        ('verify: !!map "x"\n', f"c.yaml:1: found the tag '!!map', expected {UNTAGGED}"),
        ("name: !!str {a: 1}\n", f"c.yaml:1: found the tag '!!str', expected {UNTAGGED}"),
        ("name: !!seq {a: 1}\n", f"c.yaml:1: found the tag '!!seq', expected {UNTAGGED}"),
        ("name: !!map [1]\n", f"c.yaml:1: found the tag '!!map', expected {UNTAGGED}"),
        ("name: a\n", "c.yaml:1: the key 'model' is missing"),
        (
            "model: {factory: m:f, onnx: x.onnx}\n",
            "c.yaml:1: model: found factory and onnx, expected exactly one of factory, transformers, diffusers, onnx, "
            "parts",
        ),
        (
            "name: a\nmodel: {}\n",
            "c.yaml:2: model: found none, expected exactly one of factory, transformers, diffusers, onnx, parts",
        ),
        (
            "model: {onnx: x.onnx, args: {a: 1}}\n",
            "c.yaml:1: model: found 'args' next to 'onnx', expected it with 'factory' only",
        ),
        (
            "model:\n  factory: m:f\n  inputs: {x: {shape: [2], range: [1, 0]}}\n",
            "c.yaml:3: model.inputs.x.range: found a list, expected [lo, hi] with lo not above hi",
        ),
        (
            "model: {factory: m:f, dims: {batch: [1, 2]}}\n",
            "c.yaml:1: model.dims: found a mapping, expected the first size of 'batch' to be 2 or more: "
            "the model is exported with it",
        ),
        (
            "model: {factory: m:f, dims: {batch: two}}\nexport: {input_names: x}\n",
            "c.yaml has 2 mistakes:\n  c.yaml:1: model.dims.batch: found 'two', expected a list\n"
            "  c.yaml:2: export.input_names: found 'x', expected a list: [\"x\"]",
        ),
        (
            "model: {factory: m:f}\nverify: {draws: true}\n",
            "c.yaml:2: verify.draws: found true, expected an integer",
        ),
        (
            "model: {factory: m:f}\npasses: {timeout_s: .inf}\n",
            "c.yaml:2: passes.timeout_s: found inf, expected a finite number",
        ),
        (
            "model: {factory: m:f}\nexport: {output_names: [a, a]}\n",
            "c.yaml:2: export.output_names: found a list, expected each name once; found twice: a",
        ),
    ],
)
def test_messages(write: Write, text: str, message: str) -> None:
    assert mistake(write("c.yaml", text)) == message


@pytest.mark.parametrize(("text", "number"), [("010", "8"), ("-010", "-8"), ("1:30", "90"), ("1:30.5", "90.5")])
def test_a_number_that_yaml_reads_as_another_is_refused(write: Write, text: str, number: str) -> None:
    said = mistake(write("c.yaml", f"model: {{onnx: a.onnx, dims: {{n: [{text}]}}}}\n"))
    assert said.startswith(f"c.yaml:1: found {text}, expected a number without a colon or zeros")
    assert f"YAML reads {number} there" in said


def test_numbers_in_other_bases_and_with_underscores_are_read(write: Write) -> None:
    text = "model: {onnx: a.onnx, dims: {a: [0x10, 0b11, 1_000, +7]}, seed: 00}\n"
    config = RunConfig.from_yaml(write("c.yaml", text))
    assert (config.model.dims, config.model.seed) == ({"a": (16, 3, 1000, 7)}, 0)


def test_a_missing_file_is_named(write: Write) -> None:
    assert mistake("nowhere.yaml") == "nowhere.yaml: no such file; expected a YAML configuration"


def test_merge_keys_and_anchors_work(write: Write) -> None:
    text = "model:\n  factory: m:f\n  inputs:\n    a: &a {shape: [2], seed: 1}\n    b: {<<: *a, seed: 2}\n"
    inputs = RunConfig.from_yaml(write("m.yaml", text)).model.inputs
    assert inputs["b"].shape == (2,)
    assert (inputs["a"].seed, inputs["b"].seed) == (1, 2)


def test_what_no_configuration_holds(write: Write) -> None:
    assert "nul.yaml: not YAML: unacceptable character" in mistake(write("nul.yaml", "model: \x00\n"))
    assert "nested too deeply" in mistake(write("deep.yaml", "[" * 5000))
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
    assert mistake(write("bomb.yaml", bomb)).endswith("more than 100000 values, with every alias written out")


def test_merges_of_merges_stay_small(write: Write) -> None:
    text = "x0: &x0 {k: 1}\n"
    text += "".join(f"x{n}: &x{n} {{<<: [{', '.join([f'*x{n - 1}'] * 9)}]}}\n" for n in range(1, 12))
    assert "unknown key 'x0'" in mistake(write("merges.yaml", text + "model: {onnx: a.onnx}\n"))


def test_a_seed_and_a_name_have_bounds(write: Write) -> None:
    path = write("one.yaml", "model: {onnx: a.onnx}\n")
    assert mistake(path, f"model.seed={2**63}").endswith(f"found {2**63}, expected less than {2**63}")
    assert "at most 100" in mistake(path, f"name={'n' * 101}")
    assert RunConfig.from_yaml(path, (f"name={'n' * 100}", f"model.seed={2**63 - 1}")).model.seed == 2**63 - 1


def test_a_model_where_a_configuration_is_expected_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"\x08\x0a\x80\xff")
    with pytest.raises(ConfigError, match=r"m\.onnx: cannot be read: it is not UTF-8 text; expected a YAML config"):
        RunConfig.from_yaml(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("keep: no structure named 'qkw'", "{file}:4: passes.keep[1]: no structure named 'qkw'"),
        (
            "pass 'split-qkv' has no option 'x'",
            "{file}:6: passes.recipe[0].split-qkv: pass 'split-qkv' has no option 'x'",
        ),
        ("model.factory: found 'x.py'", "{file}:2: model.factory: found 'x.py'"),
        ("no file 'elsewhere'", "no file 'elsewhere'"),
        (r"no pass 'a\n'", r"{file}:7: passes.skip[0]: no pass 'a\n'"),
        ("nothing is quoted", "nothing is quoted"),
    ],
)
def test_a_mistake_that_is_found_later_has_the_file_and_the_key(tmp_path: Path, said: str, expected: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        'model:\n  factory: x.py\npasses:\n  keep: [qkv, qkw]\n  recipe:\n    - split-qkv: {x: 1}\n  skip: ["a\\n"]\n',
        encoding="utf-8",
    )
    config = RunConfig.from_yaml(file)
    with pytest.raises(PolicyError) as caught, config.name_keys():
        raise PolicyError(said)
    assert str(caught.value) == expected.format(file=file)
    assert config == RunConfig.from_mapping(config.to_mapping())


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"verify": {"seed": 2**100}}, "configuration: verify.seed: found an integer of 101 bits, expected at most 64"),
        ({"model": {"args": {"name": "a\0"}}}, "configuration: model.args.name: found 'a\\x00', expected text without"),
    ],
)
def test_data_that_no_file_can_hold_is_named_by_its_key(data: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping(data)
    assert str(caught.value).startswith(said)
