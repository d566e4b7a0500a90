"""The nouns that every part of a pass run shares: Step, CompositeStep, PassResult, Repeat, Description."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, Self

import onnx

from passes.context import PassContext, open_local_context
from passes.weights.detached import DetachedModel, attach, detach

MAX_TURNS: Final = 20
"""Turns after which a fixed point is given up."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """The model that a step has made."""

    model: DetachedModel
    changed: bool = True
    """Whether it may differ from the model that the step was given."""
    why: str | None = None
    """Why the step did its work in another way than requested; shown in the report."""
    relation: Relation | None = None
    """What a step that `makes_reference` promises of its result."""


@dataclass(frozen=True, slots=True)
class Relation:
    """How a model computes values of the model that it was made of.

    Args:
        inputs: input of the result → the value of the model before that it is fed with.
        outputs: output of the result → the value of the model before that it has to equal.
        judged_as: the floating type that the result may compute in, whose tolerance then holds.
        rows: the number of rows that the result takes along the first axis of each input, where that is to be another;
            any number for 0. None where the inputs stay as they are.
        runs_as: a model that computes what the result computes, where onnxruntime's CPU provider has no kernel for it
            or computes in another type.
        reference: stands for the model before, where the step was asked for other values of weights.
        then: runs after the model before; some of `outputs` are its outputs.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    judged_as: str = ""
    rows: int | None = None
    runs_as: DetachedModel | None = None
    reference: DetachedModel | None = None
    then: Continuation | None = None

    @classmethod
    def between_namesakes(cls, inputs: Iterable[str], outputs: Iterable[str], **claims: Any) -> Self:
        """The relation in which each input and each output is the value of its name.

        Args:
            inputs: the inputs of the result.
            outputs: its outputs.
            **claims: the other fields.

        Returns:
            The relation.
        """
        return cls({name: name for name in inputs}, {name: name for name in outputs}, **claims)

    @property
    def changes_values(self) -> bool:
        """Whether an output may be another value, or be computed in another way, than the one it stands for."""
        claims = (self.rows, self.runs_as, self.reference, self.then)
        return bool(self.judged_as) or any(claim is not None for claim in claims)


@dataclass(frozen=True, slots=True)
class Continuation:
    """A model that runs after the model before, where the result computes both.

    Args:
        model: the model.
        inputs: its input → the value of the model before that it is fed with.
        outputs: its output → the name that the values of `Relation.outputs` give it; no value of the model before has
            that name.
    """

    model: DetachedModel
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


Reads = Literal["structure", "values"]


@dataclass(frozen=True, slots=True)
class Description:
    """What a pass does and reads. `does` is one sentence without a full stop.

    A pass reads `values` if its effect depends on the elements of weights, or if it computes new weights. All
    others read the `structure` only: operators, attributes, shapes, and constants that are as good as attributes (a
    scalar such as an epsilon; axes, pads, shapes, indices). They may rewire weights, but never look at their elements.
    """

    does: str
    reads: Reads


UNDESCRIBED: Final = Description("not described by this release of onnxline", "values")
"""The description of a pass that the installed library has and its adapter says nothing of."""


