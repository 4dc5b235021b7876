"""Defaults of each command, read from its YAML file.

raw_defaults(PPOConfig)["data"]["train_batch_size"]     # "auto"
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.fields import Section
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.supervised import RMConfig, SFTConfig

HOME = Path(__file__).parent
BUILT_IN: dict[type[Section], str] = {
    PPOConfig: "ppo_trainer",
    SFTConfig: "sft_trainer",
    RMConfig: "rm_trainer",
    GenerateConfig: "generation",
    EvalConfig: "evaluation",
}
"""Name of the YAML file that contains the defaults of each schema."""


@cache
def raw_defaults(schema: type[Section]) -> Mapping[str, Any]:
    """Return the defaults as they are written in the YAML file, with `${...}` unresolved."""
    defaults = OmegaConf.to_container(OmegaConf.load(HOME / f"{BUILT_IN[schema]}.yaml"), resolve=False)
    assert isinstance(defaults, dict)
    return {str(key): value for key, value in defaults.items()}
