"""Configuration: YAML, `extends:` and `--set` → one frozen, checked `RunConfig`."""

from pipeline.config.paths import is_reference, locate, locate_checkpoint, split_factory
from pipeline.config.quantsim import AimetProfile, CalibrationConfig, FormatsConfig, QuantSimConfig, SuggestConfig
from pipeline.config.run_config import RunConfig, check_passes, json_schema, read_recipe, recipe_of_run
from pipeline.config.sections import (
    DEFAULT_SIZES,
    DTYPES,
    Backend,
    ExportConfig,
    InputConfig,
    ModelConfig,
    PassesConfig,
    RuntimeConfig,
    ToleranceConfig,
    TransformersConfig,
    VerifyConfig,
)
from pipeline.config.train import OptimizerConfig, ScheduleConfig, TrainConfig

__all__ = [
    "DEFAULT_SIZES",
    "DTYPES",
    "AimetProfile",
    "Backend",
    "CalibrationConfig",
    "ExportConfig",
    "FormatsConfig",
    "InputConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PassesConfig",
    "QuantSimConfig",
    "RunConfig",
    "RuntimeConfig",
    "ScheduleConfig",
    "SuggestConfig",
    "ToleranceConfig",
    "TrainConfig",
    "TransformersConfig",
    "VerifyConfig",
    "check_passes",
    "is_reference",
    "json_schema",
    "locate",
    "locate_checkpoint",
    "read_recipe",
    "recipe_of_run",
    "split_factory",
]
