"""Configuration: YAML, `extends:` and `--set` → one frozen, checked `RunConfig`."""

from pipeline.config.diffusion import DiffusersConfig
from pipeline.config.model import DEFAULT_SIZES, CacheConfig, InputConfig, ModelConfig, TransformersConfig
from pipeline.config.option_names import KEYS, OptionNames
from pipeline.config.paths import is_hub_name, is_reference, locate, locate_checkpoint, split_factory
from pipeline.config.quantsim import AimetProfile, CalibrationConfig, FormatsConfig, QuantSimConfig, SuggestConfig
from pipeline.config.recipe import check_passes, read_recipe, recipe_of_run
from pipeline.config.run_config import PartConfig, RunConfig, json_schema
from pipeline.config.sections import (
    DTYPES,
    Backend,
    ExportConfig,
    PassesConfig,
    RuntimeConfig,
    ToleranceConfig,
    VerifyConfig,
)
from pipeline.config.train import OptimizerConfig, ScheduleConfig, TrainConfig
