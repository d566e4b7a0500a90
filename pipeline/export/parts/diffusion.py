"""A pipeline of diffusers as the graphs of its models, whose inputs are those of the calls that the pipeline makes.

    text_encoder, text_encoder_2: input_ids → last_hidden_state, pooler_output, hidden_states.N
    unet: sample, timestep, encoder_hidden_states … → out_sample;  transformer: hidden_states … → out_hidden_states
    vae_decoder: latent_sample → sample;  vae_encoder: sample → latent_parameters

The pipeline makes an image of a text twice, for one prompt and for two, while the calls of its models are recorded. So
each model has the arguments that this pipeline gives it, over the time steps of its own scheduler, and an axis that
differs between both images is open. No file lists classes of pipelines. The names are those of optimum-onnx.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.proof.draws import Draw, GivenDraw
from passes.weights.files import replace_when_done
from pipeline.config import DiffusersConfig, InputConfig, VerifyConfig
from pipeline.errors import SourceError
from pipeline.export.parts.draws import flat_arrays
from pipeline.export.parts.holder import TaskPart, with_parameters
from pipeline.export.patches import apply_patches
from pipeline.export.source import Example
from pipeline.export.tree import leaves_with_path, named_arguments
from pipeline.export.user_code import first_line

STEPS: Final = 4
"""Steps of the scheduler for an image."""

BATCH: Final = "batch_size"

METHODS: Final = {"encoder": "encode", "decoder": "decode"}
"""End of a part's name → the method of an autoencoder that it is."""

RENAMED: Final = {("encode", "x"): "sample", ("decode", "z"): "latent_sample"}
"""Method and parameter → name of the input, in the words of optimum-onnx."""

NOT_TENSORS: Final = frozenset({"return_dict", "generator"})
"""Parameters that are no part of a graph."""


