"""Passes of the user's own: found, refused with the nearest name, and run like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import passes
from passes import PassRun, PolicyError, Status
from passes.context import PassContext, open_context
from passes.recipe.recipe import names_of, steps_of
from passes.recipe.user_passes import code_digest
from pipeline.config import RunConfig
from tests.support.onnx_models import attention, model_of
from tests.support.pass_runs import ops
from tests.support.paths import EXAMPLES, ROOT

CODE = '''
import os
import numpy as np
import onnx
from onnx import helper, numpy_helper


class Double:
    """Relu(x) → Relu(Relu(x))."""

    reads = "structure"

    def __init__(self, times=1):
        self.times = times

    def apply(self, model):
        for number in range(self.times):
            place, node = next((at, one) for at, one in enumerate(model.graph.node) if one.op_type == "Relu")
            made = node.output[0]
            node.output[0] = f"{made}_{number}"
            model.graph.node.insert(0, helper.make_node("Relu", [node.output[0]], [made]))
        return model


class Named(Double):
    name = "twofold"


def scale(model, *, by=1.0):
    for tensor in model.graph.initializer:
        if tensor.name == "wo":
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(by), "wo"))
    return model


def same(model):
    return model


def scaling(by=1.0):
    return lambda model: scale(model, by=by)


def nothing(model):
    pass


def abort(model):
    os.abort()


def sizes(model):
    """Leaves behind what it was given."""
    for tensor in model.graph.initializer:
        model.metadata_props.add(key=tensor.name, value=str(len(tensor.raw_data)))
    model.graph.node.append(helper.make_node("Neg", ["x"], ["dead"]))
    return model


def sizes_of_stand_ins(model):
    return sizes(model)


sizes_of_stand_ins.reads = "structure"


class Odd:
    reads = "weights"

    def apply(self, model):
        return model


class WithContext:
    """A full step, which is given the model as the runner has it, and the context."""

    name = "with_context"
    source = "mine"

    def apply(self, model, context):
        assert context.folder.is_dir()
        proto = onnx.ModelProto()
        proto.CopyFrom(model.proto)
        proto.graph.node.append(helper.make_node("Neg", ["x"], ["dead"]))
        return model.with_proto(proto)


class Idle(WithContext):
    """A full step that says why it did nothing."""

    name = "idle"

    def apply(self, model, context):
        from passes.step import PassResult

        return PassResult(model, changed=False, why="there is no Relu")


number = 3
'''


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """The path of a file of passes."""
    path = tmp_path / "mine.py"
    path.write_text(CODE, encoding="utf-8")
    return str(path)


def run(context: PassContext, *recipe) -> PassRun:
    return passes.optimize(attention(), recipe=recipe, context=context)


def test_a_class_with_options_reads_the_structure(mine: str, context: PassContext) -> None:
    done = run(context, f"{mine}:Double", {f"{mine}:Named": {"times": 2}})
    assert [(row.name, row.source, row.status) for row in done.rows] == [
        ("Double", "user", Status.RAN),
        ("twofold", "user", Status.RAN),
    ]
    assert all(row.changed for row in done.rows)
    assert ops(done)["Relu"] == 4
    onnx.checker.check_model(passes.weights.detached.attach(done.model))


def test_a_function_is_proven_and_reverted(mine: str, context: PassContext) -> None:
    done = run(
        context, {f"{mine}:scale": {"by": 2.0}}, f"{mine}:scale", {f"{mine}:scaling": {"by": 3.0}}, f"{mine}:same"
    )
    assert [row.status for row in done.rows] == [Status.REVERTED, Status.RAN, Status.REVERTED, Status.RAN]
    assert not done.rows[1].changed
    assert "max abs error" in done.rows[0].reason


def test_structure_gets_stand_ins_and_values_the_weights(mine: str, context: PassContext) -> None:
    sizes = {}
    for name in ("sizes", "sizes_of_stand_ins"):
        proto = run(context, f"{mine}:{name}").model.proto
        sizes[name] = {entry.key: int(entry.value) for entry in proto.metadata_props}["wq"]
    assert sizes == {"sizes": 4 * 32 * 32, "sizes_of_stand_ins": 0}


def test_an_error_or_a_crash_costs_the_step_and_not_the_run(mine: str, context: PassContext) -> None:
    done = run(context, f"{mine}:nothing", f"{mine}:abort", f"{mine}:Double")
    assert [row.status for row in done.rows] == [Status.FAILED, Status.CRASHED, Status.RAN]
    assert "returned NoneType; expected an onnx.ModelProto" in done.rows[0].reason
    assert "SIGABRT" in done.rows[1].reason
    assert ops(done)["Relu"] == 2


def test_an_error_without_words_is_no_success(tmp_path: Path, context: PassContext) -> None:
    (tmp_path / "own.py").write_text("import passes\n\ndef fail(model):\n    raise passes.PassError\n")
    row = passes.optimize(attention(), recipe=[f"{tmp_path}/own.py:fail"], context=context).rows[0]
    assert (row.status, row.reason) == (Status.FAILED, "StepFailed")


def test_a_full_step_is_given_the_context(mine: str, context: PassContext) -> None:
    done = run(context, f"{mine}:WithContext")
    assert [(row.name, row.source, row.changed) for row in done.rows] == [("with_context", "mine", True)]


def test_a_full_step_may_say_why_it_did_nothing(mine: str, context: PassContext) -> None:
    (row,) = run(context, f"{mine}:Idle").rows
    assert (row.status, row.changed, row.reason) == (Status.RAN, False, "there is no Relu")


def test_a_function_of_any_module_is_a_pass(context: PassContext) -> None:
    done = run(context, "onnx.shape_inference:infer_shapes")
    assert (done.rows[0].name, done.rows[0].status) == ("infer_shapes", Status.RAN)


def test_it_can_be_skipped_by_its_name(mine: str, context: PassContext) -> None:
    done = passes.optimize(attention(), recipe=[f"{mine}:Named", "nop"], skip=["twofold"], context=context)
    assert [row.status for row in done.rows] == [Status.SKIPPED, Status.RAN]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("mine.py:Duble", r"no 'Duble' there; did you mean 'Double'\?"),
        ("mine.py:zzz", r"no 'zzz' there; it has: Double, Named, scale"),
        ("min.py:Double", r"no file '.*min.py'; did you mean 'mine.py'\?"),
        ("mine.py:number", "is of type int; expected a function ModelProto → ModelProto, or a class with apply"),
        ("mine.py:Odd", "reads = 'weights'; expected one of values, structure"),
        ({"mine.py:Double": {"tmes": 1}}, r"does not take these options: .*'tmes'; did you mean 'times'\?"),
        ({"mine.py:same": {"by": 1}}, "does not take these options: .*'by'; its options are: none"),
        ("broken.py:Pass", r"loading its file raises ZeroDivisionError: division by zero\n  at .*broken.py:1"),
        ("no.such.module:Pass", "importing no.such.module raises ModuleNotFoundError"),
        ("doubles", r"no pass named 'doubles'"),
    ],
)
def test_what_is_not_there_is_a_mistake_that_names_the_nearest(
    item: str | dict, words: str, mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(mine).parent
    (folder / "broken.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.chdir(folder)
    with pytest.raises(PolicyError, match=words):
        steps_of([item])


def test_a_package_announces_a_pass(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(mine).parent
    info = folder / "their_passes-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-passes\nVersion: 1.2\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[onnxline.passes]\ntwice = mine:Double\nnop = mine:abort\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(folder)
    with open_context() as context:  # its worker has the path as it is now
        done = run(context, {"twice": {"times": 2}}, "nop")
    assert [(row.name, row.source, row.status) for row in done.rows] == [
        ("twice", "their-passes", Status.RAN),
        ("nop", "onnxoptimizer", Status.RAN),
    ], "a name that onnxline has is never taken from a package"
    assert ops(done)["Relu"] == 3
    with pytest.raises(PolicyError, match=r"no pass named 'twise'; did you mean 'twice'\?"):
        steps_of(["twise"])


def test_the_digest_of_the_code_follows_what_it_imports(mine: str) -> None:
    folder = Path(mine).parent
    (folder / "beside_mine.py").write_text("FACTOR = 1.0\n", encoding="utf-8")
    (folder / "other.py").write_text("import beside_mine\ndef f(model): return model\n", encoding="utf-8")
    recipe = ["default", {f"{folder / 'other.py'}:f": {}}]
    names = names_of(recipe)
    first = code_digest(names)
    assert first == code_digest(names) != code_digest(["default", "onnxsim"])
    (folder / "beside_mine.py").write_text("FACTOR = 2.0\n", encoding="utf-8")
    assert code_digest(names) != first


BEFORE = """
g (float[2, 8, 16] q, float[2, 16, 8] k) => (float[2, 8, 8] y) {
    p = MatMul (q, k)
    y = Mul (p, s)
}
"""


def test_the_examples(context: PassContext) -> None:
    config = RunConfig.from_yaml(ROOT / "configs" / "own_pass.yaml")
    done = passes.optimize(
        EXAMPLES / "attention.onnx", recipe=config.passes.recipe, keep=config.passes.keep, context=context
    )
    statuses = {row.name: row.status for row in done.rows}
    assert statuses == {"scale_query": Status.RAN, "fold_scale": Status.REVERTED, "onnxsim": Status.RAN}
    assert [(verdict.kept, verdict.broken_by) for verdict in done.structures] == [(True, "fold_scale")]
    freely = passes.optimize(EXAMPLES / "attention.onnx", recipe=config.passes.recipe[:2], context=context)
    assert [row.status for row in freely.rows] == [Status.RAN, Status.RAN]
    assert (ops(freely)["Mul"], freely.structures[0].broken_by) == (0, "fold_scale")


def test_the_example_class_is_what_it_says(context: PassContext) -> None:
    model = model_of(BEFORE, s=np.float32(0.25))
    done = passes.optimize(model, recipe=[f"{EXAMPLES / 'own_pass.py'}:ScaleQuery"] * 2, context=context)
    assert [(node.op_type, *node.input) for node in done.model.proto.graph.node] == [
        ("Mul", "q", "s"),
        ("MatMul", "y_query", "k"),
    ]
    assert [row.changed for row in done.rows] == [True, False]
