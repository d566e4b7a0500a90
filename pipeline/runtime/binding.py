"""Bind a program to memory: the slot table of a plan, and one launch for each step.

A context and its captures share one `ProgramMemory`; each binds the program to slots of its own.

What has launches holds memory of its process, so it is refused where Python would copy or pickle it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn, SupportsIndex

import torch

from passes.suggest import with_article
from pipeline.errors import InternalError, UsageError
from pipeline.runtime.kernels import Launch
from pipeline.runtime.kernels.base import kernels_for_threads
from pipeline.runtime.program import BoundProgram, LaunchStep
from pipeline.runtime.states import States


class ProcessBound:
    """Something that can be neither copied nor pickled."""

    instead: ClassVar[str] = "pickle the graph and its weights, and compile them again where they are read"
    """What to do in place of it, for the message."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """What `copy.copy`, `copy.deepcopy`, `pickle`, `torch.save` and a spawned process ask first.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{with_article(type(self).__name__)} can be neither copied nor pickled, since its launches hold memory "
            f"of this process; {self.instead}"
        )


LAUNCH_ERRORS = (RuntimeError, IndexError, ValueError, TypeError, MemoryError)
"""What the operators of torch and numpy raise."""

Slots = Sequence[torch.Tensor]

RunBody = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""A body of a higher-order call, on storage of its own."""


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """What the runs and replays of one sequence share: a program with its weights, states, and storage in the arena."""

    bound: BoundProgram
    states: States
    arena: Mapping[int, torch.Tensor]
    """By vid, for every value that owns storage in the arena."""
    runner_of: Callable[[BoundProgram], RunBody]
    """Makes a runner for a body; each has an arena of its own."""

    @property
    def plan_key(self) -> str:
        return self.bound.plan.graph_digest

    def memory_for(self, feed: object) -> ProgramMemory:
        """This memory, as a `MemorySource` of one plan with concrete sizes."""
        return self

    def latest_memory(self) -> ProgramMemory:
        return self

    def bind_slots(self, fed: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """The slot table, with `fed` as the storage of what the caller brings: owners of storage, and views of them."""
        owners = {**self.bound.weights, **self.states.tensors, **fed, **self.arena}
        # A slot may be pointed at other memory, so each table has tensors of its own.
        slots = [owners[vid].detach() if vid in owners else UNUSED for vid in range(len(self.bound.plan.slots))]
        for view in self.bound.views:
            root, layout = slots[view.root], view.layout
            slots[view.vid] = root.as_strided(layout.sizes, layout.strides, int(root.storage_offset()) + layout.offset)
        return slots

    def bind_step(self, step: LaunchStep, slots: Slots) -> Launch:
        """The launch of `step` on these slots.

        Raises:
            InternalError: the shapes of the call do not fit its kernel.
        """
        bodies = self.bound.bodies.get(step.index)
        if bodies:
            step = step.with_attrs(bodies=tuple(map(self.runner_of, bodies)))
        ins, outs = ([slots[vid] for vid in vids] for vids in (step.call.in_vids, step.call.out_vids))
        try:
            with kernels_for_threads(self.bound.threads):
                return step.bind(ins, outs)
        except LAUNCH_ERRORS as error:
            raise self.bound.failure(step, error) from error

    def check_shapes(self, slots: Slots) -> None:
        """Check that torch resized no out= tensor. Shapes do not depend on data, so the first run is enough.

        Raises:
            InternalError: an operator resized its result.
        """
        program, plan = self.bound, self.bound.plan
        for step in self.bound.steps:
            for vid in step.call.out_vids:
                if tuple(slots[vid].shape) != plan.slots[vid].spec.sizes:
                    made = list(slots[vid].shape)
                    raise InternalError(f"{program.describe(step)} made {made} for {program.describe_value(vid)}")

    def written_states(self, steps: Iterable[LaunchStep]) -> set[int]:
        """The states that lie where one of `steps` writes."""
        roots = {self.bound.plan.root(vid) for step in steps for vid in step.call.out_vids}
        return roots & self.states.tensors.keys()


UNUSED = torch.empty(0)
"""Stands in the slots of values that nothing reads."""
