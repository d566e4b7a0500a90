"""A torch module, a loss and an optimizer → one train step as a planned program."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from passes.suggest import bytes_text, plural
from pipeline.argument_checks import FLAG, FUNCTION, a, expects
from pipeline.errors import InternalError, SourceError, UsageError
from pipeline.events import Observer, Phase
from pipeline.ir import Graph
from pipeline.ir.graph import to_device
from pipeline.lowering.fusion import fuse_train_step
from pipeline.runtime import Capture, CompiledProgram, compile_graph
from pipeline.runtime.devices import CPU, Device, find_device
from pipeline.runtime.kernels.cuda import has_triton
from pipeline.runtime.tensors import torch_dtype
from pipeline.training.batch import Batch, LossFunction, check_limit, refuse_classes
from pipeline.training.graph import LARGE, LIMIT, STEP, make_graph, moment_name, rate_name, stored_name
from pipeline.training.optimizer import OptimizerSettings, fixed_options, rate_state, read_optimizer
from pipeline.training.program import LateSum, PhaseRecorder, TrainProgram
from pipeline.training.state_dict import Sources
from pipeline.training.trace import TracedStep, refuse_what_torch_refuses, trace_step


@expects(check_gradients=FLAG, large=a(int, "a number of bytes").or_none(), native=FLAG, observe=FUNCTION.or_none())
def record_step(
    module: nn.Module,
    loss: LossFunction,
    optimizer: Optimizer,
    batch: Batch,
    *,
    max_norm: float | None = None,
    max_value: float | None = None,
    check_gradients: bool = False,
    large: int | None = None,
    native: bool = False,
    device: Device | torch.device | str | None = None,
    observe: Observer | None = None,
) -> TrainProgram:
    """Record forward, loss, backward and the optimizer's update as one program.

    The module is recorded in the mode that it is in, which is `module.train()` for dropout and BatchNorm. Module and
    optimizer are not changed; the program begins with their values, also in the middle of a training.

    Args:
        module: the module to train.
        loss: a function of outputs and target that gives one number, such as `torch.nn.functional.mse_loss`.
        optimizer: torch's SGD, Adam or AdamW over parameters of `module`.
        batch: an example, `(*inputs, target)`, where the loss is `loss(module(*inputs), target)`; or a mapping of names
            to tensors, where it is `loss(module(**those that forward names), batch)`. Later batches have the same
            shapes and dtypes.
        max_norm: clip the norm of all gradients, as `torch.nn.utils.clip_grad_norm_` does; `program.limit` changes it.
        max_value: clip each element of the gradients, as `torch.nn.utils.clip_grad_value_` does; `program.limit`
            likewise.
        check_gradients: stop also if a gradient is not finite, which reads each gradient once more; max_norm does too.
        large: bytes; a parameter of this size or larger is updated as soon as its gradient is final, and not with the
            others. None for 1 MiB on the CPU, and for no such parameter on a GPU, where one launch updates all.
        native: kernels in C++ compute what they can (see `compile_graph`); losses differ from torch's by roundings.
        device: where the step runs (see `compile_graph`); None for where the parameters of the module are. On CUDA a
            step waits for nothing: the loss is a tensor there, and `NotFinite` comes from a later step. Untested on a
            GPU.
        observe: is called with an event when a phase (`PHASES`) begins and when it has ended.

    Returns:
        A TrainProgram: `step(batch)` returns the loss before the update; `write_back()` gives the values to the module.

    Raises:
        UsageError: the batch has no form that is known, the loss is no single number that depends on a parameter,
            the module or a limit is none, or no compiler is there for `native`.
        Unsupported: another optimizer than SGD, Adam and AdamW, or something that torch cannot record.

    Example:
        >>> import onnxline, torch
        >>> module = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        >>> batch = (torch.ones(2, 4), torch.zeros(2, 1))
        >>> program = onnxline.record_step(module, torch.nn.functional.mse_loss, optimizer, batch)
        >>> first, second = program.step(batch), program.step(batch)
        >>> bool(second < first)
        True
    """
    if max_norm is not None and max_value is not None:
        raise UsageError("found max_norm and max_value; expected one of them")
    refuse_classes(module, loss)
    if device is None:  # a parameter on another kind of device is refused by name
        device = next((parameter.device for parameter in module.parameters() if parameter.is_cuda), "cpu")
    place = find_device(device)
    if large is None and place.is_host:
        large = LARGE
    limit = max_value if max_norm is None else max_norm
    if limit is not None:
        limit = check_limit("max_value" if max_norm is None else "max_norm", limit)
    clips = "norm" if max_norm is not None else "none" if limit is None else "value"
    recorder = PhaseRecorder(observe)
    with _attention_for(module, place):
        traced = recorder.run(
            "Trace",
            lambda: trace_step(module, loss, batch, clips=clips, checks_gradients=check_gradients),
            _describe_trace,
        )
    stored = _tensors_of(module, traced)

    def compile_step() -> tuple[Graph, CompiledProgram]:
        settings = read_optimizer(optimizer, module, traced.params)
        graph = to_device(make_graph(traced, settings, large=large), CPU.name)
        values = {**stored, **_initial(settings, stored, graph, limit)}
        fused = fuse_train_step(graph, native=native, rows=not place.is_host and has_triton())
        return graph, compile_graph(fused, values, device=place, native=native)

    graph, compiled = recorder.run(
        "Compile", compile_step, lambda made: f"{len(made[0].ops)} ops, arena of {bytes_text(made[1].plan.arena_bytes)}"
    )
    feed = {
        name: tensor.detach() for name, tensor in traced.layout.tensors(batch).items() if name in traced.layout.names
    }
    session = compiled.context.captures.session
    late = None if place.is_host else LateSum(place, session.states.order, compiled.signature[1][-1])
    if late is not None:
        session.further = late.launches
    try:
        capture = _capture(compiled, feed, recorder)
    except (InternalError, SourceError):  # torch's kernels check dtypes that a recording does not
        refuse_what_torch_refuses(module, loss, batch)
        raise
    if late is not None:
        late.clear()
    sources = _sources(module, optimizer, traced, stored, compiled)
    recorder.begin("Replay")
    return TrainProgram(
        graph, compiled, traced.layout, sources, capture=capture.report, example=feed, phases=recorder.phases, late=late
    )


def _attention_for(module: nn.Module, place: Device) -> AbstractContextManager[object]:
    """Where a module on the CPU is trained elsewhere, its attention is recorded as products and a softmax: torch has an
    operator of its own for it on the CPU, which no other device runs."""
    moves = not place.is_host and all(parameter.is_cpu for parameter in module.parameters())
    return sdpa_kernel(SDPBackend.MATH) if moves else nullcontext()


def _describe_trace(traced: TracedStep) -> str:
    reached = f"{len(traced.module.graph.nodes)} nodes"
    return f"{reached}; no gradient reaches {', '.join(traced.unreached)}" if traced.unreached else reached


def _capture(compiled: CompiledProgram, feed: Mapping[str, torch.Tensor], recorder: PhaseRecorder) -> Capture:
    """Warm up and record. One call does both, so the events of the second come together, after it."""
    recorder.begin("Warmup")
    start = time.perf_counter()
    capture = compiled.capture(feed, mode="train")
    seconds = time.perf_counter() - start
    taken_back = f"{plural(len(compiled.plan.updates), 'state')} as before"
    recorder.end(Phase("Warmup", capture.warm_up_seconds, taken_back))
    recorder.begin("Capture")
    recorder.end(Phase("Capture", seconds - capture.warm_up_seconds, capture.report.summary))
    return capture


def _tensors_of(module: nn.Module, traced: TracedStep) -> dict[str, torch.Tensor]:
    """Parameters and buffers by the names of their values."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {stored_name(name): tensors[name].detach() for name in traced.placeholders}


