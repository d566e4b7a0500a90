"""How the arguments and the result of a model nest: tuples, dicts, dataclasses, caches; tensors and Python values.

Kept with the IR, so that results are compared as trees, and arguments are taken as the model takes them. A traced
program has both trees, and the caller's names of dims.

Each key of a dict is a text: a string is itself, any other key is its literal in brackets. So `{1: x, "1": y}` has the
keys `[1]` and `1`, in JSON too. A string that begins with a bracket is put in brackets too.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from pipeline.export.tree import branch_of, fixed_values
from pipeline.importers.from_torch.layer_dedup import Ends
from pipeline.torch_ir.errors import ConversionError


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor (its index among the graph's inputs or outputs), or a value of Python that is the same in every run."""

    index: int | None = None
    value: Any = None


@dataclass(frozen=True, slots=True)
class Branch:
    """`kind` is `tuple`, `list`, `dict` or the full name of a class; `keys` are those of children that have names.

    `fixed` are the plain values of a cache, by path, which the graph has as constants: {"layers.0.max_cache_len": 16}.
    None of anything else.
    """

    kind: str
    keys: tuple[str, ...] | None
    children: tuple[Tree, ...]
    fixed: Mapping[str, bool | int | float | str] | None = field(default=None, hash=False)


Tree: TypeAlias = Leaf | Branch


@dataclass(frozen=True, slots=True)
class CallSignature:
    """How the arguments (a tuple of args and kwargs) and the result of the model nest; None where it is not known."""

    inputs: Tree | None = None
    outputs: Tree | None = None

    def fitting(self, inputs: int, outputs: int) -> CallSignature:
        """The signature without a side that has another number of tensors than given here."""
        return CallSignature(_if_of_size(self.inputs, inputs), _if_of_size(self.outputs, outputs))


def tree_of(spec: Any, ends: Sequence[Leaf]) -> Tree:
    """The tree that torch's TreeSpec `spec` describes, with `ends` as its leaves in order."""
    remaining = iter(ends)
    return _build_tree(spec, remaining)


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """(path, leaf) from left to right; a path is such as `past_key_values.0.1`."""
    if isinstance(tree, Leaf):
        yield path, tree
        return
    keys = tree.keys or tuple(map(str, range(len(tree.children))))
    for key, child in zip(keys, tree.children, strict=True):
        yield from leaves(child, under(path, key))


def under(path: str, key: str) -> str:
    """The path of the child `key` of the branch at `path`: `more.0`, `table[1]`."""
    return f"{path}{key}" if not path or key.startswith("[") else f"{path}.{key}"


def structure(item: Any) -> tuple[str, dict[str, Any]] | None:
    """(the kind of a branch, its children by key), one level down; None for a leaf."""
    if type(item) in (tuple, list):  # as torch would have it, in a fifth of the time
        return type(item).__name__, {str(index): part for index, part in enumerate(item)}
    if type(item) is dict:
        return "dict", {_text(key): part for key, part in item.items()}
    branch = branch_of(item)
    if branch is None:
        return None
    spec, children, names = branch
    own = None if spec.type in DICTS else names
    keys = own or _keys(spec, len(children)) or tuple(map(str, range(len(children))))
    return _kind(type(item)), dict(zip(keys, children, strict=True))


def fixed_of(item: Any) -> Mapping[str, Any] | None:
    """The `fixed` of the branch that `item` is."""
    branch = branch_of(item)
    return None if branch is None else fixed_values(branch[0].context)


def _if_of_size(tree: Tree | None, count: int) -> Tree | None:
    """`tree` if it has `count` tensors, else None."""
    found = 0 if tree is None else sum(leaf.index is not None for _, leaf in leaves(tree))
    return tree if found == count else None


def _build_tree(spec: Any, ends: Iterator[Leaf]) -> Tree:
    if spec.is_leaf():
        return next(ends)
    children = tuple(_build_tree(child, ends) for child in spec.children())
    kind = spec.context if spec.type is namedtuple else spec.type  # torch has one entry for all named tuples
    return Branch(_kind(kind), _keys(spec, len(children)), children, fixed_values(spec.context) or None)


def _kind(kind: Any) -> str:
    return kind.__name__ if kind in (tuple, list, dict) else f"{kind.__module__}.{kind.__qualname__}"