class Step:
    """One ONNX → ONNX pass, with its options as the fields of a frozen dataclass.

    A subclass gives it a `name` and `apply`, and a `source` if it calls a library; the rest has defaults, which suit a
    step that runs no other passes inside. With `reads` the first sentence of its docstring is its description:

        @dataclass(frozen=True, slots=True)
        class DropIdentity(Step, name="drop-identity", reads="structure"):
            '''Remove Identity nodes. The outputs of the model keep their names.'''
    """

    __slots__ = ()

    name: str
    source: str = "onnxline"
    """Whose code it is: onnxoptimizer, onnxsim, onnxscript, onnx, or onnxline."""
    left_out: tuple[str, ...] = ()
    """The inner passes that `without` took out."""

    is_composite: ClassVar[bool] = False
    """Whether the step runs inner passes, and can leave named inner passes out."""

    annotates: ClassVar[bool] = False
    """Whether the types, names and metadata that it writes are a result, also where no operator changes. Native
    optimizers drop and rewrite them all the time, which is no change."""

    makes_reference: ClassVar[bool] = False
    """Whether it is asked for other inputs, outputs or types: it is proven by the relation of its result, and the steps
    after it are compared with that result."""

    keeps_outputs: ClassVar[bool] = False
    """Whether a step with `makes_reference` leaves the required inputs and the outputs unchanged. A run whose reference
    is torch takes no other such step."""

    suspects: ClassVar[tuple[str, ...]] = ()
    """Inner passes to suspect first of a fault that no pass is known for."""

    never_run: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Inner passes that the library lists and never runs, with the reason."""

    joins_weights: ClassVar[tuple[str, ...]] = ()
    """Inner passes that read gigabytes of weights to compute new weights."""

    writes_contrib: ClassVar[tuple[str, ...]] = ()
    """Inner passes known to do nothing else than to write operators that ONNX does not have; they are left out where
    these are refused."""

    fixes_defaults: ClassVar[bool] = False
    """Whether it makes constants of initializers that are inputs, too; other steps are shown the inputs alone."""

    makes_structures: ClassVar[tuple[str, ...]] = ()
    """Kinds of structures that the step makes: its result is searched for them; new instances count after the step."""

    destroys: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    """Pass of the step's library → the kinds of structures that it destroys."""

    merges_siblings: ClassVar[bool] = False
    """Whether all passes of the step that destroy separate Q, K and V only merge products of one value."""

    destroys_equals: ClassVar[tuple[str, ...]] = ()
    """Those of `destroys` that destroy a structure only where it has two equal parts, and are useful elsewhere."""

    description: ClassVar[Description] = UNDESCRIBED
    """What the step itself does and reads, for the catalogue."""

    describes: ClassVar[Mapping[str, Description]] = MappingProxyType({})
    """Pass of the step's library → what it does and reads, for the catalogue. A pass without is listed by its name."""

    hands_on_options: ClassVar[bool] = False
    """Whether options of any name go on to the library, which knows them best."""

    options: Mapping[str, Any] = MappingProxyType({})
    """The options that go on to the library as they are."""

    limits: ClassVar[tuple[str, ...] | None] = None
    """For a library's optimizer, which should not make a model larger unasked: the options that say how large a folded
    value may be. None for a step that has its own reasons to store more."""

    growing: ClassVar[tuple[str, ...]] = ()
    """Inner passes that can leave more nodes than they found."""

    input_shapes: Mapping[str, Sequence[int]] = MappingProxyType({})
    """The shapes that it was asked to give the model's inputs, by name."""

    narrows: bool = False
    """Whether the step was asked to change the declared shapes of the model's inputs."""

    def __init_subclass__(cls, *, name: str = "", source: str = "", reads: Reads | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)  # a step may have other bases, such as Generic
        if name:
            cls.name = name
        if source:
            cls.source = source
        if reads is not None:
            paragraph, _, _ = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")
            does, _, _ = " ".join(paragraph.split()).partition(". ")
            does = does.removesuffix(".") or "not described: its class has no docstring, or Python runs with -OO"
            cls.description = Description(does, reads)

    @staticmethod
    def import_library() -> None:
        """In a worker: import the library, if that takes long."""

    def in_one_round(self) -> Step:
        """The step, without a repetition of all its work until nothing changes: enough to see what it merges."""
        return self

    @property
    def may_grow(self) -> bool:
        """Whether growth of the model by this step is wanted."""
        return self.limits is None or any(name in self.options for name in self.limits)

    def known_to_grow(self, context: PassContext) -> tuple[str, ...]:
        """Those of `growing` that this step would run.

        Args:
            context: where the library is asked for its passes.

        Returns:
            Names of inner passes.
        """
        inner = self.inner(context) if self.growing else ()
        return tuple(name for name in self.growing if name in inner)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        """Run the pass.

        Args:
            model: the model, which stays as it is: change `model.copy_proto()`.
            context: the workers, in which libraries run, and a folder for files.

        Returns:
            The new model, or `changed=False` and the reason.

        Raises:
            StepFailed: the pass raised, crashed or timed out.
        """
        raise NotImplementedError

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """The step with the options of a recipe's item.

        Args:
            options: name → value. A step that hands options on has them in its field `options`; for others they are
                fields.

        Returns:
            The step.
        """
        make: Any = cls  # a dataclass
        return make(options) if cls.hands_on_options else make(**options)

    def call_library(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """In a worker: run the library as its users do, without the repairs of `apply`. Our own passes have no repairs:
        they are applied in this process.

        Args:
            model: the whole model, with its weights; the library may change it.

        Returns:
            The result.

        Raises:
            Exception: whatever the library raises.
        """
        with open_local_context() as context:
            return attach(self.apply(detach(model), context).model)

    def format_call(self) -> str:
        """The call of the library, as its users write it; for a step that takes some lines, its name."""
        return f"{self.name}, without {', '.join(self.left_out)}" if self.left_out else self.name

    def join(self, following: Sequence[Step]) -> Step:
        """One step that runs this step and those after it in one call.

        Args:
            following: the steps after this one, all of this class.

        Returns:
            The joined step.
        """
        raise NotImplementedError

    def check(self, context: PassContext) -> None:
        """Refuse options that the installed release does not take.

        Args:
            context: where the library is asked for its options.

        Raises:
            PolicyError: naming the nearest option or pass.
        """

    def inner(self, context: PassContext) -> tuple[str, ...]:
        """The inner passes that this step would run.

        Args:
            context: where the library is asked for its passes.

        Returns:
            Their names, in the order in which the library lists them.
        """
        return ()

    def known_inner(self, context: PassContext) -> tuple[str, ...]:
        """Every inner pass that a skip list may name.

        Args:
            context: where the library is asked for its passes.

        Returns:
            Their names: what would run, what is left out, and `extras`.
        """
        return (*self.inner(context), *self.left_out, *self.extras(context))

    def extras(self, context: PassContext) -> tuple[str, ...]:
        """Inner passes that run only where an option of the step names them.

        Args:
            context: where the library is asked for its passes.

        Returns:
            Their names.
        """
        return ()

    def with_extra(self, name: str) -> Step:
        """The same step, which also runs one of its `extras`.

        Args:
            name: the inner pass.

        Returns:
            The new step.
        """
        return self

    def appliers(self, name: str) -> tuple[str, ...]:
        """The inner passes without which another one does not run.

        Args:
            name: the other inner pass.

        Returns:
            Their names.
        """
        return ()

    def without(self, names: Sequence[str]) -> Step:
        """The same step, without some of its inner passes.

        Args:
            names: the inner passes to leave out.

        Returns:
            The new step; a step without inner passes is returned as it is.
        """
        return self


class CompositeStep(Step):
    """A step that runs inner passes; the inner passes in its field `left_out` do not run."""

    __slots__ = ()

    is_composite: ClassVar[bool] = True

    def without(self, names: Sequence[str]) -> Self:
        own: Any = self  # a dataclass
        return replace(own, left_out=tuple(dict.fromkeys((*self.left_out, *names))))


@dataclass(frozen=True, slots=True)
class Repeat:
    """Steps that run in turns, until one turn changes nothing, or `limit` of them are done."""

    steps: tuple[Step, ...]
    limit: int = MAX_TURNS


def flatten(recipe: Sequence[Step | Repeat]) -> list[Step]:
    """The steps of a recipe; the steps of a fixed point count once.

    Args:
        recipe: steps, and groups of steps that repeat.

    Returns:
        The steps in order.
    """
    return [step for item in recipe for step in (item.steps if isinstance(item, Repeat) else (item,))]
