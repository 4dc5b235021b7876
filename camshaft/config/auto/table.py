"""The table of the values that were chosen automatically, which a run prints."""

from camshaft.config.auto.fitting import has_role
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.supervised import SupervisedConfig
from camshaft.config.short_names import short_names
from camshaft.config.tree import format_value

_WIDTH = 40
"""Maximum width of the column of settings. Longer settings extend over the next column."""


def format_choices(config: PPOConfig | SupervisedConfig | GenerateConfig) -> str:
    """Return a table of the values that were chosen automatically, with the keys that change them."""
    names = {key: name for name, key in short_names(type(config)).items()}
    settings = [
        (f"{names.get(choice.key, choice.key)}={format_value(choice.value)}", choice.reason)
        for choice in config.choices()
        if choice.value is not None and choice.reason and has_role(config, choice.key)
    ]
    width = max((len(setting) for setting, _ in settings if len(setting) <= _WIDTH), default=0)
    lines = [f"  {setting:<{width}}  {reason}" for setting, reason in settings]
    return "\n".join(["chosen automatically; set a key to change its value:", *lines]) if lines else ""
