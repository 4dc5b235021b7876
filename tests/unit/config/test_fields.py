"""A key is one line: its default, description, bounds, short name, and the condition under which it is unread."""

from camshaft.config.checks.ineffective import find_notices
from camshaft.config.defaults import raw_defaults
from camshaft.config.schema.fields import CommandConfig, Section, describe, key, section, unless
from camshaft.config.short_names import expand_short_names
from camshaft.config.tree import leaf_fields


def test_a_new_key_is_one_line():
    class NoiseConfig(Section):
        enable: bool = key(False, "Add noise to the weights.")
        scale: float = key(0.1, "Scale of the noise. See noise.md.", unread=unless("enable"), short="noise", ge=0)

    class Command(CommandConfig):
        noise: NoiseConfig = section("Noise.", {"scale": 0.2})

    assert raw_defaults(Command) == {"noise": {"enable": False, "scale": 0.2}}
    assert expand_short_names({"noise": 0.5}, Command) == {"noise.scale": 0.5}
    assert describe(leaf_fields(Command)["noise.scale"]) == "a number >= 0"
    values = {"noise": {"enable": False, "scale": 0.5}}
    notice = "noise.scale=0.5 has no effect with noise.enable=false; set noise.enable=true, or omit the key"
    assert list(find_notices(Command.model_validate(values), values, {"noise.scale"})) == [notice]
    values["noise"]["enable"] = True
    assert list(find_notices(Command.model_validate(values), values, {"noise.scale"})) == []
