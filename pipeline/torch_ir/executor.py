"""Run an IR: check everything first, then run it by the engine, and say what to do where a run fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from pipeline.errors import DataError, InternalError, SourceError
from pipeline.ir.dims import dim_names
from pipeline.runtime.devices import Device
from pipeline.runtime.eager import Step
from pipeline.runtime.states import LostStates
from pipeline.torch_ir.arguments import Inputs
from pipeline.torch_ir.checks import (
    check_inputs,
    copy_from_first_element,
    counts_from_storage,
    explain_wrong_results,
    find_counted_values,
    find_unmatched_ops,
    refuse_unmatched_ops,
)
from pipeline.torch_ir.engine import Engine, copy_given_states, lost_states_error
from pipeline.torch_ir.errors import ExecutionError, NoWeights, by_name
from pipeline.torch_ir.ir import IR, an_ir
from pipeline.torch_ir.nodes import stored_values
from pipeline.torch_ir.registry import REGISTERED, Registry
from pipeline.torch_ir.weights import Bound, bind_stored, load_weights

Tensors = Mapping[str, torch.Tensor]

NOT_LOADED = (
    "Weights not loaded. Call load_weights() or load_weights_from_state_dict() first, or give IRExecutor weights"
)


def execute_ir(
    ir: IR,
    inputs: Inputs,
    weights: Tensors | None = None,
    weights_path: str | Path | None = None,
    constants: Tensors | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    strict_sizes: bool = True,
    device: Device | torch.device | str | None = None,
) -> tuple[torch.Tensor, ...]:
    """Run `ir` once. `IRExecutor` is for several runs.

    Args:
        ir: what `extract_ir` gives, or `IR.load`.
        inputs: tensors of the declared dtypes and shapes, in order, or by name.
        weights: tensors by their names in the checkpoint or by those of the placeholders.
        weights_path: a checkpoint, in place of `weights`: a safetensors or torch file.
        constants: tensors that go before `weights` and before what the IR holds itself.
        kwargs: keyword arguments of the model, if it has any.
        strict_sizes: refuse inputs of other sizes than the declared sizes.
        device: where the plan runs and the outputs are, `cuda` or `cuda:1`; None for the CPU. Untested on a GPU.

    Returns:
        The outputs, in the order of `ir.graph_outputs`.

    Raises:
        NoWeights: neither weights nor a path to them, for an IR that has some (a ValueError too).
        ExecutionError: something does not fit the IR; the message lists all of it. Or torch has no operator of a name.
        WeightLoadError: the file of weights cannot be read; NoWeightFile where there is none.

    Example:
        >>> import onnxline, torch
        >>> ir = onnxline.extract_ir(torch.nn.Linear(4, 2, device="meta"), (torch.empty(1, 4, device="meta"),))
        >>> onnxline.execute_ir(ir, (torch.ones(1, 4),), {"weight": torch.ones(2, 4), "bias": torch.zeros(2)})
        (tensor([[4., 4.]]),)
    """
    if weights is None and weights_path is not None:
        weights = load_weights(weights_path)
    executor = IRExecutor(ir, weights, constants, strict_sizes=strict_sizes, device=device)
    executor.refuse_without_weights("Either weights or weights_path must be provided: the IR holds none")
    return executor.execute(inputs, kwargs)


class IRExecutor:
    """Runs `ir` on `weights`, by their names in the checkpoint or by those of the placeholders.

    `constants` go before `weights` and before what the IR holds itself. Buffers that the model writes to (a KV cache,
    running statistics) are kept here from call to call; the caller's tensors are never written to.

    Runs are planned: storage and kernels are settled once for all calls with equal sizes. `planned=False` takes the
    plain reference, op by op with torch's operators, and so does an IR that was not functionalized or that has ops with
    an executor of the user's own. Threads may share an executor, and wait for one another: the runs of one are planned
    in one storage. `strict_sizes=False` lets inputs have other sizes than the declared ones, on the reference too: this
    is right where the ops do not depend on the size, as with a batch of 2 for a batch of 1. `device` says where plans
    run, as in `execute_ir`.
    """

    def __init__(
        self,
        ir: IR,
        weights: Tensors | None = None,
        constants: Tensors | None = None,
        *,
        planned: bool = True,
        strict_sizes: bool = True,
        device: Device | torch.device | str | None = None,
        registry: Registry = REGISTERED,
    ) -> None:
        self.ir = ir = an_ir(ir, ExecutionError)
        self._weights = None if weights is None else by_name("weights", weights, ExecutionError)
        self._constants = _optional("constants", constants)
        self._strict_sizes = strict_sizes
        self._own = registry.executors_for(ir.graph)
        self._unmatched_ops = find_unmatched_ops(ir.graph, self._own)
        self._counted = find_counted_values(ir.graph)
        self._dynamic = strict_sizes and bool(dim_names(ir.graph))
        self._bound: Bound | None = None
        self._planned, self._device = planned, device
        self._engine = self._make_engine()
        self._alone = RLock()

    @property
    def not_planned(self) -> str:
        """Why runs are not planned although that was asked for; "" where they are."""
        return self._engine.not_planned

    def load_weights(self, path: str | Path) -> None:
        """Take the weights of a file.

        Args:
            path: a file or folder that `load_weights` takes.

        Raises:
            WeightLoadError: it cannot be read.
        """
        self.load_weights_from_state_dict(load_weights(path))

    def load_weights_from_state_dict(self, state_dict: Tensors) -> None:
        """Take these weights; what earlier runs have written to buffers is forgotten.

        Args:
            state_dict: name in the checkpoint → tensor of the weight's shape and dtype.
        """
        weights = by_name("weights", state_dict, ExecutionError)
        with self._alone:
            self._weights, self._bound = weights, None
            self._engine = self._make_engine()

    def _make_engine(self) -> Engine:
        return Engine(self.ir.graph, self._own, planned=self._planned, device=self._device)

    def give_states(self, states: Tensors) -> None:
        """Set buffers that the model writes to, by their names in the checkpoint or by those of the placeholders.

        They are copied; the rest stay. So a run that failed can be undone, and a cache that was kept be used again.

        Args:
            states: name of a buffer → tensor of its shape and dtype.

        Raises:
            ExecutionError: the model writes to no such buffer, or it has another shape or dtype.
        """
        states = by_name("states", states, ExecutionError)
        given = copy_given_states(self.ir.graph, states, any_stored=self.writes)
        with self._alone:
            self._engine.give_states(given)

    def refuse_without_weights(self, said: str = NOT_LOADED) -> None:
        """Check that each weight has a value.

        Args:
            said: the sentence of the error before the names of the weights.

        Raises:
            NoWeights: no weights were given, and there are some that neither the IR nor `constants` has.
        """
        if self._weights is None and (bound := self._get_bound({})).unloaded:
            raise NoWeights("\n".join([said, *bound.hints]))

    def execute(
        self, inputs: Inputs, kwargs: Mapping[str, Any] | None = None, constants: Tensors | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The outputs, in the order of `ir.graph_outputs`.

        `inputs` and `kwargs` nest as the model takes them; all tensors in a row do too, or a mapping by input name.

        Args:
            inputs: the positional arguments, nested as the model takes them; or all tensors in a row, or name → tensor.
            kwargs: the arguments by name, nested as the model takes them.
            constants: tensors by name that go before the weights and before what the IR holds, in this run alone.

        Raises:
            ExecutionError: weights were never loaded; inputs, weights or constants are missing or do not fit (one
                message lists all of them, before anything runs); torch has no operator of a node's name; an index in
                the inputs is out of range; or an earlier run failed and left states half written (see `give_states`).
        """
        constants = _optional("constants", constants)
        with self._prepare(inputs, _optional("kwargs", kwargs), constants) as (tensors, fed):
            if constants:
                names = self.ir.graph.weight_names()
                stored = stored_values(self.ir.graph)
                given = [value.name for value in stored if not constants.keys().isdisjoint(names[value.vid])]
                outputs = self._engine.run_op_by_op(tensors, fed, given)
            else:
                outputs = self._engine.run(tensors, fed, strict_sizes=self._strict_sizes)
        return tuple(outputs[self.ir.graph.values[vid].name] for vid in self.ir.graph.outputs)

    def walk(self, inputs: Inputs, kwargs: Mapping[str, Any] | None = None) -> Iterator[Step]:
        """Every op with its results in the order of a run op by op, the ops of bodies before the op around them.

        Args:
            inputs: as in `execute`.
            kwargs: as in `execute`.

        Raises:
            ExecutionError: as `execute`.
        """
        with self._prepare(inputs, _optional("kwargs", kwargs), {}) as (tensors, fed):
            yield from self._engine.walk(tensors, fed)

    @contextmanager
    def _prepare(
        self, inputs: Inputs, kwargs: Mapping[str, Any], constants: Tensors
    ) -> Iterator[tuple[Tensors, Tensors]]:
        """Check all; yield the stored tensors and the inputs by name, to be run inside."""
        with self._alone:
            if not constants:
                self.refuse_without_weights()
            bound = self._get_bound(constants)
            fed = check_inputs(
                self.ir,
                bound,
                inputs,
                kwargs,
                strict_sizes=self._strict_sizes,
                dynamic=self._dynamic,
                counted=self._counted,
            )
            with self._explain_errors(fed):
                refuse_unmatched_ops(self._unmatched_ops)
                yield bound.tensors, fed

    @contextmanager
    def _explain_errors(self, fed: Tensors) -> Iterator[None]:
        """Turn errors of a run into ones that say what to do."""
        try:
            yield
        except DataError as error:  # an index out of range, or an edited node that reads another tensor as its index
            raise explain_wrong_results(self.ir.graph, fed, self._own) or ExecutionError(str(error)) from error
        except SourceError as error:  # an operator that torch has not
            raise ExecutionError(str(error)) from error
        except LostStates as error:
            raise lost_states_error(self.ir.graph, error.names) from error
        except (InternalError, RuntimeError, ArithmeticError) as error:
            if (mismatch := explain_wrong_results(self.ir.graph, fed, self._own)) is not None:
                raise mismatch from error
            raise

    @property
    def updates(self) -> dict[str, torch.Tensor]:
        """After a run: copies of the buffers and inputs that the model has written to, by name in the graph.

        Raises:
            ExecutionError: a run that failed left some of them half written (see `give_states`).
        """
        with self._alone:
            try:
                kept = self._engine.states()
            except LostStates as error:
                raise lost_states_error(self.ir.graph, error.names) from error
            return {**{name: tensor.clone() for name, tensor in self._engine.updated.items()}, **kept}

    @property
    def writes(self) -> bool:
        """Whether ops of the IR write to their arguments, as they do without functionalization."""
        return self._engine.writes

    def _get_bound(self, constants: Tensors) -> Bound:
        if constants:
            return self._bind({**self._constants, **constants})
        if self._bound is None:
            self._bound = self._bind(self._constants)
        return self._bound

    def _bind(self, constants: Tensors) -> Bound:
        bound = bind_stored(self.ir, self._weights or {}, constants)
        if counts_from_storage(self.ir.graph):
            bound.tensors.update(copy_from_first_element(self._counted, bound.tensors))
        return bound


def _optional(what: str, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return {} if given is None else by_name(what, given, ExecutionError)