def _keys(spec: Any, count: int) -> tuple[str, ...] | None:
    """A dict keeps its keys as the context of its spec, a dataclass the names of its fields, maybe among others."""
    context = spec.context
    if spec.type in DICTS:
        return tuple(map(_text, context[1] if spec.type is defaultdict else context))
    if spec.type is namedtuple:
        return tuple(context._fields)
    if isinstance(context, Mapping):
        context = list(context)
    candidates = [context, *(context if isinstance(context, list | tuple) else ())]
    for names in candidates:
        if isinstance(names, list | tuple) and len(names) == count and all(isinstance(name, str) for name in names):
            return tuple(names)
    return None


def _text(key: Any) -> str:
    if isinstance(key, str) and not key.startswith("["):
        return str.__str__(key)  # of an enum of strings: the string, as a dict finds it
    return f"[{key!r}]"


DICTS = (dict, OrderedDict, defaultdict)
"""Types that torch flattens with keys of any type."""


def signature_of(program: ExportedProgram) -> CallSignature:
    """
    Raises:
        ConversionError: it takes or gives what is neither a tensor nor a constant.
    """
    call = program.call_spec
    signature = program.graph_signature
    inputs = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    outputs = [spec for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    return CallSignature(
        None if call.in_spec is None else tree_of(call.in_spec, _leaves_of(inputs)),
        None if call.out_spec is None else tree_of(call.out_spec, _leaves_of(outputs)),
    )


def signature_of_ends(inputs: Ends, outputs: Ends) -> CallSignature:
    """The signature after layer_dedup: meta tensors among the leaves are the graph's inputs and outputs."""
    return CallSignature(_tree(inputs), _tree(outputs))


def _tree(ends: Ends) -> Tree:
    count = iter(range(len(ends.leaves)))
    found = [Leaf(next(count)) if isinstance(leaf, torch.Tensor) else Leaf(None, leaf) for leaf in ends.leaves]
    return tree_of(ends.spec, found)


def _leaves_of(specs: Sequence[Any]) -> list[Leaf]:
    """Tensors are numbered as the graph numbers its inputs and outputs; the rest are constants of the program."""
    found: list[Leaf] = []
    count = 0
    for spec in specs:
        if isinstance(spec.arg, TensorArgument):
            found.append(Leaf(count))
            count += 1
        elif isinstance(spec.arg, ConstantArgument):
            found.append(Leaf(None, spec.arg.value))
        else:
            what = getattr(spec.arg, "class_fqn", "number that differs from run to run")
            raise ConversionError(
                f"{spec.arg.name!r} is a {what}, and a graph takes and gives tensors: "
                "give it as a tensor, leave it out of the result, or fix it in the trace"
            )
    return found


def dim_names(program: ExportedProgram, dynamic_shapes: Any) -> dict[str, str]:
    """{torch's symbol: the caller's name}; a dim that the caller left to torch is called by its input and axis."""
    found: dict[str, str] = {}
    asked = dict(_requested_names(program, dynamic_shapes))
    for name, tensor in inputs_of(program):
        for axis, size in enumerate(tensor.shape):
            symbol = str(size)
            if isinstance(size, torch.SymInt) and symbol.isidentifier():
                found.setdefault(symbol, asked.get((name, axis)) or f"{name}_{axis}")
    return found


def inputs_of(program: ExportedProgram) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, fake tensor) of each tensor that the program is called with, in order."""
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if kinds.get(node.name) is InputKind.USER_INPUT and isinstance(value, torch.Tensor):
            yield node.name, value


def _requested_names(program: ExportedProgram, dynamic_shapes: Any) -> Iterator[tuple[tuple[str, int], str]]:
    """((input, axis), name) of every `Dim("batch")` in `dynamic_shapes`."""
    if dynamic_shapes is None:
        return
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    shapes = list(dynamic_shapes.values()) if isinstance(dynamic_shapes, Mapping) else list(dynamic_shapes)
    flat = pytree.tree_leaves(shapes, is_leaf=_is_shape)
    for spec, shape in zip(specs, flat, strict=False):
        axes = shape.items() if isinstance(shape, Mapping) else enumerate(shape or ())
        for axis, dim in axes:
            name = getattr(dim, "__name__", None)
            if isinstance(name, str) and name.isidentifier():
                yield (spec.arg.name, int(axis)), name


def _is_shape(item: Any) -> bool:
    """One tensor's entry: None, {axis: dim}, or a tuple of dims."""
    if item is None or (isinstance(item, Mapping) and all(isinstance(key, int) for key in item)):
        return True
    return isinstance(item, list | tuple) and not any(isinstance(part, Mapping | list | tuple) for part in item)
