"""Operators that become operators of our own (`onnxline.…`): recurrent layers, drawn numbers, regions of pictures.

LSTM, GRU and RNN get zeros for the biases and first states that are left out. What draws numbers gets a fixed seed:
that of the node, or a hash of the name of its output.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from passes.suggest import plural
from pipeline.importers.from_onnx.node import Importer, Node
from pipeline.importers.from_onnx.shape import EXPAND, PERMUTE, permute
from pipeline.ir.graph import Attr, InputRef, TensorSpec

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
LENGTHS, HIDDEN, CELL, PEEPHOLES = 4, 5, 6, 7
DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}
WITH_ALPHA = {
    "LeakyRelu": 0.01,
    "ThresholdedRelu": 1.0,
    "ScaledTanh": 1.0,
    "HardSigmoid": 0.2,
    "Elu": 1.0,
    "Affine": 1.0,
}
WITH_BETA = {"ScaledTanh": 1.0, "HardSigmoid": 0.5, "Affine": 0.0}


def recurrent(node: Node, *, layout: bool = False, direction: str = "forward") -> None:
    kind, batch_first = node.kind, layout
    if direction not in DIRECTIONS:
        raise node.refusal(f"found direction {direction!r}, expected {', '.join(DIRECTIONS)}")
    node.attributes.settle("hidden_size", "output_sequence")  # both say what the shapes say
    x = node.operand(0)
    if batch_first:
        x = swap_axes(node, x)
    steps, batch, features = node.vid_spec(x).sizes
    directions, hidden = DIRECTIONS[direction], node.spec(2).sizes[-1]
    rows, state = GATES[kind] * hidden, (directions, batch, hidden)
    shapes = {1: (directions, rows, features), 2: (directions, rows, hidden), 3: (directions, 2 * rows)}
    for place, shape in shapes.items():
        if node.has(place) and node.spec(place).sizes != shape:
            found = list(node.spec(place).sizes)
            raise node.refusal(f"its input {node.input_names[place]!r} has the shape {found}, expected {list(shape)}")
    bias = node.operand(3) if node.has(3) else zeros(node, shapes[3])
    operands = {"input": x, "w": node.operand(1), "r": node.operand(2), "b": bias}
    for name, place in (("hidden", HIDDEN), ("cell", CELL))[: 2 if kind == "LSTM" else 1]:
        operands[name] = initial(node, place, state, batch_first=batch_first)
    for name, place in (("lengths", LENGTHS), ("peepholes", PEEPHOLES)):
        if node.has(place):
            operands[name] = node.operand(place)
    refs = {name: InputRef(at) for at, name in enumerate(operands)}
    attrs: dict[str, Attr] = {**refs, "kind": kind, "direction": direction, **cell_attrs(node, directions)}
    outputs = specs_of_outputs(node, (steps, directions, batch, hidden), state, batch_first=batch_first)
    made = node.make("onnxline.recurrent.default", list(operands.values()), outputs, attrs)
    if batch_first:
        give_batch_first(node, made)


def specs_of_outputs(
    node: Node, every: tuple[int, ...], state: tuple[int, ...], *, batch_first: bool
) -> list[tuple[str, TensorSpec]]:
    """All results of the cell, those that nobody reads too."""
    shapes = (every, state, state)[: 3 if node.kind == "LSTM" else 2]
    names = [*node.output_names, "", ""][: len(shapes)]
    base = next(filter(None, names))
    dtype = node.spec(0).dtype
    return [
        (node.fresh(f"{base}.{role}") if batch_first or not name else name, TensorSpec(shape, dtype))
        for role, name, shape in zip(("Y", "Y_h", "Y_c"), names, shapes, strict=False)
    ]


def give_batch_first(node: Node, made: tuple[int, ...]) -> None:
    """Name the results, with the batch in front: [batch, steps, directions, hidden] and [batch, directions, hidden]."""
    for at, name in enumerate(node.output_names):
        if name:
            perm = (2, 0, 1, 3) if at == 0 else (1, 0, 2)
            node.make(PERMUTE, [made[at]], [(name, node.spec_of(name))], {"dims": perm})


def cell_attrs(node: Node, directions: int) -> dict[str, Attr]:
    read, kind = node.attributes, node.kind
    names = read.texts("activations") or DEFAULTS[kind] * directions
    if strange := [name for name in names if name not in ACTIVATIONS]:
        raise node.refusal(f"found the activation {strange[0]}, expected one of {', '.join(ACTIVATIONS)}")
    node.check_length("activations", names, len(DEFAULTS[kind]) * directions)
    alphas = numbers_for(node, "activation_alpha", names, WITH_ALPHA)
    betas = numbers_for(node, "activation_beta", names, WITH_BETA)
    usual = names == DEFAULTS[kind] * directions
    squashes: dict[str, Attr] = {} if usual else {"activations": ",".join(names), "alphas": alphas, "betas": betas}
    flags = [
        name
        for name, attribute in (("input_forget", "input_forget"), ("reset_after", "linear_before_reset"))
        if read.flag(attribute)
    ]
    clip = read.number("clip", 0.0)
    return {**squashes, **({"clip": clip} if clip else {}), **dict.fromkeys(flags, True)}


def numbers_for(node: Node, attribute: str, names: tuple[str, ...], defaults: dict[str, float]) -> tuple[float, ...]:
    """One number for each activation: those that have one take the given numbers in turn."""
    rest = list(node.attributes.numbers(attribute))
    numbers = []
    for name in names:
        number = defaults.get(name, 0.0)
        numbers.append(rest.pop(0) if name in defaults and rest else number)
    if rest:
        raise node.refusal(f"its {attribute} has {plural(len(rest), 'number')} that no activation takes")
    return tuple(numbers)


def initial(node: Node, place: int, shape: tuple[int, ...], *, batch_first: bool) -> int:
    if not node.has(place):
        return zeros(node, shape)
    vid = node.operand(place)
    return swap_axes(node, vid) if batch_first else vid


def swap_axes(node: Node, vid: int) -> int:
    """The first two axes exchanged."""
    return permute(node, vid, (1, 0, *range(2, node.vid_spec(vid).rank)))


def zeros(node: Node, shape: tuple[int, ...]) -> int:
    return node.constant_operand(np.zeros(shape, node.spec(0).dtype))


ACTIVATIONS = ("Sigmoid", "Tanh", "Relu", "Softsign", "Softplus", *WITH_ALPHA)


def normal(node: Node, *, mean: float = 0.0, scale: float = 1.0) -> None:
    """RandomNormal and RandomNormalLike: of their input only shape and dtype count, and both are known."""
    draw(node, "random_normal", mean=mean, scale=scale)


def uniform(node: Node, *, low: float = 0.0, high: float = 1.0) -> None:
    draw(node, "random_uniform", low=low, high=high)


def draw(node: Node, operator: str, **numbers: float) -> None:
    node.attributes.settle("shape", "dtype")
    node.settle_inputs(0)
    out = node.output()
    attrs: dict[str, Attr] = {"size": out.sizes, **numbers, "dtype": out.dtype, "seed": seed_of(node)}
    node.emit(f"onnxline.{operator}.default", [], attrs)


def bernoulli(node: Node) -> None:
    node.attributes.settle("dtype")
    node.emit("onnxline.bernoulli.default", node.operands(), {"dtype": node.output().dtype, "seed": seed_of(node)})


def multinomial(node: Node) -> None:
    node.attributes.settle("dtype", "sample_size")
    out = node.output()
    attrs: dict[str, Attr] = {"count": out.sizes[1], "dtype": out.dtype, "seed": seed_of(node)}
    node.emit("onnxline.multinomial.default", node.operands(), attrs)


def dropout(node: Node) -> None:
    """In training mode it draws; else its output is another name of input 0, and its mask is all true."""
    training = node.has(2) and bool(node.need_constant(2, "training_mode").item())
    if training:
        drawn_dropout(node)
        return
    node.attributes.settle("ratio", "seed")  # of training alone
    node.settle_inputs(1)
    node.alias(node.operand(0))
    if node.is_read(1):
        mask = node.output(1)  # a number in old opsets
        one = node.constant_operand(np.ones((), mask.dtype))
        node.make(EXPAND, [one], [(node.output_names[1], mask)], {"size": mask.sizes})


def drawn_dropout(node: Node) -> None:
    """Result and mask are both outputs of the op, whichever is read."""
    ratio = float(node.need_constant(1, "the ratio").item()) if node.has(1) else 0.5
    if not 0 <= ratio < 1:
        raise node.refusal(f"its ratio is {ratio}, expected 0 ≤ ratio < 1")
    spec = node.spec(0)
    first, mask = (*node.output_names, "", "")[:2]
    outputs = [
        (first or node.fresh(f"{mask}.kept"), spec),
        (mask or node.fresh(f"{first}.mask"), TensorSpec(spec.shape, "bool")),
    ]
    attrs: dict[str, Attr] = {"ratio": ratio, "seed": seed_of(node)}
    node.make("onnxline.dropout.default", node.operands(0), outputs, attrs)


def seed_of(node: Node) -> int:
    """The bits of `seed`, since 0.1 and 0.2 are two seeds; without one, a hash of the output's name."""
    read = node.attributes
    if "seed" not in read:
        return zlib.crc32(next(filter(None, node.output_names)).encode())
    if node.kind == "Dropout":
        return read.integer("seed")
    return int.from_bytes(struct.pack("<f", read.number("seed")), "little")