def _initial(
    settings: OptimizerSettings, stored: dict[str, torch.Tensor], graph: Graph, limit: float | None
) -> dict[str, torch.Tensor]:
    """The values that the optimizer's states begin with."""
    found = {STEP: torch.tensor(float(settings.step), dtype=torch.float32)}
    if limit is not None:
        (spec,) = (value.spec for value in graph.values if value.name == LIMIT)
        found[LIMIT] = torch.tensor(float(limit), dtype=torch_dtype(spec.dtype))
    for group in settings.groups:
        found[rate_name(group.index)] = rate_state(group.learning_rate)
        for name in group.params:
            for sort in group.moments:
                known = settings.moments.get((name, sort))
                found[moment_name(name, sort)] = _zeros_like(stored[stored_name(name)]) if known is None else known
    names = {value.name for value in graph.values}
    return {name: tensor for name, tensor in found.items() if name in names}


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape, dtype and device of `tensor`, in the memory of one element."""
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _sources(
    module: nn.Module,
    optimizer: Optimizer,
    traced: TracedStep,
    stored: dict[str, torch.Tensor],
    compiled: CompiledProgram,
) -> Sources:
    states = compiled.state_names
    names = {id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    keys = {key: stored_name(names[id(tensor)]) for key, tensor in module.state_dict(keep_vars=True).items()}
    params = [names[id(tensor)] for group in optimizer.param_groups for tensor in group["params"]]
    trained = {number: name for number, name in enumerate(params) if name in traced.params}
    held = optimizer.state_dict()["state"]
    return Sources(
        module,
        optimizer,
        {name: tensor for name, tensor in stored.items() if name not in states},
        keys,
        trained,
        fixed_options(optimizer),
        copy.deepcopy({number: state for number, state in held.items() if number not in trained}),
    )
