"""Pipelines of diffusers in parts: inputs by the calls that a pipeline makes, graphs that compute them, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("diffusers", reason="needs onnxline[diffusion]")

from benchmarks.diffusion import FAMILIES, configuration
from pipeline.config import ModelConfig
from pipeline.errors import ConfigError, SourceError
from pipeline.export import TorchSource, load_source, run_torch
from pipeline.export.parts import CallFile, load_for_parts
from tests.pipeline.export.parts.graphs import check_graph


def section_of(family: str, part: str | None = None) -> ModelConfig:
    return ModelConfig.model_validate({**configuration(family)["model"], "part": part})


@pytest.fixture(scope="module")
def flux() -> Any:
    return load_for_parts(section_of("Flux"))


def test_inputs_are_those_of_the_calls_and_axes_that_differ_are_open(flux: Any) -> None:
    models = flux.module
    assert models.names == ("text_encoder", "text_encoder_2", "transformer", "vae_encoder", "vae_decoder")
    transformer = models.part("transformer")
    assert {name: [*tensor.shape] for name, tensor in transformer.calls[0].items()} == {
        "hidden_states": [1, 16, 16],
        "encoder_hidden_states": [1, 512, 32],
        "pooled_projections": [1, 32],
        "timestep": [1],
        "img_ids": [16, 3],
        "txt_ids": [512, 3],
        "guidance": [1],
    }
    batch = {name: declared.dynamic for name, declared in transformer.declarations().items()}
    assert batch["hidden_states"] == batch["guidance"] == {0: "batch_size"} and batch["img_ids"] == {}
    times = [float(call["timestep"][0]) for call in transformer.calls]
    assert times[:4] == sorted(times[:4], reverse=True) and len(set(times[:4])) == 4  # of the scheduler itself
    assert transformer.output_name("sample") == "out_hidden_states"
    assert [*models.part("vae_decoder").calls[0]] == ["latent_sample"]
    assert [*models.part("vae_encoder").calls[0]] == ["sample"]


def test_the_image_is_the_same_by_calls_that_stand_for_the_models(flux: Any) -> None:
    """Each call goes through names and arrays, as through a session; a fault in one of them is seen."""
    models = flux.module

    def stand_in(name: str, factor: float = 1.0) -> Any:
        source = load_source(section_of("Flux", name), loaded=flux)
        assert isinstance(source, TorchSource)
        return lambda feeds: {key: array * np.float32(factor) for key, array in run_torch(source, feeds).items()}

    steps = {name: stand_in(name) for name in models.names if name != "vae_encoder"}
    with models.replace_models(steps):
        assert float((models.make_image() - models.image).abs().max()) < 1e-5  # masks are added in another way
    with models.replace_models({**steps, "transformer": stand_in("transformer", 1.02)}):
        assert float((models.make_image() - models.image).abs().max()) > 1e-3


def test_calls_are_taken_from_an_earlier_run_of_the_same_pipeline(flux: Any, tmp_path: Path) -> None:
    file = CallFile(tmp_path / "calls.pt", "a key")
    changed = flux.module.image + 1  # which no pipeline makes
    file.save(replace(flux.module, image=changed))
    again = load_for_parts(section_of("Flux"), calls=file).module
    assert (again.image == changed).all() and again.alone == flux.module.alone
    calls = zip(again.part("transformer").calls, flux.module.part("transformer").calls, strict=True)
    assert all((found[name] == call[name]).all() for found, call in calls for name in call)
    assert CallFile(file.path, "another key").load() is None
    file.path.write_bytes(file.path.read_bytes()[:1000])
    assert file.load() is None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graphs_are_the_models(family: str, tmp_path: Path) -> None:
    loaded = load_for_parts(section_of(family))
    for part in loaded.module.names:
        source = load_source(section_of(family, part), loaded=loaded)
        assert isinstance(source, TorchSource)
        draws = check_graph(source, tmp_path / f"{part}.onnx")
        assert len({tuple(array.shape for array in draw.feeds.values()) for draw in draws}) == 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"class": "StableDiffusionPipelin"}, "has no pipeline 'StableDiffusionPipelin'"),
        ({"vae": None}, "StableDiffusionPipeline needs 'vae', which is not there"),
        ({"unet": {"class": "UNetModel"}}, "neither diffusers nor transformers has 'UNetModel'"),
        ({"unet": {"class": "UNet2DConditionModel", "config": {"in_chanels": 4}}}, "unet: UNet2DConditionModel cannot"),
        ({"motor": {"class": "UNet2DConditionModel"}}, "takes no 'motor'"),
    ],
)
def test_a_pipeline_that_cannot_be_made_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    settings = configuration("SD 1.5")["model"]["diffusers"]
    settings["class"] = change.pop("class", settings["class"])
    components = {**settings["components"], **change}
    settings["components"] = {name: item for name, item in components.items() if item is not None}
    with pytest.raises(SourceError, match=sentence):
        load_for_parts(ModelConfig.model_validate({"diffusers": settings}))


def test_a_folder_that_lacks_a_component_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(
        '{"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"],'
        ' "tokenizer": ["transformers", "CLIPTokenizer"], "safety_checker": [null, null]}'
    )
    section = ModelConfig.model_validate({"diffusers": str(tmp_path)})
    assert section.part_names == ("unet",)
    with pytest.raises(SourceError, match="has no folder 'unet', which its"):
        load_for_parts(section)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_list_of_components_that_is_none_is_one_sentence(text: str, tmp_path: Path) -> None:
    from pipeline import RunConfig

    (tmp_path / "model_index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"diffusers: found .*index\.json, which is no list of components"):
        RunConfig.from_mapping({"model": {"diffusers": str(tmp_path)}}, title="mistake")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"diffusers": "nowhere"}, "found no folder .*nowhere, expected that of a pipeline"),
        ({"diffusers": {"class": "FluxPipeline"}}, "found 'class' without 'components'"),
        ({"diffusers": configuration("Flux")["model"]["diffusers"], "part": "unet"}, "expected one of text_encoder"),
        ({"diffusers": configuration("Flux")["model"]["diffusers"], "task": "text-generation"}, "found 'task' next to"),
        ({"diffusers": configuration("Flux")["model"]["diffusers"], "inputs": {"x": {"shape": [1]}}}, "found 'inputs'"),
    ],
)
def test_a_mistake_in_the_section_is_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    from pipeline import RunConfig

    with pytest.raises(ConfigError, match=sentence):
        RunConfig.from_mapping({"model": settings}, title="mistake")