def roi_align(node: Node, *, mode: str = "avg", sampling_ratio: int = 0, spatial_scale: float = 1.0) -> None:
    """Before opset 16 places were not moved by half a pixel."""
    read = node.attributes
    coordinates = read.text("coordinate_transformation_mode", "half_pixel" if node.opset >= 16 else "output_half_pixel")
    if mode not in ("avg", "max") or coordinates not in ("half_pixel", "output_half_pixel"):
        raise node.refusal(f"found mode {mode!r} and coordinates {coordinates!r}, which it does not have")
    read.settle("output_height", "output_width")  # of the output's shape
    attrs: dict[str, Attr] = {
        "output_size": node.output().sizes[2:],
        "mode": mode,
        "half_pixel": coordinates == "half_pixel",
        "sampling_ratio": sampling_ratio,
        "spatial_scale": spatial_scale,
    }
    node.emit("onnxline.roi_align.default", node.operands(), attrs)


IMPORTERS: dict[str, Importer] = {
    **dict.fromkeys(("GRU", "LSTM", "RNN"), recurrent),
    **dict.fromkeys(("RandomNormal", "RandomNormalLike"), normal),
    **dict.fromkeys(("RandomUniform", "RandomUniformLike"), uniform),
    "Bernoulli": bernoulli,
    "Dropout": dropout,
    "Multinomial": multinomial,
    "RoiAlign": roi_align,
}