@dataclass(frozen=True, slots=True)
class CallFile:
    """A file that keeps the calls of a pipeline's models.

    key: digest of all that they depend on; calls of another one are not taken.
    """

    path: Path
    key: str

    def load(self) -> Mapping[str, Any] | None:
        """`calls`, `alone` and `image` of a `DiffusionModels`; None where there are none, or of another pipeline."""
        try:
            known = torch.load(self.path, weights_only=True)
            return known if known.pop("key") == self.key else None
        except Exception:  # what a damaged file can raise
            return None

    def save(self, models: DiffusionModels) -> None:
        """
        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        found = {"key": self.key, "calls": models.calls, "alone": models.alone, "image": models.image}
        with replace_when_done(self.path) as temporary:
            torch.save(found, temporary)


@dataclass(eq=False)
class DiffusionModels:
    """A pipeline, the calls of its models, and the image that it makes of one prompt.

    calls: part → the arguments of each call by name; those of two prompts are the last.
    image: float (1, channels, height, width) from 0 to 1.
    """

    pipe: Any
    section: DiffusersConfig
    seed: int
    calls: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    alone: dict[str, int] = field(default_factory=dict)
    """Part → how many of the calls are of one prompt."""
    image: Tensor = field(default_factory=lambda: torch.zeros(0))
    parts: dict[str, ComponentPart] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The parts, in the order in which an application runs them."""
        return self.section.parts

    def component(self, part: str) -> tuple[Any, str]:
        """The model of a part, and the method of it that the part is."""
        components = self.pipe.components
        if part in components:
            return components[part], "forward"
        name, _, end = part.rpartition("_")
        return components[name], METHODS[end]

    def part(self, name: str) -> ComponentPart:
        """The module of a part.

        Raises:
            SourceError: the pipeline does not call it.
        """
        if name not in self.parts:
            calls = self.calls.get(name)
            if not calls:
                raise SourceError(f"model.diffusers: {type(self.pipe).__name__} made an image without calling {name}")
            self.parts[name] = ComponentPart(*self.component(name), calls, self.alone[name])
        return self.parts[name]

    def record(self, file: CallFile | None = None) -> None:
        """Make two images, and note how the models are called; or take that from an earlier run.

        Args:
            file: that keeps the calls.

        Raises:
            SourceError: the pipeline does not run.
        """
        known = file.load() if file else None
        if known is not None:
            self.calls, self.alone, self.image = known["calls"], known["alone"], known["image"]
            return
        try:
            with self._recorders():
                self.image = self.make_image()
                self.alone = {name: len(calls) for name, calls in self.calls.items()}
                # Two steps: some pipelines take one step for a distilled model.
                self.make_image(("a red square", "two green circles on grey"), steps=2)
        except Exception as error:  # a pipeline may raise anything
            raise SourceError(
                f"model.diffusers: {type(self.pipe).__name__} does not run: {first_line(error)}"
            ) from error
        for name in self.names:
            if (
                name.endswith("_encoder")
                and name not in self.calls
                and name.removesuffix("_encoder") in self.pipe.components
            ):
                self._record_encoder(name)
        if file:
            file.save(self)

    def _record_encoder(self, name: str) -> None:
        """Calls of the encoder of an autoencoder, which no image of a text needs: of the images that were decoded."""
        decoder = name.removesuffix("encoder") + "decoder"
        model, _ = self.component(decoder)
        first = next(iter(inspect.signature(model.encode).parameters))
        with torch.no_grad():
            images = [model.decode(**arguments).sample for arguments in self.calls.get(decoder, ())]
        self.calls[name] = [{first: image} for image in images]
        self.alone[name] = self.alone.get(decoder, 0)

    @contextmanager
    def _recorders(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in self.names:
                model, method = self.component(name)
                stack.enter_context(patch.object(model, method, self._recorder(name, getattr(model, method))))
            yield

    def _recorder(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = pytree.tree_map_only(
                Tensor, lambda tensor: tensor.detach().clone(), arguments_of(original, args, kwargs)
            )
            self.calls.setdefault(name, []).append(arguments)
            return original(*args, **kwargs)

        return call

    @contextmanager
    def replace_models(
        self, steps: Mapping[str, Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]]
    ) -> Iterator[None]:
        """Let the pipeline call `steps` in place of its models in this block: inputs by name → outputs by name."""
        with ExitStack() as stack:
            for name, step in steps.items():
                model, method = self.component(name)
                stack.enter_context(patch.object(model, method, self.part(name).caller(getattr(model, method), step)))
            yield

    @torch.no_grad()
    def make_image(
        self, prompts: Sequence[str] = ("a blue house",), steps: int = STEPS, seed: int | None = None
    ) -> Tensor:
        """The images of the prompts, float (prompts, channels, height, width) from 0 to 1."""
        known = inspect.signature(type(self.pipe).__call__).parameters
        wishes = {
            "prompt": list(prompts),
            "num_inference_steps": steps,
            "generator": torch.Generator().manual_seed(self.seed if seed is None else seed),
            "height": self.section.height,
            "width": self.section.width,
            "output_type": "pt",
            "use_resolution_binning": False,
            "clean_caption": False,
        }
        self.pipe.set_progress_bar_config(disable=True)
        given = {name: value for name, value in wishes.items() if name in known and value is not None}
        return self.pipe(**given).images.float()

    def eval(self) -> DiffusionModels:
        """Put all models into eval mode."""
        for item in self.pipe.components.values():
            if isinstance(item, torch.nn.Module):
                item.eval()
        return self


def arguments_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, without those that are None or no part of a graph."""
    arguments = named_arguments(function, args, kwargs).items()
    return {name: value for name, value in arguments if value is not None and name not in NOT_TENSORS}


class ComponentPart(TaskPart):
    """The part that is one model of a pipeline, or one method of its autoencoder.

    Args:
        model: of diffusers or transformers; it is not copied.
        method: of the model.
        calls: the arguments of the calls that the pipeline made.
        alone: how many of them are of one prompt; the others are of two.
    """

    def __init__(self, model: Any, method: str, calls: Sequence[Mapping[str, Any]], alone: int) -> None:
        super().__init__(model)
        self.method, self.template = method, dict(calls[-1])
        self._spec = pytree.tree_structure(self.template)
        self.names = self._input_names()
        same = [call for call in calls if self._tree_of(call) == self._tree_of(self.template)]
        self.calls = [self._by_input_name(call) for call in same]
        self.alone = alone
        self.forward = with_parameters(self.compute, [name for name in self.names if name is not None])
        self.dims = self._open_dims()
        with torch.no_grad():
            result = self._call(self.template)
        self.result_class = type(result)
        self.fields = {key: value for key, value in result.items() if value is not None}

    def _tree_of(self, call: Mapping[str, Any]) -> list[Any]:
        return [
            (path, type(leaf), leaf.ndim if isinstance(leaf, Tensor) else leaf) for path, leaf in leaves_with_path(call)
        ]

    def _input_names(self) -> tuple[str | None, ...]:
        """The name of each leaf of a call: the last key of its path; None of a constant."""
        paths = [(path, leaf) for path, leaf in leaves_with_path(self.template)]
        last = [path[-1] for path, leaf in paths if isinstance(leaf, Tensor)]
        return tuple(
            RENAMED.get((self.method, path[-1]), path[-1] if last.count(path[-1]) == 1 else "_".join(path))
            if isinstance(leaf, Tensor)
            else None
            for path, leaf in paths
        )

    def _by_input_name(self, call: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of a call by the names of the graph's inputs; one without axes has one of size 1."""
        leaves = pytree.tree_leaves(call)
        return {
            name: leaf if leaf.ndim else leaf.reshape(1)
            for name, leaf in zip(self.names, leaves, strict=True)
            if name is not None
        }

    def _open_dims(self) -> dict[str, dict[int, str]]:
        """Input → its axes that differ between an image of one prompt and of two, with a name for each row of sizes."""
        names: dict[tuple[int, ...], str] = {}
        found: dict[str, dict[int, str]] = {}
        for name, tensor in self.calls[-1].items():
            for axis in range(tensor.ndim):
                sizes = tuple(call[name].shape[axis] for call in self.calls)
                if len(set(sizes)) > 1:
                    dim = names.setdefault(sizes, BATCH if not names else f"{BATCH}_{len(names) + 1}")
                    found.setdefault(name, {})[axis] = dim
        return found

    def _sizes_of(self, call: Mapping[str, Tensor]) -> dict[str, int]:
        return {dim: call[name].shape[axis] for name, axes in self.dims.items() for axis, dim in axes.items()}

    def _call(self, arguments: Mapping[str, Any]) -> Any:
        # That of the class: the tracer looks for `model(…)` among the modules of the holder, and the model's own may
        # be replaced while the pipeline makes an image by other means.
        method = getattr(type(self.held_model), self.method)
        extra = (
            {"return_dict": True}
            if "return_dict" in inspect.signature(method).parameters or self.method == "forward"
            else {}
        )
        with apply_patches(self.held_model):
            return method(self.held_model, **arguments, **extra)

    def compute(self, **tensors: Tensor) -> dict[str, Any]:
        """
        Args:
            tensors: the inputs by name, with the shapes of the recorded calls.

        Returns:
            What the model returns, by name.
        """
        leaves = [
            leaf if name is None else (tensors[name] if leaf.ndim else tensors[name].reshape(()))
            for name, leaf in zip(self.names, pytree.tree_leaves(self.template), strict=True)
        ]
        result = self._call(pytree.tree_unflatten(leaves, self._spec))
        return {self.output_name(key): _tensors_of(value) for key, value in result.items() if value is not None}

    def output_name(self, key: str) -> str:
        """The name of an output: of a denoiser `out_` and the name of its first input."""
        if key == "latent_dist":
            return "latent_parameters"
        is_denoiser = self.method == "forward" and key == "sample"
        return f"out_{next(name for name in self.names if name)}" if is_denoiser else key

    def caller(self, original: Callable[..., Any], step: Callable[..., Mapping[str, np.ndarray]]) -> Callable[..., Any]:
        """What takes the place of the method: it calls `step`, and returns what the method would."""

        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = self._by_input_name(arguments_of(original, args, kwargs))
            outputs = step(flat_arrays(tensors))
            fields = {key: self._field(key, value, outputs) for key, value in self.fields.items()}
            result = self.result_class(**fields)
            return result.to_tuple() if kwargs.get("return_dict") is False else result

        return call

    def _field(self, key: str, value: Any, outputs: Mapping[str, np.ndarray]) -> Any:
        name = self.output_name(key)
        if isinstance(value, tuple):
            return tuple(torch.from_numpy(outputs[f"{name}.{place}"].copy()) for place in range(len(value)))
        found = torch.from_numpy(outputs[name].copy())
        return type(value)(found) if key == "latent_dist" else found

    @property
    def sizes(self) -> dict[str, int]:
        return self._sizes_of(self.calls[-1])

    def declarations(self) -> dict[str, InputConfig]:
        return {name: InputConfig(dynamic=self.dims.get(name, {})) for name in self.calls[-1]}

    def example(self) -> Example:
        return Example((), dict(self.calls[-1]))

    def draw(self, verify: VerifyConfig) -> Sequence[GivenDraw]:
        count = len(self.calls)
        titles = [f"call {place + 1} of {count} of the pipeline" for place in range(count)]
        return [
            GivenDraw(Draw(seed, self._sizes_of(call), source=title), flat_arrays(call))
            for seed, (title, call) in enumerate(zip(titles, self.calls, strict=True), verify.seed)
        ]


def _tensors_of(value: Any) -> Any:
    return value.parameters if hasattr(value, "parameters") and not isinstance(value, torch.nn.Module) else value
