"""The section `model.diffusers`: a pipeline of diffusers, a folder or classes with configurations, and its parts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import Field, StrictStr, model_validator

from pipeline.config.sections import Count, Section

INDEX: Final = "model_index.json"

NO_MODELS: Final = ("Scheduler", "Tokenizer", "TokenizerFast", "Processor", "Extractor", "SafetyChecker")
"""Ends of the names of classes that are no part; a checker of images follows a pipeline, and is none of its models."""

NOT_CALLED: Final = ("image_encoder", "safety_checker", "watermark")
"""Components that no image of a text needs."""

AUTOENCODERS: Final = ("Autoencoder", "VQModel", "AsymmetricAutoencoder")
"""Beginnings of the names of classes that are two parts, an encoder and a decoder."""


class ComponentConfig(Section):
    """One component: a class of diffusers or transformers, and its configuration."""

    class_name: StrictStr = Field(alias="class")
    config: dict[str, Any] = Field(default_factory=dict)


class DiffusersConfig(Section):
    """A pipeline: a folder that save_pretrained wrote; or a class and its components, with random weights.

    height, width: of the image, in pixels; by default those of the pipeline.
    """

    folder: StrictStr | None = None
    class_name: StrictStr | None = Field(default=None, alias="class")
    components: dict[str, ComponentConfig] = Field(default_factory=dict)
    height: Count | None = None
    width: Count | None = None

    @model_validator(mode="after")
    def _check_origin(self) -> DiffusersConfig:
        if (self.folder is None) == (self.class_name is None):
            raise ValueError("expected one of 'folder', which save_pretrained wrote, and 'class' with 'components'")
        if self.folder is not None and self.components:
            raise ValueError("found 'components' next to 'folder', expected one of them: the folder has all of them")
        if self.class_name is not None and not self.components:
            raise ValueError("found 'class' without 'components', expected the class and configuration of each of them")
        if not self.parts:
            raise ValueError("found no component that is a model, expected a denoiser at least")
        return self

    @property
    def parts(self) -> tuple[str, ...]:
        """The models of which each is a part, in the order in which an application runs them."""
        if self.folder is None:
            return kinds_of_components({name: item.class_name for name, item in self.components.items()})
        return kinds_of_components(_read_index(Path(self.folder)))


def _read_index(folder: Path) -> dict[str, str]:
    """Component → its class, by the pipeline's `model_index.json`.

    Raises:
        ValueError: there is no such file, or it is no list of components.
    """
    if not (folder / INDEX).is_file():
        if not folder.is_dir():
            raise ValueError(f"found no folder {folder}, expected that of a pipeline that save_pretrained wrote")
        listing = ", ".join(sorted(path.name for path in folder.iterdir())[:8])
        raise ValueError(
            f"found no {INDEX} in {folder}, but {listing or 'no file'}; expected a pipeline that save_pretrained wrote"
        )
    try:
        index = json.loads((folder / INDEX).read_bytes())
        return {name: entry[1] for name, entry in index.items() if isinstance(entry, list) and entry[0] is not None}
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise ValueError(
            f"found {folder / INDEX}, which is no list of components ({error}); fetch the pipeline again, or write it "
            "by save_pretrained"
        ) from error


def kinds_of_components(classes: Mapping[str, str]) -> tuple[str, ...]:
    """The parts of a pipeline whose components have these classes."""
    models = {
        name: kind for name, kind in classes.items() if not kind.endswith(NO_MODELS) and not name.startswith(NOT_CALLED)
    }
    doubles = [name for name, kind in models.items() if kind.startswith(AUTOENCODERS)]
    texts = sorted(name for name in models if name.startswith("text_encoder"))
    others = [name for name in models if name not in (*doubles, *texts)]
    ends = [f"{name}_{end}" for name in doubles for end in ("encoder", "decoder")]
    return (*texts, *others, *ends)
